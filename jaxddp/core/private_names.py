"""Access to private names of libraries. Each name is checked before use. If it is missing, a warning is logged.

docs/design.md lists all of them, and tests/test_private_names.py checks the list.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Collection
from typing import Any

from jaxddp.core.versions import installed_version

_log = logging.getLogger("jaxddp.libraries")


def function(
    module: Any, name: str, needed: Collection[str], optional: Collection[str] = ()
) -> Callable[..., Any] | None:
    """Return a function of a module, or None if it is missing or has other parameters.

    Its parameters must be all of `needed` and any of `optional`.
    """
    found = getattr(module, name, None)
    if not callable(found):
        return None
    parameters = inspect.signature(found).parameters.keys()
    return found if set(needed) <= parameters <= {*needed, *optional} else None


@functools.cache
def warn_missing(package: str, name: str, consequence: str) -> None:
    """Warn once that the installed version of a package lacks a private name, and describe the consequence."""
    # TensorFlow is published as several packages. If the installed package is unknown, the message has no version.
    which = f"{package} {installed_version(package) or ''}".rstrip()
    _log.warning(f"{which} has no usable {name}: {consequence}")
