"""A recipe file with objects of its own, from a folder outside of the repository: one process and two, killed and
resumed; and the same objects given to the Python API."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from small import random_table, write_arrays
from started import Launched, Program, checkpoint_bytes, environment, lines, losses
from test_recipe_file import NETWORK, WHOLE

TOTAL = 120
WORDS = ["--train.duration", f"{TOTAL} steps", "--checkpoint.every", "20 steps", "--eval.every", "40 steps"]
CHECKED = ("loss", "top1", "sure", "learning_rate")

SCRIPT = """
import sys
import jaxddp, mine
import numpy as np
from jaxddp.config import load
from jaxddp.schedules.warmup import Steps, make_schedule

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
    """What each line says of the training itself."""
    return [
        {name: line[name] for name in (*CHECKED, "step", "split") if name in line}
        for split in ("train", "val")
        for line in lines(workdir, split)
    ]


def test_a_recipe_file_on_one_process_and_two_killed_and_from_python(folder, start, tmp_path):
    whole, killed, alone = tmp_path / "whole", tmp_path / "killed", tmp_path / "alone"
    start(Launched, tmp_path / "a", 2, words(folder, whole)).ends_well()
    assert list(losses(whole)) == list(range(1, TOTAL + 1))

    # Killed by kill -9 between two checkpoints, as soon as there is one; the same command resumes.
    run = start(Launched, tmp_path / "b", 2, words(folder, killed), "--grace", "2")
    run.wait_until(lambda: len(lines(killed)) >= 50)
    os.kill(run.worker(1), signal.SIGKILL)
    assert run.end() == 128 + signal.SIGKILL
    assert len(lines(killed)) < TOTAL
    again = start(Launched, tmp_path / "c", 2, words(folder, killed))
    again.ends_well()
    assert "resuming at step" in again.out
    assert numbers(killed) == numbers(whole)
    assert checkpoint_bytes(killed) == checkpoint_bytes(whole)

    # One process with two devices, and the objects from Python: the same but for rounding.
    start(Launched, tmp_path / "d", 1, words(folder, alone, "--parallel.cpu-devices", "2")).ends_well()
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "set.npz", str(TOTAL)]
    env = environment(JAX_NUM_CPU_DEVICES="2")
    python = start(Program, ["env", "-C", str(folder), *command], tmp_path / "e", env)
    python.ends_well()
    for other in (alone, folder / "python"):
        for ours, theirs in zip(numbers(whole), numbers(other), strict=True):
            names = [name for name in CHECKED if name in ours and name in theirs]
            assert "loss" in names and ours["step"] == theirs["step"]
            assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-4)

    # Evaluated from its config.json, with the recipe moved away.
    hidden = folder.with_name("moved")
    folder.rename(hidden)
    try:
        evaluated = start(
            Program,
            [
                sys.executable,
                "-m",
                "jaxddp",
                "eval",
                str(whole / "config.json"),
                "--data.path",
                str(hidden / "set.npz"),
            ],
            tmp_path / "f",
        )
        evaluated.ends_well()
    finally:
        hidden.rename(folder)
    shown = dict(line.split(": ") for line in evaluated.out.splitlines())
    assert float(shown["loss"]) == pytest.approx(losses(whole, "val")[TOTAL], rel=1e-5)


UNLIKE = """
import dataclasses, os, sys
import jax
import optax
import jaxddp
import small

mine = os.environ["JAX_PROCESS_ID"] == "1"
init, apply = small.linear_model()
usual = jaxddp.softmax_cross_entropy

def train(what):
    scaled = lambda key, example: {"weight": (2 if mine and what == "parameters" else 1) * init(key, example)["weight"]}
    loss = (lambda logits, labels: 2 * usual(logits, labels)) if mine and what == "loss" else usual
    optimizer = optax.sgd(0.2 if mine and what == "rate" else 0.1)
    if what == "injected":
        optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.2 if mine else 0.1)
    precision = "float32" if mine and what == "setting" else None
    with jax.default_matmul_precision(precision):
        setup = jaxddp.prepare_training(
            (scaled, apply), small.random_table(50), None, optimizer, 4,
            epochs=2 if mine and what == "epochs" else 1,
            data=jaxddp.DataConfig(std=(0.5, 0.5, 0.4 if mine and what == "data" else 0.5)),
            xla_options=["xla_cpu_enable_fast_min_max=true"] if mine and what == "options" else [],
        )
    if what == "step" and mine:
        setup = dataclasses.replace(setup, state=setup.state.replace(step=setup.state.step + 1))
    more = {}
    if what == "val" and mine:
        more["val"] = small.random_table(23)
    if what == "saving" or what == "workdir" and mine:
        more["workdir"] = "w"
    if what == "saving":
        more["save_every"] = "2 steps" if mine else "3 steps"
    jaxddp.train(loss, setup, listeners=(), **more)

for what in sys.argv[1:]:
    try:
        train(what)
    except jaxddp.InputError as error:
        print(f"{what}: {error}", flush=True)
"""


UNLIKE_NAMES = {
    "rate": "optimizer",
    "injected": "optimizer",
    "parameters": "the initial parameters",
    "step": "the step that training begins with",
    "loss": "loss",
    "epochs": "epochs",
    "data": "data.std",
    "setting": "jax_default_matmul_precision",
    "options": "XLA's options",
    "workdir": "workdir",
    "val": "val",
    "saving": "save_every",
}


def test_processes_with_other_objects_end_before_the_first_step(start, tmp_path):
    """All in one job: where the processes disagree, each hears of it, and what it knew before still stands."""
    (tmp_path / "unlike.py").write_text(UNLIKE)
    for helper in ("small.py", "recipes/small_recipe.py"):
        shutil.copy(Path(__file__).parents[1] / helper, tmp_path)
    command = ["env", "-C", str(tmp_path), sys.executable, "unlike.py", *UNLIKE_NAMES]
    run = start(Launched, tmp_path, 2, command)
    run.ends_well()
    for rank in (0, 1):
        said = (run.logs / f"process-{rank}.log").read_text().splitlines()
        found = dict(line.split(": ", 1) for line in said if line.split(":")[0] in UNLIKE_NAMES)
        assert {what: line.partition(" differs: process ")[0] for what, line in found.items()} == UNLIKE_NAMES
