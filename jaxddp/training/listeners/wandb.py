"""Weights & Biases: one run for all processes, which a resumed run goes on with. An extra of the package."""

import contextlib
import io
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxddp.config import Config, LogConfig
from jaxddp.core.wording import on_screen
from jaxddp.registry import LOGGERS
from jaxddp.training import rows
from jaxddp.training.events import EvaluationRecord, Listener, RunEnd, RunStart, StepRecord
from jaxddp.training.extras import need
from jaxddp.training.listeners.run_id import keep_id, kept_id
from jaxddp.training.provenance import provenance
from jaxddp.training.shown import SHOWN, Shown, drawable, images_to_show

_FILE = "wandb.json"
_EXIT_CODES = {"done": 0, "stopped": 0, "failed": 1, "preempted": 75, "interrupted": 130}
_INIT_SECONDS, _FINISH_SECONDS = 60, 60


@LOGGERS.add("wandb")
def wandb_of(config: Config, workdir: Path) -> "WandB":
    """A run of Weights & Biases. Raises: InputError; its library is not installed."""
    need("wandb", "wandb")
    return WandB(workdir, images_to_show(config), config.log)


class WandB(Listener):
    """Logs the rows of metrics.jsonl as `train/loss`, `val/top1`, …, and predictions as images with captions.

    The config says where and by which name, else the environment (`WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_MODE`, …).
    Where neither does, the project is "jaxddp"; the run is named after its work directory, into which the library
    writes.

    Rows carry the training step as `step`, the axis of all metrics. W&B's own count of rows only grows: it would lose
    what a resumed run measures again, or for the first time, at a step up to which rows were sent.

    Args:
        directory: keeps the id of the run.
        images: how many validation images to show at each evaluation.
        log: the project, the name, and what is recorded beside the run's own config.
    """

    def __init__(self, directory: Path, images: int = SHOWN, log: LogConfig | None = None):
        self._directory, self._log = directory, log or LogConfig()
        self._run: Any = None
        self.wants_predictions = images

    def start(self, run: RunStart) -> None:
        import wandb

        kept = self._directory / _FILE
        own = kept_id(kept, run) or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:16]
        with _as_before():
            self._run = wandb.init(
                id=own,
                resume="allow",
                config=self._log.recorded | provenance(run),
                settings=wandb.Settings(**self._settings()),
            )
        keep_id(kept, own)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if self._run.offline:
            print(f"wandb: offline; to send it: wandb sync {Path(self._run.dir).parent}")
        else:
            print(on_screen(f"wandb: {self._run.url or 'disabled'}"))

    def step(self, record: StepRecord) -> None:
        row = rows.step_row(record)
        self._run.log({"step": row["step"], **rows.scalars(row)})

    def evaluation(self, record: EvaluationRecord) -> None:
        if record.final:
            row = rows.evaluation_row(record)
            images = {} if record.predictions is None else {f"{record.split}/predictions": _images(record.predictions)}
            self._run.log({"step": row["step"], **rows.scalars(row), **images})

    def end(self, run: RunEnd) -> None:
        if run.status == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES[run.status])

    def _settings(self) -> dict[str, Any]:
        """What the config says, what the environment leaves open, and what is not for it to say."""
        open_to_it = {
            "WANDB_PROJECT": ("project", "jaxddp"),
            "WANDB_NAME": ("run_name", self._directory.absolute().name),
            "WANDB_DIR": ("root_dir", str(self._directory.absolute())),
            # The library would take the place of standard output and error, also of a live display.
            "WANDB_CONSOLE": ("console", "off"),
            "WANDB_QUIET": ("quiet", True),
            "WANDB_INIT_TIMEOUT": ("init_timeout", _INIT_SECONDS),
            # What was not sent by then is on the disk, for `wandb sync`.
            "WANDB_FINISH_TIMEOUT": ("finish_timeout", _FINISH_SECONDS),
        }
        settings = {name: value for variable, (name, value) in open_to_it.items() if not os.environ.get(variable)}
        own = {"project": self._log.project, "run_name": self._log.name}
        settings |= {name: value for name, value in own.items() if value is not None}
        # A resumed run may have another duration, and several runs of a process follow each other.
        settings |= {"allow_val_change": True, "reinit": "create_new", "finish_timeout_raises": True}
        # "Stop run" in the browser is SIGTERM: the run saves, and can be resumed.
        return settings | {"stop_fn": lambda: os.kill(os.getpid(), signal.SIGTERM)}


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Start the library without its banner, and without its prompt for a key: only where stderr is a terminal it asks.

    What it hooks into Python's end is taken out again: it prints a traceback above the one line of an error.
    """
    before = sys.excepthook, sys.exit
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        sys.excepthook, sys.exit = before


def _images(predictions: Shown) -> list[Any]:
    import wandb

    pairs = zip(predictions.images, predictions.captions, strict=True)
    return [wandb.Image(drawable(image), caption=caption) for image, caption in pairs]
