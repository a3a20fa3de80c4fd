"""Two hosts: network namespaces with an address each, joined by a virtual cable that can be pulled."""

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.processes import ENDLESS, STEPS, TRAIN, Program, close, environment, last_line, lines, losses

pytestmark = pytest.mark.ci

SOON = 40
"""Maximum seconds until all processes end after the cable is pulled: the heartbeat, and time to report."""
HOSTS = {"jaxddp-a": "10.77.0.1", "jaxddp-b": "10.77.0.2"}
COORDINATOR = "10.77.0.1:7077"


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@pytest.fixture
def hosts(require) -> Iterator[list[str]]:
    """The names of two namespaces, each with an /etc/hosts as on Debian: the machine's name is a loopback address."""
    require("ip", package="iproute2", root=True)
    folders = [Path("/etc/netns") / host for host in HOSTS]
    try:
        for host, folder in zip(HOSTS, folders, strict=True):
            ip("netns", "add", host)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
        a, b = HOSTS
        ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for host, address in HOSTS.items():
            ip("-n", host, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", "cable", "up")
        yield list(HOSTS)
    finally:
        for host, folder in zip(HOSTS, folders, strict=True):
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, timeout=30)
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Host:
    """`jaxddp launch` on one of two hosts."""

    launcher: Program
    log: Path


@pytest.fixture
def trained(hosts, arrays, start, tmp_path):
    """Start the same training on both hosts, one process each, with a shared file system."""

    def run(workdir: Path, *more: str) -> list[Host]:
        words = [*TRAIN, "--data.path", str(arrays), "--workdir", str(workdir), *more]
        return [
            Host(
                start(
                    Program,
                    ["ip", "netns", "exec", host, sys.executable, "-m", "jaxddp", "launch", "--nodes", "2", "--nr",
                     str(number), "--processes", "1", "--coordinator", COORDINATOR, "--grace", "2",
                     "--logs", str(tmp_path / host), "--", *words],
                    tmp_path / f"launch-{host}",
                    environment()
                ),
                tmp_path / host / f"process-{number}.log"
            )
            for number, host in enumerate(hosts)
        ]  # fmt: skip

    return run


def test_two_hosts_train_as_one_until_the_cable_is_pulled(trained, reference, hosts, tmp_path):
    workdir = tmp_path / "run"
    both = trained(workdir, *ENDLESS, "--parallel.heartbeat-timeout", "4")
    both[0].launcher.wait_until(lambda: len(lines(workdir)) >= STEPS)
    expected = losses(reference)
    assert close({step: losses(workdir)[step] for step in expected}, expected)
    ip("-n", hosts[1], "link", "set", "cable", "down")
    for number, host in enumerate(both):
        assert host.launcher.end(SOON) == 1, host.launcher.out + host.launcher.err
        assert f"process {number}: exit code 1\n" in host.launcher.err
        line = last_line(host.log)
        assert line.startswith(f"jaxddp: process {1 - number} gave no sign of life for 4 s"), line
        assert host.launcher.last == f"[{number}] {line}"


def test_launchers_meet_again_when_the_cable_is_plugged_in(hosts, start, tmp_path):
    """No process fails; only the launchers lose their connection."""
    program = "import os, time; print('generation', os.environ['JAXDDP_GENERATION'], flush=True); time.sleep(600)"
    a, b = (
        start(
            Program,
            ["ip", "netns", "exec", host, sys.executable, "-m", "jaxddp", "launch", "--nodes", "2", "--nr", str(number),
             "--processes", "1", "--coordinator", COORDINATOR, "--restarts", "1", "--grace", "1",
             "--logs", str(tmp_path / host), "--", "python", "-c", program],
            tmp_path / f"launch-{host}",
            environment(JAXDDP_JOB_KEY="secret")
        )
        for number, host in enumerate(hosts)
    )  # fmt: skip
    for each in (a, b):
        each.wait_until(lambda each=each: "generation 0" in each.out)
    ip("-n", hosts[1], "link", "set", "cable", "down")
    a.wait_until(lambda: "restart 1 of 1 in 1 s" in a.err)
    assert "machine 1 gave no sign of life for 10 s (on " in a.err
    b.wait_until(lambda: "reaching machine 0 at 10.77.0.1:7077 again" in b.err)
    assert "machine 0 gave no sign of life for 10 s" in b.err and "killed by SIGTERM" in b.err
    ip("-n", hosts[1], "link", "set", "cable", "up")
    for each in (a, b):
        each.wait_until(lambda each=each: "generation 1" in each.out)
    a.process.send_signal(signal.SIGTERM)
    assert (a.end(SOON), b.end(SOON)) == (143, 143)
