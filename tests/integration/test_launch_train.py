"""`jaxddp launch -- train`: the processes of a job compute what one would, or say why they cannot."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small import SMALL, random_table, write_arrays
from started import (
    BRIEF,
    HANGING,
    STEPS,
    TRAIN,
    Launched,
    checkpoint_bytes,
    checkpoint_steps,
    close,
    environment,
    lines,
    losses,
    result,
)

# Process 1 of a job is told something else; the launcher itself tells all the same.
TWISTED = """
import os, sys
from jaxddp.cli import main
words = sys.argv[1:]
if os.environ["JAX_PROCESS_ID"] == "1":
    {twist}
sys.exit(main(words))
"""


def words_of(data: Path):
    return lambda workdir, *more: [*TRAIN, "--data.path", str(data), "--workdir", str(workdir), *BRIEF, *more]


@pytest.fixture(scope="module")
def words(arrays):
    return words_of(arrays)


@pytest.fixture(scope="module")
def by_two(words, tmp_path_factory) -> Path:
    """The work directory of a run of two processes with two devices each, which also saved half-way."""
    workdir = tmp_path_factory.mktemp("two")
    run = Launched(workdir, 2, words(workdir, "--parallel.cpu-devices", "2", "--checkpoint.every", "3 steps"))
    try:
        run.ends_well()
    finally:
        run.close()
    return workdir


def series(workdir: Path) -> dict[str, dict[int, float]]:
    return {split: losses(workdir, split) for split in ("train", "val")}


def is_whole(workdir: Path, *, processes: int) -> bool:
    """Whether a run on four devices made every step, and validated with every image."""
    end = result(workdir)
    return (
        (end["status"], end["step"], end["devices"], end["processes"]) == ("done", STEPS, 4, processes)
        and list(losses(workdir)) == list(range(1, STEPS + 1))
        and {line["count"] for line in lines(workdir, "val")} == {11}
    )


def are_the_same(workdir: Path, reference: Path) -> bool:
    """Whether two runs differ by rounding alone."""
    ours, theirs = series(workdir), series(reference)
    return (
        all(close(ours[split], theirs[split]) for split in ours)
        and result(workdir)["val"]["top1"] == result(reference)["val"]["top1"]
    )


def test_two_processes_of_two_devices_are_one_of_four(by_two, reference):
    assert is_whole(by_two, processes=2)
    assert are_the_same(by_two, reference), (series(by_two), series(reference))


def test_two_processes_that_read_files_are_one(tree, reference_of_files, start, tmp_path):
    start(Launched, tmp_path, 2, words_of(tree)(tmp_path, "--parallel.cpu-devices", "2")).ends_well()
    assert is_whole(tmp_path, processes=2)
    assert are_the_same(tmp_path, reference_of_files), (series(tmp_path), series(reference_of_files))


def test_four_processes_of_one_device_are_one_of_four(words, reference, start, tmp_path):
    run = start(Launched, tmp_path, 4, words(tmp_path))
    run.ends_well()
    cores = len(os.sched_getaffinity(0))
    assert (f"oversubscribed: 4 processes on {cores} core" in run.err) == (cores < 4), run.err
    assert is_whole(tmp_path, processes=4)
    assert are_the_same(tmp_path, reference), (series(tmp_path), series(reference))
    # One of them says where the files are.
    said = [(run.logs / f"process-{rank}.log").read_text() for rank in range(4)]
    assert [f"metrics: {tmp_path}" in each for each in said] == [True, False, False, False]


def test_a_reproducible_run_has_the_same_bits_over_any_processes(arrays, start, tmp_path):
    """Two processes have a core each, one has both; all have as many threads."""
    alone, two = tmp_path / "alone", tmp_path / "two"
    words = ["train", "digits", *SMALL, "--data.path", str(arrays), *BRIEF, "--log.every", "1 step"]
    words += ["--parallel.reproducible", "--checkpoint.every", f"{STEPS} steps"]
    start(Launched, alone, 1, [*words, "--workdir", str(alone), "--parallel.cpu-devices", "4"]).ends_well()
    start(Launched, two, 2, [*words, "--workdir", str(two), "--parallel.cpu-devices", "1"]).ends_well()
    assert checkpoint_steps(alone)[-1] == STEPS
    assert checkpoint_bytes(two) == checkpoint_bytes(alone)
    assert [line["loss"] for line in lines(two)] == [line["loss"] for line in lines(alone)]


WIDE = """
import flax.linen as nn
from jaxddp.config import load


class Net(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, images):
        return nn.Dense(self.classes)(nn.relu(nn.Conv(8, (3, 3), strides=2)(images)).mean((1, 2)))


def get_config():
    return load("digits").replace(data={"image_size": 32, "resize": 32})


def get_model(config, num_classes):
    return Net(num_classes)
"""


def test_a_reproducible_run_has_the_same_bits_with_any_number_of_threads(start, tmp_path):
    """Of images so large that XLA's threads share the sum of a kernel's gradient: there are 4 for 4 devices, and as
    many as cores, which differ from machine to machine, for one."""
    recipe = tmp_path / "wide.py"
    recipe.write_text(WIDE)
    data = write_arrays(tmp_path / "data.npz", random_table(96, image=32), random_table(16, image=32))
    words = ["train", str(recipe), "--data.path", str(data), *BRIEF, "--train.batch-size", "64"]
    words += ["--parallel.reproducible", "--log.every", "1 step"]
    runs = [tmp_path / str(devices) for devices in (1, 4)]
    for run in runs:
        start(Launched, run, 1, [*words, "--workdir", str(run), "--parallel.cpu-devices", run.name]).ends_well()
    assert checkpoint_bytes(runs[0]) == checkpoint_bytes(runs[1])


@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (4, 1)])
def test_the_newest_whole_checkpoint_of_two_processes_restores_on_one_and_on_four(
    by_two, words, reference, start, tmp_path, processes, devices
):
    workdir = tmp_path / "run"
    shutil.copytree(by_two, workdir, ignore=shutil.ignore_patterns("logs"))
    assert checkpoint_steps(workdir) == [3, STEPS]
    # One flipped bit in the largest file of the last one.
    state = workdir / "checkpoints" / str(STEPS) / "state"
    damaged = max((file for file in state.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    more = ["--resume", "must", "--parallel.cpu-devices", str(devices), "--checkpoint.every", "3 steps"]
    run = start(Launched, tmp_path, processes, words(workdir, *more))
    run.ends_well()
    assert "resuming at step 3 | " in run.out
    assert f"step {STEPS} is damaged: " in run.out + run.err and checkpoint_steps(workdir) == [3, STEPS]
    assert is_whole(workdir, processes=processes)
    assert are_the_same(workdir, reference), (series(workdir), series(reference))


def test_a_batch_that_the_devices_cannot_share(words, start, tmp_path):
    more = ["--train.batch-size", "6", "--parallel.cpu-devices", "2"]
    run = start(Launched, tmp_path / "launch", 2, words(tmp_path / "run", *more))
    assert run.end() == 2
    expected = "train.batch_size=6 cannot be divided among 4 devices; 4 or 8 would do"
    assert f"jaxddp: {expected}" in (run.last_of(0), run.last_of(1))
    # One may have heard of the other's end, and be gone before it.
    assert expected in run.last
    assert not (tmp_path / "run").exists()


@pytest.fixture
def twisted(arrays, start, tmp_path):
    """Runs two processes, the second of them twisted, which end with code 2; what they said last."""

    def run(twist: str, data: Path = arrays) -> list[str]:
        program = tmp_path / "twisted.py"
        program.write_text(TWISTED.format(twist=twist))
        words = words_of(data)(tmp_path / "run")
        launched = start(Launched, tmp_path / "launch", 2, ["python", str(program), *words])
        assert launched.end() == 2, launched.out + launched.err
        said = [launched.last_of(rank) for rank in (0, 1)]
        assert all(line.startswith("jaxddp: ") for line in said), said
        assert all(f"process {rank}: exit code 2" in launched.err for rank in (0, 1)), launched.err
        assert launched.last.removeprefix("[0] ").removeprefix("[1] ") in said
        return said

    return run


def test_a_key_that_differs_is_named_with_both_values(twisted):
    said = twisted("words += ['--optimizer.weight-decay', '0.25']")
    for rank, line in enumerate(said):
        # The first to find it may end before the other has looked.
        assert f"jaxddp: optimizer.weight_decay differs: process {rank} has " in line or f"process {1 - rank}" in line
        assert "'0.25'" in line and "'0.05'" in line and "optimizer.weight_decay differs" in line


def test_data_that_differs_is_named(twisted, arrays, tmp_path, monkeypatch):
    """One relative path, and another file under it where the second process works."""
    with np.load(arrays) as columns:
        changed = {name: column[1:] if name.startswith("train") else column for name, column in columns.items()}
    np.savez(tmp_path / arrays.name, **changed)
    monkeypatch.chdir(arrays.parent)
    said = twisted(f"os.chdir({str(tmp_path)!r})", Path(arrays.name))
    assert all("training data differs: process" in line for line in said), said


def test_a_work_directory_that_is_not_shared(twisted, tmp_path):
    said = twisted(f"words[words.index('--workdir') + 1] = {str(tmp_path / 'private')!r}")
    assert said[0].startswith(f"jaxddp: {tmp_path / 'run'}: process 1 does not see what process 0 writes there")
    assert "process 1 does not see what process 0 writes there" in said[1]


def test_a_process_may_compile_much_longer_than_the_other(words, start, tmp_path):
    """As where one finds its program in the cache; gloo's first collective waits for 30 s."""
    program = tmp_path / "slow.py"
    slow = """import time, jaxddp.engine.step as made
    compiles = made.compile_with_cost
    made.compile_with_cost = lambda *a: (time.sleep(35), compiles(*a))[1]"""
    program.write_text(TWISTED.format(twist=slow))
    command = ["python", str(program), *words(tmp_path / "run", "--train.duration", "1 step")]
    launched = start(Launched, tmp_path / "launch", 2, command)
    assert launched.end(HANGING) == 0, launched.out + launched.err
    assert result(tmp_path / "run")["status"] == "done"


def test_the_launch_script_on_the_python_api_trains(tree, tmp_path):
    script = Path(__file__).parents[2] / "launch" / "main.py"
    recipe = ["--model", "resnet10", "--width", "2", "--image-size", "16", "--batch-size", "4", "--epochs", "0.5"]
    command = [sys.executable, str(script), "--data", str(tree), "--workdir", str(tmp_path), *recipe]
    env = environment(JAX_NUM_CPU_DEVICES="1")
    done = subprocess.run(
        [*command, "--gpus", "0", "--processes", "2"], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "[0] validation top-1: 0." in done.stdout or "[0] validation top-1: 1." in done.stdout
    assert result(tmp_path)["processes"] == 2
    bad = subprocess.run([*command, "--nodes", "2"], env=env, capture_output=True, text=True, timeout=60)
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)
    assert "--nodes 2: give --coordinator HOST:PORT" in bad.stderr
