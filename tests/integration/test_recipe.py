"""A recipe file with its own objects, outside the repository: in one and two processes, killed and resumed, and with
the same objects in the Python API."""

import os
import signal
import sys
from pathlib import Path

import pytest
from support.data import random_table, write_arrays
from support.processes import Launched, Program, environment, is_checkpointed, lines, losses
from support.recipes import NETWORK, WHOLE

# tests/test_recipe_file.py tests each hook, and test_restarts.py that a kill changes no bit.
pytestmark = pytest.mark.ci

TOTAL = 120
WORDS = ["--train.duration", f"{TOTAL} steps", "--checkpoint.every", "20 steps", "--eval.every", "40 steps"]
CHECKED = ("loss", "top1", "sure", "learning_rate")

SCRIPT = """
import sys
import jaxddp, mine
import numpy as np
from jaxddp.config import load
from jaxddp.schedules import Steps, make_schedule

config = load("mine.py")
arrays = np.load(sys.argv[1])
train, val = (
    jaxddp.ArrayTable(arrays[f"{name}_images"], arrays[f"{name}_labels"], tuple("01234")) for name in ("train", "val")
)
total = int(sys.argv[2])
learning_rate = make_schedule(config, Steps(total, round(0.05 * total)))
setup = jaxddp.prepare_training(
    mine.get_model(config, 5), train, 2, mine.get_optimizer(config, learning_rate), 4, epochs=total * 8 / 50,
    data=config.data, metrics=mine.get_metrics(config), augmentation=mine.get_augmentation(config),
    objective=mine.get_objective(config, None),
)
loss = mine.get_loss(config)
jaxddp.train(loss, setup, val=val, workdir="python", log_every="1 step", eval_every="40 steps", listeners=())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "network.py").write_text(NETWORK)
    (folder / "mine.py").write_text(WHOLE)
    write_arrays(folder / "set.npz", random_table(50), random_table(23, seed=1))
    return folder


def words(folder: Path, workdir: Path, *more: str) -> list[str]:
    places = ["--data.path", str(folder / "set.npz"), "--workdir", str(workdir)]
    return ["train", str(folder / "mine.py"), *places, *WORDS, *more]


def numbers(workdir: Path) -> list[dict[str, float]]:
    """Return the numbers of each line without times."""
    return [
        {name: line[name] for name in (*CHECKED, "step", "split") if name in line}
        for split in ("train", "val")
        for line in lines(workdir, split)
    ]


def test_a_recipe_file_trains_equally_when_killed_or_in_one_process_or_from_python(folder, start, tmp_path):
    killed, alone = tmp_path / "killed", tmp_path / "alone"
    # The run is killed by SIGKILL after the first checkpoint. The same command resumes it.
    run = start(Launched, tmp_path / "a", 2, words(folder, killed), "--grace", "2")
    run.wait_until(lambda: len(lines(killed)) >= 25 and is_checkpointed(killed))
    os.kill(run.worker(1), signal.SIGKILL)
    assert run.end() == 128 + signal.SIGKILL
    assert len(lines(killed)) < TOTAL
    again = start(Launched, tmp_path / "b", 2, words(folder, killed))
    again.ends_well()
    assert "resuming at step" in again.out
    assert list(losses(killed)) == list(range(1, TOTAL + 1))

    # One process with two devices, and a run with the objects from Python, give equal results up to rounding.
    start(Launched, tmp_path / "c", 1, words(folder, alone, "--parallel.cpu-devices", "2")).ends_well()
    (folder / "script.py").write_text(SCRIPT)
    command = ["env", "-C", str(folder), sys.executable, "script.py", "set.npz", str(TOTAL)]
    start(Program, command, tmp_path / "d", environment(JAX_NUM_CPU_DEVICES="2")).ends_well()
    for other in (alone, folder / "python"):
        for ours, theirs in zip(numbers(killed), numbers(other), strict=True):
            names = [name for name in CHECKED if name in ours and name in theirs]
            assert "loss" in names and ours["step"] == theirs["step"]
            assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-4)

    # The run is evaluated from its config.json, without the recipe file.
    hidden = folder.with_name("moved")
    folder.rename(hidden)
    command = [sys.executable, "-m", "jaxddp", "eval", str(killed / "config.json")]
    try:
        evaluated = start(Program, [*command, "--data.path", str(hidden / "set.npz")], tmp_path / "e")
        evaluated.ends_well()
    finally:
        hidden.rename(folder)
    shown = dict(line.split(": ") for line in evaluated.out.splitlines())
    assert float(shown["loss"]) == pytest.approx(losses(killed, "val")[TOTAL], rel=1e-5)
