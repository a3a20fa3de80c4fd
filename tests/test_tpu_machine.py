"""A machine with TPU chips: they are counted, one process uses them, and errors of libtpu are one line."""

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from support.errors import error_line
from support.launches import HANGING, PRINT_ENVIRONMENT, LaunchResult, plain_environment
from support.metadata import serving, write_chips

import jaxddp.cluster.launcher as launcher
from jaxddp.cluster import doctor as checklist
from jaxddp.cluster.launcher import check_tpu_options
from jaxddp.cluster.options import Launch
from jaxddp.config import ParallelConfig
from jaxddp.core import tpu
from jaxddp.core.errors import InputError, JaxddpError, Unreachable
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.tpu import local_chips
from jaxddp.job.membership import stop_on_signals
from jaxddp.job.tpu import sigterm_on_eviction
from jaxddp.mesh import Topology

CHIPS = [Path(f"/dev/accel{n}") for n in range(4)]


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        ({}, [], []),
        ({}, ["dev/accel0", "dev/accel1", "dev/accel10", "dev/accel2"], ["accel0", "accel1", "accel2", "accel10"]),
        ({}, ["dev/vfio/0", "dev/vfio/12"], ["0", "12"]),
        ({"JAX_PLATFORMS": "cpu"}, ["dev/accel0"], []),
        # The kernel's own class of accelerators, and the control file of VFIO.
        ({}, ["dev/accel/accel0", "dev/vfio/vfio"], []),
    ],
)
def test_chips_are_counted_without_a_backend(environ, files, expected, tmp_path):
    assert [file.name for file in local_chips(environ, write_chips(tmp_path, *files))] == expected
    other = write_chips(tmp_path / "other", *files, vendor="0x8086")
    assert local_chips(environ, other) == []
    for name, pci_class in (("disk", "0x010802"), ("network", "0x020000")):
        assert local_chips(environ, write_chips(tmp_path / name, *files, pci_class=pci_class)) == []


@pytest.fixture
def lock(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tpu, "LOCK_FILE", tmp_path / "libtpu_lockfile")
    return tmp_path / "libtpu_lockfile"


def start_with(reason: str, monkeypatch) -> None:
    """Make a topology, with JAX's error for a TPU that does not start."""

    def devices():
        raise RuntimeError(
            f"Unable to initialize backend 'tpu': {reason} (set JAX_PLATFORMS='' to automatically choose)"
        )

    with monkeypatch.context() as patched:
        patched.setattr(jax, "devices", devices)
        Topology.create()


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="needs Linux's /proc")
def test_the_process_that_holds_the_lock_is_named(lock, monkeypatch):
    command = [sys.executable, "-c", HOLD, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        # The text of libtpu 0.0.42 when another process holds the lock and no chip is found.
        text = 'ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm X".'
        line = error_line(start_with, text, monkeypatch)
        holder.communicate(timeout=HANGING)
    assert line.startswith(f"the TPU is in use by process {holder.pid} ('{sys.executable} -c")
    assert line.endswith(f"which holds {lock}; end that process, or set JAX_PLATFORMS=cpu to compute without TPUs")


def test_a_process_of_another_user_is_not_named(lock, monkeypatch):
    lock.touch()
    text = "ABORTED: The TPU is already in use by another process probably owned by another user."
    assert error_line(start_with, text, monkeypatch) == (
        f"the TPU is in use by a process that this user may not see, or {lock} is left over from one; `sudo lsof "
        "/dev/accel0` shows it: end it or remove the file, or set JAX_PLATFORMS=cpu to compute without TPUs"
    )


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("NOT_FOUND: TPU initialization failed: No jellyfish device found.", InputError),
        ("DEADLINE_EXCEEDED: Failed to establish SliceBuilder grpc channel", Unreachable),
    ],
)
def test_another_error_of_libtpu_is_one_line(reason, kind, monkeypatch):
    with pytest.raises(JaxddpError) as error:
        start_with(f"{reason}\nmore lines", monkeypatch)
    assert type(error.value) is kind and str(error.value) == (
        f"JAX does not start on the TPU ({reason.rstrip('.')}): this machine has 0 TPU chips; set JAX_PLATFORMS=cpu to "
        "compute without TPUs"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "not installed"), ("Unable to initialize backend 'cuda': No GPU. (set JAX_PLATFORMS='' to …)", "No GPU")],
)
def test_a_platform_on_which_jax_does_not_start_is_one_line(text, reason, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", Mock(side_effect=RuntimeError(text) if text else AssertionError))
    advice = "install the extra of jaxddp for your devices, such as cuda12, or set JAX_PLATFORMS=cpu"
    assert error_line(Topology.create) == f"JAX does not start on cuda ({reason}); {advice}"


class Chip:
    id, platform = 0, "tpu"

    def __init__(self, process_index: int = 0):
        self.process_index = process_index


class PlaceOne(Peers):
    """Process 1 of four."""

    process_index, process_count = 1, 4


@pytest.fixture
def chips_of_four_hosts(monkeypatch) -> list[Chip]:
    """The devices of JAX in process 1 of four, with one chip each."""
    all_chips = [Chip(host) for host in range(4)]
    for name, value in (("devices", all_chips), ("process_count", 4), ("process_index", 1)):
        monkeypatch.setattr(jax, name, lambda value=value: value)
    return all_chips


@pytest.mark.parametrize("devices", [None, 4])
def test_other_numbers_than_those_of_libtpu_are_an_error(devices, chips_of_four_hosts):
    with pytest.raises(InputError, match="libtpu numbers this process 1 of 4, and the job 0 of 1; start one process"):
        Topology.create(devices)
    assert Topology.create(devices, PlaceOne()).num_devices == 4


@pytest.fixture
def chips(monkeypatch):
    plain_environment(monkeypatch)
    monkeypatch.setattr(launcher.tpu, "local_chips", lambda: CHIPS)


def test_the_launcher_starts_one_process_with_all_chips(chips, capfd, tmp_path):
    (environ,) = LaunchResult(capfd, tmp_path, PRINT_ENVIRONMENT, processes=None).environments()
    assert environ["JAX_NUM_PROCESSES"] == "1" and "CUDA_VISIBLE_DEVICES" not in environ


MACHINE = "this machine has 4 TPU chips, which one process uses; leave out "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Launch(gpus=2), f"--gpus 2: {MACHINE}--gpus, or compute only on the CPU with --gpus 0 --processes P"),
        (Launch(processes=2), f"--processes 2: {MACHINE}--processes, or compute only on the CPU with "),
    ],
)
def test_options_that_do_not_fit_the_chips_are_an_error(options, message):
    assert error_line(check_tpu_options, options, CHIPS).startswith(message)


def test_chips_that_jax_does_not_see_are_a_warning(monkeypatch):
    monkeypatch.setattr(checklist.tpu, "local_chips", lambda: CHIPS)
    row = checklist.devices(ParallelConfig(), ALONE)
    assert row.verdict == "warn" and row.detail.endswith(
        "JAX does not see the 4 TPU chips of this machine: install jaxddp[tpu], or set JAX_PLATFORMS=cpu"
    )
    monkeypatch.setattr(
        checklist.libraries, "installed_version", lambda package: None if package == "libtpu" else "1.0"
    )
    assert "libtpu not installed" in checklist.versions().detail


@pytest.mark.parametrize(("path", "value"), [("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")])
def test_an_eviction_stops_the_run(path, value, tmp_path, monkeypatch, caplog):
    root = write_chips(tmp_path, "dev/accel0")
    calm = {"preempted": "FALSE", "maintenance-event": "NONE"}
    with serving(calm) as server:
        monkeypatch.setattr(
            "jaxddp.job.membership.sigterm_on_eviction", lambda: sigterm_on_eviction(server.environ, root, period=0.01)
        )
        with caplog.at_level(logging.WARNING), stop_on_signals() as stop:
            wait_until(lambda: len(server.asked) > 4)
            assert not stop(0)
            # The machine cannot be reached for a while.
            server.status = 503
            asked = len(server.asked)
            wait_until(lambda: len(server.asked) > asked)
            server.status, server.answers[path] = 200, value
            wait_until(lambda: stop(0))
    assert f"Google evicts this machine ({path}): the run saves and stops" in caplog.text


def test_other_machines_watch_nothing(tmp_path):
    def has_watcher() -> bool:
        return "eviction notice" in {thread.name for thread in threading.enumerate()}

    with serving({}) as server:
        with sigterm_on_eviction(server.environ, tmp_path, period=0.01):
            assert not has_watcher()
        with sigterm_on_eviction(server.environ, write_chips(tmp_path, "dev/accel0")):
            assert has_watcher()
    assert server.asked == [] and not has_watcher()


def wait_until(condition) -> None:
    """Wait for a condition."""
    give_up = time.monotonic() + HANGING / 4
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)
