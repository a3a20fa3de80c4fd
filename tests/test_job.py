"""Jobs of several processes over gloo: they join, compare values, compute together, and end if a process is lost."""

import functools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.launches import free_port

from jaxddp.core.errors import InputError, Unreachable
from jaxddp.job import membership
from jaxddp.job.control_plane import ControlPlane, absence
from jaxddp.job.environment import INHERITED_SOCKET, Job, find_job
from jaxddp.job.messages import MOST_PROCESSES
from jaxddp.job.watchdog import Timeouts

JOB = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
TORCHRUN = {"MASTER_ADDR": "h0", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1"}
SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[003-004,7],cpu1",
    "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_PROCID": "4", "SLURM_LOCALID": "0"
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_MCA_orte_hnp_uri": "123.0;tcp://192.0.2.7,198.51.100.1:4567"
}  # fmt: skip


def job_of(*environs: dict[str, str], **more: str) -> Job:
    job = find_job({name: value for environ in (*environs, more) for name, value in environ.items()})
    assert job is not None
    return job


def test_without_variables_a_process_is_alone():
    assert find_job({}) is None and find_job({"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}) is None
    # A batch script without srun is one process, whatever its allocation.
    assert find_job({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODELIST": "a[1-4]"}) is None
    assert find_job({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_jax_variables_take_precedence():
    job = job_of(TORCHRUN, JOB, JAX_LOCAL_DEVICE_IDS="0,2")
    assert (job.coordinator, job.num_processes, job.process_id, job.local_device_ids) == ("10.0.0.1:1234", 4, 3, (0, 2))
    assert (job.host, job.port) == ("10.0.0.1", 1234)
    text = "process 3 of 4, coordinator 10.0.0.1:1234 (from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID"
    assert str(job).startswith(text)
    mixed = job_of(TORCHRUN, JAX_COORDINATOR_ADDRESS="other:1")
    assert (mixed.coordinator, mixed.num_processes) == ("other:1", 8)


def test_torchrun_variables_are_read():
    job = job_of(TORCHRUN, LOCAL_WORLD_SIZE="4")
    assert job == Job("h0:29500", 8, 5, (1,), "", ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"))
    assert job_of(TORCHRUN, LOCAL_WORLD_SIZE="4", CUDA_VISIBLE_DEVICES="1").local_device_ids is None


def test_slurm_uses_the_first_node_of_the_step_and_a_port_for_the_step():
    job, other = job_of(SLURM), job_of(SLURM, SLURM_STEP_ID="3")
    assert (job.run_id, other.run_id) == ("77:2", "77:3") and job.port != other.port
    assert (job.host, job.num_processes, job.process_id, job.local_device_ids) == ("gpu003", 6, 4, (0,))
    assert job_of(SLURM, SLURM_STEP_NUM_NODES="1").host == "127.0.0.1"


def test_open_mpi_pmi_and_kubernetes_variables_are_read():
    job = job_of(OPEN_MPI, SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0")
    assert (job.host, job.num_processes, job.process_id) == ("127.0.0.1", 2, 1)
    assert job_of(OPEN_MPI, OMPI_COMM_WORLD_LOCAL_SIZE="1").host == "192.0.2.7"
    pmi = job_of(PMI_RANK="1", PMI_SIZE="2", MPI_LOCALNRANKS="2")
    assert (pmi.host, pmi.process_id) == ("127.0.0.1", 1)
    cray = job_of(JOB, JAX_PROCESS_ID="", PMI_RANK="3", PMI_SIZE="4", PMI_LOCAL_RANK="1", PMI_LOCAL_SIZE="2")
    assert (cray.process_id, cray.local_device_ids) == (3, (1,))
    job = job_of(JOB_COMPLETION_INDEX="2", JAX_NUM_PROCESSES="3", JAX_COORDINATOR_ADDRESS="train-0.train:1234")
    assert (job.process_id, job.host) == (2, "train-0.train")


PRINTABLE = "expected at most 1,000 characters, all of them printabl"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({**JOB, "JAX_PROCESS_ID": ""}, "set but not this process's id .JAX_PROCESS_ID."),
        ({"JAX_PROCESS_ID": "1"}, "JAX_PROCESS_ID set but not the coordinator's .* and the number of processes"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}, "PMI_SIZE, PMI_RANK set but not the coordinator"),
        ({**JOB, "JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID=4: expected 0 to 3, for JAX_NUM_PROCESSES=4"),
        ({**JOB, "JAX_NUM_PROCESSES": 5000 * "9"}, "JAX_NUM_PROCESSES=.*: expected .* from 1 to 16,777,216$"),
        ({**JOB, "JAX_NUM_PROCESSES": "\uff14"}, "JAX_NUM_PROCESSES='\uff14': expected .*, in the digits 0 to 9"),
        ({**JOB, "JAX_NUM_PROCESSES": "\u00a04"}, r"JAX_NUM_PROCESSES='\\xa04': expected"),
        ({**JOB, "JAX_NUM_PROCESSES": " \t"}, "set but not the number of processes .JAX_NUM_PROCESSES."),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE='two': expected"),
        ({**JOB, "JAXDDP_RUN_ID": 1001 * "x"}, f"JAXDDP_RUN_ID: {PRINTABLE}"),
        ({**JOB, "JAXDDP_JOB_KEY": "\ud800"}, f"JAXDDP_JOB_KEY: {PRINTABLE}"),
        ({**JOB, "JAX_COORDINATOR_ADDRESS": "h:99999"}, "expected HOST:PORT"),
        ({**JOB, "JAX_COORDINATOR_ADDRESS": "h\x1b[31m:1"}, r"ADDRESS='h\\x1b\[31m:1': expected HOST:PORT"),
        ({**JOB, "JAX_LOCAL_DEVICE_IDS": "0,x"}, "JAX_LOCAL_DEVICE_IDS='x': expected a whole number"),
    ],
)
def test_an_error_names_missing_and_invalid_variables(environ, expected):
    with pytest.raises(InputError, match=expected):
        find_job(environ)


PROGRAM = """
import os, signal, sys, time, numpy as np, jax, jax.numpy as jnp
from jaxddp.core.errors import JaxddpError
from jaxddp.job.environment import find_job
from jaxddp.job.membership import abandon, join
from jaxddp.mesh import Topology

try:
    peers = join(find_job(), start=float(os.environ.get("START", "20")), silence=float(os.environ.get("SILENCE", "10")))
    {body}
except JaxddpError as error:
    abandon(str(error), error.exit_code)
    print("jaxddp:", error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
ADD = """
    topology = Topology.create(peers=peers)
    total = jax.jit(lambda x: x.sum())
    placed = topology.place(np.full(1, 10.0 ** topology.peers.process_index))
    print("sum", float(total(placed)), flush=True)
"""
FOREVER = ADD + "    while True: total(placed).block_until_ready(); time.sleep(0.01)\n"


class Group:
    """The processes of a job. They run `body` inside PROGRAM, or `body` alone if it begins with #.

    `environments` are additional variables of a process, with the keys process0, process1, …
    """

    def __init__(self, tmp_path: Path, body: str, count: int = 2, port: int = 0, **environments: dict[str, str]):
        program = tmp_path / "program.py"
        program.write_text(body if body.startswith("#") else PROGRAM.replace("{body}", body.strip()))
        address = f"127.0.0.1:{port or free_port()}"
        common = {
            **os.environ, "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count),
            "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": os.pathsep.join(sys.path)
        }  # fmt: skip
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(program)],
                env={**common, "JAX_PROCESS_ID": str(process), **environments.get(f"process{process}", {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for process in range(count)
        ]

    def wait_for_output(self, word: str) -> None:
        for process in self.processes:
            assert process.stdout is not None
            while word not in (line := process.stdout.readline()):
                assert line, process.communicate()[1]

    def results(self, timeout: float = 60) -> list[tuple[int, str]]:
        """Return the exit code of each process and the last line of its stderr, in bounded time."""
        try:
            errors = [process.communicate(timeout=timeout)[1] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        last = [error.rstrip().split("\n")[-1] for error in errors]
        return [(process.returncode, line) for process, line in zip(self.processes, last, strict=True)]


def line_of(words: str, folder: Path) -> int:
    """Return the number of the first line with `words` in the program of a `Group`, from 1; 0 without such a line."""
    lines = (folder / "program.py").read_text().splitlines()
    return next((number for number, line in enumerate(lines, 1) if words in line), 0)


@pytest.mark.slow
def test_processes_compute_together_and_process_0_prints_its_variables(tmp_path):
    # The processes ignore proxies in the environment.
    proxies = {name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY")}
    group = Group(tmp_path, ADD + "    peers.agree({'seed': '1'})\n", process0=proxies, process1=proxies)
    outputs = [process.communicate(timeout=60) for process in group.processes]
    assert [process.returncode for process in group.processes] == [0, 0], outputs
    assert all("sum 11.0" in output and error == "" for output, error in outputs), outputs
    assert outputs[0][0].startswith("joined: process 0 of 2, coordinator 127.0.0.1:")
    assert "joined" not in outputs[1][0]


@pytest.mark.slow
def test_a_surplus_process_is_rejected_and_all_others_name_a_killed_process(tmp_path):
    port = free_port()
    group = Group(tmp_path, FOREVER, count=3, port=port)
    group.wait_for_output("sum 111.0")
    late = Group(tmp_path, ADD, count=1, port=port, process0={"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "3"})
    ((code, line),) = late.results()
    assert code == 2 and "have joined already; is JAX_PROCESS_ID=1 given twice" in line
    assert [process.poll() for process in group.processes] == [None] * 3
    group.processes[0].send_signal(signal.SIGKILL)
    (first_code, _), *others = group.results()
    assert first_code == -signal.SIGKILL
    assert all(code == 1 and line.startswith("jaxddp: process 0 was lost") for code, line in others)


@pytest.mark.slow
def test_an_exception_in_process_0_prints_one_line_in_a_process_that_does_not_wait(tmp_path):
    """If JAX noticed the end first, it would end the other process by SIGABRT, with other lines."""
    fails = "    if topology.peers.process_index == 0: raise RuntimeError('disk on fire')\n"
    group = Group(tmp_path, f"{ADD}{fails}    time.sleep(600)\n")
    raised = f"{tmp_path}/program.py:{line_of('disk on fire', tmp_path)}: RuntimeError: disk on fire"
    first, other = group.processes
    error = other.communicate(timeout=60)[1]
    assert (error, other.returncode) == (f"jaxddp: process 0 ended: {raised}; the job ends here\n", 1)
    assert first.communicate(timeout=60)[1].splitlines()[-1] == f"jaxddp: {raised}" and first.returncode == 1


@pytest.mark.slow
def test_an_error_names_a_process_killed_while_all_leave(tmp_path):
    """When all leave, JAX waits for the killed process, and would end the other process by SIGABRT."""
    dies = "    if topology.peers.process_index == 0: jax.distributed.shutdown = lambda: os.kill(os.getpid(), 9)\n"
    group = Group(tmp_path, ADD + dies)
    errors = [process.communicate(timeout=60)[1] for process in group.processes]
    assert [process.returncode for process in group.processes] == [-9, 1], errors
    assert errors[1] == "jaxddp: process 0 was lost (on 127.0.0.1): its connection broke; the job ends here\n"


# The connection of a stopped process does not break. test_meeting.py tests a silent process without JAX.
@pytest.mark.ci
def test_a_stopped_process_ends_the_other_which_names_it(tmp_path):
    group = Group(tmp_path, FOREVER, process0={"SILENCE": "3"}, process1={"SILENCE": "3"})
    group.wait_for_output("sum 11.0")
    first, other = group.processes
    first.send_signal(signal.SIGSTOP)
    assert other.wait(timeout=60) == 1
    first.kill()
    assert "jaxddp: process 0 gave no sign of life for 3 s" in group.results()[1][1]


SCRIPT = """# A user's script, which catches no exception.
from jaxddp.core.errors import {error}
from jaxddp.job.environment import find_job
from jaxddp.job.membership import join
peers = join(find_job())
if {where}: raise {error}("train.csv:7: empty ImageId")
peers.agree({"all": "well"})
"""


INITIALIZED_JAX = """# A program that initializes JAX itself.
import os
import jax
from jaxddp.core.errors import InputError, Unreachable
from jaxddp.job.environment import find_job
from jaxddp.job.membership import join
process_id = int(os.environ["JAX_PROCESS_ID"])
jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], 2, process_id)
peers = join(find_job())
peers.agree({"all": "well"})
assert peers.exchange("texts", "x" * 300 * process_id) == ["", "x" * 300]
assert peers.from_first("the first", lambda: str(process_id)) == "0" and peers.is_first == (process_id == 0)
try:
    peers.agree({"same": "1", "seed": str(process_id)})
except InputError as error:
    print("raised:", error, flush=True)
"""


@pytest.mark.slow
def test_if_a_program_initialized_jax_itself_values_travel_over_the_devices(tmp_path):
    group = Group(tmp_path, INITIALIZED_JAX)
    line = "raised: seed differs: process 0 has '0', process 1 has '1'; start every process with the same value"
    ends = [process.communicate(timeout=60) for process in group.processes]
    assert [out.splitlines()[-1] for out, _ in ends] == [line] * 2, ends
    assert [process.returncode for process in group.processes] == [0, 0]


@pytest.mark.slow
def test_a_user_script_ends_all_with_the_code_of_bad_input_and_leaves_in_order_if_preempted(tmp_path):
    script = SCRIPT.replace("{error}", "InputError").replace("{where}", "find_job().process_id == 1")
    (code, line), second = Group(tmp_path, script).results()
    assert second == (2, "jaxddp: train.csv:7: empty ImageId")
    assert code == 2 and "process 1 ended: train.csv:7: empty ImageId" in line
    script = SCRIPT.replace("{error}", "Preempted").replace("{where}", "True")
    assert Group(tmp_path, script).results() == [(75, "jaxddp: train.csv:7: empty ImageId")] * 2


@pytest.mark.slow
def test_an_error_names_processes_with_unequal_devices(tmp_path):
    message = "devices: process 1 has 2 devices and process 0 has 1; use the same number of devices in every process"
    for code, line in Group(tmp_path, "Topology.create(peers=peers)", process1={"JAX_NUM_CPU_DEVICES": "2"}).results():
        assert code == 2 and message in line


def join_errors(*changes: dict[str, Any], facts: Sequence[str] = (), timeout: float = 20) -> list[Exception]:
    """Return the error of each of several processes that try to join one job of two at the same time."""
    coordinator = f"127.0.0.1:{free_port()}"
    jobs = [Job(**({"coordinator": coordinator, "num_processes": 2} | change)) for change in changes]
    versions = [{"jax": version} for version in facts] or [dict[str, str]()] * len(jobs)
    with ThreadPoolExecutor(len(jobs)) as pool:
        join = functools.partial(ControlPlane, timeouts=Timeouts(timeout), end=print)
        futures = [pool.submit(join, job, values) for job, values in zip(jobs, versions, strict=True)]
        return [future.exception(60) for future in futures]


OTHER_COUNT = {"process_id": 1, "num_processes": 3}


@pytest.mark.parametrize(
    ("others", "facts", "message"),
    [
        ([OTHER_COUNT], (), "JAX_NUM_PROCESSES differs: process 0 has 2, process 1 on .* has 3"),
        ([{"process_id": 1}], ("0.6.1", "0.6.0"), "jax differs: process 0 has '0.6.1', process 1 on .* has '0.6.0'"),
        ([{"process_id": 2}], (), "JAX_PROCESS_ID=2 on .*: expected 0 to 1"),
        ([OTHER_COUNT] * 2, (), "JAX_PROCESS_ID=1 twice"),
    ],
    ids=["count", "version", "id", "twice"],
)
def test_all_processes_name_what_does_not_fit(others, facts, message):
    first = {"process_id": 0, "num_processes": len(others) + 1}
    for error in join_errors(first, *others, facts=facts):
        assert isinstance(error, InputError) and re.search(message, str(error))


def test_processes_compare_the_files_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(membership, "__file__", f"{tmp_path}/job/membership.py")
    (tmp_path / ".#new.py").symlink_to("the lock of an editor")
    before = membership._versions().items()
    (tmp_path / "new.py").write_text("import jax")
    assert [name for name, _ in membership._versions().items() - before] == ["the digest of jaxddp's files"]


@pytest.mark.slow
def test_another_job_at_the_same_address_is_detected():
    """Process 0 reports that process 1 is absent. Process 1 reports that the address serves another job."""
    first, second = join_errors({"process_id": 0, "run_id": "own"}, {"process_id": 1, "run_id": "other"}, timeout=1)
    assert isinstance(first, Unreachable) and "process 1 of 2 did not join" in str(first)
    assert isinstance(second, InputError) and "it serves another job" in str(second)


def test_an_error_names_processes_that_never_join():
    with pytest.raises(Unreachable, match=r" \(from WORLD_SIZE, RANK\): processes 1, 2 of 3 did not join in 0.3 s"):
        ControlPlane(Job(f"127.0.0.1:{free_port()}", 3, 0, sources=("WORLD_SIZE", "RANK")), {}, Timeouts(0.3))
    # Those of the largest job are listed quickly.
    absent = absence(MOST_PROCESSES, {0: "h"}, 60, "h")
    assert str(absent).startswith("processes 1, 2, 3, 4, 5, 6, 7, 8 and 16,777,207 more of 16777216 did not join in")


@pytest.mark.parametrize("value", ["x", "999999"])
def test_a_socket_that_was_not_inherited_is_an_error(value, monkeypatch):
    monkeypatch.setenv(INHERITED_SOCKET, value)
    with pytest.raises(InputError, match=f"{INHERITED_SOCKET}='?{value}'?: (expected a whole number|is no socket)"):
        ControlPlane(Job("127.0.0.1:1", 2, 0), {}, Timeouts(5))


def test_an_address_without_a_listener_is_an_error():
    job = Job(f"127.0.0.1:{free_port()}", 2, 1)
    with pytest.raises(Unreachable, match=rf"coordinator {job.coordinator}: process 1 could not reach it in 0.5 s"):
        ControlPlane(job, {}, Timeouts(0.5))
    with pytest.raises(Unreachable, match="name cannot be resolved"):
        ControlPlane(Job("no-such-host.invalid:1", 2, 1), {}, Timeouts(0.5))


@pytest.mark.parametrize(("name", "process"), [("host..a", 0), (".cluster", 1)])
def test_an_impossible_host_name_is_an_error(name, process):
    with pytest.raises(InputError, match=f"coordinator {name}:1: there is no host '{name}'; give its name or address"):
        ControlPlane(Job(f"{name}:1", 2, process), {}, Timeouts(20))


def test_process_0_waits_until_its_name_has_its_address(monkeypatch):
    look_up, answers = socket.getaddrinfo, iter([socket.EAI_NONAME, socket.EAI_AGAIN, "192.0.2.1"])

    def fake_look_up(host, *arguments, **options):
        answer = next(answers, "127.0.0.1") if host == "job-0.job" else host
        if isinstance(answer, int):
            raise socket.gaierror(answer, "not yet")
        return look_up(answer, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", fake_look_up)
    job = Job(f"job-0.job:{free_port()}", 2, 0)
    with pytest.raises(Unreachable, match="process 1 of 2 did not join in 1 s; .* .process 0 listens on 127.0.0.1"):
        ControlPlane(job, {}, Timeouts(1))


OTHER_HOST = "not an address of this machine; start process 0 .* on the coordinator's machine"


@pytest.mark.parametrize(("address", "expected"), [(None, "there is no host 'job-0.job'; "), ("192.0.2.1", OTHER_HOST)])
def test_a_name_without_an_address_of_process_0_may_pass(address, expected, monkeypatch):
    def fake_look_up(host, port, **options):
        if address is None:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", fake_look_up)
    with pytest.raises(Unreachable, match=f"coordinator job-0.job:4321: {expected}"):
        ControlPlane(Job("job-0.job:4321", 2, 0), {}, Timeouts(0.3))


@pytest.mark.slow
def test_a_taken_port_or_an_address_of_another_machine_is_an_error(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address, port = "{}:{}".format(*taken.getsockname()), taken.getsockname()[1]
        full = socket.create_server(("127.0.0.2", port), backlog=0)
        taken.settimeout(30)
        with full, socket.create_connection(full.getsockname()), monkeypatch.context() as patch:
            # A full queue answers no further connection, so the second address of the name is tried.
            found = [(full.family, full.type, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
            patch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
            with pytest.raises(Unreachable, match="could not reach it in 3 s"):
                ControlPlane(Job(f"host0:{port}", 2, 1), {}, Timeouts(3))
        taken.accept()[0].close()
        with pytest.raises(InputError, match=f"coordinator {address}: port .* is taken; choose another"):
            ControlPlane(Job(address, 2, 0), {}, Timeouts(5))
        with pytest.raises(Unreachable, match=r"could not reach it in 0.5 s \(no answer\)"):
            ControlPlane(Job(address, 2, 1), {}, Timeouts(0.5))
    with pytest.raises(InputError, match="192.0.2.1:4321: not an address of this machine; start process 0 .* on the"):
        ControlPlane(Job("192.0.2.1:4321", 2, 0), {}, Timeouts(5))
