"""How the encoded images of a table come into TensorFlow's graph: read there, or fetched in threads."""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.data.table import ExampleTable
from jaxddp.data.tensorflow_cpu import tf

FETCH_THREADS = 32
"""How many images are fetched at once from a store that the graph cannot read."""

BATCHES_AHEAD = 2
"""How many batches of encoded images are fetched beyond the one that is being decoded."""


@dataclass(frozen=True)
class ImageReader:
    """What names images to the graph, and the op that reads one so named."""

    signature: tuple[tf.TensorSpec, ...]
    batches: Callable[[Iterable[np.ndarray]], Iterator[tuple[np.ndarray, ...]]]
    """From batches of rows, int64[n] each, to what names them: arrays of n values each."""
    read: Callable[..., Any]
    """From one value of each array to the encoded image, a string scalar."""


def image_reader(table: ExampleTable) -> ImageReader:
    """The fastest way to the images of a table's store."""
    in_graph = table.store.in_graph()
    if in_graph is None:
        return ImageReader((tf.TensorSpec([], tf.string),), functools.partial(_fetched, table), tf.identity)

    def names(rows: np.ndarray) -> tuple[np.ndarray, ...]:
        offset = np.zeros(len(rows), np.int64) if table.offset is None else table.offset[rows]
        return in_graph.names(table.path[rows], offset)

    signature = tuple(tf.TensorSpec([], tf.as_dtype(column.dtype)) for column in names(np.arange(0)))
    return ImageReader(signature, functools.partial(map, names), in_graph.read)


def _fetched(table: ExampleTable, rows: Iterable[np.ndarray]) -> Iterator[tuple[np.ndarray]]:
    """The encoded images of one batch after the other, fetched ahead in threads, which end with the iterator."""
    pending: deque[list[Future[bytes]]] = deque()
    pool = ThreadPoolExecutor(FETCH_THREADS)
    try:
        for batch in rows:
            pending.append([pool.submit(table.read, row) for row in batch.tolist()])
            if len(pending) > BATCHES_AHEAD:
                yield _results(pending.popleft())
        while pending:
            yield _results(pending.popleft())
    finally:
        # Closing the stream does not wait for a store that does not answer.
        pool.shutdown(wait=False, cancel_futures=True)


def _results(images: Iterable[Future[bytes]]) -> tuple[np.ndarray]:
    return (np.array([image.result() for image in images], object),)
