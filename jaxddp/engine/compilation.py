"""How programs are compiled: the XLA options of a program, and the cache of compiled programs between runs.

Each option is tried on a trivial program before a run uses it. An unknown option in the variable XLA_FLAGS aborts the
process. An unknown option of a single program raises an error, so this module sets options per program. The options are
not a stable interface and change between releases of jaxlib.

Compiled programs are kept in JAX's persistent compilation cache. Its key covers a program's code and options, the
versions of jaxlib and XLA, and the devices, including a CPU's instruction set. So machines of different kinds may share
a home directory. In a job of several processes on GPUs, only process 0 writes programs, and every process with access
to the files reads them. On CPUs each process writes programs, because only a process with the same devices can use
them.
"""

import functools
import inspect
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

import jaxddp.core.libraries as libraries
from jaxddp.config import Config
from jaxddp.core.errors import InputError, Key, show, text_of
from jaxddp.core.files import CACHE_VARIABLE, cache_folder
from jaxddp.core.peers import ALONE, Peers
from jaxddp.engine.gradients import Averaging
from jaxddp.mesh import Topology
from jaxddp.platforms import platform_named

KEY = "parallel.xla_options"
_PREFIX = "xla_"
_NO_EMITTERS = ("xla_cpu_use_fusion_emitters", "False")
"""An option of jaxlib 0.10. Later releases do not have this option and do not need it."""
_BOOLEANS = {"true": "True", "false": "False"}
PROGRAMS = "programs"
"""The folder of compiled programs within the cache folder."""
MOST_BYTES = 1 << 30
"""The size to which the start of a run reduces the folder. The programs of some hundred runs fit in."""

# For each setting: JAX's default, and the value that replaces the default. By default JAX does not cache programs that
# compile within a second.
_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_KEEP_ALL = {_LEAST_SECONDS: (1.0, 0.0), "jax_persistent_cache_min_entry_size_bytes": (0, -1)}
# The names of the arguments, in any order, of two private JAX functions that write a program.
_WRITTEN = ("cache_key", "compile_time_secs", "module_name", "backend", "executable")
_PUT = ("cache_key", "module_name", "executable", "backend", "compile_time")
_config: Any = jax.config
_log = logging.getLogger("jaxddp.parallel")
# Each warning is logged once, because a notebook may prepare many trainings.
_warn_once = functools.cache(_log.warning)


def compiler_options(words: Sequence[str]) -> dict[str, str]:
    """Parse `("NAME=VALUE", ...)` into the `compiler_options` of `jax.jit`.

    Each option is tried on JAX's default platform. The trial checks only the name and the type of the option. An option
    of another platform is accepted and has no effect.

    Raises:
        InputError: a word is not NAME=VALUE, XLA has no option of this name, the name appears twice, or the value has
            the wrong type.
    """
    options: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        # XLA_FLAGS has booleans in lower case, and the options of a single program have them capitalized.
        value = _BOOLEANS.get(value, value)
        if not equals or not name.startswith(_PREFIX):
            reason = f"expected NAME=VALUE, a name that begins with {_PREFIX}"
        elif name in options:
            reason = "the name is given twice"
        else:
            reason = _rejection_reason(name, value)
        if reason is not None:
            problem = f": {show(word)} cannot be used ({reason})"
            raise InputError(Key(KEY), problem, advice="correct it, or leave it out")
        options[name] = value
    return options


def step_options(config: Config, topology: Topology) -> dict[str, str]:
    """Return the options of the training step.

    On GPUs these are the options that reproducible or bucketed gradients need, if the installed jaxlib accepts them.
    The options of `parallel.xla_options` are added and take precedence.

    Raises: InputError if an option of the config is wrong; see `compiler_options`.
    """
    options, platform = {}, platform_named(topology.platform)
    if config.parallel.reproducible:
        options = _accepted(platform.reproducible_options, "parallel.reproducible may not give the same bits twice")
    elif Averaging.of(config, topology).buckets > 1:
        options = _accepted(platform.overlap_options, "gradients may not be averaged while the next ones are computed")
    return options | compiler_options(config.parallel.xla_options)


def options_of_one_call(platform: str) -> dict[str, str]:
    """Return the options of a program that runs once: on a CPU, optimization level 1, which halves the compile time."""
    options = platform_named(platform).single_use_options
    return _accepted(options, "programs take longer to compile at the start of a run")


def unoptimized_options(platform: str) -> dict[str, str]:
    """Return the options of a program that runs once on little data.

    On a CPU the options disable optimization, which reduces the compile time to a fifth. Options that the installed
    jaxlib rejects are left out.
    """
    choices = platform_named(platform)
    options = _accepted(choices.unoptimized_options, "the self-test takes longer to compile")
    uses_emitters = choices.uses_cpu_compiler and not _rejection_reason(*_NO_EMITTERS)
    return options | ({_NO_EMITTERS[0]: _NO_EMITTERS[1]} if uses_emitters else {})


def _accepted(options: Mapping[str, str], consequence: str) -> dict[str, str]:
    """Return the options that the installed jaxlib accepts. Log the consequence of each rejected one."""
    for name, value in options.items():
        if _rejection_reason(name, value) is not None:
            libraries.warn_missing("jaxlib", f"option {name}={value}", consequence)
    return {name: value for name, value in options.items() if _rejection_reason(name, value) is None}


@functools.cache
def _rejection_reason(name: str, value: str) -> str | None:
    """Return the reason why XLA rejects an option, or None if a program compiles with it."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return " ".join(str(error).split())
    return None


def keep_compiled_programs(peers: Peers = ALONE) -> None:
    """Switch on JAX's persistent compilation cache, in the folder `programs` of the cache folder.

    Call it after the process has joined the job and before the first compilation. It does not start a JAX backend. JAX
    settings that the user has changed keep their values. `JAX_COMPILATION_CACHE_DIR` sets another folder, from which no
    file is removed. `JAX_ENABLE_COMPILATION_CACHE=false` switches the cache off. If the folder cannot be used, a
    warning is logged.
    """
    if not _config.jax_enable_compilation_cache:
        return
    for name, (default, value) in _KEEP_ALL.items():
        if name.upper() not in os.environ and getattr(jax.config, name) == default:
            jax.config.update(name, value)
    _write_atomically()
    _write_in_every_cpu_process(peers)
    if _config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = _prepare_folder(peers)
    except (OSError, InputError) as error:
        # Only one process of a job logs the warning.
        if peers.is_first:
            reason = text_of(error.problem) if isinstance(error, InputError) else error
            _warn_once(f"compiled programs are not kept ({reason}); set {CACHE_VARIABLE} to a folder for them")
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))


@functools.cache
def _write_atomically() -> None:
    """Make JAX write each program to a temporary file and rename it.

    JAX writes a program in place. If the process is killed, a part of it remains, which JAX reports at each start and
    never replaces. Another process may read while this one writes.
    """
    lost = "a killed process may leave a damaged program in the cache, which is then compiled again at each start"
    put = libraries.private_function("jax._src.lru_cache:LRUCache.put", ("self", "key", "value"), lost)
    if put is None:
        return
    from jax._src.lru_cache import LRUCache

    @functools.wraps(put)
    def put_atomically(self: Any, key: str, value: bytes) -> None:
        folder = os.fspath(self.path)
        # With a limit of the size, JAX locks the folder and writes further files. A store has no partial objects.
        if self.eviction_enabled or "://" in folder:
            return put(self, key, value)
        # JAX writes programs that it did not find, or could not read. A damaged file is replaced. Several processes may
        # write the same program.
        temporary_key = f"{key}.{os.getpid()}.{threading.get_ident()}.tmp"
        try:
            put(self, temporary_key, value)
            for file in Path(folder).glob(f"{temporary_key}*"):
                file.replace(file.with_name(file.name.replace(temporary_key, key)))
        except OSError as error:  # JAX would warn of each program.
            reason = error.strerror or type(error).__name__
            _warn_once(f"compiled programs are not kept ({reason}); set {CACHE_VARIABLE} to a folder for them")
        finally:
            for file in Path(folder).glob(f"{temporary_key}*"):
                file.unlink()

    LRUCache.put = put_atomically


def _write_in_every_cpu_process(peers: Peers) -> None:
    """Make every process on CPUs write its programs, because no other process can use them. JAX writes in process 0.

    JAX has no setting for this, so a private function is replaced. If the function has changed, a warning is logged.
    """
    if peers.is_first:
        return
    lost = "on CPUs, this process compiles its programs again at each start"
    replaced = libraries.private_function("jax._src.compiler:_cache_write", _WRITTEN, lost, ["host_callbacks"])
    put = libraries.private_function("jax._src.compilation_cache:put_executable_and_time", _PUT, lost)
    if replaced is None or put is None:
        return
    from jax._src import compiler

    order = inspect.signature(replaced)

    @functools.wraps(replaced)
    def write(*arguments: Any, **keywords: Any) -> None:
        bound = order.bind(*arguments, **keywords).arguments
        backend, seconds = bound["backend"], bound["compile_time_secs"]
        if backend.platform != "cpu" or bound.get("host_callbacks") or seconds < getattr(jax.config, _LEAST_SECONDS):
            return
        try:
            put(bound["cache_key"], bound["module_name"], bound["executable"], backend, int(seconds))
        except Exception as error:  # Training continues, as in JAX.
            _warn_once(f"a compiled program is not kept ({type(error).__name__}); the next start compiles it again")

    compiler._cache_write = write


def _prepare_folder(peers: Peers) -> Path:
    """Create the folder if it is missing, check it, and remove old programs from it."""
    folder = cache_folder() / PROGRAMS
    # Programs of this folder run with this user's permissions, so no other user may write to the folder.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder}: other users may write to it")
    # Writing a file reveals a full disk or a read-only file system, which permissions do not show.
    with tempfile.TemporaryFile(dir=folder):
        pass
    if peers.is_first and _config.jax_compilation_cache_max_size == -1:
        _remove_old(folder, MOST_BYTES)
    return folder


def _remove_old(folder: Path, most_bytes: int) -> None:
    """Remove the least recently used programs until the folder has at most `most_bytes` bytes.

    JAX's own limit of the size lists the folder for each program, which takes 0.2 s with 2,000 files.
    """
    entries = []
    for path in folder.iterdir():
        # Another run may remove files at the same time.
        with suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= most_bytes:
            break
        path.unlink(missing_ok=True)
        total -= size
