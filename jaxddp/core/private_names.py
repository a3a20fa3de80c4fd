"""Names that a library promises to nobody: each is probed before it is used, and one line says what is lost without it.

docs/design.md lists them all, and tests/test_private_names.py holds that list.
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
    """A module's function, if it has all parameters that are needed and no others than these and the optional ones.

    None where it is another, or is not there; what an unknown parameter asks for cannot be done for it.
    """
    found = getattr(module, name, None)
    if not callable(found):
        return None
    parameters = inspect.signature(found).parameters.keys()
    return found if set(needed) <= parameters <= {*needed, *optional} else None


@functools.cache
def say_lost(package: str, name: str, lost: str) -> None:
    """Say once that the installed version of a package has no such name as is used here, and what that costs."""
    # TensorFlow's has several.
    which = f"{package} {installed_version(package) or ''}".rstrip()
    _log.warning(f"{which} has no {name} of the kind that is used here: {lost}")
