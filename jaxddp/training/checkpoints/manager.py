"""Checkpoints through Orbax: saved in the background; the latest ones and the best one are kept.

The file errors of Orbax and TensorStore become one-line errors that a user can act on.
"""

import contextlib
import errno
import functools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep_policy

import jaxddp.core.files as files
from jaxddp.config.goal import Goal
from jaxddp.core.errors import InputError, Key, NonFiniteError, Option, Preempted, added_as_note_to, counted
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.phases import committing, doing, phase
from jaxddp.core.ranges import Range, whole
from jaxddp.engine.state import TrainState, first_difference, is_sound, stacked_in
from jaxddp.training.checkpoints.integrity import METADATA, Integrity, ValidationFile, steps_in

UNFINISHED_SUFFIX = ".orbax-checkpoint-tmp"
"""The usual suffix of directories that Orbax has not finished."""
# TensorStore, which writes the arrays, raises a ValueError whose text contains `_OS_ERROR`. If a file that it or
# Orbax wrote is gone, the text starts with one of `_GONE`.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")
_GONE = ("NOT_FOUND: ", "No ArrayMetadata found ", "Checkpoint directory does not exist")
_UNFINISHED = re.compile(rf"(/[^\s'\"]*{UNFINISHED_SUFFIX})")
# The errors of Orbax and TensorStore for damaged files.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError)
# Modules of Orbax that both log and raise the error of a failed save, in each thread.
_RAISING_MODULES = ("future", "async_checkpointer", "checkpoint_manager")
_SAVING = threading.Lock()
"""Orbax numbers the saves of a process, so two runs in threads must not begin one at the same time."""
_log = logging.getLogger("jaxddp.training")


class Checkpoints:
    """The checkpoints of one work directory.

    A checkpoint becomes visible only when all of it is on disk, because Orbax then renames its directory. So a killed
    run resumes from a complete checkpoint. A manifest then stores the hashes of the checkpoint's files. Before the
    files are read, they are compared with the manifest. A checkpoint is saved before it is validated; the metrics of
    all checkpoints are in one file in the same directory. On several hosts the directory must be shared; process 0
    writes and compares the manifests.

    Args:
        peers: the processes that save and restore together.
        keep: the number of latest checkpoints to keep, in addition to the best one.
        goal: the metric by which the best checkpoint is chosen; the default is read from the directory.
        read_only: leave the directory unchanged, because a run may be writing to it.

    Attributes:
        peers: see Args.
        integrity: the manifests of the checkpoints.
        validations: the metrics of the checkpoints, by which the best one is chosen.
        last_saved: the last step that process 0 saved; None if there is none, or on another process.
        last_complete: the last of these steps that has a manifest.

    Raises: InputError if a file of the directory cannot be read or written.
    """

    def __init__(
        self, directory: Path, peers: Peers = ALONE, *, keep: int = 2, goal: Goal | None = None, read_only: bool = False
    ):
        self.directory, self.peers = Path(directory).resolve(), peers
        self.integrity = Integrity(self.directory, Path(directory).parent)
        self.validations = ValidationFile(self.directory, self.integrity if peers.is_first else None, goal)
        self.last_saved: int | None = None
        self.last_complete: int | None = None
        self._writer = ThreadPoolExecutor(1, "manifest")
        self._manifest: Future[None] | None = None
        policies = [keep_policy.LatestN(n=keep), _Best(self.validations)]
        # If a process does not write its part, the watchdog reports the process before this timeout.
        timeout, barrier = round(peers.longest_wait), Barrier(ocp.multihost.get_barrier_sync_fn())
        saving: dict[str, Any] = {"async_options": ocp.AsyncOptions(timeout_secs=timeout, barrier_sync_fn=barrier)}
        # Remove the unfinished checkpoint of a killed run.
        saving |= {"preservation_policy": keep_policy.AnyPreservationPolicy(policies), "cleanup_tmp_directories": True}
        reading_only: dict[str, Any] = {"read_only": True, "create": False, "save_interval_steps": 0}
        for step in steps_in(self.directory):
            # Orbax would wait forever at metadata that are a FIFO.
            if (metadata := self.directory / str(step) / METADATA).exists():
                with files.reading(metadata, f"move the directory of step {step} away"):
                    files.read(metadata)
        try:
            with reading(self.directory) if read_only else writing(self.directory):
                self._manager = _Manager(
                    self.directory,
                    options=ocp.CheckpointManagerOptions(**(reading_only if read_only else saving)),
                    # A manager that has not saved anything needs these handlers to read the checkpoints.
                    item_handlers={"state": ocp.StandardCheckpointHandler(), "progress": ocp.JsonCheckpointHandler()},
                )
        except (ValueError, OverflowError, RecursionError) as error:
            problem = f"{self.directory}: the file {METADATA} of a step is damaged ({error})"
            raise InputError(problem, advice="move the directory of this step away") from None

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """Return the step of the latest complete checkpoint; None if there is none."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """Return the best validated step; of several equally good ones, the latest; None if none is validated."""
        return self.validations.best(self.steps())

    def step(self, which: str) -> int:
        """Return the step that `which` names: "latest", "best" or a number.

        Raises: InputError if there is no such checkpoint. The error lists the steps that have a checkpoint.
        """
        named = {"latest": self.latest(), "best": self.best()}
        step = named[which] if which in named else whole(which, Range(0, 2**63 - 1))
        if step not in (steps := self.steps()):
            known = ", ".join(map(str, steps))
            advice = f"give latest, best or one of the steps {known}" if steps else "the folder has no checkpoint"
            raise InputError(f"{self.directory}: no checkpoint {which!r}; {advice}")
        return step

    @phase("save")
    def save(self, step: int, state: TrainState, progress: Mapping[str, Any]) -> None:
        """Copy the state to host memory, and write it in the background.

        Args:
            progress: small plain values, which are saved as JSON.

        Raises:
            NonFiniteError: the state holds a NaN or an infinity; it is not saved.
            InputError: this checkpoint or the previous one cannot be written.
        """
        if not bool(is_sound(state)):
            latest = self.latest()
            last_saved = "there is no checkpoint yet" if latest is None else f"the last good one is step {latest}"
            raise NonFiniteError(f"step {step}: the state is not finite and was not saved; {last_saved}")
        # Raise the error of a failed last save here, before Orbax's `save`. If the last save failed in this process
        # alone, `save` would first wait for the other processes, which do not save.
        self.wait()
        # An earlier checkpoint of this step may have been removed without its metrics and its digest.
        self.validations.forget(step)
        if self.peers.is_first:
            self.integrity.forget(step)
            self.last_saved = step
        if self.peers.is_alone:
            # Of an array that all devices hold, Orbax saves a slice of each, by a program for each shape and device.
            held = lambda leaf: isinstance(leaf, jax.Array) and leaf.is_fully_replicated  # noqa: E731
            state = jax.tree.map(lambda leaf: leaf.addressable_data(0) if held(leaf) else leaf, state)
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(dict(progress)))
        with _SAVING, writing(self.directory):
            self._manager.save(step, args=items, force=True)
        if self.peers.is_first:
            self._manifest = self._writer.submit(self._write_manifest, step)

    @phase("restore")
    def verify(self, step: int) -> None:
        """Check that a checkpoint matches its manifest and was saved by the run of config.json. Only process 0 checks.

        A missing manifest is logged.

        Raises:
            InputError: the checkpoint is damaged. The error names the first damaged file, and the steps that are not
                damaged.
        """
        if not self.peers.is_first:
            return
        place = self.directory / str(step)
        try:
            fault = self.integrity.check(step)
            if fault is not None:
                # A training run may be removing the checkpoint at this moment.
                time.sleep(0.3)
                fault = self.integrity.check(step)
        except FileNotFoundError:
            raise _removed(place) from None
        if fault is not None:
            undamaged = [str(each) for each in self.steps() if each != step and self._is_undamaged(each)]
            others = f"undamaged steps: {', '.join(undamaged)}" if undamaged else "there is no other undamaged step"
            raise InputError(f"{place}: step {step} is damaged: {fault}; {others}")
        if not self.integrity.needs_manifest(step):
            _warn_once(f"{place}: step {step} has no manifest, so its files cannot be verified")

    @phase("restore")
    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Return the state and the progress (see `save`) of a step, with the shardings of `like`.

        Raises: InputError if the checkpoint is damaged, was removed, or is of another architecture or optimizer.
        """
        self.verify(step)
        with doing(f"restoring step {step:,}"), restoring(self.directory, step) as place:
            check_saved(self._manager.item_metadata(step)["state"], like, str(place))
            state, progress = ocp.args.StandardRestore(jax.tree.map(_abstract, like)), ocp.args.JsonRestore()
            restored = self._manager.restore(step, args=ocp.args.Composite(state=state, progress=progress))
        return restored["state"], restored["progress"]

    @phase("restore")
    def restore_as_saved(self, step: int, sharding: jax.sharding.Sharding) -> TrainState:
        """Return a step's state, of any architecture. All arrays get the given sharding. Raises: see `restore`."""
        self.verify(step)
        with doing(f"restoring step {step:,}"), restoring(self.directory, step):
            saved = dict(self._manager.item_metadata(step)["state"].items())
            placed = functools.partial(_abstract, sharding=sharding)
            like = jax.tree.map(placed, saved, is_leaf=lambda leaf: hasattr(leaf, "shape"))
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))
        return TrainState(**restored["state"])

    @phase("save", "finishing the last save")
    def wait(self) -> None:
        """Wait until all checkpoints are on disk. Raises: InputError if a save in the background failed."""
        # First for the thread that writes the manifest: Python before 3.13 takes a thread for ended, whose `join`
        # Ctrl-C interrupts, and the manifest would be written too early.
        self._finish_manifest()
        with writing(self.directory):
            self._manager.wait_until_finished()

    @phase("save", "finishing the last save")
    def close(self) -> None:
        """Finish the checkpoint that is being written. Otherwise the directory's next manager would delete it."""
        try:
            with writing(self.directory):
                self._manager.close()
        finally:
            self._writer.shutdown()
        self._finish_manifest()

    def _write_manifest(self, step: int) -> None:
        """Write the manifest of a step once the checkpoint is complete. This runs in a thread beside training."""
        try:
            self._manager.wait_until_finished()
        except Exception:
            return  # `wait` and `close` raise the error again, in the thread that trains.
        self.integrity.write(step)
        self.last_complete = step

    def _finish_manifest(self) -> None:
        """Wait for the manifest of the last checkpoint. Raises: InputError if the manifest cannot be written."""
        pending, self._manifest = self._manifest, None
        if pending is not None:
            pending.result()

    def _is_undamaged(self, step: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return self.integrity.check(step) is None
        return False

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with added_as_note_to(error):
            if error is None or isinstance(error, Preempted) or self.peers.is_alone:
                self.close()
                return
            # Orbax would wait for the other processes, which may not save. This process waits only a few seconds, and
            # can then report to the other processes why it ends.
            with contextlib.suppress(TimeoutError):
                ThreadPoolExecutor(1, "close").submit(self.close).result(5.0)


def _abstract(leaf: Any, sharding: jax.sharding.Sharding | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding)


def _removed(place: Path) -> InputError:
    return InputError(f"{place}: was removed while it was read; the run is still training, so try again")


@functools.cache
def _warn_once(line: str) -> None:
    """Log a warning once; a checkpoint may be verified several times."""
    _log.warning(line)


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        """Return False without a call of JAX. JAX counts these calls, so only `stop_on_signals` may make them."""
        return False


class _Best(keep_policy.PreservationPolicy):
    """A policy that keeps the checkpoint with the best validation. Orbax calls it at each save."""

    def __init__(self, validations: ValidationFile):
        self.validations = validations

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        best = self.validations.best(checkpoint.step for checkpoint in checkpoints)
        return [checkpoint.step == best for checkpoint in checkpoints]


def check_saved(saved: Mapping[str, Any], like: TrainState, place: str) -> None:
    """Check that a saved state has the names, shapes and dtypes of the arrays of a run.

    Args:
        saved: the types of the saved state, by field.
        like: the state of the run.
        place: the directory of the checkpoint, for the message.

    Raises: InputError if the state is of another architecture or optimizer, or of another number of groups of devices.
    """
    other = ("use ", Key("the config"), " that wrote it")
    before, now = stacked_in(saved["parts"]), like.stacked
    if before != now:
        of_saved, of_run = (counted(count or 1, "group") for count in (before, now))
        problem = f"{place}: the checkpoint has the states of {of_saved} of devices, and this run has {of_run}"
        raise InputError(problem, advice=other if None in (before, now) else ("give ", Key("parallel.groups", before)))
    if difference := first_difference(saved, like):
        name, saved_as, needed = difference
        problem = f"{place}: the checkpoint is of another architecture or optimizer: {name} is {saved_as} in the "
        advice = (*other, ", or another ", Option("workdir"))
        raise InputError(f"{problem}checkpoint and {needed} in this run", advice=advice)


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn an error in writing a file in the block into an `InputError` of one line, and shorten Orbax's logs."""
    _shorten_thread_logs()
    with files.readable_errors(directory):
        try:
            yield
        except ValueError as error:
            if (file_error := _file_error(error)) is None:
                raise
            raise file_error from error


def _file_error(error: BaseException) -> OSError | None:
    """Return a file error as an OSError; None for any other error."""
    if not isinstance(error, ValueError):
        return error if isinstance(error, OSError) else None
    text, code = str(error), None
    if match := _OS_ERROR.search(text):
        code = int(match[1])
    elif text.startswith(_GONE) or any(not os.path.exists(place) for place in _UNFINISHED.findall(text)):
        code = errno.ENOENT
    return None if code is None else OSError(code, os.strerror(code))


@functools.cache
def _shorten_thread_logs() -> None:
    """Shorten the log records of Orbax's threads about file errors, until the process ends.

    On a full disk, the threads log 20 or more tracebacks, some of them after the save has failed. An error that is not
    about a file keeps its traceback.
    """
    logging.getLogger("absl").addFilter(_shorten_record)
    previous = sys.unraisablehook

    def unraisable(raised: "sys.UnraisableHookArgs") -> None:
        # After an error has closed an event loop, TensorStore may still finish a write that the loop waited for. Do
        # not report the error that follows.
        if not (isinstance(raised.exc_value, RuntimeError) and str(raised.exc_value) == "Event loop is closed"):
            previous(raised)

    sys.unraisablehook = unraisable


def _shorten_record(record: logging.LogRecord) -> bool:
    """Shorten a log record about a file error to one line. Returns False for a record that repeats an error."""
    if not (record.exc_info and record.exc_info[1] and (error := _file_error(record.exc_info[1]))):
        # Drop warnings about missing files of an unfinished step: the error that follows is clearer.
        return record.levelno >= logging.ERROR or UNFINISHED_SUFFIX not in record.getMessage()
    if record.module in _RAISING_MODULES:
        return False
    record.msg, record.args = f"{record.getMessage()}: {error.strerror or type(error).__name__}", ()
    record.exc_info = None
    return True


class Barrier:
    """The barrier at which Orbax's threads wait for other processes. A thread whose save failed does not wait.

    After a failed save Orbax would wait at another barrier than the other processes, so all would wait for
    `AsyncOptions.timeout_secs` and the cause would not be reported. This barrier raises the error of the save instead.
    """

    def __init__(self, wait: Callable[..., None]):
        self._wait = wait
        # `__call__` ignores the error that this thread handles, because it need not come from the save: a user may call
        # `train` in an `except` block.
        self._training = threading.get_ident()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        if threading.get_ident() != self._training and (error := sys.exception()) is not None:
            raise error
        with committing():
            self._wait(key=key, timeout_ms=timeout_ms)


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Turn an error in reading a file in the block into an `InputError` of one line, and hide Orbax's warnings."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with files.reading(directory, ("check ", Option("workdir"))):
            yield
    finally:
        log.setLevel(before)


@contextlib.contextmanager
def restoring(directory: Path, step: int) -> Iterator[Path]:
    """Turn errors of a step's checkpoint in the block into InputError or Unreachable. Yields the step's directory."""
    place = directory / str(step)
    try:
        yield place
    except InputError:
        raise
    except _UNREADABLE as error:
        if isinstance(error, TimeoutError) and error.errno is None:
            raise  # A wait for another process timed out.
        if (file_error := _file_error(error)) is not None:
            files.check_server(place, file_error)
        if not place.is_dir():
            raise _removed(place) from None
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        advice = "move it away to use the step before"
        raise InputError(f"{place}: step {step} cannot be restored ({reason})", advice=advice) from error
