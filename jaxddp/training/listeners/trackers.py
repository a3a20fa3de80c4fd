"""Loggers for TensorBoard, Weights & Biases and MLflow.

The last two are services, in which all processes share one run; a resumed run continues it. The loggers record the
run's id, config, versions and commit.
"""

import contextlib
import importlib.util
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import jaxddp.core.files as files
from jaxddp.config import Config, LogConfig
from jaxddp.config.registry import LOGGERS
from jaxddp.config.values import flatten
from jaxddp.core.errors import InputError, Key
from jaxddp.core.libraries import installed_version
from jaxddp.core.wording import not_installed, on_screen
from jaxddp.training.events import DEFAULT_SHOWN, PredictedImages, RunEnd, RunStart, images_to_show, to_drawable
from jaxddp.training.listeners.jsonl import Row, RowListener, scalars
from jaxddp.training.progress import count_parameters

PROJECT = "jaxddp"
"""The default project, or experiment."""
_PACKAGES = ("jaxddp", "jax", "jaxlib", "flax", "optax")
_EXIT_CODES = {"done": 0, "stopped": 0, "failed": 1, "preempted": 75, "interrupted": 130}
_INIT_SECONDS, _FINISH_SECONDS = 60, 60
_STATUSES = {
    **{"done": "FINISHED", "stopped": "FINISHED"},
    **{"failed": "FAILED", "preempted": "KILLED", "interrupted": "KILLED"},
}
_MAX_PARAMS, _MAX_METRICS = 100, 1000
"""The limits of one MLflow request."""
_MAX_PARAM_LENGTH = 6000
_SECONDS_BETWEEN = 1.0
"""Seconds between two requests: a request takes tens of milliseconds, during which the devices may be idle."""
_ENVIRONMENT_DEFAULTS = {
    # Training waits for each request. Without a server, a request fails after seconds with these values, and after 15
    # minutes with MLflow's defaults.
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_PLUGIN = "tensorboard.plugins.hparams"
_GIT_SECONDS = 5
"""On a network file system git may take long, and a run should not wait for it."""


class TrackingLogger(RowListener, ABC):
    """A logger for a service. All processes share one run of the service; a resumed run continues it.

    Args:
        directory: the work directory; `LIBRARY.json` in it holds the id of the run.
        images: how many validation images to show at each evaluation.
        log: the `log` section of the config, with the project, the name, and values to record besides the config.
    """

    library: ClassVar[str]
    """The name of the logger, of its library, and of the package's extra that installs it."""

    def __init__(self, directory: Path, images: int = DEFAULT_SHOWN, log: LogConfig | None = None):
        self._directory, self._log = directory, log or LogConfig()
        self.wants_predictions = images

    @classmethod
    def of(cls, config: Config, workdir: Path) -> Self:
        """Return the logger of a config. Raises: InputError if its library is not installed."""
        if importlib.util.find_spec(cls.library) is None:
            missing = not_installed(cls.library, cls.library)
            raise InputError(Key.plain("log.to", cls.library), f": the package {missing}")
        return cls(workdir, images_to_show(config), config.log)

    def start(self, run: RunStart) -> None:
        file, recorded = self._directory / f"{self.library}.json", self._log.recorded | provenance(run)
        run_id = self.open(saved_id(file, run), recorded)
        save_id(file, run_id)
        self.finish_open(recorded)

    @abstractmethod
    def open(self, saved_id: str | None, recorded: Mapping[str, Any]) -> str:
        """Open the service's run with a saved id, or create a run if the id is None. Returns the id of the run."""

    @abstractmethod
    def finish_open(self, recorded: Mapping[str, Any]) -> None:
        """Finish the setup after the id of the run is saved, and print the address of the run."""

    @property
    def default_name(self) -> str:
        """The default name of the run: the name of its work directory."""
        return self._directory.absolute().name


def saved_id(path: Path, run: RunStart) -> str | None:
    """Return the id in the file at `path`; None for a run from step 0, or if there is no such file.

    Raises: InputError if the file holds no id.
    """
    if run.start_step == 0 or not path.exists():
        return None
    advice = "remove it to log to a new run"
    with files.reading(path, advice):
        content = files.read(path)
    try:
        return str(files.parse_json(content)["id"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: holds no id of a run; {advice}") from None


def save_id(path: Path, run_id: str) -> None:
    """Save the id of a run for when it is resumed. Raises: InputError if the file cannot be written."""
    files.create(path.parent)
    files.replace(path, (json.dumps({"id": run_id}) + "\n").encode())


def provenance(run: RunStart, folder: Path | None = None) -> dict[str, Any]:
    """Return the config by dotted names, together with the entries `run.…`, `versions.…` and `code.…`.

    `code.…` describes the repository around `folder`, by default the current directory.
    """
    sections = {
        "run": {
            "devices": run.devices,
            "device_kind": run.device_kind,
            "processes": run.processes,
            "parameters": None if run.params is None else count_parameters(run.params),
            "examples": run.num_examples,
            "steps": run.total_steps,
        },
        "versions": {package: installed_version(package) for package in _PACKAGES},
        "code": code_version(folder or Path.cwd()),
    }
    return flatten({**run.config, **sections})


def code_version(folder: Path) -> dict[str, Any]:
    """Return the `commit` of the repository around a folder, and whether its files are `dirty` (differ from it).

    The result is empty if git is missing, there is no repository, or git takes longer than seconds.
    """
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": _git(folder, "status", "--porcelain", "--untracked-files=no") != ""}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(folder: Path, *arguments: str) -> str:
    # `git status` must not lock a repository in which somebody works.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(folder), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    return result.stdout.strip()


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


class MLflow(TrackingLogger):
    """A logger of the rows of metrics.jsonl as `train/loss`, …, of the config as parameters, and of predicted images.

    The environment names the server (`MLFLOW_TRACKING_URI`, …); the default is mlflow.db in the current directory. The
    config or the environment (`MLFLOW_EXPERIMENT_NAME`, …) names the experiment; the default is "jaxddp". The run is
    named by the config, or after its work directory. A step that a resumed run repeats is logged twice. MLflow's
    parameters cannot change, so a setting that a resumed run changes is logged as a tag of the same name.
    """

    library = "mlflow"
    _client: Any = None
    _id = ""
    _last_sent = 0.0

    def open(self, saved_id: str | None, recorded: Mapping[str, Any]) -> str:
        self._unsent: list[Any] = []
        for name, value in _ENVIRONMENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        # urllib3 warns of each failed attempt; the final failure is reported anyway.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self._client = MlflowClient()
        if saved_id is None:
            self._id = self._create(recorded.get("code.commit"))
        else:
            self._client.update_run(saved_id, status="RUNNING")
            self._id = saved_id
        return self._id

    def finish_open(self, recorded: Mapping[str, Any]) -> None:
        # The URI may contain a password.
        print(on_screen(f"mlflow: run {self._id} at {re.sub(r'//[^/]*@', '//', self._client.tracking_uri)}"))
        self._log_params({name: str(value) for name, value in recorded.items()})

    def log(self, row: Row, predictions: PredictedImages | None = None) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._unsent += [Metric(name, value, now, row["step"]) for name, value in scalars(row).items()]
        if row["split"] != "train" or time.monotonic() - self._last_sent >= _SECONDS_BETWEEN:
            self._send()
        if predictions is not None:
            from jaxddp.training.pictures import prediction_pixels

            picture = prediction_pixels(predictions)
            self._client.log_image(self._id, picture, key=f"{row['split']}/predictions", step=row["step"])

    def end(self, run: RunEnd) -> None:
        self._send()
        self._client.set_terminated(self._id, _STATUSES[run.status])

    def _create(self, commit: str | None) -> str:
        experiment, name = os.environ.get("MLFLOW_EXPERIMENT_ID"), self._log.project
        if name is not None or not experiment:
            name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            existing = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if existing is None else existing.experiment_id
        tags = {"mlflow.source.git.commit": commit} if commit else {}
        run_name = self._log.name or self.default_name
        created = self._client.create_run(experiment, run_name=run_name, tags=tags)
        return created.info.run_id

    def _log_params(self, params: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        # MLflow truncates longer values, and a truncated value would look changed when the run is resumed.
        params = {name: value[:_MAX_PARAM_LENGTH] for name, value in params.items()}
        logged = self._client.get_run(self._id).data.params
        new = [Param(name, value) for name, value in params.items() if name not in logged]
        for batch in _batches(new, _MAX_PARAMS):
            self._client.log_batch(self._id, params=batch, synchronous=True)
        changed = [name for name, value in logged.items() if params.get(name, value) != value]
        for batch in _batches([RunTag(name, params[name]) for name in changed], _MAX_PARAMS):
            self._client.log_batch(self._id, tags=batch, synchronous=True)

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, []
        for batch in _batches(unsent, _MAX_METRICS):
            self._client.log_batch(self._id, metrics=batch, synchronous=True)
        self._last_sent = time.monotonic()


def _batches(entries: list[Any], size: int) -> Iterator[list[Any]]:
    return (entries[at : at + size] for at in range(0, len(entries), size))


LOGGERS.add("mlflow")(MLflow.of)


class TensorBoard(RowListener):
    """A logger of scalars under `directory` (`train/loss`, `train/learning_rate`, `train/epoch_top1`, `val/top1`, …).

    It also writes a picture with the predictions of `images` validation images, or of more images if another listener
    requests more.

    The files are opened at the first record, so the first step does not wait for the import of TensorFlow, which takes
    seconds. (A thread must not import them: other threads would find incomplete modules.)

    A resumed run adds a file beside the earlier ones; TensorBoard drops the points of repeated steps. A run from step 0
    removes the event files in the directory. Raises: InputError if the directory cannot be written.
    """

    imports_tensorflow = True
    """The check of the memory before the first step counts TensorFlow."""

    def __init__(self, directory: Path, images: int = 0):
        self._directory = directory
        self._writer: Any = None
        self.wants_predictions = images

    def start(self, run: RunStart) -> None:
        files.create(self._directory)
        if run.start_step == 0:
            for path in self._directory.glob("events.out.tfevents.*"):
                files.remove(path)

    def log(self, row: Row, predictions: PredictedImages | None = None) -> None:
        if self._writer is None:
            self._writer = _open(self._directory)
        self._writer.write_scalars(row["step"], scalars(row))
        if predictions is not None:
            from jaxddp.training.pictures import prediction_pixels

            picture = prediction_pixels(predictions)[None, ..., :3]
            self._writer.write_images(row["step"], {f"{row['split']}/predictions": picture})
        if row["split"] != "train":
            self._writer.flush()

    def end(self, run: RunEnd) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _open(directory: Path) -> Any:
    # This import must precede clu, which would import TensorFlow without our settings.
    from jaxddp.data.stream import tensorflow_cpu  # noqa: F401

    with _without_keras():
        from clu import metric_writers

    with files.readable_errors(directory):
        return metric_writers.SummaryWriter(str(directory))


@contextmanager
def _without_keras() -> Iterator[None]:
    """Import clu in the block without Keras, which would import scikit-learn and half of SciPy, in 1.1 s.

    clu imports tensorboard's plugin for hyperparameters. The plugin derives a class from a class of Keras; nothing here
    uses it.
    """
    package, keras, api = _PLUGIN, f"{_PLUGIN}._keras", f"{_PLUGIN}.api"
    if {"keras", keras, api} & sys.modules.keys():
        yield
        return
    stand_in = ModuleType(keras)
    stand_in.Callback = object  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[keras] = stand_in
    try:
        yield
    finally:
        # A later import of the plugin, by the user's code, finds the class of Keras.
        for name in (keras, api):
            sys.modules.pop(name, None)
            vars(sys.modules.get(package, stand_in)).pop(name.rpartition(".")[2], None)


LOGGERS.add("tensorboard")(lambda config, workdir: TensorBoard(workdir, config.log.images or 0))
