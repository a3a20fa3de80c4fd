"""Jobs of two processes that have different data, of which each process reads its own only."""

import ast
import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image
from support.data import random_table, write_arrays
from support.local_data import DoubleNet, Unpadded, joined
from support.networks import largest_difference
from support.processes import STEPS, THREADS, TRAIN, Launched, checkpoint_bytes, lines, losses, result
from support.runs import setup_of, train
from support.shared import sgd

import jaxddp
from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.order import UnitedOrder

ONLY_OWN = """
import os, sys

rank = os.environ["JAX_PROCESS_ID"]

def end_at_files_of_the_other_process(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes)):
        if f"host-{1 - int(rank)}" in os.fsdecode(arguments[0]):
            os.write(2, f"process {rank}: {event} {arguments}".encode())
            os._exit(9)

sys.addaudithook(end_at_files_of_the_other_process)
"""

SCRIPT = f"""{ONLY_OWN}
import jax, numpy as np
import jaxddp
from support.local_data import DoubleNet
from support.shared import sgd

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_enable_x64", True)
table, val = jaxddp.open_data(f"host-{{rank}}.npz")
data = jaxddp.DataConfig(placement="local", augment=jaxddp.AugmentConfig(pad=1))
setup = jaxddp.prepare_training(DoubleNet(), table, None, sgd(0.1), 2, data=data, epochs=2, seed=5)
print(setup, repr(setup.resources.train).replace("\\n", " "), flush=True)

def train(name, epochs=2, workdir=None):
    state, history = jaxddp.train(
        jaxddp.softmax_cross_entropy, setup, val=val, listeners=(), epochs=epochs, workdir=workdir, log_every="1 step",
    )
    if rank == "0":
        arrays = {{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in
                  jax.tree_util.tree_leaves_with_path(state.params)}}
        np.savez(name, **arrays)
    print(name, jaxddp.evaluate(state, setup, val), flush=True)

train("whole.npz")
train("begun.npz", 1, "run")
train("resumed.npz", 2, "run")
"""
SIZES, VAL_SIZES = (31, 12), (7, 10)


@pytest.fixture(scope="module")
def tables() -> dict[str, list[ArrayTable]]:
    sizes = {"train": SIZES, "val": VAL_SIZES}
    return {
        split: [random_table(size, seed=10 * seed + len(split)) for seed, size in enumerate(of_hosts)]
        for split, of_hosts in sizes.items()
    }


@pytest.fixture(scope="module")
def job(tables, tmp_path_factory) -> Path:
    """A job that trains at once, and again in two parts."""
    folder = tmp_path_factory.mktemp("local")
    for host in (0, 1):
        write_arrays(folder / f"host-{host}.npz", tables["train"][host], tables["val"][host])
    (folder / "script.py").write_text(SCRIPT)
    run = Launched(folder, 2, ["env", "-C", str(folder), sys.executable, "script.py"], *THREADS)
    run.ends_well()
    return folder


def trained_alone(tables: dict[str, list[ArrayTable]]) -> tuple[Any, dict[str, float]]:
    """Return the parameters, and the validation metrics, of one process with one device and all data."""
    with jax.enable_x64(True):
        data = DataConfig(augment=AugmentConfig(pad=1))
        setup = setup_of(DoubleNet(), sgd(0.1), joined(tables["train"]), data=data, seed=5)
        order = Unpadded.of(UnitedOrder(sum(SIZES), 8, 5, tuple(SIZES), 6))
        setup = dataclasses.replace(setup, feed=dataclasses.replace(setup.feed, order=order))
        state = train(setup, {"train": {"duration": "2 epochs"}, "eval": {"every": "0 steps"}})
        return jax.device_get(state.params), jaxddp.evaluate(state, setup, joined(tables["val"]))


@pytest.mark.ci
def test_two_processes_with_their_own_data_equal_one_process_with_all_data(job, tables):
    """Parameters agree to 1e-9 in float64, and validation counts every example of both processes once."""
    params, metrics = trained_alone(tables)
    names = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    assert largest_difference(dict(np.load(job / "whole.npz")), names) < 1e-9
    for rank in (0, 1):
        log = (job / "logs" / f"process-{rank}.log").read_text()
        assert rank or "process 0 has 31 of 43 examples; 4 of the 12 slots of a batch are padding (33.3%)" in log
        measured = ast.literal_eval(re.search(r"^whole.npz (.*)$", log, re.M)[1])
        assert measured == pytest.approx(metrics, rel=1e-6) and measured["count"] == sum(VAL_SIZES)
        assert f"UnitedSource(43 examples on 2 processes; process {rank} has ArrayTable({SIZES[rank]} examples" in log


@pytest.mark.ci
def test_a_resumed_run_has_the_same_bits(job):
    whole, begun, resumed = (dict(np.load(job / f"{name}.npz")) for name in ("whole", "begun", "resumed"))
    assert all((whole[name] == resumed[name]).all() for name in whole)
    assert all((whole[name] != begun[name]).any() for name in whole)


@pytest.fixture
def folders(tmp_path) -> Path:
    """A folder of classes for each of two processes. The first has no images of the last class."""
    rng = np.random.default_rng(0)
    for host, (count, classes) in enumerate([(9, "abc"), (4, "abcd")]):
        for split, images in (("train", count), ("val", 2)):
            for index, name in enumerate(classes):
                folder = tmp_path / f"host-{host}" / split / name
                folder.mkdir(parents=True)
                for number in range(images):
                    pixels = rng.integers(60 * index, 60 * index + 60, (20, 20, 3)).astype(np.uint8)
                    Image.fromarray(pixels).save(folder / f"{host}-{number}.png")
    return tmp_path


@pytest.mark.ci
def test_the_command_line_trains_resumes_and_evaluates_on_folders_of_each_process(folders, start):
    (folders / "main.py").write_text(f"{ONLY_OWN}\nfrom jaxddp.cli import main\nsys.exit(main(sys.argv[1:]))\n")
    place = ["--data.path", str(folders / "host-{process}"), "--data.placement", "local"]
    words = [*TRAIN, *place, "--train.precision", "float32"]

    def job(name: str, *command: str, processes: int = 2) -> Launched:
        return start(Launched, folders / name, processes, ["python", str(folders / "main.py"), *command], *THREADS)

    whole, resumed = folders / "whole", folders / "resumed"
    steps = [["--train.duration", f"{count} steps"] for count in (2 * STEPS, STEPS)]
    runs = [(whole, steps[0]), (resumed, steps[1]), (resumed, steps[0])]
    for number, (workdir, length) in enumerate(runs):
        job(f"job-{number}", *words, "--workdir", str(workdir), *length).ends_well()
    assert checkpoint_bytes(resumed) == checkpoint_bytes(whole)
    log = (folders / "job-0" / "logs" / "process-0.log").read_text()
    assert "data.placement=local: 2 processes, process 0 has 27 of 43 examples; " in log
    assert lines(whole, "val")[-1]["count"] == 3 * 2 + 4 * 2
    assert result(whole)["processes"] == 2 and len(losses(whole)) == 2 * STEPS
    evaluation = job("eval", "eval", str(whole))
    evaluation.ends_well()
    assert "count: 14" in evaluation.out
    # Another number of processes has other data.
    other = job("alone", *words, "--workdir", str(whole), "--train.duration", "99 steps", processes=1)
    assert other.end() == 2
    message = r"fingerprint.train was '2 processes: \w{64}' and is now '\w{64}'; a resumed run keeps its recipe"
    assert re.search(message, other.last_of(0))
