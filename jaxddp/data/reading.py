"""How the encoded images of a table come into TensorFlow's graph: read there, or fetched in threads."""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxddp.data.storage.local import LocalFiles
from jaxddp.data.storage.records import RecordFiles, record_image
from jaxddp.data.table import ExampleTable
from jaxddp.data.tensorflow_cpu import tf

FETCH_THREADS = 32
"""How many images of a store that the graph cannot read are on their way at once."""

BATCHES_AHEAD = 2
"""How many batches of encoded images are fetched beyond the one that is being decoded."""

Columns = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Reading:
    """What names images to the graph, and the op that reads one so named.

    Attributes:
        signature: of one image's columns.
        batches: from batches of rows, int64[n] each, to their columns of n values each.
        read: from one value of each column to the encoded image, a string scalar.
    """

    signature: tuple[tf.TensorSpec, ...]
    batches: Callable[[Iterable[np.ndarray]], Iterator[Columns]]
    read: Callable[..., Any]


def reading(table: ExampleTable) -> Reading:
    """The quickest way to the images of a table's store."""
    text, number = tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)
    store, offset = table.store, table.offset
    if isinstance(store, LocalFiles):

        def locate_file(rows: np.ndarray) -> Columns:
            return (store.locate(table.path[rows]),)

        return Reading((text,), functools.partial(map, locate_file), tf.io.read_file)
    if isinstance(store, RecordFiles) and offset is not None:
        files = LocalFiles(store.root)

        def locate_record(rows: np.ndarray) -> Columns:
            return files.locate(table.path[rows]), offset[rows]

        read = functools.partial(record_image, feature=store.feature)
        return Reading((text, number), functools.partial(map, locate_record), read)
    return Reading((text,), functools.partial(_fetched, table), tf.identity)


def _fetched(table: ExampleTable, rows: Iterable[np.ndarray]) -> Iterator[Columns]:
    """The encoded images of one batch after the other, fetched ahead in threads, which end with the iterator."""
    under_way: deque[list[Future[bytes]]] = deque()
    pool = ThreadPoolExecutor(FETCH_THREADS)
    try:
        for batch in rows:
            under_way.append([pool.submit(table.read, row) for row in batch.tolist()])
            if len(under_way) > BATCHES_AHEAD:
                yield _results(under_way.popleft())
        while under_way:
            yield _results(under_way.popleft())
    finally:
        # Who closes the stream need not wait for a store that does not answer.
        pool.shutdown(wait=False, cancel_futures=True)


def _results(images: Iterable[Future[bytes]]) -> Columns:
    return (np.array([image.result() for image in images], object),)
