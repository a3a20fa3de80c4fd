"""A real mpirun starts processes, which join the job through its environment variables."""

import sys

import pytest
from support.processes import BRIEF, TRAIN, Program, close, is_whole, losses

pytestmark = pytest.mark.ci

MPIRUN = [
    "mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
    "--mca", "oob_tcp_if_include", "lo"
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def open_mpi(require):
    require("mpirun", package="openmpi-bin")


def test_mpirun_trains(arrays, reference, start, tmp_path):
    workdir = tmp_path / "run"
    words = [*TRAIN, "--data.path", str(arrays), "--workdir", str(workdir), *BRIEF]
    run = start(Program, [*MPIRUN, sys.executable, "-m", "jaxddp", *words], tmp_path / "mpirun")
    run.ends_well()
    assert "joined: process 0 of 2, coordinator 127.0.0.1:" in run.out
    assert "OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK" in run.out
    assert is_whole(workdir, processes=2, devices=2) and close(losses(workdir), losses(reference))
