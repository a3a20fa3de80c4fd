"""A connection between two processes of a job, which carries one JSON object a line."""

import contextlib
import json
import select
import socket
import threading
import time
from typing import Any

_LONGEST_LINE = 65536


class Peer:
    """A connection that carries JSON lines."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(True)
        self._socket = connection
        self._buffer = b""
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send a message; any thread may. Raises OSError where the other side has gone."""
        with self._sending:
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next message; None where the connection has ended.

        Raises `TimeoutError` where none arrived in time, `ValueError` where what arrived is not a message.
        """
        give_up = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if len(self._buffer) > _LONGEST_LINE:
                raise ValueError("an endless line")
            # A timeout of the socket would also apply to `send` in other threads.
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(1000 * max(give_up - time.monotonic(), 0)):
                raise TimeoutError
            received = b""
            with contextlib.suppress(ConnectionError):
                received = self._socket.recv(4096)
            if not received:
                return None
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not an object")
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
