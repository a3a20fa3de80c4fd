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
def proxy(coordinator) -> Iterator[tuple[subprocess.Popen, tuple[str, int]]]:
    """The proxy's process, and the address to which JAX's client would connect."""
    host, port = coordinator.getsockname()
    command = [sys.executable, "-I", "-S", str(Path(coordinator_proxy.__file__)), host, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process, ("127.0.0.1", int(process.stdout.readline()))
        process.stdin.close()
        assert process.wait(SECONDS) == 0


def connect(coordinator: socket.socket, address: tuple[str, int]) -> tuple[socket.socket, socket.socket]:
    client = socket.create_connection(address, SECONDS)
    server, _ = coordinator.accept()
    server.settimeout(SECONDS)
    return client, server


def test_bytes_pass_both_ways_and_a_client_stays_connected_after_its_coordinator_closes(coordinator, proxy):
    client, server = connect(coordinator, proxy[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(proxy[0].pid, number)
    client.sendall(b"there")
    assert server.recv(10) == b"there"
    server.sendall(b"back")
    assert client.recv(10) == b"back"
    server.close()
    client.settimeout(0.3)
    with pytest.raises(TimeoutError):
        client.recv(10)
    client.close()


def test_closing_both_ends_of_a_connection_keeps_other_connections_open(coordinator, proxy):
    process, address = proxy
    other_ends = connect(coordinator, address)
    client, server = connect(coordinator, address)
    os.kill(process.pid, signal.SIGSTOP)
    client.close()
    server.sendall(b"late")
    os.kill(process.pid, signal.SIGCONT)
    # The proxy closes this connection without reading the last bytes, which may reset it.
    with contextlib.suppress(ConnectionResetError):
        assert server.recv(10) == b""
    other_ends[0].sendall(b"still there")
    assert other_ends[1].recv(20) == b"still there"
    assert connect(coordinator, address)
