"""What the package asks of other libraries: their versions, their private names, and a fast import.

A private name is checked before use, and a warning is logged if it is missing. docs/design.md lists all of them, and
tests/test_private_names.py checks the list.
"""

import functools
import importlib
import inspect
import logging
import pkgutil
import platform
from collections.abc import Collection
from contextlib import suppress
from typing import Any

_log = logging.getLogger("jaxddp.libraries")


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    # Commands that print no version start faster without this import.
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        return version(package)
    return None


def versions() -> str:
    """Return a line with the versions of this package and of the libraries that affect results."""
    found = {name: installed_version(name) for name in ("jax", "flax", "optax")} | {"Python": platform.python_version()}
    known = ", ".join(f"{name} {number}" for name, number in found.items() if number is not None)
    return f"jaxddp {installed_version('jaxddp') or '(not installed)'} ({known})"


def private_function(name: str, needed: Collection[str], consequence: str, optional: Collection[str] = ()) -> Any:
    """Return a private function of JAX; None, with a warning, if it is missing or has other parameters.

    Its parameters must be all of `needed` and any of `optional`.

    Args:
        name: the function's module and its name there, such as "jax._src.lru_cache:LRUCache.put".
    """
    with suppress(ImportError, AttributeError, TypeError):
        found = pkgutil.resolve_name(name)
        if set(needed) <= inspect.signature(found).parameters.keys() <= {*needed, *optional}:
            return found
    warn_missing("jax", name.replace(":", "."), consequence)
    return None


@functools.cache
def warn_missing(package: str, name: str, consequence: str) -> None:
    """Warn once that the installed version of a package lacks a private name, and describe the consequence."""
    # TensorFlow is published as several packages. If the installed package is unknown, the message has no version.
    which = f"{package} {installed_version(package) or ''}".rstrip()
    _log.warning(f"{which} has no usable {name}: {consequence}")


class Lazy:
    """A module that is imported when one of its attributes is first read, because its import is slow."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
