"""Weights & Biases, offline: the behaviour of this logger alone. tests/conformance tests all loggers."""

from collections.abc import Iterator

import pytest
from support.logged import alone, offline_runs, wandb_config, wandb_records

from jaxddp.config import Config
from jaxddp.training.events import RunEnd, RunStart
from jaxddp.training.listeners.trackers import WandB


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        alone(tmp_path_factory.mktemp("elsewhere"), patch)
        yield


@pytest.fixture
def fresh_library() -> Iterator[None]:
    """Make the library read its environment again, which it reads once per process."""
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.slow
def test_project_name_and_config_are_those_of_the_run(fresh_library, tmp_path, monkeypatch):
    """The config takes precedence over the environment."""
    monkeypatch.setenv("WANDB_PROJECT", "others")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    log = {"to": ["wandb"], "project": "flowers", "name": "first", "config": ["fold=3", "note=baseline"]}
    logger = WandB.of(Config().replace(log=log), tmp_path / "run")
    logger.start(RunStart(0, 9, 8, 9, 1, 1))
    logger.end(RunEnd("done", 9, 1.0))
    (folder,) = offline_runs(tmp_path)
    runs = [record.run for record in wandb_records(folder) if record.run.project]
    assert {(run.project, run.display_name) for run in runs} == {("flowers", "first")}
    assert {"fold": "3", "note": "baseline", "run.steps": 9}.items() <= wandb_config(folder).items()


def test_without_a_key_an_error_is_raised_and_no_question_is_asked(fresh_library, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(Exception, match="No API key configured"):
        WandB(tmp_path).start(RunStart(0, 9, 8, 9, 1, 1))
    assert not (tmp_path / "wandb.json").exists()


def test_the_config_sets_the_number_of_logged_images(tmp_path):
    numbers = [
        WandB.of(Config().replace(log={"images": images}), tmp_path).wants_predictions for images in (None, 0, 5)
    ]
    assert numbers == [16, 0, 5]
