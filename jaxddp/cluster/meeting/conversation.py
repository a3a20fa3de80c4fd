"""A connection between the launchers of two machines."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from jaxddp.cluster.meeting.notes import Note, packed, unpacked
from jaxddp.job.connection import Connection
from jaxddp.job.messages import Left, Strange, Value
from jaxddp.job.watch import Loss, Waits, Watch

SILENCE_SECONDS = 10.0
"""Without a sign of life for so long, a launcher counts as lost."""
_FLUSH_SECONDS = 2.0


@dataclass(frozen=True)
class Arrived:
    """The launcher of a machine is connected."""

    machine: int
    host: str


@dataclass(frozen=True)
class Heard:
    """It said something."""

    machine: int
    note: Note


@dataclass(frozen=True)
class Gone:
    """It is not connected any more, as it was."""

    machine: int
    reason: str


async def converse(connection: Connection, own: int, machine: int, host: str, hear: Callable[[Heard], None]) -> str:
    """Hear the notes of another launcher until it is gone; returns how that came."""
    losses: list[Loss] = []

    def lose(loss: Loss) -> None:
        losses.append(loss)
        connection.writer.transport.abort()

    # Of a launcher nothing is expected but signs of life.
    watch = Watch(own, {machine: connection}, {machine: host}, Waits(SILENCE_SECONDS), lose)
    beating = asyncio.ensure_future(watch.beat())
    try:
        async for message in connection.messages():
            watch.told(machine, message)
            if isinstance(message, Left):
                return "left"
            if isinstance(message, Value):
                hear(Heard(machine, unpacked(message)))
    except Strange:
        pass  # Of another version, as it were: nothing that it says counts.
    finally:
        watch.broke(machine)
        watch.close()
        beating.cancel()
    return losses[0].reason


async def leave(connection: Connection, *notes: Note) -> None:
    """Send the last notes, and say that no more will come; in bounded time."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_FLUSH_SECONDS):
            for message in (*map(packed, notes), Left()):
                connection.send(message)
            await connection.writer.drain()
            await connection.close()
