"""Loggers for TensorBoard, Weights & Biases and MLflow.

The last two are services, in which all processes share one run; a resumed run continues it. The loggers record the
run's id, config, versions and commit.
"""

import contextlib
import importlib.util
import io
import logging
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jaxddp.core.files as files
from jaxddp.config import Config
from jaxddp.config.registry import LOGGERS
from jaxddp.config.values import flatten
from jaxddp.core.errors import InputError, Key, not_installed, on_screen
from jaxddp.core.libraries import installed_version
from jaxddp.training.events import PredictedImages, RunEnd, RunStart, to_drawable
from jaxddp.training.listeners.jsonl import Row, RowListener, encode, scalars
from jaxddp.training.progress import count_parameters

DEFAULT_SHOWN = 16
"""The default number of images whose predictions a service shows."""
PROJECT = "jaxddp"
"""The default project, or experiment."""
_ENDS = {"done": (0, "FINISHED"), "stopped": (0, "FINISHED"), "failed": (1, "FAILED")}
_ENDS |= {"preempted": (75, "KILLED"), "interrupted": (130, "KILLED")}
"""The exit code for W&B and the status for MLflow, by the status of a run."""
_MAX_PARAMS, _MAX_METRICS, _MAX_PARAM_LENGTH = 100, 1000, 6000
"""The limits of one MLflow request."""
_SECONDS_BETWEEN = 1.0
"""The seconds between two requests: a request takes tens of milliseconds, during which the devices may be idle."""
# Training waits for each request. Without a server, a request fails after seconds with these values, and after 15
# minutes with MLflow's defaults.
_MLFLOW_ENVIRONMENT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}
_MLFLOW_ENVIRONMENT |= {"MLFLOW_LOGGING_LEVEL": "WARNING", "MLFLOW_DISABLE_TELEMETRY": "true"}
_MLFLOW_ENVIRONMENT |= {"MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}


class TrackingLogger(RowListener):
    """A logger for a service. All processes share one run of the service; a resumed run continues it.

    Args:
        directory: the work directory; `LIBRARY.json` in it holds the id of the run.
        config: its `log` section has the project, the name, values to record besides the config, and how many
            validation images to show at each evaluation.
    """

    library = ""
    """The name of the logger, of its library, and of the package's extra that installs it."""

    def __init__(self, directory: Path, config: Config | None = None):
        self._directory, self._log = directory.absolute(), (config or Config()).log
        self.wants_predictions = DEFAULT_SHOWN if self._log.images is None else self._log.images

    @classmethod
    def of(cls, config: Config, workdir: Path) -> Self:
        """Return the logger of a config. Raises: InputError if its library is not installed."""
        if importlib.util.find_spec(cls.library) is None:
            missing = not_installed(cls.library, cls.library)
            raise InputError(Key.plain("log.to", cls.library), f": the package {missing}")
        return cls(workdir, config)

    def start(self, run: RunStart) -> None:
        file = self._directory / f"{self.library}.json"
        print(on_screen(f"{self.library}: {self.open(saved_id(file, run), self._log.recorded | provenance(run))}"))

    def open(self, saved_id: str | None, recorded: Mapping[str, Any]) -> str:
        """Open the service's run with a saved id, or create a run if the id is None. Return the address of the run.

        Save the id by `save_id` before anything else can fail.
        """
        raise NotImplementedError

    def save_id(self, run_id: str) -> None:
        """Write the id of the run into the work directory, from which a resumed run takes it."""
        files.create(self._directory)
        files.replace(self._directory / f"{self.library}.json", encode({"id": run_id}))


def saved_id(path: Path, run: RunStart) -> str | None:
    """Return the id in the file at `path`; None for a run from step 0, or if there is no such file.

    Raises: InputError if the file holds no id.
    """
    if run.start_step == 0 or not path.exists():
        return None
    advice = "remove it to log to a new run"
    try:
        with files.reading(path, advice):
            return str(files.parse_json(files.read(path), dict)["id"])
    except (ValueError, KeyError):
        raise InputError(f"{path}: holds no id of a run; {advice}") from None


def provenance(run: RunStart, folder: Path | None = None) -> dict[str, Any]:
    """Return the config by dotted names, together with the entries `run.…`, `versions.…` and `code.…`.

    `code.…` describes the repository around `folder`, by default the current directory.
    """
    size = {"examples": run.num_examples, "steps": run.total_steps, "parameters": count_parameters(run.params)}
    machine = {"devices": run.devices, "device_kind": run.device_kind, "processes": run.processes}
    versions = {package: installed_version(package) for package in ("jaxddp", "jax", "jaxlib", "flax", "optax")}
    code = code_version(folder or Path.cwd())
    return flatten({**run.config, "run": machine | size, "versions": versions, "code": code})


def code_version(folder: Path) -> dict[str, Any]:
    """Return the `commit` of the repository around a folder, and whether its files are `dirty` (differ from it).

    The result is empty if git is missing, there is no repository, or git takes longer than seconds.
    """

    def git(*arguments: str) -> str:
        # `git status` must not lock a repository in which somebody works. On a network file system git may take long,
        # and a run should not wait for it.
        environment, command = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, ["git", "-C", str(folder), *arguments]
        quiet = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 5}
        return subprocess.check_output(command, env=environment, **quiet).strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        is_dirty = git("status", "--porcelain", "--untracked-files=no") != ""
        return {"commit": git("rev-parse", "HEAD"), "dirty": is_dirty}
    return {}


class WandB(TrackingLogger):
    """A logger of the rows of metrics.jsonl as `train/loss`, `val/top1`, …, and of predictions as images with captions.

    The config or the environment (`WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_MODE`, …) names the project and the run. The
    default project is "jaxddp"; the default name is the name of the work directory, into which W&B writes.

    Rows hold the training step as `step`, which is the axis of all metrics. W&B's own step counter can only grow, so
    W&B would drop the rows of a resumed run for steps that were already sent.
    """

    library = "wandb"

    def open(self, saved_id: str | None, recorded: Mapping[str, Any]) -> str:
        import wandb

        run_id = saved_id or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:16]
        settings, hooks = wandb.Settings(**self._settings()), (sys.excepthook, sys.exit)
        try:
            # Without standard error, the library prints no banner, and does not ask for a key.
            with contextlib.redirect_stderr(io.StringIO()):
                self._run = wandb.init(id=run_id, resume="allow", config={**recorded}, settings=settings)
        finally:
            # The library's hooks for Python's exit print a traceback above a one-line error.
            sys.excepthook, sys.exit = hooks
        self.save_id(run_id)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        if self._run.offline:
            return f"offline; to send it: wandb sync {Path(self._run.dir).parent}"
        return self._run.url or "disabled"

    def log(self, row: Row, predictions: PredictedImages | None = None) -> None:
        import wandb

        content = {"step": row["step"], **scalars(row)}
        if predictions is not None:
            pairs = zip(map(to_drawable, predictions.images), predictions.captions, strict=True)
            content[f"{row['split']}/predictions"] = [wandb.Image(image, caption=text) for image, text in pairs]
        self._run.log(content)

    def end(self, run: RunEnd) -> None:
        if run.status == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=_ENDS[run.status][0])

    def _settings(self) -> dict[str, Any]:
        """Return defaults for variables that are not set, the settings of the config, and fixed settings."""
        defaults = {
            "WANDB_PROJECT": ("project", PROJECT),
            "WANDB_NAME": ("run_name", self._directory.name),
            "WANDB_DIR": ("root_dir", str(self._directory)),
            # Otherwise the library replaces standard output and error, also those of a live display.
            "WANDB_CONSOLE": ("console", "off"),
            "WANDB_QUIET": ("quiet", True),
            "WANDB_INIT_TIMEOUT": ("init_timeout", 60),
            # Data that are not sent by then stay on the disk; `wandb sync` sends them.
            "WANDB_FINISH_TIMEOUT": ("finish_timeout", 60),
        }
        settings = {name: value for variable, (name, value) in defaults.items() if not os.environ.get(variable)}
        settings |= {"project": self._log.project} if self._log.project is not None else {}
        settings |= {"run_name": self._log.name} if self._log.name is not None else {}
        # A resumed run may have another duration, and a process may train several runs.
        settings |= {"allow_val_change": True, "reinit": "create_new", "finish_timeout_raises": True}
        # "Stop run" in the browser sends SIGTERM: the run saves, and can be resumed.
        return settings | {"stop_fn": lambda: os.kill(os.getpid(), signal.SIGTERM)}


LOGGERS.add("wandb")(WandB.of)


class MLflow(TrackingLogger):
    """A logger of the rows of metrics.jsonl as `train/loss`, …, of the config as parameters, and of predicted images.

    The environment names the server (`MLFLOW_TRACKING_URI`, …); the default is mlflow.db in the current directory. The
    config or the environment (`MLFLOW_EXPERIMENT_NAME`, …) names the experiment; the default is "jaxddp". The run is
    named by the config, or after its work directory. A step that a resumed run repeats is logged twice. MLflow's
    parameters cannot change, so a setting that a resumed run changes is logged as a tag of the same name.
    """

    library = "mlflow"

    def open(self, saved_id: str | None, recorded: Mapping[str, Any]) -> str:
        self._unsent, self._last_sent = list[Any](), 0.0
        for name, value in _MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        # urllib3 warns of each failed attempt; the final failure is reported anyway.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        # The trials of a sweep begin together, and MLflow's database and experiment can be created only once.
        with files.in_turn(self._directory.parent / ".mlflow.lock", patience=30.0):
            self._client = MlflowClient()
            if saved_id is not None:
                self._client.update_run(saved_id, status="RUNNING")
            self._id: str = saved_id or self._create(recorded.get("code.commit"))
        self.save_id(self._id)
        # MLflow truncates longer values, and a truncated value would look changed when the run is resumed.
        params = {name: str(value)[:_MAX_PARAM_LENGTH] for name, value in recorded.items()}
        logged = self._client.get_run(self._id).data.params
        changed = [name for name, value in logged.items() if params.get(name, value) != value]
        self._send("params", [Param(name, value) for name, value in params.items() if name not in logged], _MAX_PARAMS)
        self._send("tags", [RunTag(name, params[name]) for name in changed], _MAX_PARAMS)
        # The URI may contain a password.
        return f"run {self._id} at {re.sub(r'//[^/]*@', '//', self._client.tracking_uri)}"

    def log(self, row: Row, predictions: PredictedImages | None = None) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._unsent += [Metric(name, value, now, row["step"]) for name, value in scalars(row).items()]
        if row["split"] != "train" or time.monotonic() - self._last_sent >= _SECONDS_BETWEEN:
            self._send_metrics()
        if predictions is not None:
            from jaxddp.training.pictures import prediction_pixels

            picture = prediction_pixels(predictions)
            self._client.log_image(self._id, picture, key=f"{row['split']}/predictions", step=row["step"])

    def end(self, run: RunEnd) -> None:
        self._send_metrics()
        self._client.set_terminated(self._id, _ENDS[run.status][1])

    def _create(self, commit: str | None) -> str:
        experiment, name = os.environ.get("MLFLOW_EXPERIMENT_ID"), self._log.project
        if name is not None or not experiment:
            name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            existing = self._client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        tags, run_name = {"mlflow.source.git.commit": commit} if commit else {}, self._log.name or self._directory.name
        return self._client.create_run(experiment, run_name=run_name, tags=tags).info.run_id

    def _send_metrics(self) -> None:
        unsent, self._unsent, self._last_sent = self._unsent, [], time.monotonic()
        self._send("metrics", unsent, _MAX_METRICS)

    def _send(self, kind: str, entries: list[Any], most: int) -> None:
        for at in range(0, len(entries), most):
            self._client.log_batch(self._id, **{kind: entries[at : at + most]}, synchronous=True)


LOGGERS.add("mlflow")(MLflow.of)


class TensorBoard(RowListener):
    """A logger of scalars under `directory` (`train/loss`, `train/learning_rate`, `train/epoch_top1`, `val/top1`, …).

    It also writes a picture with the predictions of `images` validation images, or of more images if another listener
    requests more.

    A resumed run adds a file beside the earlier ones; TensorBoard drops the points of repeated steps. A run from step 0
    removes the event files in the directory. Raises: InputError if the directory cannot be written.
    """

    def __init__(self, directory: Path, images: int = 0):
        self._directory, self._writer = directory, None
        self.wants_predictions = images

    def start(self, run: RunStart) -> None:
        files.create(self._directory)
        earlier = self._directory.glob("events.out.tfevents.*") if run.start_step == 0 else ()
        for path in earlier:
            files.remove(path)

    def log(self, row: Row, predictions: PredictedImages | None = None) -> None:
        # These modules of tensorboard do not import TensorFlow. Its own writer of event files does, for seconds.
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(row).items()]
        if predictions is not None:
            from PIL import Image

            from jaxddp.training.pictures import prediction_pixels

            png, picture = io.BytesIO(), Image.fromarray(prediction_pixels(predictions)[..., :3])
            picture.save(png, "PNG")
            size = {"width": picture.width, "height": picture.height, "colorspace": 3}
            image = Summary.Image(encoded_image_string=png.getvalue(), **size)
            values.append(Summary.Value(tag=f"{row['split']}/predictions", image=image))
        with files.readable_errors(self._directory):
            if self._writer is None:
                file = self._directory / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
                self._writer = RecordWriter(files.open_regular(file, "ab"))
                self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            event = Event(wall_time=time.time(), step=row["step"], summary=Summary(value=values))
            self._writer.write(event.SerializeToString())
            if row["split"] != "train":
                self._writer.flush()

    def end(self, run: RunEnd) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


LOGGERS.add("tensorboard")(lambda config, workdir: TensorBoard(workdir, config.log.images or 0))
