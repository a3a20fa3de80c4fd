"""Checkpoints through Orbax: (arrays, step), saved while training goes on; the last few are kept, and the best."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as keep_policy

from jaxddp.engine.state import TrainState, abstract_like, all_finite
from jaxddp.errors import InputError, NonFiniteError

_BEST_BY = "top1"
# Worse than any accuracy: a checkpoint that was not validated is never the best.
_UNMEASURED = {_BEST_BY: -1.0}


class Checkpoints:
    """The checkpoints of one work directory.

    A checkpoint becomes visible only when all of it is on disk (Orbax writes beside it and renames), so a run killed at
    any moment resumes from a whole one. On many hosts the directory is one that all of them share.

    Args:
        keep: how many of the latest are kept, beside the best by validation top-1.
        read_only: leave everything as it is, since a run may be writing there at this moment.

    Raises:
        InputError: `keep` below 1.
    """

    def __init__(self, directory: Path, *, keep: int = 2, read_only: bool = False):
        if keep < 1:
            raise InputError(f"checkpoint.keep={keep}: keep at least 1, or a run could not resume")
        policies = [
            keep_policy.LatestN(n=keep),
            keep_policy.BestN(get_metric_fn=_figure, n=1),
        ]
        writing = {
            "preservation_policy": keep_policy.AnyPreservationPolicy(policies),
            # Orbax writes the figures down, for a later process to compare with, only where it is told of a best.
            "best_fn": _figure,
            # What a killed run left half written.
            "cleanup_tmp_directories": True,
        }
        reading = {"read_only": True, "create": False, "save_interval_steps": 0}
        self.directory = Path(directory).resolve()
        with _unwarned() if read_only else nullcontext():
            self._manager = ocp.CheckpointManager(
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
        measured = [(_figure(self._manager.metrics(step) or _UNMEASURED), step) for step in self.steps()]
        return max(((figure, step) for figure, step in measured if figure >= 0), default=(0, None))[1]

    def step(self, which: str) -> int:
        """Resolve "latest", "best" or a number.

        Raises:
            InputError: there is no such checkpoint; says which there are.
        """
        known = self.steps()
        named = {"latest": self.latest(), "best": self.best()}
        step = named[which] if which in named else int(which) if which.isdecimal() else None
        if step not in known:
            there = f"there are steps {', '.join(map(str, known))}" if known else "there is none"
            raise InputError(f"{self.directory}: no checkpoint {which!r}; {there} (or say latest or best)")
        return step

    def save(
        self, step: int, state: TrainState, progress: Mapping[str, Any], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Copy the state to host memory and write it in the background.

        Args:
            progress: small plain values that belong to the moment, kept as JSON.
            metrics: the validation figures at this step, where it was validated; `top1` decides which one is best.

        Raises:
            NonFiniteError: the state holds a NaN or an infinity; the checkpoints already there stay as they are.
        """
        if not bool(all_finite((state.params, state.model_state, state.opt_state))):
            raise NonFiniteError(
                f"step {step}: the state is not finite and was not saved; "
                f"the last good checkpoint is step {self.latest()}"
            )
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), progress=ocp.args.JsonSave(dict(progress)))
        measured = dict(metrics) if metrics and _BEST_BY in metrics else _UNMEASURED
        self._manager.save(step, args=items, metrics=measured, force=True)

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state and the progress saved at a step, laid out over the devices as `like` is.

        Raises:
            InputError: the checkpoint is of another architecture or optimizer; names the first array that differs. Or
                it is no longer there.
        """
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_like(like)), progress=ocp.args.JsonRestore())
        try:
            saved = self._manager.item_metadata(step)["state"]
            _check_same_shapes(f"{self.directory / str(step)}", saved, like)
            restored = self._manager.restore(step, args=items)
        except FileNotFoundError:
            raise InputError(f"{self.directory / str(step)}: is no longer there; a run goes on, so try again") from None
        return restored["state"], restored["progress"]

    def wait(self) -> None:
        """Return when all that was saved is on disk; an error of the background writing shows here."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finish what is being written: another manager of the directory would take it for rubbish."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _unwarned() -> Iterator[None]:
    """Orbax warns of a directory that it may only read, though it was asked to."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _figure(metrics: Mapping[str, float]) -> float:
    return metrics[_BEST_BY]


def _check_same_shapes(where: str, saved: Any, like: TrainState) -> None:
    there, here = _shapes(saved), _shapes(like)
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise InputError(
                f"{where}: a checkpoint of another architecture or optimizer: "
                f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} here; "
                "use the config that wrote it, or another --workdir"
            )


def _shapes(tree: Any) -> dict[str, str]:
    """Path to `dtype[shape]`, the same for a saved tree (nested dicts) and a live one (named fields)."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }
