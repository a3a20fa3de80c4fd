"""The thread that serves a process's connections to other processes."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_FLUSH_SECONDS = 2.0


class NetworkThread:
    """Runs an event loop in its own thread. Other threads of the process call these methods."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def result(self, coroutine: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run a coroutine, and return its result. Raises TimeoutError if it takes longer than `seconds`."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine without waiting for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in the event loop, without waiting for it."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """Cancel all coroutines, which close their connections, and end the thread."""
        with contextlib.suppress(TimeoutError):
            self.result(_cancel_all(), _FLUSH_SECONDS)
        self.call(self._loop.stop)
        self._thread.join(_FLUSH_SECONDS)


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
