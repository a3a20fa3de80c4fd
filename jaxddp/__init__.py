"""Data-parallel training of image classifiers in JAX.

For notebooks and launch scripts: the names of `jaxddp.api` are this package's own.
"""

from typing import TYPE_CHECKING, Any

# What the user has set can be told only until JAX is imported.
import jaxddp.core.log_level as log_level  # noqa: F401
from jaxddp.core.log_lines import show_lines

if TYPE_CHECKING:
    from jaxddp.api import *  # noqa: F403

    __version__: str

show_lines()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from jaxddp.core.versions import installed_version

        return installed_version("jaxddp") or "unknown"
    # On first use: the launcher, and the help for a mistyped command, need none of JAX, which takes seconds to import.
    if not name.startswith("__"):
        import jaxddp.api as api

        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module 'jaxddp' has no attribute {name!r}")


def __dir__() -> list[str]:
    import jaxddp.api as api

    return sorted(api.__all__)
