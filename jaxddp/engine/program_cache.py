"""Compiled programs are kept from run to run, so that a second start compiles nothing.

JAX's key of a program covers its code and options, the versions of jaxlib and XLA, and the devices, of a CPU down to
its instruction set. So machines of any kind may share a home directory: none loads what was compiled for another.

In a job of several processes on GPUs, process 0 alone writes, and every process that sees its files reads them. On CPUs
a program belongs to the process for whose devices it was compiled: every process keeps its own.
"""

import functools
import inspect
import logging
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

import jaxddp.core.private_names as private_names
from jaxddp.core.cache_folder import CACHE_VARIABLE, cache_folder
from jaxddp.core.peers import ALONE, Peers

PROGRAMS = "programs"
"""The folder of the compiled programs, in the cache folder."""
MOST_BYTES = 1 << 30
"""How much may lie there when a run starts: some hundred runs' programs."""

# JAX's defaults, which leave out what compiles within a second, and the values that replace them.
_KEPT_FROM = "jax_persistent_cache_min_compile_time_secs"
_KEEP_ALL = {_KEPT_FROM: (1.0, 0.0), "jax_persistent_cache_min_entry_size_bytes": (0, -1)}
# Of JAX's private functions that write a program: what is read of their arguments, in whatever order.
_WRITTEN = ("cache_key", "compile_time_secs", "module_name", "backend", "executable")
_PUT = ("cache_key", "module_name", "executable", "backend", "compile_time")
_log = logging.getLogger("jaxddp.parallel")
# A notebook may prepare many trainings.
_warn_once = functools.cache(_log.warning)


def keep_compiled_programs(peers: Peers = ALONE) -> None:
    """Switch JAX's persistent compilation cache on, in a folder of its own below the cache folder.

    Call it once the job is joined and before the first compilation; it starts no backend. JAX's own settings that the
    user has changed stay: `JAX_COMPILATION_CACHE_DIR` names another folder, which is never thinned out, and
    `JAX_ENABLE_COMPILATION_CACHE=false` switches the cache off. Where the folder cannot be used, the log says so.
    """
    if not _setting("jax_enable_compilation_cache"):
        return
    for name, (default, wanted) in _KEEP_ALL.items():
        if name.upper() not in os.environ and _setting(name) == default:
            jax.config.update(name, wanted)
    _keep_those_of_every_cpu(peers)
    if _setting("jax_compilation_cache_dir") is not None:
        return
    try:
        folder = _own_folder(peers)
    except (OSError, RuntimeError) as error:
        # The other processes of a job would say the same.
        if peers.is_first:
            _warn_once(f"compiled programs are not kept ({error}); name a place for them in {CACHE_VARIABLE}")
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _keep_those_of_every_cpu(peers: Peers) -> None:
    """On CPUs, have every process write its programs, which no other process can use; in JAX only process 0 writes.

    There is no setting for it. Where JAX's function is another one, a line says what is lost.
    """
    if peers.is_first:
        return
    try:
        from jax._src import compilation_cache, compiler
    except ImportError:
        compilation_cache = compiler = None
    replaced = private_names.function(compiler, "_cache_write", _WRITTEN, ["host_callbacks"])
    put = private_names.function(compilation_cache, "put_executable_and_time", _PUT)
    if compiler is None or replaced is None or put is None:
        lost = "on CPUs, this process will compile its programs anew at each start"
        private_names.say_lost("jax", "jax._src.compiler._cache_write", lost)
        return
    order = inspect.signature(replaced)

    @functools.wraps(replaced)
    def write_own(*arguments: Any, **named: Any) -> None:
        given = order.bind(*arguments, **named).arguments
        backend, seconds = given["backend"], given["compile_time_secs"]
        if backend.platform != "cpu" or given.get("host_callbacks") or seconds < _setting(_KEPT_FROM):
            return
        try:
            put(given["cache_key"], given["module_name"], given["executable"], backend, int(seconds))
        except Exception as error:  # As in JAX: training goes on.
            reason = getattr(error, "strerror", None) or type(error).__name__
            _warn_once(f"a compiled program is not kept ({reason}) and will be compiled anew at the next start")

    compiler._cache_write = write_own


def _setting(name: str) -> Any:
    return getattr(jax.config, name)


def _own_folder(peers: Peers) -> Path:
    """The folder, made where it is missing, checked, and thinned out."""
    folder = cache_folder() / PROGRAMS
    # A program in this folder runs with this user's permissions.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder}: others may write there")
    # Permissions do not show a full disk, or a file system that is mounted read-only.
    with tempfile.TemporaryFile(dir=folder):
        pass
    if peers.is_first and _setting("jax_compilation_cache_max_size") == -1:
        _thin_out(folder, MOST_BYTES)
    return folder


def _thin_out(folder: Path, most_bytes: int) -> None:
    """Remove the least recently used. JAX's own limit would list the folder for each program: 0.2 s among 2,000."""
    found = []
    for path in folder.iterdir():
        # Another run may thin out at the same time.
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most_bytes:
            break
        path.unlink(missing_ok=True)
        total -= size
