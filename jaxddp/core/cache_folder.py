"""The folder that caches compiled programs, indexes of record files, and weights."""

import os
from pathlib import Path

from jaxddp.core.errors import InputError

CACHE_VARIABLE = "JAXDDP_CACHE"
"""Environment variable for the path of the cache folder. The default is `jaxddp` in XDG_CACHE_HOME or ~/.cache."""


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet.

    Raises:
        InputError: the user has no home directory.
    """
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxddp")
    path = os.path.expanduser(os.environ.get(CACHE_VARIABLE) or default)
    if path.startswith("~"):
        raise InputError(f"{path}: there is no such home directory", advice=f"set {CACHE_VARIABLE} to a folder")
    return Path(path).absolute()
