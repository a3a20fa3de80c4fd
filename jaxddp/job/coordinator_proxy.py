"""Keeps JAX's connection with its coordinator open when process 0 has gone: `python keeper.py HOST PORT`.

JAX ends a process by SIGABRT as soon as that connection breaks, in C++, before a thread of Python can name process 0.
So its client is connected with this process, which prints the port of the loopback where it listens, and carries the
bytes both ways. It ends when its standard input does, that is with the process that started it, and by no signal that a
terminal or a scheduler sends to all. It imports nothing of the package, and starts in 20 ms.

It is no thread: JAX waits for its coordinator with Python's lock held, as where all processes stop at one step.
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
    """Listen, print the port, and carry bytes until the standard input ends."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    with socket.create_server(("127.0.0.1", 0)) as server, selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ, lambda: accept(server, (host, port), selector))
        selector.register(sys.stdin, selectors.EVENT_READ, sys.exit)
        print(server.getsockname()[1], flush=True)
        while True:
            for key, _ in selector.select():
                # What the one before it has closed is not there any more.
                if selector.get_map().get(key.fd) is key:
                    key.data()


def accept(server: socket.socket, coordinator: tuple[str, int], selector: selectors.BaseSelector) -> None:
    """Connect JAX's client with its coordinator, which may start a little later."""
    near, _ = server.accept()
    far = connected(coordinator)
    if far is None:
        near.close()
        return

    def to_coordinator() -> None:
        if not carried(near, far):
            for end in (near, far):
                with contextlib.suppress(KeyError):
                    selector.unregister(end)
                end.close()

    def to_client() -> None:
        if not carried(far, near):
            # The other side stays open: that is what this process is for.
            selector.unregister(far)

    selector.register(near, selectors.EVENT_READ, to_coordinator)
    selector.register(far, selectors.EVENT_READ, to_client)


def connected(coordinator: tuple[str, int]) -> socket.socket | None:
    """A connection with JAX's coordinator; None where there is none in time."""
    give_up = time.monotonic() + _START_SECONDS
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError):
            far = socket.create_connection(coordinator, timeout=_START_SECONDS)
            far.settimeout(None)
            return far
        time.sleep(_RETRY_SECONDS)
    return None


def carried(source: socket.socket, to: socket.socket) -> bool:
    """Carry what has arrived; False where the source has ended."""
    data = b""
    with contextlib.suppress(OSError):
        data = source.recv(_CHUNK)
        to.sendall(data)
    return bool(data)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
