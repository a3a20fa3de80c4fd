"""A connection that carries messages between two processes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from jaxddp.wire.codec import LENGTH, Codec, Malformed, encode

LONGEST_OF_STRANGER, LONGEST = 1 << 16, 1 << 28
"""The maximum number of bytes of a message, before and after the peer has proved that it belongs to the job."""


class Connection:
    """Sends and receives messages. Only the thread of the event loop calls its methods."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, codec: Codec):
        self.reader, self.writer, self._codec = reader, writer, codec

    def send(self, message: Any) -> None:
        """Send a message without waiting. If the peer is gone, the message is dropped, and `receive` returns None."""
        if not self.writer.is_closing():
            self.writer.write(encode(message))

    async def receive(self, longest: int = LONGEST) -> Any | None:
        """Return the next message; None if the connection has ended. Raises Malformed if the message is invalid."""
        try:
            length = int.from_bytes(await self.reader.readexactly(LENGTH), "big")
            if length > longest:
                raise Malformed(f"{length} bytes")
            return self._codec.decode(await self.reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError):
            return None

    async def messages(self) -> AsyncIterator[Any]:
        """Yield all messages until the connection ends. A malformed message also ends the iteration."""
        with contextlib.suppress(Malformed):
            while (message := await self.receive()) is not None:
                yield message

    async def close(self) -> None:
        """Send the buffered messages, and close the connection."""
        with contextlib.suppress(OSError):
            self.writer.close()
            await self.writer.wait_closed()
