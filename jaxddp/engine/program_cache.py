"""Compiled programs are kept from run to run, so that a second start compiles nothing.

What JAX takes for the same program agrees in its code and options, in the versions of jaxlib and XLA, and in the
devices, of a CPU down to the instructions that it knows. So a home directory may be shared by machines of any kind:
none of them ever loads what was compiled for another.

In a job of several processes on GPUs, process 0 alone writes, and every process that sees its files reads them. On CPUs
a program is that of the process whose devices it was compiled for: every process keeps its own.
"""

import functools
import inspect
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from jaxddp.cache_folder import CACHE_VARIABLE, cache_folder
from jaxddp.job.membership import is_first

PROGRAMS = "programs"
"""The folder of the compiled programs, in the cache folder."""
MOST_BYTES = 1 << 30
"""How much may lie there when a run starts: some hundred runs' programs."""

# JAX's defaults leave out what compiles within a second, of which a start has a score; and what takes their place.
_KEPT_FROM = "jax_persistent_cache_min_compile_time_secs"
_KEEP_ALL = {
    _KEPT_FROM: (1.0, 0.0),
    "jax_persistent_cache_min_entry_size_bytes": (0, -1),
}
_log = logging.getLogger("jaxddp.parallel")


def keep_compiled_programs() -> None:
    """Switch JAX's persistent compilation cache on, in a place of its own below the cache folder.

    To be called once the job is joined and before the first compilation; starts no backend. What the user has set of
    JAX's own settings stands, by variable or in `jax.config`: `JAX_COMPILATION_CACHE_DIR` names another place, which is
    then the user's to keep small, and `JAX_ENABLE_COMPILATION_CACHE=false` switches it off. Where the place cannot be
    used, the run compiles as if there were none, and says so in one line.
    """
    if not _setting("jax_enable_compilation_cache"):
        return
    for name, (default, wanted) in _KEEP_ALL.items():
        if name.upper() not in os.environ and _setting(name) == default:
            jax.config.update(name, wanted)
    _keep_those_of_every_cpu()
    if _setting("jax_compilation_cache_dir") is not None:
        return
    try:
        folder = _own_folder()
    except (OSError, RuntimeError) as error:
        # The other processes of a job would say the same.
        if is_first():
            _warn_once(f"compiled programs are not kept ({error}); name a place for them in {CACHE_VARIABLE}")
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _keep_those_of_every_cpu() -> None:
    """On CPUs, have a process that is not the first write too: JAX would not, and it can read what none but it writes.

    There is no setting for it. Where a release of JAX has no such function, these processes compile at each start.
    """
    if is_first():
        return
    from jax._src import compilation_cache, compiler

    def write_own(key: str, seconds: float, name: str, backend: Any, executable: Any, callbacks: Sequence[Any]) -> None:
        if backend.platform != "cpu" or callbacks or seconds < _setting(_KEPT_FROM):
            return
        # A program that cannot be kept will be compiled again.
        with suppress(Exception):
            compilation_cache.put_executable_and_time(key, name, executable, backend, int(seconds))

    replaced, known = getattr(compiler, "_cache_write", None), inspect.signature(write_own).parameters
    if replaced is not None and len(inspect.signature(replaced).parameters) == len(known):
        compiler._cache_write = write_own


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


@functools.cache
def _warn_once(line: str) -> None:
    """A notebook may prepare many a training."""
    _log.warning(line)


def _own_folder() -> Path:
    """The folder, made where it is missing, seen to be of use, and thinned out."""
    folder = cache_folder() / PROGRAMS
    # Whoever may write there may have programs run in this user's name.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder}: others may write there")
    # Permissions alone tell nothing of a full disk, or of a file system that is mounted for reading.
    with tempfile.TemporaryFile(dir=folder):
        pass
    if is_first() and _setting("jax_compilation_cache_max_size") == -1:
        _thin_out(folder, MOST_BYTES)
    return folder


def _thin_out(folder: Path, most_bytes: int) -> None:
    """Remove what was not used for the longest time, until the rest fits.

    JAX's own bound would look through the whole folder for each program that it writes: 0.2 s among 2,000.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            # Another run may thin out at the same time.
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False):
                    found.append((max(status.st_atime, status.st_mtime), status.st_size, entry.path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most_bytes:
            break
        with suppress(FileNotFoundError):
            os.unlink(path)
        total -= size
