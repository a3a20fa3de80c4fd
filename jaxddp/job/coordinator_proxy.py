"""A proxy between JAX's client and its coordinator, run as `python coordinator_proxy.py HOST PORT`.

JAX ends a process by SIGABRT as soon as the connection to its coordinator breaks. It does so in C++, before Python can
report that process 0 was lost. So JAX's client connects to this proxy, which keeps the connection to the client open
when process 0 is gone. The proxy prints the loopback port on which it listens, and forwards bytes in both directions.
It ends when its standard input is closed: its parent process has ended. It ignores the signals that a terminal or a
scheduler sends to all processes. It does not import the package, so it starts in 20 ms.

The proxy cannot be a thread. JAX may hold the GIL while it waits for its coordinator, for example when all processes
stop at the same step after a SIGTERM.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time

_CHUNK = 1 << 16
_START_SECONDS, _RETRY_SECONDS = 5.0, 0.05


def main(host: str, port: int) -> None:
    """Listen, print the port, and forward bytes until the standard input ends."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            client, _ = server.accept()
            threading.Thread(target=serve, args=(client, (host, port)), daemon=True).start()


def serve(client: socket.socket, address: tuple[str, int]) -> None:
    """Connect JAX's client to JAX's coordinator, until the client closes the connection."""
    with client:
        coordinator = connect(address)
        if coordinator is None:
            return
        # When the coordinator closes, only this thread ends. The connection to the client stays open, which is the
        # purpose of this process.
        threading.Thread(target=forward, args=(coordinator, client), daemon=True).start()
        with coordinator:
            forward(client, coordinator)
            with contextlib.suppress(OSError):
                coordinator.shutdown(socket.SHUT_RDWR)


def connect(address: tuple[str, int]) -> socket.socket | None:
    """Return a connection to JAX's coordinator, which may start a little later; None if it accepts none in time."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            coordinator = socket.create_connection(address, timeout=_START_SECONDS)
            coordinator.settimeout(None)
            return coordinator
        time.sleep(_RETRY_SECONDS)
    return None


def forward(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes until the source ends. What arrives after the target is gone is lost."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            with contextlib.suppress(OSError):
                target.sendall(data)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
