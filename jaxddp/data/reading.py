"""How the encoded images of a table come into TensorFlow's graph: read there, or fetched in threads."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
        locate: from rows, int64[n], to columns of n values each.
        read: from one value of each column to the encoded image, a string scalar.
        ahead: how many batches to locate ahead, in threads; 0 where locating is no work.
    """

    signature: tuple[tf.TensorSpec, ...]
    locate: Callable[[np.ndarray], Columns]
    read: Callable[..., Any]
    ahead: int = 0

    def batches(self, rows: Iterable[np.ndarray]) -> Iterator[Columns]:
        """The columns of one batch of rows after the other, located ahead where that is work."""
        if not self.ahead:
            yield from map(self.locate, rows)
            return
        under_way: deque[Any] = deque()
        with ThreadPoolExecutor(1 + self.ahead) as pool:
            try:
                for some in rows:
                    under_way.append(pool.submit(self.locate, some))
                    if len(under_way) > self.ahead:
                        yield under_way.popleft().result()
                while under_way:
                    yield under_way.popleft().result()
            finally:
                for waiting in under_way:
                    waiting.cancel()


def reading(table: ExampleTable) -> Reading:
    """The quickest way to the images of a table's store."""
    text, number = tf.TensorSpec([], tf.string), tf.TensorSpec([], tf.int64)
    store, offset = table.store, table.offset
    if isinstance(store, LocalFiles):
        return Reading((text,), lambda rows: (store.locate(table.path[rows]),), tf.io.read_file)
    if isinstance(store, RecordFiles) and offset is not None:
        files = LocalFiles(store.root)

        def locate(rows: np.ndarray) -> Columns:
            return files.locate(table.path[rows]), offset[rows]

        return Reading((text, number), locate, lambda path, at: record_image(path, at, store.feature))
    pool = ThreadPoolExecutor(FETCH_THREADS)

    def fetch(rows: np.ndarray) -> Columns:
        return (np.array([*pool.map(table.read, rows.tolist())], object),)

    return Reading((text,), fetch, tf.identity, ahead=BATCHES_AHEAD)
