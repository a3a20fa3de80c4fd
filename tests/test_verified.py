"""Images that an earlier run or `data check` found sound are not verified again, unless the file changed."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from support.ilsvrc import write_tree

import jaxddp.data.stream.workers as workers
from jaxddp.cli import main
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.files import cache_folder
from jaxddp.curate import PackOptions, pack
from jaxddp.data.formats.ilsvrc import train_solutions
from jaxddp.data.formats.packed_records import read_packed
from jaxddp.data.order import WHOLE, SampleOrder, Shard
from jaxddp.data.soundness import Verified
from jaxddp.data.table import ExampleTable

pytestmark = pytest.mark.usefixtures("own_cache")
DATA = DataConfig(image_size=16, resize=16, crop="whole")
N = 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "tree", classes=2, images=N // 2, val=4, size=40)


@pytest.fixture
def verifications(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the size of each image that is verified."""
    sizes, sound_image = [], workers.sound_image

    def counted(data: bytes, *kept):
        sizes.append(len(data))
        return sound_image(data, *kept)

    monkeypatch.setattr(workers, "sound_image", counted)
    return sizes


def read(table: ExampleTable, shard: Shard = WHOLE) -> np.ndarray:
    """Read one epoch of a run; return its images."""
    table.check(DATA)
    order = SampleOrder(len(table), 4, seed=0)
    return np.concatenate([batch.image for batch in table.train_batches(order, DATA, range(len(table) // 4), shard)])


def mark_verified(table: ExampleTable) -> list[int]:
    """Return the rows that a run would verify, and cache them as a run does, without TensorFlow."""
    table.check(DATA)
    rows = np.flatnonzero(~table.verified.sound)
    table.verified.add(rows)
    table.verified.write_cache()
    return rows.tolist()


def test_a_selection_of_verified_images_is_not_verified_again(root: Path):
    assert len(mark_verified(train_solutions(root))) == N
    assert mark_verified(train_solutions(root, classes="1:2")) == mark_verified(train_solutions(root).take(4)) == []


def test_after_data_check_nothing_is_verified(root: Path, tmp_path: Path, verifications: list[int]):
    assert main(["data", "check", str(root), "--manifest", str(tmp_path / "m.jsonl")]) == 0
    read(train_solutions(root))
    assert verifications == []


@pytest.mark.parametrize("change", ["longer", "same size and time", "another file"])
def test_a_changed_file_is_verified_again(root: Path, change: str):
    table = train_solutions(root)
    mark_verified(table)
    file = Path(table.name(3))
    data, before = file.read_bytes(), file.stat()
    if change == "another file":
        file.with_suffix(".new").write_bytes(data)
        file.with_suffix(".new").replace(file)
    else:
        file.write_bytes(data + b"more" if change == "longer" else data[::-1][::-1])
    if change == "same size and time":
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert mark_verified(train_solutions(root)) == [3]


@pytest.mark.slow
def test_a_file_that_is_damaged_later_never_trains_even_if_the_cache_has_its_times(root: Path, tmp_path: Path):
    table = train_solutions(root)
    read(table)
    file = Path(table.name(3))
    file.write_bytes(file.read_bytes()[:-60] + b"\xff\xd9")
    damaged = train_solutions(root)
    with pytest.raises(InputError, match=f"^{file}: damaged"):
        read(damaged)
    # `data check` removes the file from the cache.
    damaged.check(DATA)
    damaged.verified.add(np.arange(N))
    damaged.verified.write_cache()
    with pytest.raises(InputError, match=f"^{file}: damaged"):
        read(damaged)
    assert not damaged.verified.sound[3]
    damaged.verified.add(np.arange(N))
    damaged.verified.write_cache()
    assert main(["data", "check", str(root), "--manifest", str(tmp_path / "m.jsonl")]) == 1
    with pytest.raises(InputError, match=f"^{file}: damaged"):
        read(train_solutions(root))


def cache_files() -> list[Path]:
    return sorted((cache_folder() / "verified").iterdir())


@pytest.mark.parametrize("damage", ["cut", "flipped", "a directory"])
def test_a_damaged_cache_file_is_ignored(root: Path, damage: str, caplog):
    mark_verified(train_solutions(root))
    (cache_file,) = cache_files()
    data = bytearray(cache_file.read_bytes())
    if damage == "a directory":
        cache_file.unlink()
        cache_file.mkdir()
    else:
        data[40] ^= 1
        cache_file.write_bytes({"cut": data[:50], "flipped": data}[damage])
    with caplog.at_level(logging.WARNING, "jaxddp.data"):
        assert len(mark_verified(train_solutions(root))) == N
    lines = [message for message in caplog.messages if str(cache_file) in message]
    assert len(lines) <= 2 and (damage == "a directory" or lines)
    assert len(mark_verified(train_solutions(root))) == (N if damage == "a directory" else 0)


@pytest.mark.slow
def test_each_process_caches_its_share(root: Path, verifications: list[int]):
    for index in range(2):
        read(train_solutions(root), Shard(index, 2))
    assert len(verifications) == N and len(cache_files()) == 2
    read(train_solutions(root))
    assert len(verifications) == N


def test_the_cache_is_written_every_ten_minutes(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxddp.data.soundness._SECONDS", -1.0)
    table = train_solutions(root)
    table.check(DATA)
    batches = iter(table.train_batches(SampleOrder(N, 4, seed=0), DATA, range(1000)))
    for _ in range(3):
        next(batches)
    assert cache_files()
    # A stream that is dropped caches the images that it has verified.
    for _ in range(N):
        next(batches)
    del batches
    assert mark_verified(train_solutions(root)) == []


@pytest.mark.slow
def test_images_of_packed_sets_are_verified_again_after_a_change_of_their_shards(
    root: Path, tmp_path: Path, verifications: list[int]
):
    pack({"train": train_solutions(root)}, tmp_path / "packed", PackOptions())
    first = read(read_packed(tmp_path / "packed", "train"))
    np.testing.assert_array_equal(read(read_packed(tmp_path / "packed", "train")), first)
    assert len(verifications) == N
    for shard in (tmp_path / "packed").glob("*.tfrecord"):
        os.utime(shard)
    read(read_packed(tmp_path / "packed", "train"))
    assert len(verifications) == 2 * N


def test_a_cache_file_does_not_grow_without_end(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxddp.data.soundness._MAX_ENTRIES", 10)
    for _ in range(4):
        for path in root.rglob("*.JPEG"):
            os.utime(path)
        assert len(mark_verified(train_solutions(root))) == N
        assert cache_files()[0].stat().st_size <= 32 + 8 * 10
    assert mark_verified(train_solutions(root)) == []


def test_no_two_rows_of_a_shard_have_the_same_identity():
    class Records:
        root = Path("/nowhere")

        def faults(self, paths: np.ndarray, identity: np.ndarray) -> list:
            identity[:] = 7
            return []

    rows = 10_000
    verified = Verified(Records(), np.array([b"a"] * rows), np.arange(rows))  # type: ignore[arg-type]
    verified.check_files()
    assert len(np.unique(verified._identity)) == rows


def test_other_rules_invalidate_the_cache(root: Path, monkeypatch: pytest.MonkeyPatch):
    mark_verified(train_solutions(root))
    monkeypatch.setattr("jaxddp.data.soundness.RULES_VERSION", 1_000)
    assert len(mark_verified(train_solutions(root))) == N
