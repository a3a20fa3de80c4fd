"""MLflow, with a local store and with a server that does not answer: what it holds of a run, and of a resumed one."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made
import numpy as np
import optax
import pytest
from small import linear_model, random_table

import jaxddp
from jaxddp.config import Config
from jaxddp.training import rows
from jaxddp.training.events import RunEnd, RunStart, StepRecord
from jaxddp.training.listeners.mlflow import MLflow, mlflow_of

TRAIN, VAL = random_table(24), random_table(9, seed=1)


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory) -> Iterator[Path]:
    """The folder in which the runs of these tests start, and so that of the library's own store."""
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
            patch.delenv(name)
        patch.chdir(folder)
        yield folder
        # What the logger has set.
        for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
            del os.environ[name]


def client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient()


def run_of(workdir: Path) -> Any:
    return client().get_run(json.loads((workdir / "mlflow.json").read_text())["id"])


@pytest.fixture(scope="module")
def resumed(store) -> Path:
    return made.logged_in_two_parts(store / "runs" / "first", TRAIN, VAL, ["mlflow"])


@pytest.mark.slow
def test_metrics_are_those_of_metrics_jsonl(resumed):
    expected: dict[str, list[tuple[int, float]]] = {}
    for _, row in rows.parse(resumed / "metrics.jsonl"):
        for name, value in rows.scalars(row).items():
            expected.setdefault(name, []).append((row["step"], value))
    run = run_of(resumed)
    logged = {name: client().get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    assert {name: [(one.step, one.value) for one in points] for name, points in logged.items()} == expected
    assert [step for step, _ in expected["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in expected["val/top1"]] == [3, 6]


@pytest.mark.slow
def test_there_is_one_run_with_the_config_and_where_its_code_comes_from(resumed):
    own, run = json.loads((resumed / "config.json").read_text()), run_of(resumed)
    experiment = client().get_experiment_by_name("jaxddp")
    assert run.info.experiment_id == experiment.experiment_id
    named = client().search_runs([experiment.experiment_id], "attributes.run_name = 'first'")
    assert [each.info.run_id for each in named] == [run.info.run_id]
    params = run.data.params
    assert params["fingerprint.train"] == own["fingerprint"]["train"]
    assert (params["data.image_size"], params["run.devices"]) == (str(own["data"]["image_size"]), "2")
    assert {"versions.jax", "versions.jaxddp", "seed", "objects.model"} <= params.keys()
    assert run.info.status == "FINISHED"


@pytest.mark.slow
def test_what_a_resumed_run_changes_is_a_tag(resumed):
    data = run_of(resumed).data
    assert (data.params["train.duration"], data.tags["train.duration"]) == ("1 epoch", "2 epochs")
    changed = data.params.keys() & data.tags.keys()
    assert changed == {"train.duration", "run.steps"}


@pytest.mark.slow
def test_each_evaluation_shows_its_predictions(resumed, tmp_path):
    from PIL import Image

    run = run_of(resumed)
    pictures = [file.path for file in client().list_artifacts(run.info.run_id, "images") if file.path.endswith(".png")]
    assert sorted(int(path.split("+step+")[1].split("+")[0]) for path in pictures) == [3, 6]
    for path in pictures:
        picture = np.asarray(Image.open(client().download_artifacts(run.info.run_id, path, str(tmp_path))))
        assert np.ptp(picture[..., :3]) > 200


@pytest.mark.slow
@pytest.mark.parametrize(("status", "told"), [("done", "FINISHED"), ("failed", "FAILED"), ("preempted", "KILLED")])
def test_the_end_of_a_run_is_told_and_a_resumed_one_runs_again(status, told, tmp_path):
    logger = MLflow(tmp_path)
    logger.start(RunStart(0, 9, 8, 9, 1, 1))
    for step in (1, 2, 3):
        logger.step(StepRecord(step, 0.1, {"loss": 1 / step}, None, 1.0, 0.0))
    logger.end(RunEnd(status, 3, 1.0))
    run = run_of(tmp_path)
    assert run.info.status == told
    losses = client().get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in losses] == [(1, 1), (2, 1 / 2), (3, 1 / 3)]
    again = MLflow(tmp_path)
    again.start(RunStart(3, 9, 8, 9, 1, 1))
    assert run_of(tmp_path).info.status == "RUNNING"


@pytest.mark.slow
def test_a_run_from_step_0_begins_another_and_the_environment_has_its_say(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "flowers")
    found = []
    for _ in range(2):
        logger = MLflow(tmp_path)
        logger.start(RunStart(0, 9, 8, 9, 1, 1))
        found.append(run_of(tmp_path).info)
    assert found[0].run_id != found[1].run_id
    assert {info.experiment_id for info in found} == {client().get_experiment_by_name("flowers").experiment_id}


@pytest.mark.slow
def test_a_config_of_many_keys_is_told_whole(tmp_path):
    config = {f"key{number}": "x" * (7000 if number == 3 else number) for number in range(1, 250)}
    logger = MLflow(tmp_path)
    logger.start(RunStart(0, 9, 8, 9, 1, 1, config=config))
    params = run_of(tmp_path).data.params
    assert [len(params[key]) for key in config] == [min(len(value), 6000) for value in config.values()]


@pytest.mark.slow
def test_a_server_that_says_nothing_costs_the_logger_and_not_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        setup = jaxddp.prepare_training(linear_model(), TRAIN, 1, optax.sgd(0.1), 8)
        state, _ = jaxddp.train(
            jaxddp.softmax_cross_entropy, setup, listeners=(), workdir=tmp_path / "run", log_to="mlflow"
        )
    assert int(state.step) == 3
    (said,) = [record.getMessage() for record in caplog.records if record.name == "jaxddp.training"]
    assert said.startswith("the logger mlflow failed at step 0 (MlflowException: ")
    assert said.endswith("and is left out from here on") and "ReadTimeoutError" in said


SERVER = """
from mlflow.server import app
from werkzeug.serving import make_server

server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def server(tmp_path) -> Iterator[str]:
    """MLflow's own server, with a store and with artifacts that come through it."""
    told = {
        "FILE_STORE": f"sqlite:///{tmp_path}/server.db",
        "ARTIFACT_ROOT": "mlflow-artifacts:/",
        "ARTIFACT_DESTINATION": str(tmp_path / "artifacts"),
        "SERVE_ARTIFACTS": "true",
    }
    environment = {f"_MLFLOW_SERVER_{name}": value for name, value in told.items()}
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


@pytest.mark.slow
def test_a_server_is_told_the_same(server, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    setup = jaxddp.prepare_training(linear_model(), TRAIN, 1, optax.sgd(0.1), 8)
    workdir = tmp_path / "served"
    jaxddp.train(
        jaxddp.softmax_cross_entropy, setup, val=VAL, listeners=(), workdir=workdir, log_to="mlflow", log_every="1 step"
    )
    run = run_of(workdir)
    logged = [(one.step, one.value) for one in client().get_metric_history(run.info.run_id, "train/loss")]
    written = [row for _, row in rows.parse(workdir / "metrics.jsonl")]
    assert logged == [(row["step"], row["loss"]) for row in written if row["split"] == "train"]
    assert run.info.status == "FINISHED"
    names = [file.path for file in client().list_artifacts(run.info.run_id, "images")]
    assert [name for name in names if "+step+3+" in name and name.endswith(".png")]
    said = capfd.readouterr().out
    assert said == f"mlflow: run {run.info.run_id} at {server.replace('someone:secret@', '')}\n"


def test_how_many_images_it_shows_is_the_configs_to_say(tmp_path):
    wanted = [mlflow_of(Config().replace(log={"images": count}), tmp_path).wants_predictions for count in (None, 0, 5)]
    assert wanted == [16, 0, 5]
