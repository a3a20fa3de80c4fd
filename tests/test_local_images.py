"""Image files of which each process has its own: the same crops as with all files, and substitutes of its own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.images import encode
from support.local_data import Unpadded
from support.peers import as_processes
from support.streams import DATA, NUM_EXAMPLES, SEED, table_of, waves, write_table

from jaxddp.config import DataConfig
from jaxddp.core.peers import Peers
from jaxddp.data.batch import Batch
from jaxddp.data.order import Shard
from jaxddp.data.table import ExampleTable
from jaxddp.data.united import UnitedSource, unite

pytestmark = pytest.mark.slow
BATCH_SIZE, FIRST = 4, 7
LOCAL = DataConfig(image_size=DATA.image_size, resize=DATA.resize, placement="local", bad_images="substitute")
STEPS = range(6)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ExampleTable:
    contents = [encode(waves(row), quality=90) for row in range(NUM_EXAMPLES)]
    return write_table(tmp_path_factory.mktemp("images"), contents)


def processes_of(table: ExampleTable) -> list[tuple[UnitedSource, Any]]:
    """Divide a table between two processes. Return the source and the order of each."""
    parts = [table.rows(np.arange(FIRST)), table.rows(np.arange(FIRST, NUM_EXAMPLES))]

    def source_and_order(peers: Peers) -> tuple[UnitedSource, Any]:
        source: Any = unite(parts[peers.process_index], LOCAL, peers, "training data")
        return source, source.order(BATCH_SIZE, SEED, 1, peers)

    return as_processes(2, source_and_order)


def parts_of(table: ExampleTable) -> list[list[Batch]]:
    """Return the batches of each process."""
    return [
        [*source.train_batches(order, LOCAL, STEPS, Shard(host, 2), source.substitutes(LOCAL))]
        for host, (source, order) in enumerate(processes_of(table))
    ]


def test_random_crops_are_those_of_one_process_with_all_files(table: ExampleTable):
    whole = table.train_batches(Unpadded.of(processes_of(table)[0][1]), DATA, STEPS)
    for batch, *parts in zip(whole, *parts_of(table), strict=True):
        image, row, label = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("image", "row", "label")
        )
        real = np.concatenate([part.mask for part in parts]) > 0
        np.testing.assert_array_equal(row[real], batch.row)
        np.testing.assert_array_equal(label[real], batch.label)
        np.testing.assert_array_equal(image[real], batch.image)
        # Padding has real images.
        assert image[~real].any((1, 2, 3)).all()


def test_a_bad_image_is_replaced_by_one_of_the_same_process(table: ExampleTable, tmp_path: Path):
    contents = [b"" if row in (3, 7) else table.read(row) for row in range(NUM_EXAMPLES)]
    names = [f"{row}.JPEG" for row in range(NUM_EXAMPLES)]
    for name, content in zip(names, contents, strict=True):
        (tmp_path / name).write_bytes(content)
    parts = parts_of(table_of(tmp_path, names))
    marked: list[int] = []
    for step, batches in zip(STEPS, zip(*parts, strict=True), strict=True):
        first = step * BATCH_SIZE // NUM_EXAMPLES
        for batch in batches:
            bad = np.isin(batch.row, (3, 7)) & (batch.mask > 0) & (batch.epoch == first)
            assert batch.substituted.tolist() == bad.tolist()
            marked += batch.row[bad].tolist()
    assert first == 1 and {*marked} == {3, 7}
