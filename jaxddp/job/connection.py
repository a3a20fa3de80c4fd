"""A connection between two processes of a job, which carries messages."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from jaxddp.core.errors import InputError
from jaxddp.job.messages import LENGTH, Message, Strange, decode, encode

T = TypeVar("T")

STRANGERS_LONGEST, LONGEST = 1 << 16, 1 << 28
"""Bytes of a message, at most: before a process has shown that it belongs to the job, and then."""

_RETRY_SECONDS, _CONNECT_SECONDS = 0.2, 5.0

Served = Callable[["Connection"], Coroutine[Any, Any, None]]


class Connection:
    """Sends and receives messages. Only the thread of its event loop uses it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    def send(self, message: Message) -> None:
        """Send without waiting; where the other side has gone, nothing happens: who receives notices it."""
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    async def receive(self, longest: int = LONGEST) -> Message | None:
        """The next message; None where the connection has ended. Raises: Strange; what arrived is none."""
        try:
            length = int.from_bytes(await self.reader.readexactly(LENGTH), "big")
            if length > longest:
                raise Strange(f"{length} bytes")
            return decode(await self.reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError):
            return None

    async def messages(self) -> AsyncIterator[Message]:
        """All messages until the connection ends, which one that is strange ends too."""
        with contextlib.suppress(Strange):
            while (message := await self.receive()) is not None:
                yield message

    async def close(self) -> None:
        """Send what is left, and end the connection."""
        with contextlib.suppress(OSError):
            self.writer.close()
            await self.writer.wait_closed()


def serving(serve: Served) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]:
    """What `asyncio.start_server` calls for each connection, which is closed when it was served."""

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        try:
            await serve(connection)
        except (OSError, asyncio.CancelledError):
            # Whoever it was has gone, or is let go. Of a task that is cancelled, Python 3.11 would print a traceback.
            pass
        finally:
            await connection.close()

    return served


class NotReached(Exception):
    """Nobody was reached in time; the text is why not the last time."""


async def reached(host: str, port: int, give_up: float, greet: Callable[[Connection], Awaitable[T]]) -> T:
    """What `greet` makes of a connection with whoever listens there, and may start a little later.

    Where it raises an OSError, that is tried again; whatever it raises ends the connection.

    Args:
        give_up: a time of the monotonic clock.

    Raises:
        NotReached: nobody is there until then.
        InputError: no host can have that name.
    """
    last = "no answer"
    while (remaining := give_up - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(min(remaining, _CONNECT_SECONDS)):
                connection = Connection(*await _opened(host, port))
            try:
                return await greet(connection)
            except BaseException:
                await connection.close()
                raise
        except socket.gaierror as error:
            last = f"its name cannot be resolved: {error.strerror}"
        except OSError as error:
            last = error.strerror or str(error) or last
        await asyncio.sleep(min(_RETRY_SECONDS, remaining))
    raise NotReached(last)


async def _opened(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_connection(host, port)
    except UnicodeError:
        raise InputError(f"there is no host {host!r}; give its name or address") from None
