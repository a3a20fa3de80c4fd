"""JAX's connections with its coordinator go through those of the job.

JAX ends a process by SIGABRT as soon as the connection to its coordinator breaks, before anyone can say which process
was lost. So its client is connected with a port of its own process, which stays open when process 0 has gone; process 0
passes the bytes on to JAX's coordinator, which listens on the loopback alone. A job needs one port.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from jaxddp.job.connection import Connection
from jaxddp.job.ports import LOOPBACK, split_address

_CHUNK = 1 << 16
_RETRY_SECONDS = 0.05


async def open_when_there(address: str, timeout: float) -> Connection:
    """A connection to an address where something is about to listen. Raises: TimeoutError; nothing does."""
    async with asyncio.timeout(timeout):
        while True:
            with contextlib.suppress(OSError):
                return Connection(*await asyncio.open_connection(*split_address(address)))
            await asyncio.sleep(_RETRY_SECONDS)


async def splice(near: Connection, far: Connection, may_end: Callable[[], Awaitable[None]] | None = None) -> None:
    """Carry bytes both ways until one side ends; then both are closed.

    Args:
        may_end: where the far side ends, the near one is kept open until this returns.
    """

    async def far_to_near() -> None:
        await _carry(far, near)
        if may_end is not None:
            await may_end()

    ways = [asyncio.ensure_future(far_to_near()), asyncio.ensure_future(_carry(near, far))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        for side in (near, far):
            await side.close()


async def listen(open_far: Callable[[], Awaitable[Connection]], may_end: Callable[[], Awaitable[None]]) -> str:
    """Listen on a port of the loopback, and join each connection with one of `open_far`'s; returns the address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near = Connection(reader, writer)
        try:
            far = await open_far()
        except (OSError, TimeoutError):
            # As where process 0 has gone: JAX's client waits, and the watch says why.
            await may_end()
            await near.close()
            return
        await splice(near, far, may_end)

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    return "{}:{}".format(*server.sockets[0].getsockname())


async def _carry(source: Connection, to: Connection) -> None:
    with contextlib.suppress(OSError):
        while data := await source.reader.read(_CHUNK):
            to.writer.write(data)
            await to.writer.drain()
