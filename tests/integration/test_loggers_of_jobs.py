"""Loggers in real jobs: one run for all processes, also after a stop and a resume, and a prompt end."""

import shutil
import signal
import sqlite3
import sys
from pathlib import Path

import pytest
from support.processes import ENDLESS, TRAIN, Launched, Program, lines, result

pytestmark = pytest.mark.ci

LOG = ["--log.to", "jsonl,wandb,mlflow", "--log.images", "4"]
WANTS_MORE = """
import time
from jaxddp.config import load

class Watching:
    wants_predictions = 6

    def start(self, run):
        self.seconds = 7 if run.processes == 2 else 0

    def evaluation(self, record):
        pass

    def end(self, run):
        time.sleep(self.seconds)

def get_config():
    return load("small_recipe.py")

def get_listeners(config, workdir):
    return [Watching()]
"""


@pytest.fixture(autouse=True)
def local(tmp_path, monkeypatch) -> None:
    """Make both libraries write into the test's folder, without a network."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)


def mlflow_runs(folder: Path) -> list[tuple[str, str]]:
    """Return the name and status of each run in the store."""
    with sqlite3.connect(folder / "mlflow.db") as store:
        return store.execute("select name, status from runs").fetchall()


def mlflow_losses(folder: Path, split: str) -> set[tuple[int, float]]:
    """Return (step, loss) pairs; a step that ran twice appears once if its losses are equal."""
    with sqlite3.connect(folder / "mlflow.db") as store:
        return set(store.execute("select step, value from metrics where key = ?", [f"{split}/loss"]).fetchall())


def wandb_ids(workdir: Path) -> list[str]:
    return [folder.name.rpartition("-")[2] for folder in (workdir / "wandb").glob("offline-run-*")]


def test_a_run_that_is_stopped_and_resumed_by_two_processes_is_one(arrays, start, tmp_path):
    """This includes a listener in the first process only, which requests more predictions than the config.

    It ends later than the timeout with which ended processes wait for the others.
    """
    workdir, recipe = tmp_path / "run", tmp_path / "recipe.py"
    shutil.copy(TRAIN[1], tmp_path)
    recipe.write_text(WANTS_MORE)
    words = ["train", str(recipe), *TRAIN[2:], "--data.path", str(arrays), "--workdir", str(workdir), *LOG]

    stopped = start(Program, [sys.executable, "-m", "jaxddp", *words, *ENDLESS], tmp_path / "stopped")
    stopped.wait_until(lambda: len(lines(workdir)) > 2)
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.end() == 75
    assert stopped.last.startswith("jaxddp: asked to stop: saved step")
    assert mlflow_runs(tmp_path) == [("run", "KILLED")]

    until = ["--train.duration", f"{result(workdir)['step'] + 3} steps", "--parallel.cpu-devices", "2"]
    start(Launched, tmp_path, 2, [*words, *until, "--parallel.shutdown-timeout", "5"]).ends_well()
    assert result(workdir)["processes"] == 2
    assert mlflow_runs(tmp_path) == [("run", "FINISHED")]
    assert len(wandb_ids(workdir)) == 2 and len(set(wandb_ids(workdir))) == 1
    assert lines(workdir, "val")
    for split in ("train", "val"):
        assert mlflow_losses(tmp_path, split) == {(line["step"], line["loss"]) for line in lines(workdir, split)}
    pictures = list((workdir / "wandb").glob("offline-run-*/files/media/images/val/predictions_*.png"))
    assert len(pictures) == 6 * len(lines(workdir, "val"))
