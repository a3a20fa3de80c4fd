"""Weights & Biases offline, and MLflow with a local store: what one logger does alone. tests/conformance tests all."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import support.logged as logged
from support.data import random_table
from support.networks import linear_model
from support.shared import sgd, shared

import jaxddp
from jaxddp.config import Config
from jaxddp.core.files import try_lock
from jaxddp.training.events import RunEnd, RunStart
from jaxddp.training.listeners.trackers import MLflow, WandB

START = RunStart(0, 9, 8, 9, 1, 1)


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory) -> Iterator[None]:
    """Change to a folder in which MLflow creates its local store."""
    with pytest.MonkeyPatch.context() as patch:
        logged.alone(tmp_path_factory.mktemp("store"), patch)
        yield
        logged.remove_mlflow_variables()


@pytest.fixture
def fresh_wandb() -> Iterator[None]:
    """Make the library read its environment again, which it reads once per process."""
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


def train(**options: Any) -> Any:
    setup = shared(jaxddp.prepare_training(linear_model(), random_table(24), 1, sgd(0.1), 8))
    return jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=(), **options)[0]


@pytest.mark.parametrize("tracker", [WandB, MLflow])
def test_the_config_sets_the_number_of_logged_images(tracker, tmp_path):
    configs = [Config().replace(log={"images": count}) for count in (None, 0, 5)]
    assert [tracker.of(config, tmp_path).wants_predictions for config in configs] == [16, 0, 5]


@pytest.mark.ci
def test_the_config_names_wandbs_project_run_and_values_before_the_environment(fresh_wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "others")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    log = {"to": ["wandb"], "project": "flowers", "name": "first", "config": ["fold=3", "note=baseline"]}
    logger = WandB.of(Config().replace(log=log), tmp_path / "run")
    logger.start(START)
    logger.end(RunEnd("done", 9, 1.0))
    (folder,) = logged.offline_runs(tmp_path)
    runs = [record.run for record in logged.wandb_records(folder) if record.run.project]
    assert {(run.project, run.display_name) for run in runs} == {("flowers", "first")}
    assert {"fold": "3", "note": "baseline", "run.steps": 9}.items() <= logged.wandb_config(folder).items()


def test_without_a_key_wandb_raises_an_error_and_asks_no_question(fresh_wandb, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(Exception, match="No API key configured"):
        WandB(tmp_path).start(START)
    assert not (tmp_path / "wandb.json").exists()


def test_the_options_name_mlflows_experiment_run_and_parameters_before_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "others")
    options = {"log_project": "petals", "log_name": "first", "log_config": {"fold": 3, "note": "baseline"}}
    train(workdir=tmp_path, log_to="mlflow", **options)
    run = logged.mlflow_run(tmp_path)
    assert run.info.experiment_id == logged.mlflow_client().get_experiment_by_name("petals").experiment_id
    assert run.info.run_name == "first"
    assert {"fold": "3", "note": "baseline", "run.steps": "3"}.items() <= run.data.params.items()


def test_mlflow_logs_a_config_with_many_keys_completely(tmp_path):
    config = {f"key{number}": "x" * (7000 if number == 3 else number) for number in range(1, 250)}
    MLflow(tmp_path).start(RunStart(0, 9, 8, 9, 1, 1, config=config))
    params = logged.mlflow_run(tmp_path).data.params
    assert [len(params[key]) for key in config] == [min(len(value), 6000) for value in config.values()]


def test_the_printed_address_has_no_password(tmp_path, monkeypatch):
    run, uri = SimpleNamespace(data=SimpleNamespace(params={})), "http://someone:secret@host:5000"
    update = lambda name, status: locks.append(try_lock((tmp_path / ".mlflow.lock").open("ab")))  # noqa: E731
    client, locks = SimpleNamespace(tracking_uri=uri, get_run=lambda name: run, update_run=update), list[bool]()
    monkeypatch.setattr("mlflow.MlflowClient", lambda: client)
    assert MLflow(tmp_path / "run").open("abc", {}) == "run abc at http://host:5000"
    assert locks == [False]  # Another trial of a sweep waits.


@pytest.mark.slow
def test_a_silent_server_disables_the_logger_and_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        state = train(workdir=tmp_path / "run", log_to="mlflow")
    assert int(state.step) == 3
    (message,) = [record.getMessage() for record in caplog.records if record.name == "jaxddp.training"]
    assert message.startswith("the logger mlflow failed at step 0 (MlflowException: ")
    assert message.endswith("and is left out from here on") and "ReadTimeoutError" in message
