"""Access to private names of libraries. Each is checked before use, and a warning says what is lost without it.

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
    """Return a function of a module, if it has all `needed` parameters and no others but the `optional` ones.

    Otherwise, or if there is no such function, return None.
    """
    found = getattr(module, name, None)
    if not callable(found):
        return None
    parameters = inspect.signature(found).parameters.keys()
    return found if set(needed) <= parameters <= {*needed, *optional} else None


@functools.cache
def warn_missing(package: str, name: str, consequence: str) -> None:
    """Warn once that the installed version of a package does not have a name, and what is lost without it."""
    # TensorFlow has several packages. The installed one may be unknown, and then the message has no version.
    which = f"{package} {installed_version(package) or ''}".rstrip()
    _log.warning(f"{which} has no {name} of the kind that is used here: {consequence}")
