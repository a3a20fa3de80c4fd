"""The MLflow logger with a local store, with a server, and with a server that does not answer.

tests/conformance tests the behavior that all loggers have in common.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.data import random_table
from support.logged import alone, mlflow_client, mlflow_run, remove_mlflow_variables
from support.networks import linear_model
from support.shared import sgd, shared

import jaxddp
from jaxddp.config import Config
from jaxddp.training.events import RunEnd, RunStart
from jaxddp.training.listeners import jsonl as rows
from jaxddp.training.listeners.trackers import MLflow

TRAIN, VAL = random_table(24), random_table(9, seed=1)


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory) -> Iterator[Path]:
    """Return the current directory of these tests, in which MLflow creates its local store."""
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        alone(folder, patch)
        yield folder
        remove_mlflow_variables()


@pytest.mark.ci
def test_a_resumed_run_has_status_running_again(tmp_path):
    logger = MLflow(tmp_path)
    logger.start(RunStart(0, 9, 8, 9, 1, 1))
    logger.end(RunEnd("preempted", 3, 1.0))
    assert mlflow_run(tmp_path).info.status == "KILLED"
    MLflow(tmp_path).start(RunStart(3, 9, 8, 9, 1, 1))
    assert mlflow_run(tmp_path).info.status == "RUNNING"


def test_the_log_options_of_a_run_set_mlflows_experiment_name_and_parameters(tmp_path, monkeypatch):
    """The options take precedence over the environment."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "others")
    setup = shared(jaxddp.prepare_training(linear_model(), TRAIN, 1, sgd(0.1), 8))
    options = {"log_project": "petals", "log_name": "first", "log_config": {"fold": 3, "note": "baseline"}}
    jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=(), workdir=tmp_path, log_to="mlflow", **options)
    run = mlflow_run(tmp_path)
    assert run.info.experiment_id == mlflow_client().get_experiment_by_name("petals").experiment_id
    assert run.info.run_name == "first"
    assert {"fold": "3", "note": "baseline", "run.steps": "3"}.items() <= run.data.params.items()


def test_a_config_with_many_keys_is_logged_completely(tmp_path):
    config = {f"key{number}": "x" * (7000 if number == 3 else number) for number in range(1, 250)}
    logger = MLflow(tmp_path)
    logger.start(RunStart(0, 9, 8, 9, 1, 1, config=config))
    params = mlflow_run(tmp_path).data.params
    assert [len(params[key]) for key in config] == [min(len(value), 6000) for value in config.values()]


@pytest.mark.slow
def test_a_silent_server_disables_the_logger_and_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        setup = shared(jaxddp.prepare_training(linear_model(), TRAIN, 1, sgd(0.1), 8))
        state, _ = jaxddp.train(
            jaxddp.softmax_cross_entropy, setup, listeners=(), workdir=tmp_path / "run", log_to="mlflow"
        )
    assert int(state.step) == 3
    (message,) = [record.getMessage() for record in caplog.records if record.name == "jaxddp.training"]
    assert message.startswith("the logger mlflow failed at step 0 (MlflowException: ")
    assert message.endswith("and is left out from here on") and "ReadTimeoutError" in message


SERVER = """
from mlflow.server import app
from werkzeug.serving import make_server

server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    """Return the URL of an MLflow server with its own store, which also serves the artifacts."""
    settings = {
        "FILE_STORE": f"sqlite:///{tmp_path}/server.db",
        "ARTIFACT_ROOT": "mlflow-artifacts:/",
        "ARTIFACT_DESTINATION": str(tmp_path / "artifacts"),
        "SERVE_ARTIFACTS": "true",
    }
    environment = {f"_MLFLOW_SERVER_{name}": value for name, value in settings.items()}
    environment |= {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-c", SERVER]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        yield f"http://someone:secret@127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait(30)


@pytest.mark.ci
def test_a_server_receives_the_metrics_images_and_status_of_a_run(server, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    setup = shared(jaxddp.prepare_training(linear_model(), TRAIN, 1, sgd(0.1), 8))
    workdir = tmp_path / "served"
    jaxddp.train(
        jaxddp.softmax_cross_entropy, setup, val=VAL, listeners=(), workdir=workdir, log_to="mlflow", log_every="1 step"
    )
    run = mlflow_run(workdir)
    logged = [
        (metric.step, metric.value) for metric in mlflow_client().get_metric_history(run.info.run_id, "train/loss")
    ]
    written = [row for _, row in rows.parse(workdir / "metrics.jsonl")]
    assert logged == [(row["step"], row["loss"]) for row in written if row["split"] == "train"]
    assert run.info.status == "FINISHED"
    names = [file.path for file in mlflow_client().list_artifacts(run.info.run_id, "images")]
    assert [name for name in names if "+step+3+" in name and name.endswith(".png")]
    output = capfd.readouterr().out
    assert output == f"mlflow: run {run.info.run_id} at {server.replace('someone:secret@', '')}\n"


def test_the_config_sets_the_number_of_logged_images(tmp_path):
    numbers = [MLflow.of(Config().replace(log={"images": count}), tmp_path).wants_predictions for count in (None, 0, 5)]
    assert numbers == [16, 0, 5]
