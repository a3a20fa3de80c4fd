"""Two processes with the variables of two TPU hosts join one job. They compute on the CPU."""

import secrets
import sys

import pytest
from support.processes import Program, are_the_same, brief_words, environment, is_whole, series

# tests/test_tpu_environment.py tests which job the variables describe.
pytestmark = pytest.mark.ci


def test_the_hosts_of_two_slices_train_as_one_process_does(arrays, reference, start, tmp_path):
    # The port follows from the coordinator's address, so another run has another address.
    coordinator = "127." + ".".join(str(1 + secrets.randbelow(250)) for _ in range(3))
    words = brief_words(arrays, tmp_path / "run", "--parallel.cpu-devices", "2")
    several = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_COORDINATOR_ADDRESS": f"{coordinator}:8080"}
    runs = [
        start(
            Program,
            [sys.executable, "-m", "jaxddp", *words],
            tmp_path / str(host),
            environment(
                TPU_WORKER_ID="0",
                TPU_WORKER_HOSTNAMES=f"127.0.0.{host + 1}",
                MEGASCALE_SLICE_ID=str(host),
                JAX_PLATFORMS="cpu",
                **several,
            ),
        )
        for host in range(2)
    ]
    for run in runs:
        run.ends_well()
    assert f"joined: process 0 of 2, coordinator {coordinator}:" in runs[0].out
    assert "(from MEGASCALE_COORDINATOR_ADDRESS, TPU_WORKER_HOSTNAMES, MEGASCALE_NUM_SLICES, " in runs[0].out
    assert is_whole(tmp_path / "run", processes=2)
    assert are_the_same(tmp_path / "run", reference), (series(tmp_path / "run"), series(reference))
