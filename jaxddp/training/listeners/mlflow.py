"""MLflow, an optional dependency: one MLflow run for all processes, which a resumed run continues."""

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxddp.core.wording import on_screen
from jaxddp.registry import LOGGERS
from jaxddp.training.events import RunEnd
from jaxddp.training.listeners.metric_rows import Row, scalars
from jaxddp.training.listeners.tracking import PROJECT, TrackingLogger
from jaxddp.training.validation.predicted_images import PredictedImages

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
