"""A connection between the launchers of two machines, and the thread in which a launcher keeps its own."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxddp.cluster.notes import Note, packed, unpacked
from jaxddp.job.connection import Connection
from jaxddp.job.messages import Done, Strange, Value
from jaxddp.job.watch import Loss, Waits, Watch

T = TypeVar("T")

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


class NetworkThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def result(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """What a coroutine returns or raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Have a coroutine run, for which nobody waits."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> None:
        self.call(self._loop.call_later, seconds, function, *arguments)

    def close(self) -> None:
        """Let go of all connections, and end the thread."""
        with contextlib.suppress(TimeoutError):
            self.result(_left(), _FLUSH_SECONDS)
        self.call(self._loop.stop)
        self._thread.join(_FLUSH_SECONDS)


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
            if isinstance(message, Done):
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
            for message in (*map(packed, notes), Done()):
                connection.send(message)
            await connection.writer.drain()
            await connection.close()


async def _left() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
