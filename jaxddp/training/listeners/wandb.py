"""Weights & Biases, an optional dependency: one W&B run for all processes, which a resumed run continues."""

import contextlib
import io
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxddp.core.wording import on_screen
from jaxddp.registry import LOGGERS
from jaxddp.training.events import RunEnd
from jaxddp.training.listeners.metric_rows import Row, scalars
from jaxddp.training.listeners.tracking import PROJECT, TrackingLogger
from jaxddp.training.validation.predicted_images import PredictedImages, to_drawable

_EXIT_CODES = {"done": 0, "stopped": 0, "failed": 1, "preempted": 75, "interrupted": 130}
_INIT_SECONDS, _FINISH_SECONDS = 60, 60


class WandB(TrackingLogger):
    """A logger of the rows of metrics.jsonl as `train/loss`, `val/top1`, …, and of predictions as images with captions.

    The config or the environment (`WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_MODE`, …) names the project and the run. The
    default project is "jaxddp"; the default name is the name of the work directory, into which W&B writes.

    Rows hold the training step as `step`, which is the axis of all metrics. W&B's own step counter can only grow, so
    W&B would drop the rows of a resumed run for steps that were already sent.
    """

    library = "wandb"
    _run: Any = None

    def open(self, saved_id: str | None, recorded: Mapping[str, Any]) -> str:
        import wandb

        run_id = saved_id or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:16]
        with _without_banner():
            self._run = wandb.init(
                id=run_id, resume="allow", config={**recorded}, settings=wandb.Settings(**self._settings())
            )
        return run_id

    def finish_open(self, recorded: Mapping[str, Any]) -> None:
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if self._run.offline:
            print(f"wandb: offline; to send it: wandb sync {Path(self._run.dir).parent}")
        else:
            print(on_screen(f"wandb: {self._run.url or 'disabled'}"))

    def log(self, row: Row, predictions: PredictedImages | None = None) -> None:
        images = {} if predictions is None else {f"{row['split']}/predictions": _images(predictions)}
        self._run.log({"step": row["step"], **scalars(row), **images})

    def end(self, run: RunEnd) -> None:
        if run.status == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=_EXIT_CODES[run.status])

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the config, defaults for variables that are not set, and fixed settings."""
        defaults = {
            "WANDB_PROJECT": ("project", PROJECT),
            "WANDB_NAME": ("run_name", self.default_name),
            "WANDB_DIR": ("root_dir", str(self._directory.absolute())),
            # Otherwise the library replaces standard output and error, also those of a live display.
            "WANDB_CONSOLE": ("console", "off"),
            "WANDB_QUIET": ("quiet", True),
            "WANDB_INIT_TIMEOUT": ("init_timeout", _INIT_SECONDS),
            # Data that are not sent by then stay on the disk; `wandb sync` sends them.
            "WANDB_FINISH_TIMEOUT": ("finish_timeout", _FINISH_SECONDS),
        }
        settings = {name: value for variable, (name, value) in defaults.items() if not os.environ.get(variable)}
        from_config = {"project": self._log.project, "run_name": self._log.name}
        settings |= {name: value for name, value in from_config.items() if value is not None}
        # A resumed run may have another duration, and a process may train several runs.
        settings |= {"allow_val_change": True, "reinit": "create_new", "finish_timeout_raises": True}
        # "Stop run" in the browser sends SIGTERM: the run saves, and can be resumed.
        return settings | {"stop_fn": lambda: os.kill(os.getpid(), signal.SIGTERM)}


@contextlib.contextmanager
def _without_banner() -> Iterator[None]:
    """Start the library in the block without a banner, and without a prompt for a key, which needs a terminal.

    After the block, the library's hooks for Python's exit are removed, which print a traceback above a one-line error.
    """
    before = sys.excepthook, sys.exit
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        sys.excepthook, sys.exit = before


def _images(predictions: PredictedImages) -> list[Any]:
    import wandb

    pairs = zip(predictions.images, predictions.captions, strict=True)
    return [wandb.Image(to_drawable(image), caption=caption) for image, caption in pairs]


LOGGERS.add("wandb")(WandB.of)
