"""Read an iterator ahead in a thread."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def read_ahead(values: Iterable[T]) -> Iterator[T]:
    """Iterate over values, each of which is computed in a thread while the caller uses the one before it.

    An error of `values` is raised when its value is requested.
    """
    iterator, end = iter(values), object()
    thread = ThreadPoolExecutor(1, "read ahead")
    try:
        following = thread.submit(next, iterator, end)
        while (value := following.result()) is not end:
            following = thread.submit(next, iterator, end)
            yield value  # type: ignore[misc]
    finally:
        # An unfinished generator may be closed by a garbage collection, which may run in the thread itself.
        thread.shutdown(wait=False, cancel_futures=True)
