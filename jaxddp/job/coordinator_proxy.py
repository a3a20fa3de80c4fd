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
import selectors
import signal
import socket
import sys
import time

_CHUNK = 1 << 16
_START_SECONDS, _RETRY_SECONDS = 5.0, 0.05


def main(host: str, port: int) -> None:
    """Listen, print the port, and forward bytes until the standard input ends."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    with socket.create_server(("127.0.0.1", 0)) as server, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ, lambda: accept(server, (host, port), selector))
        selector.register(sys.stdin, selectors.EVENT_READ, sys.exit)
        print(server.getsockname()[1], flush=True)
        while True:
            for key, _ in selector.select():
                # An earlier event may have closed this connection.
                if selector.get_map().get(key.fd) is key:
                    key.data()


def accept(server: socket.socket, address: tuple[str, int], selector: selectors.BaseSelector) -> None:
    """Accept JAX's client, and connect it to JAX's coordinator, which may start a little later."""
    client, _ = server.accept()
    coordinator = connect(address)
    if coordinator is None:
        client.close()
        return

    def to_coordinator() -> None:
        if not forward(client, coordinator):
            for socket_ in (client, coordinator):
                with contextlib.suppress(KeyError):
                    selector.unregister(socket_)
                socket_.close()

    def to_client() -> None:
        if not forward(coordinator, client):
            # The connection to the client stays open, which is the purpose of this process.
            selector.unregister(coordinator)

    selector.register(client, selectors.EVENT_READ, to_coordinator)
    selector.register(coordinator, selectors.EVENT_READ, to_client)


def connect(address: tuple[str, int]) -> socket.socket | None:
    """Return a connection to JAX's coordinator; None if the coordinator does not accept one in time."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            coordinator = socket.create_connection(address, timeout=_START_SECONDS)
            coordinator.settimeout(None)
            return coordinator
        time.sleep(_RETRY_SECONDS)
    return None


def forward(source: socket.socket, target: socket.socket) -> bool:
    """Forward the bytes that have arrived. Return False if the source has ended."""
    data = b""
    with contextlib.suppress(OSError):
        data = source.recv(_CHUNK)
        target.sendall(data)
    return bool(data)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
