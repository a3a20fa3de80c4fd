"""The options of the launcher: machines, processes, cores, GPUs, an address, a command."""

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import error_line
from support.launches import PRINT_ENVIRONMENT, LaunchResult, free_port, program

from jaxddp.cluster.launcher import launch
from jaxddp.cluster.machine import divide, local_gpus
from jaxddp.cluster.options import Launch, split
from jaxddp.core.cores import local_cores
from jaxddp.core.errors import InputError

pytestmark = pytest.mark.usefixtures("clean_environment")
AFFINITY = "say(*sorted(os.sched_getaffinity(0)))"


def cores(ran: LaunchResult, processes: int) -> list[list[int]]:
    return [[int(core) for core in ran.of(rank)[0].split()] for rank in range(processes)]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
def test_processes_get_an_even_share_of_the_cores_or_the_requested_number(run, monkeypatch):
    available = local_cores()
    assigned = cores(run(AFFINITY, processes=min(2, len(available))), min(2, len(available)))
    assert [core for part in assigned for core in part] == available and all(assigned)
    assert cores(run(AFFINITY, processes=1, cores=1), 1) == [available[:1]]
    assert cores(run(AFFINITY, processes=1, cores=0), 1) == [available]
    count = len(available) + 1
    ran = run(AFFINITY, processes=count)
    assert cores(ran, count) == [available] * count
    assert f"oversubscribed: {count} processes on {len(available)} core" in ran.err
    # Processes with GPUs are not bound to cores.
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert cores(run(AFFINITY, processes=None), 2) == [available] * 2


@given(st.lists(st.integers(), max_size=40), st.integers(1, 12))
def test_shares_of_cores_are_even_and_leave_no_core_unused(items, count):
    parts = divide(items, count)
    assert [item for part in parts for item in part] == items
    assert len(parts) == count and max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["4", "7", "GPU-ab", "1"]),
        ({"processes": 2}, ["4,7", "GPU-ab,1"]),
        ({"processes": 1, "gpus": 2}, ["4,7"]),
        ({"processes": 2, "gpus": 0}, ["", ""]),
    ],
    ids=str,
)
def test_gpus_are_divided_among_the_processes(options, expected, run, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,GPU-ab,1")
    environments = run(PRINT_ENVIRONMENT, **({"processes": None} | options)).environments()
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == expected
    assert {environment.get("JAX_PLATFORMS") for environment in environments} == {None if any(expected) else "cpu"}


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        ({}, [], []),
        ({}, ["dev/nvidia0", "dev/nvidia3", "dev/nvidiactl", "dev/nvidia-uvm"], ["0", "1"]),
        ({}, ["proc/driver/nvidia/gpus/0000:01:00.0", "proc/driver/nvidia/gpus/0000:02:00.0"], ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["dev/nvidia0"], []),
        ({"CUDA_VISIBLE_DEVICES": "2, 0,-1,3"}, [], ["2", "0"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ab,MIG-cd,none,3"}, [], ["GPU-ab", "MIG-cd"]),
        ({"JAX_PLATFORMS": "cpu"}, ["dev/nvidia0"], []),
        ({"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": "5"}, [], ["5"]),
    ],
)
def test_gpus_are_counted_without_a_backend(environ, files, expected, tmp_path):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert local_gpus(environ, tmp_path) == expected


# fmt: off
BAD_OPTIONS = {
    "no process": ({"processes": 0}, "--processes=0: expected 1 to 10,000"),
    "no GPU and no number": ({"processes": None}, "set the number of processes with --processes P"),
    "GPUs that are not there": ({"processes": None, "gpus": 2}, "--gpus 2: this machine has 0 visible GPUs"),
    "more cores than there are": ({"processes": 1, "cores": 99999}, "--cores 99999: 1 process would need 99,999 cores"),
    "nodes without coordinator": ({"nodes": "2", "nr": 0}, "--nodes 2: give --coordinator HOST:PORT"),
    "nodes without nr": ({"nodes": "2", "coordinator": "h:1"}, "and --nr, this machine's number, 0 to 1"),
    "nr too large": ({"nodes": "2", "coordinator": "h:1", "nr": 2}, "--nr 2: expected 0 to 1, for --nodes 2"),
    "no port": ({"nodes": "2", "nr": 0, "coordinator": "host0"}, "--coordinator host0: expected HOST:PORT"),
    "machines that are no number": ({"nodes": "two"}, "--nodes='two': expected a number of machines such as 2, or MIN"),
    "from many to few machines": ({"nodes": "4:2"}, "--nodes 4:2: MIN is above MAX"),
    "no wait": ({"wait": 0.0}, "--wait=0.0: expected above 0, at most 1,000,000"),
    "no such host": ({"coordinator": "no..where:1234"}, "no..where:1234: there is no host 'no..where'"),
    "another machine": ({"coordinator": "192.0.2.1:1234"}, "192.0.2.1:1234: not an address of this machine; start")
}
# fmt: on


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_an_error_before_the_log_folder_exists(case, tmp_path):
    options, expected = BAD_OPTIONS[case]
    assert expected in error_line(launch, Launch(**({"processes": 2, "logs": tmp_path / "logs"} | options)), ["true"])
    assert not (tmp_path / "logs").exists()


def test_gpus_that_cannot_be_divided_evenly_are_an_error(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(InputError, match="--processes 2: 3 GPUs cannot be divided evenly among 2 processes; use fewer"):
        launch(Launch(processes=2, logs=tmp_path), ["true"])


def test_a_coordinator_that_resolves_to_the_loopback_address_is_reported(run, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "host0")
    original = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **options: original("127.0.0.1", *rest, **options))
    ran = run("", nodes="2", nr=0, processes=1, coordinator=f"host0:{free_port()}")
    assert "host0 resolves to 127.0.0.1 here, which no other machine can reach" in ran.err


def children() -> set[str]:
    """Return the pids of this process's children, including zombies."""
    found = set[str]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # The thread has ended.
            found.update((task / "children").read_text().split())
    return found


def test_a_failed_start_restores_the_signal_handlers_and_leaves_no_process(tmp_path):
    def state() -> tuple[set[str], list[object]]:
        names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
        return children(), [signal.getsignal(name) for name in names]

    before = state()
    (tmp_path / "process-1.log").mkdir()
    with pytest.raises(InputError, match=r"process-1\.log: cannot be written .* choose another folder with --logs"):
        launch(Launch(processes=2, logs=tmp_path), program("time.sleep(600)"))
    assert state() == before


def test_options_and_the_command_are_separated_by_two_dashes():
    words = ["--processes", "2"], ["train", "x", "--", "y"]
    assert split([*words[0], "--", *words[1]]) == words
    assert split(["--help"]) == (["--help"], [])
    for arguments in (["--processes", "2", "--"], ["train", "digits"]):
        with pytest.raises(InputError, match=r"launch: no command; write the command after --, as in: jaxddp launch"):
            split(arguments)


def test_the_command_is_a_command_of_jaxddp_or_a_program(run, tmp_path, monkeypatch, capfd):
    with pytest.raises(InputError, match="'trian' is neither a command of jaxddp nor a program, did you mean 'train'?"):
        launch(Launch(processes=1, logs=tmp_path), ["trian", "digits"])
    package = tmp_path / "jaxddp"
    package.mkdir()
    # Without __init__.py this would be a namespace package, and an installed jaxddp would come first.
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import sys; print(sys.executable, *sys.argv[1:])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # `python -m pytest` imports from it first.
    assert launch(Launch(processes=1, logs=tmp_path), ["train", "digits", "--seed", "1"]) == 0
    assert capfd.readouterr().out.split() == ["[0]", sys.executable, "train", "digits", "--seed", "1"]
    assert launch(Launch(processes=1, logs=tmp_path), ["echo", "a  b"]) == 0
    assert capfd.readouterr().out == "[0] a  b\n"
