"""The versions of installed packages."""

import platform
from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> str:
    """Return a line with the versions of this package and of the libraries that affect results."""
    others = {name: installed_version(name) for name in ("jax", "flax", "optax")} | {
        "Python": platform.python_version()
    }
    known = ", ".join(f"{name} {number}" for name, number in others.items() if number is not None)
    return f"jaxddp {installed_version('jaxddp') or '(not installed)'} ({known})"
