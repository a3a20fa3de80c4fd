"""The folder that caches compiled programs, indexes of record files, and weights."""

import os
from pathlib import Path

CACHE_VARIABLE = "JAXDDP_CACHE"
"""Environment variable for the path of the cache folder. The default is `jaxddp` in XDG_CACHE_HOME or ~/.cache."""


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet.

    Raises:
        RuntimeError: the user has no home directory.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "jaxddp"
