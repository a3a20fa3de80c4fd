"""Who a process is in its job, and what its devices hold."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxddp.errors import InputError
from jaxddp.parallel.environment import Job, find_job, simulate_cpu_devices
from jaxddp.parallel.topology import Topology

JOB = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


def test_a_job_is_read_from_the_environment():
    assert find_job({}) is None
    assert find_job(JOB) == Job("10.0.0.1:1234", 4, 3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"JAX_PROCESS_ID": ""}, "set but not JAX_PROCESS_ID"),
        ({"JAX_COORDINATOR_ADDRESS": "", "JAX_NUM_PROCESSES": ""}, "not JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES"),
        ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID=4: expected 0 to 3"),
        ({"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES='four': expected a whole number"),
    ],
)
def test_half_a_job_is_an_error_that_says_what_is_missing(changes, expected):
    with pytest.raises(InputError, match=expected):
        find_job({**JOB, **changes})


def test_placing_a_batch_gives_each_device_its_rows():
    topology = Topology.create(4)
    rows = np.arange(12)
    placed = topology.place(rows)
    assert [np.asarray(shard.data).tolist() for shard in placed.addressable_shards] == rows.reshape(4, 3).tolist()
    assert topology.replicate({"w": rows})["w"].sharding.is_fully_replicated


@pytest.mark.parametrize(("size", "expected"), [(9, "8 or 12 would do"), (3, "4 would do"), (0, "4 would do")])
def test_a_batch_that_cannot_be_divided(size, expected):
    with pytest.raises(InputError, match=f"train.batch_size={size} cannot be divided among 4 devices; {expected}$"):
        Topology.create(4).check_batch_size(size)


def test_one_process_agrees_with_itself():
    Topology.create(1).agree("anything", "value")


def test_devices_cannot_be_simulated_once_jax_has_started():
    assert len(jax.devices()) == 8
    simulate_cpu_devices(8)
    with pytest.raises(InputError, match="JAX already runs with 8 devices"):
        simulate_cpu_devices(2)
    with pytest.raises(InputError, match="parallel.cpu_devices=0: expected at least 1"):
        simulate_cpu_devices(0)


def test_processes_over_gloo_see_each_other_and_a_difference(tmp_path):
    """Two real processes: one mesh over both, the same sum in both, and a value that differs named by both."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, jax, numpy as np\n"
        "from jaxddp.parallel.environment import find_job, join\n"
        "from jaxddp.parallel.topology import Topology\n"
        "join(find_job())\n"
        "topology = Topology.create()\n"
        "topology.agree('seed', '1')\n"
        "placed = topology.place(np.full(2, 10.0 ** topology.process_index))\n"
        "print('sum', float(jax.jit(lambda x: x.sum())(placed)), topology.num_devices)\n"
        "try:\n"
        "    topology.agree('batch size', str(8 * topology.process_index))\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    environment = {
        **os.environ, "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2",
        "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env={**environment, "JAX_PROCESS_ID": str(process)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    for process, output in enumerate(outputs):
        assert "sum 22.0 4" in output, output
        mine, other = str(8 * process), str(8 * (1 - process))
        assert f"batch size differs between processes: process {process} has {mine!r}" in output, output
        assert f"process {1 - process} has {other!r}" in output, output


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
