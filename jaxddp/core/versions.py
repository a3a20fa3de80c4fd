"""The versions of installed packages."""

import platform
from importlib.metadata import PackageNotFoundError, version


def installed_version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> str:
    """This package's version, and those of what decides a run's numbers, on one line; nothing is imported for it."""
    others = {each: installed_version(each) for each in ("jax", "flax", "optax")} | {
        "Python": platform.python_version()
    }
    known = ", ".join(f"{name} {number}" for name, number in others.items() if number is not None)
    return f"jaxddp {installed_version('jaxddp') or '(not installed)'} ({known})"
