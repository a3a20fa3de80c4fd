"""`jaxddp launch -- train`: the processes of a job compute the same as one process."""

import shutil
from pathlib import Path

import pytest
from support.processes import STEPS, Launched, are_the_same, brief_words, checkpoint_steps, is_whole, series


@pytest.fixture(scope="module")
def words(arrays):
    return lambda workdir, *more: brief_words(arrays, workdir, *more)


@pytest.fixture(scope="module")
def by_two(words, tmp_path_factory) -> Path:
    """The work directory of a run of two processes with two devices each, with a checkpoint half-way."""
    workdir = tmp_path_factory.mktemp("two")
    run = Launched(workdir, 2, words(workdir, "--parallel.cpu-devices", "2", "--checkpoint.every", "3 steps"))
    run.ends_well()
    return workdir


def test_two_processes_of_two_devices_equal_one_of_four(by_two, reference):
    assert is_whole(by_two, processes=2)
    assert are_the_same(by_two, reference), (series(by_two), series(reference))


@pytest.mark.ci
@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (4, 1)])
def test_the_newest_whole_checkpoint_of_two_processes_restores_on_one_and_on_four(
    by_two, words, reference, start, tmp_path, processes, devices
):
    workdir = tmp_path / "run"
    shutil.copytree(by_two, workdir, ignore=shutil.ignore_patterns("logs"))
    assert checkpoint_steps(workdir) == [3, STEPS]
    # One bit is flipped in the largest file of the last checkpoint.
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
    # One process prints where the files are.
    logs = [(run.logs / f"process-{rank}.log").read_text() for rank in range(processes)]
    assert [f"metrics: {workdir}" in each for each in logs] == [True] + [False] * (processes - 1)
