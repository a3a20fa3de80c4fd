"""The thread in which a process keeps its connections with others."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_FLUSH_SECONDS = 2.0


class NetworkThread:
    """An event loop in a thread of its own. The other threads of the process call these functions."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def result(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """What a coroutine returns or raises. Raises: TimeoutError; it takes longer."""
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


async def _left() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
