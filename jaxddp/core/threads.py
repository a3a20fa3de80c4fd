"""Compute values in threads, ahead of their use."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

A = TypeVar("A")
T = TypeVar("T")


def in_daemon(call: Callable[[], T]) -> Future[T]:
    """Start a call in a thread that does not keep the process alive, and return its future result."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def taken_ahead(items: Iterable[T], ahead: int) -> Iterator[T]:
    """Yield items in order, each after `ahead` further ones were taken."""
    taken = deque[T]()
    for item in items:
        taken.append(item)
        if len(taken) > ahead:
            yield taken.popleft()
    yield from taken


def map_in_threads(work: Callable[[A], T], items: Iterable[A], threads: int = 1, *, ahead: int = 32) -> Generator[T]:
    """Yield `work(item)` for each item, in order.

    An error of `work` is raised when its value is requested. `close()` ends the threads after their current item.

    Args:
        ahead: the number of items for each thread, after the yielded one, whose work is queued or done. With a large
            number, one slow item does not stop the other threads.
    """
    pool = ThreadPoolExecutor(threads, "map")
    try:
        for future in taken_ahead((pool.submit(work, item) for item in items), ahead * threads):
            yield future.result()
    finally:
        # A garbage collection may close the generator, also in one of the threads, so this does not wait for them.
        pool.shutdown(wait=False, cancel_futures=True)
