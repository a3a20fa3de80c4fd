"""Where this user's machine keeps what can always be made again: indexes of record files, compiled programs."""

import os
from pathlib import Path

CACHE_VARIABLE = "JAXDDP_CACHE"
"""Names the cache folder, by default `jaxddp` in XDG_CACHE_HOME or in ~/.cache."""


def cache_folder() -> Path:
    """The folder, which need not be there yet.

    Raises:
        RuntimeError: the default's place is not known, for this user has no home directory.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "jaxddp"
