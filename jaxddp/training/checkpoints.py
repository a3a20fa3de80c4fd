"""Checkpoints through Orbax: (arrays, step), saved while training goes on; the last few are kept, and the best."""

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep_policy

import jaxddp.files as files
from jaxddp.engine.state import TrainState, all_finite, first_difference
from jaxddp.errors import InputError, NonFiniteError, noted_on
from jaxddp.job.membership import is_first

VALIDATION_FILE = "validation.json"
_BEST_BY = "top1"
# TensorStore, which writes the arrays, raises ValueError with this in its text.
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")


class Checkpoints:
    """The checkpoints of one work directory.

    A checkpoint becomes visible only when all of it is on disk (Orbax writes beside it and renames), so a run killed at
    any moment resumes from a whole one. It is saved before it is validated, and its metrics come to it in a file beside
    all of them. On many hosts the directory is one that all of them share.

    Args:
        keep: how many of the latest are kept, beside the best by validation top-1.
        read_only: leave everything as it is, since a run may be writing there at this moment.

    Attributes:
        validations: what was measured of them; `top1` decides which one is best.

    Raises:
        InputError: `keep` below 1, or what is there cannot be read or written.
    """

    def __init__(self, directory: Path, *, keep: int = 2, read_only: bool = False):
        if keep < 1:
            raise InputError(f"checkpoint.keep={keep}: keep at least 1, or a run could not resume")
        self.directory = Path(directory).resolve()
        self.validations = Validations(self.directory)
        kept = [keep_policy.LatestN(n=keep), _Best(self.validations)]
        writing = {
            "preservation_policy": keep_policy.AnyPreservationPolicy(kept),
            # What a killed run left half written.
            "cleanup_tmp_directories": True,
        }
        reading = {"read_only": True, "create": False, "save_interval_steps": 0}
        with _reading(self.directory) if read_only else _writing(self.directory):
            self._manager = _Manager(
                self.directory,
                options=ocp.CheckpointManagerOptions(**(reading if read_only else writing)),
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
        """The step of the checkpoint with the highest validation top-1; of equal ones the latest; None without any."""
        return self.validations.best(self.steps())

    def step(self, which: str) -> int:
        """The step of "latest", "best" or a number. Raises: InputError; there is none, says which there are."""
        known = self.steps()
        named = {"latest": self.latest(), "best": self.best()}
        step = named[which] if which in named else int(which) if which.isdecimal() else None
        if step not in known:
            there = f"there are steps {', '.join(map(str, known))}" if known else "there is none"
            raise InputError(f"{self.directory}: no checkpoint {which!r}; {there} (or say latest or best)")
        return step

    def save(self, step: int, state: TrainState, progress: Mapping[str, Any]) -> None:
        """Copy the state to host memory and write it in the background, and `progress`, small plain values, as JSON.

        Raises:
            NonFiniteError: the state holds a NaN or an infinity; the checkpoints already there stay as they are.
            InputError: this one, or the one before, cannot be written.
        """
        if not bool(all_finite((state.params, state.model_state, state.opt_state, state.parts))):
            latest = self.latest()
            good = "there is no checkpoint yet" if latest is None else f"the last good one is step {latest}"
            raise NonFiniteError(f"step {step}: the state is not finite and was not saved; {good}")
        # One of that step may have been there before, and been removed.
        self.validations.forget(step)
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(dict(progress)))
        with _writing(self.directory):
            self._manager.save(step, args=items, force=True)

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state and the progress (see `save`) of a step, laid out over the devices as `like` is.

        Raises:
            InputError: the checkpoint is no longer there, or of another architecture or optimizer.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), progress=ocp.args.JsonRestore())
        try:
            saved = self._manager.item_metadata(step)["state"]
            if differs := first_difference(saved, like):
                name, there, here = differs
                raise InputError(
                    f"{self.directory / str(step)}: a checkpoint of another architecture or optimizer: {name} is "
                    f"{there} there and {here} here; use the config that wrote it, or another --workdir"
                )
            restored = self._manager.restore(step, args=items)
        except FileNotFoundError:
            raise InputError(f"{self.directory / str(step)}: is no longer there; a run goes on, so try again") from None
        return restored["state"], restored["progress"]

    def wait(self) -> None:
        """Return when all that was saved is on disk; an `InputError` of the background writing shows here."""
        with _writing(self.directory):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish what is being written: another manager of the directory would take it for rubbish."""
        with _writing(self.directory):
            self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with noted_on(error):
            self.close()


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Turns what Orbax and TensorStore raise of files that cannot be written into an InputError."""
    with files.readable_errors(directory):
        try:
            yield
        except ValueError as error:
            if (code := _OS_ERROR.search(str(error))) is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


@contextmanager
def _reading(directory: Path) -> Iterator[None]:
    """The same for reading; and Orbax is kept from warning of a directory that it was told only to read."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    except OSError as error:
        raise InputError(f"{directory}: cannot be read ({error.strerror}); check --workdir") from error
    finally:
        log.setLevel(before)


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        """Orbax would ask JAX by the number of the step, and JAX forget the questions that the loop counts up."""
        return False


class Validations:
    """What validation measured of each step, in a small file beside the checkpoints.

    All processes know them, the first one writes. Raises: InputError; the file cannot be read, or holds something else.
    """

    def __init__(self, directory: Path):
        self._path = directory / VALIDATION_FILE
        self._known = _read_validations(self._path)

    def __contains__(self, step: int) -> bool:
        return step in self._known

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep a step's metrics; one that is not finite as null. Raises: InputError."""
        self._known[step] = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._write()

    def forget(self, step: int) -> None:
        """The step is to be another's than the one that was measured. Raises: InputError."""
        if self._known.pop(step, None) is not None:
            self._write()

    def best(self, steps: Iterable[int]) -> int | None:
        """The one of these steps with the highest top-1; of equal ones the latest; None without any."""
        measured = [(value, step) for step in steps if (value := self._known.get(step, {}).get(_BEST_BY)) is not None]
        return max(measured, default=(0, None))[1]

    def _write(self) -> None:
        if is_first():
            files.replace(self._path, json.dumps(self._known, indent=2).encode())


def _read_validations(path: Path) -> dict[int, dict[str, float | None]]:
    try:
        return {int(step): dict(metrics) for step, metrics in json.loads(files.read(path)).items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: is damaged ({error}); remove it, and keep a copy of the best checkpoint: it will not be known"
        ) from None


class _Best(keep_policy.PreservationPolicy):
    """Keeps the best of the checkpoints by what is known of them when another is saved."""

    def __init__(self, validations: Validations):
        self.validations = validations

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        best = self.validations.best(steps)
        return [step == best for step in steps]
