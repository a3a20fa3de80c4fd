"""Checkpoints through Orbax: (arrays, step), saved while training goes on; the last few are kept, and the best."""

import contextlib
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep_policy

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, NonFiniteError, Preempted, noted_on
from jaxddp.core.message import Key, Option
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.phases import doing, phase
from jaxddp.core.ranges import Range, whole
from jaxddp.engine.state import TrainState, first_difference, is_sound
from jaxddp.recipe_file import CONFIG_FILE
from jaxddp.sections.goal import Goal
from jaxddp.training.checkpoints.integrity import MANIFEST, METADATA, Integrity, steps_in
from jaxddp.training.checkpoints.orbax_errors import Barrier, reading, restoring, writing
from jaxddp.training.checkpoints.validation_file import ValidationFile

_STEPS = Range(0, 2**63 - 1)
_DELETING_SECONDS = 0.3
_FAILING_SECONDS = 5.0
_log = logging.getLogger("jaxddp.training")


class Checkpoints:
    """The checkpoints of one work directory.

    A checkpoint becomes visible only when all of it is on disk (Orbax writes beside it and renames), so a run killed at
    any moment resumes from a whole one. Then its files are hashed into a manifest, which is compared before they are
    read again. It is saved before it is validated, and its metrics come to it in a file beside all of them. On many
    hosts the directory is one that all of them share; process 0 writes manifests and compares them.

    Args:
        peers: the processes that save and restore together.
        keep: how many of the latest are kept, beside the best.
        goal: which one is best; what the directory says where absent.
        read_only: leave everything as it is, since a run may be writing there at this moment.

    Attributes:
        peers: as given.
        integrity: their manifests.
        validations: what was measured of them, which decides which one is best.

    Raises:
        InputError: what is there cannot be read or written.
    """

    def __init__(
        self,
        directory: Path,
        peers: Peers = ALONE,
        *,
        keep: int = 2,
        goal: Goal | None = None,
        read_only: bool = False,
    ):
        self.directory, self.peers = Path(directory).resolve(), peers
        self.integrity = Integrity(self.directory, Path(directory).parent)
        self.validations = ValidationFile(self.directory, self.integrity if peers.is_first else None, goal)
        self._read_only = read_only
        self._writer = ThreadPoolExecutor(1, "manifest")
        self._manifest: Future[None] | None = None
        kept = [keep_policy.LatestN(n=keep), _Best(self.validations)]
        to_write = {
            "preservation_policy": keep_policy.AnyPreservationPolicy(kept),
            # What a killed run left half written.
            "cleanup_tmp_directories": True,
            # The watch knows sooner of a process that does not write its part, and names it.
            "async_options": ocp.AsyncOptions(
                timeout_secs=round(peers.longest_wait), barrier_sync_fn=Barrier(ocp.multihost.get_barrier_sync_fn())
            ),
        }
        to_read = {"read_only": True, "create": False, "save_interval_steps": 0}
        _check_metadata(self.directory)
        with reading(self.directory) if read_only else writing(self.directory):
            self._manager = _Manager(
                self.directory,
                options=ocp.CheckpointManagerOptions(**(to_read if read_only else to_write)),
                # Named here, so that a manager that has not saved yet can read what another process saved.
                item_handlers={"state": ocp.StandardCheckpointHandler(), "progress": ocp.JsonCheckpointHandler()},
            )

    def steps(self) -> list[int]:
        """The steps of all whole checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """The step of the latest whole checkpoint, or None."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """The step of the best checkpoint by what validation measured; of equal ones the latest; None without any."""
        return self.validations.best(self.steps())

    def step(self, which: str) -> int:
        """The step of "latest", "best" or a number. Raises: InputError; there is none, says which there are."""
        known = self.steps()
        named = {"latest": self.latest(), "best": self.best()}
        step = named[which] if which in named else whole(which, _STEPS)
        if step not in known:
            there = f"there are steps {', '.join(map(str, known))}" if known else "there is none"
            raise InputError(f"{self.directory}: no checkpoint {which!r}; {there} (or say latest or best)")
        return step

    @phase("save")
    def save(self, step: int, state: TrainState, progress: Mapping[str, Any]) -> None:
        """Copy the state to host memory and write it in the background, and `progress`, small plain values, as JSON.

        Raises:
            NonFiniteError: the state holds a NaN or an infinity; the checkpoints already there stay as they are.
            InputError: this one, or the one before, cannot be written.
        """
        if not bool(is_sound(state)):
            latest = self.latest()
            good = "there is no checkpoint yet" if latest is None else f"the last good one is step {latest}"
            raise NonFiniteError(f"step {step}: the state is not finite and was not saved; {good}")
        # Orbax would first meet the others, who may stand elsewhere if the last save failed in this process alone.
        self.wait()
        # One of that step may have been there before, and been removed.
        self.validations.forget(step)
        if self.peers.is_first:
            self.integrity.forget(step)
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(dict(progress)))
        with writing(self.directory):
            self._manager.save(step, args=items, force=True)
        if self.peers.is_first:
            self._manifest = self._writer.submit(self._write_manifest, step)

    @phase("restore")
    def verify(self, step: int) -> None:
        """Compare a checkpoint with its manifest, and its run with that of config.json; a line says so where one of
        them is missing. Does nothing on other processes.

        Raises:
            InputError: names the step, the first file that is damaged, and which steps are not.
        """
        if not self.peers.is_first:
            return
        place = self.directory / str(step)
        try:
            fault = self.integrity.check(step)
            if fault is not None and self._read_only:
                # A run that goes on may be removing it at this moment.
                time.sleep(_DELETING_SECONDS)
                fault = self.integrity.check(step)
        except FileNotFoundError:
            raise InputError(f"{place}: is no longer there; a run goes on, so try again") from None
        if fault is not None:
            sound = [str(each) for each in self.steps() if each != step and self._is_sound(each)]
            others = f"steps {', '.join(sound)} are whole" if sound else "no other step is whole"
            raise InputError(f"{place}: step {step} is damaged: {fault}; {others}")
        if not self.integrity.has(step):
            _say_once(f"{place}: step {step} has no manifest, so its files cannot be verified")
        elif self.integrity.run is None or self.integrity.run_id(step) is None:
            silent = f"no {CONFIG_FILE} beside it" if self.integrity.run is None else f"its {MANIFEST} does not"
            _say_once(f"{place}: {silent} names the run, so whether step {step} is this run's cannot be compared")

    @phase("restore")
    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state and the progress (see `save`) of a step, laid out over the devices as `like` is.

        Raises:
            InputError: the checkpoint is damaged, no longer there, or of another architecture or optimizer.
        """
        self.verify(step)
        with doing(f"restoring step {step:,}"), restoring(self.directory, step) as place:
            saved = self._manager.item_metadata(step)["state"]
            if differs := first_difference(saved, like):
                name, there, here = differs
                raise InputError(
                    f"{place}: a checkpoint of another architecture or optimizer: {name} is "
                    f"{there} there and {here} here",
                    advice=("use ", Key("the config"), " that wrote it, or another ", Option("workdir")),
                )
            abstract = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like
            )
            items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore())
            restored = self._manager.restore(step, args=items)
        return restored["state"], restored["progress"]

    @phase("restore")
    def restore_as_saved(self, step: int, sharding: jax.sharding.Sharding) -> TrainState:
        """The state of a step, whatever its architecture, each array laid out as `sharding`. Raises: as `restore`."""
        self.verify(step)
        with doing(f"restoring step {step:,}"), restoring(self.directory, step):
            saved = self._manager.item_metadata(step)["state"]
            abstract = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                {key: saved[key] for key in saved},
                is_leaf=lambda leaf: hasattr(leaf, "shape"),
            )
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))
        return TrainState(**restored["state"])

    @phase("save", "finishing what is saved")
    def wait(self) -> None:
        """Return when all that was saved is on disk; an `InputError` of the background writing shows here."""
        with writing(self.directory):
            self._manager.wait_until_finished()
        self._finish_manifest()

    @phase("save", "finishing what is saved")
    def close(self) -> None:
        """Finish what is being written: another manager of the directory would take it for rubbish."""
        try:
            with writing(self.directory):
                self._manager.close()
        finally:
            self._writer.shutdown()
        self._finish_manifest()

    def _write_manifest(self, step: int) -> None:
        """Once the checkpoint is complete, in a thread of its own: the loop goes on."""
        try:
            with self.integrity.hashing_early(step):
                self._manager.wait_until_finished()
        except Exception:
            return  # Orbax raises it once more for whoever waits in the loop's thread.
        self.integrity.write(step)

    def _finish_manifest(self) -> None:
        """Wait until the manifest of what was saved last is there. Raises: InputError; it cannot be written."""
        pending, self._manifest = self._manifest, None
        if pending is not None:
            pending.result()

    def _is_sound(self, step: int) -> bool:
        try:
            return self.integrity.check(step) is None
        except FileNotFoundError:
            return False

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with noted_on(error):
            if error is None or isinstance(error, Preempted) or self.peers.is_alone:
                self.close()
                return
            # The others may be elsewhere, and Orbax would wait for them: this process is to tell them why it ends.
            with contextlib.suppress(TimeoutError):
                ThreadPoolExecutor(1, "close").submit(self.close).result(_FAILING_SECONDS)


def _check_metadata(directory: Path) -> None:
    """Raises `InputError` where a step's metadata are no regular file: Orbax, which looks at all, waits for a FIFO."""
    for step in steps_in(directory):
        if (metadata := directory / str(step) / METADATA).exists():
            with files.reading(metadata, f"move the directory of step {step} away"):
                files.open_regular(metadata).close()


@functools.cache
def _say_once(line: str) -> None:
    """A checkpoint is verified each time that it is looked up."""
    _log.warning(line)


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        """Orbax would ask JAX by the number of the step, and JAX forget the questions that the loop counts up."""
        return False


class _Best(keep_policy.PreservationPolicy):
    """Keeps the best of the checkpoints by what is known of them when another is saved."""

    def __init__(self, validations: ValidationFile):
        self.validations = validations

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = self.validations.best(steps)
        return [step == best for step in steps]
