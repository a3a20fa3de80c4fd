"""Data-parallel training of image classifiers in JAX.

Notebooks and launch scripts use the names of `jaxddp.api`, which this package also exports.
"""

from typing import TYPE_CHECKING, Any

from jaxddp.core.log import show_lines

if TYPE_CHECKING:
    from jaxddp.api import *  # noqa: F403

    __version__: str

show_lines()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from jaxddp.core.libraries import installed_version

        return installed_version("jaxddp") or "unknown"
    # `jaxddp.api` is imported on first use, because it imports JAX, which takes seconds. The launcher and the error for
    # a mistyped command do not need it.
    if not name.startswith("__"):
        import jaxddp.api as api

        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module 'jaxddp' has no attribute {name!r}")


def __dir__() -> list[str]:
    import jaxddp.api as api

    return sorted(api.__all__)
