"""The proxy that keeps the connection of JAX's client to its coordinator open."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxddp.job.coordinator_proxy as coordinator_proxy

SECONDS = 20


@pytest.fixture
def coordinator() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SECONDS)
        yield server


@pytest.fixture
def kept(coordinator) -> Iterator[tuple[subprocess.Popen, tuple[str, int]]]:
    """The proxy's process, and the address where JAX's client would connect."""
    host, port = coordinator.getsockname()
    command = [sys.executable, "-I", "-S", str(Path(coordinator_proxy.__file__)), host, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process, ("127.0.0.1", int(process.stdout.readline()))
        process.stdin.close()
        assert process.wait(SECONDS) == 0


def connected(coordinator: socket.socket, place: tuple[str, int]) -> tuple[socket.socket, socket.socket]:
    near = socket.create_connection(place, SECONDS)
    far, _ = coordinator.accept()
    far.settimeout(SECONDS)
    return near, far


def test_bytes_are_carried_both_ways_and_the_client_outlives_its_coordinator(coordinator, kept):
    near, far = connected(coordinator, kept[1])
    near.sendall(b"there")
    assert far.recv(10) == b"there"
    far.sendall(b"back")
    assert near.recv(10) == b"back"
    far.close()
    near.settimeout(0.3)
    with pytest.raises(TimeoutError):
        near.recv(10)
    near.close()


def test_closing_both_sides_at_once_ends_no_other_connection(coordinator, kept):
    process, place = kept
    other = connected(coordinator, place)
    near, far = connected(coordinator, place)
    os.kill(process.pid, signal.SIGSTOP)
    near.close()
    far.sendall(b"late")
    os.kill(process.pid, signal.SIGCONT)
    # The rest of its bytes is not read any more.
    with contextlib.suppress(ConnectionResetError):
        assert far.recv(10) == b""
    other[0].sendall(b"still there")
    assert other[1].recv(20) == b"still there"
    assert connected(coordinator, place)
