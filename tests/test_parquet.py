"""Parquet files as `datasets` writes them: the order of rows, the class names, and reading of single images."""

import itertools
import json
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.forms import example_tables, refusal
from support.images import encode

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.curate import check
from jaxddp.data.opening import open_one_split, open_splits, open_tables
from jaxddp.data.order import SampleOrder
from jaxddp.data.storage.store import LocalFiles
from jaxddp.data.storage.tables import WRITE_AGAIN, ParquetFiles
from jaxddp.data.table import ExampleTable

SIZE = 4
NAMES = ("cat", "dog", "ant")
CELL = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def encoded(number: int) -> bytes:
    return encode(np.full((SIZE, SIZE, 3), number, np.uint8), "PNG")


def write_file(file: Path, numbers: Iterable[int], **options: Any) -> Path:
    """Write images of these gray values as `datasets` does: class names in the schema, three rows in a row group."""
    numbers = list(numbers)
    cells = options.get("cells", [{"bytes": encoded(number), "path": f"{number}.png"} for number in numbers])
    labels = options.get("labels", pa.array([number % 3 for number in numbers], pa.int64()))
    image, label = options.get("columns", ("image", "label"))
    names = list(options.get("names", NAMES))
    features = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
    table = pa.table({"note": ["x"] * len(numbers), image: pa.array(cells, CELL), label: labels})
    if options.get("named", True):
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=3, compression=options.get("compression", "snappy"))
    return file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_file(tmp_path / "set/data/train-00000-of-00002.parquet", range(8))
    write_file(tmp_path / "set/data/train-00001-of-00002.parquet", range(8, 13))
    write_file(tmp_path / "set/data/test-00000-of-00001.parquet", range(100, 104))
    return tmp_path / "set"


def config_of(path: Path, **options: Any) -> DataConfig:
    return DataConfig(path=str(path), image_size=SIZE, crop="whole", **options)


def open_both(path: Path, **options: Any) -> tuple[ExampleTable, ExampleTable]:
    return example_tables(config_of(path, **options))


def test_rows_follow_the_files_in_their_order(root: Path):
    train, val = open_both(root)
    assert train.class_names == val.class_names == NAMES
    assert train.labels.tolist() == [number % 3 for number in range(13)] and train.labels.dtype == np.int32
    assert val.labels.tolist() == [number % 3 for number in range(100, 104)]
    assert [train.read(row) for row in range(13)] == [encoded(number) for number in range(13)]
    assert train.id[9] == b"data/train-00001-of-00002.parquet__1"
    assert train.name(9) == f"{root}/data/train-00001-of-00002.parquet, row 1"
    assert train.record(9)[1:] == ("data/train-00001-of-00002.parquet", 1)
    open_tables(config_of(root))


@pytest.mark.parametrize(
    ("train", "val", "classes"),
    [
        ([[0, 1, 2]], [4, 0], "0 1 2 3 4"),
        ([[0, 1, 3]], [2, 0], "0 1 2 3"),
        ([["dog", "ant", "cat"]], pa.array(["cat"]).dictionary_encode(), "ant cat dog"),
        # Integers are names if a training label is a string.
        ([[2, 3, 4], ["jack", "10"]], [4, 10, -1], "10 2 3 4 jack"),
        ([["10", "2", "a;b"]], ["2"], "10 2 a;b"),
        ([["10", "2", "-1"]], ["2"], "2 10"),
        ([["dog", "ant"]], ["cow"], "val.parquet, row 0: label 'cow' is none of the 2 classes"),
    ],
)
def test_labels_without_names_are_numbered_and_strings_are_sorted(tmp_path: Path, train, val, classes: str):
    options = {"named": False, "columns": ("img", "labels")}
    for name, labels in {**{f"train-{part}": labels for part, labels in enumerate(train)}, "val": val}.items():
        file = write_file(tmp_path / f"{name}.parquet", range(len(labels)), labels=pa.array(labels), **options)
        pq.write_table(pq.read_table(file).append_column("w", pa.array([1.0] * len(labels))), file)
    if "row" in classes:
        assert classes in message_of(tmp_path)
        return
    written = [label for part in train for label in part], pa.array(val).to_pylist()
    # A listing has no larger label than that of the training rows.
    for keys, split in itertools.product(({}, {"weight_column": "w"})[: 1 + (4 not in val)], (0, 1)):
        table, labels = open_both(tmp_path, **keys)[split], written[split]
        assert " ".join(table.class_names) == classes
        names = dict(enumerate(table.class_names)) | {-1: "-1"}
        assert [names[label] for label in table.labels.tolist()] == [*map(str, labels)]


def test_the_column_label_precedes_a_column_of_class_names(tmp_path: Path):
    labels = pa.array(["x", "y", "x"])
    for split, columns in (("train", ("label", "source")), ("val", ("source", "label"))):
        table = pq.read_table(write_file(tmp_path / f"{split}.parquet", range(3), columns=("image", "source")))
        pq.write_table(table.append_column("label", labels).select(["image", *columns]), tmp_path / f"{split}.parquet")
    for table in open_both(tmp_path):
        assert table.class_names == ("x", "y") and table.labels.tolist() == [0, 1, 0]
    for split in ("train", "val"):
        write_file(tmp_path / f"{split}.parquet", range(3), columns=("image", "source"))
    assert open_both(tmp_path)[0].class_names == NAMES


@pytest.mark.parametrize(
    ("keys", "train", "val", "labels"),
    [
        ({"split_column": "fold", "val_fold": "1"}, [0, 2, 4], [1, 3, 5], [0, 2, 1]),
        ({"val_share": 0.5, "group_column": "patient"}, [2, 3, 4, 5], [0, 1], [2, 0, 1, 2]),
        ({"val_share": 0.3, "columns": "label=words", "label_separator": "|"}, [0, 1, 3, 5], [2, 4], None),
        ({"val_share": 0.3, "columns": "label=tags"}, [0, 1, 3, 5], [2, 4], None),
        ({"val_share": 0.3, "columns": "label=pair"}, [0, 1, 3, 5], [2, 4], None),
        ({"val_share": 0.3, "columns": "label=fold,label=odd"}, [0, 1, 4, 5], [2, 3], None),
        ({"val_share": 0.5, "columns": "image=path,label=words", "images": "pictures"}, None, None, None)
    ]
)  # fmt: skip
def test_the_keys_of_tables_serve_parquet(tmp_path: Path, keys: dict[str, Any], train, val, labels):
    table = pq.read_table(write_file(tmp_path / "a.parquet", range(6)))
    more = {"fold": [0, 1] * 3, "patient": [*"ppqqrr"], "words": ["a", "a|b"] * 3, "path": [*"012345"]}
    more |= {"tags": [["a"], ["a", "b"]] * 3, "odd": [False, True] * 3}
    for name, cells in {**more, "pair": pa.array([["a", "b"], ["a", "c"]] * 3, pa.list_(pa.string(), 2))}.items():
        table = table.append_column(name, pa.array(cells))
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "pictures").mkdir()
    for number in range(6):
        (tmp_path / "pictures" / f"{number}.png").write_bytes(encoded(number))
    tables = open_both(tmp_path / "a.parquet", **keys)
    read = [[encoded(number) for number in range(6)].index(one.read(row)) for one in tables for row in range(len(one))]
    assert (sorted(read) == [*range(6)] and not labels) or tables[0].labels.tolist() == labels
    assert train is None or read == [*train, *val]
    assert tables[0].class_names == NAMES or labels is None


@pytest.fixture
def groups_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The row groups that were read from the file, which the public API does not show."""
    read, cells = [], ParquetFiles._cells
    monkeypatch.setattr(ParquetFiles, "_cells", lambda *arguments: read.append(arguments[2]) or cells(*arguments))
    return read


def test_the_number_of_cached_row_groups_is_limited(root: Path, groups_read: list[int]):
    path = b"data/train-00000-of-00002.parquet"
    store = ParquetFiles(LocalFiles(root), "image")
    for row in (0, 1, 2, 7, 0, 5):
        assert store.read(path, row) == encoded(row)
    assert groups_read == [0, 2, 1]
    groups_read.clear()
    smallest_store = ParquetFiles(LocalFiles(root), "image", max_cached=1)
    for row in (0, 1, 4, 5, 2):
        assert smallest_store.read(path, row) == encoded(row)
    assert groups_read == [0, 1, 0]
    write_file(root / path.decode(), range(7, -1, -1))
    with pytest.raises(InputError, match="train-00000-of-00002.parquet: has changed since it was opened; start again$"):
        smallest_store.read(path, 7)
    # Threads that need one row group read it once.
    groups_read.clear()
    with ThreadPoolExecutor(5) as pool:
        images = [*pool.map(partial(store.read, b"data/train-00001-of-00002.parquet"), range(5))]
    assert images == [encoded(8 + row) for row in range(5)] and sorted(groups_read) == [0, 1]


def test_row_groups_above_the_limit_are_read_one_after_another(root: Path, monkeypatch: pytest.MonkeyPatch):
    reading, most, cells, together = [0], [0], ParquetFiles._cells, threading.Barrier(3, timeout=30)

    def slow(*arguments: Any) -> Any:
        reading[0] += 1
        most[0] = max(most[0], reading[0])
        # Without a limit, all three threads read at the same time.
        time.sleep(0.05) if limit == 1 else together.wait()
        reading[0] -= 1
        return cells(*arguments)

    # The public API does not show which row groups are read from the file.
    monkeypatch.setattr(ParquetFiles, "_cells", slow)
    for limit, expected in ((1, 1), (2**30, 3)):
        store, most[0] = ParquetFiles(LocalFiles(root), "image", max_cached=limit), 0
        with ThreadPoolExecutor(3) as pool:
            # Each of these rows is in another row group.
            images = [*pool.map(partial(store.read, b"data/train-00000-of-00002.parquet"), (0, 4, 7))]
        assert images == [encoded(row) for row in (0, 4, 7)] and most[0] == expected


def message_of(path: Path, **options: Any) -> str:
    return refusal(config_of(path, **options))


def test_wrong_columns_raise_a_one_line_error(tmp_path: Path):
    file, part, share = tmp_path / "a.parquet", tmp_path / "b/train-1.parquet", {"val_share": 0.5}
    write_file(file, range(6), columns=("photo", "kind"), named=False)
    # A run's columns are those of another file.
    assert len(open_one_split([str(file)], DataConfig("own.parquet", columns=("image=photo", "label=kind")))) == 6
    fault = "no column of labels by a usual name, found 'note', 'photo', 'kind'; name one by data.columns label=NAME"
    assert message_of(file, **share) == f"{file}: {fault}"
    pq.write_table(pa.table({"label": [0, 1]}), file)
    assert message_of(file, **share).startswith(f"{file}: no column of images by a usual name, found 'label'; name")
    pq.write_table(pa.table({"image": pa.array([b"x"] * 4, pa.binary_view()), "label": [0, 1] * 2}), file)
    assert len(open_both(file, **share)[0]) == 2
    pq.write_table(pa.table({"image": [b"x"], "label": [[0, 1, 0]]}), file)
    assert "row 0: label '0, 1, 0' has an empty name or one name twice; write one label, and" in message_of(
        file, **share
    )
    for name in ("train-0", "val"):
        write_file(tmp_path / f"b/{name}.parquet", range(3))
    for changed, fault in (
        ({"columns": ("image", "kind")}, "no column 'label', which the first file has"),
        ({"columns": ("photo", "label")}, "no column 'image', which the first file has"),
        ({"names": ("dog", "cat", "ant")}, "the names of label are not those of the first file"),
    ):
        write_file(part, range(3), **changed)
        assert message_of(tmp_path / "b") == f"{part}: {fault}; {WRITE_AGAIN}"
    for labels, fault in (
        ([0, None, 1], f"{file}, row 1: no label; give each row one, or leave the row out"),
        ([0, 3, 1], f"{file}, row 1: label 3 is none of the 3 classes; correct it"),
        ([0.0, 1.0, 1.0], f"{file}: label is of double; give one integer or one string per row"),
    ):
        write_file(file, range(3), labels=pa.array(labels))
        assert message_of(file, **share).startswith(fault)
    for cell in (None, {"bytes": None, "path": "a.png"}, {"bytes": b"", "path": "a.png"}):
        write_file(file, range(6), cells=[{"bytes": encoded(0), "path": None}] * 5 + [cell])
        assert message_of(file, **share) == f"{file}, row 5: 'image' holds no bytes; write the images into the file"
        assert check(open_splits(config_of(file, **share))).num_faults == 1


NAMED = '{"info": {"features": {"label": {"_type": "ClassLabel", "names": %s}}}}'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metadata", "fault"),
    [
        ('"text"', "its metadata of `datasets` are damaged (it holds 'text')"),
        ("{}", "its metadata of `datasets` are damaged ('info')"),
        ('{"info":' * 100_000, "its metadata of `datasets` are damaged (it is nested too deeply)"),
        (NAMED % '"ab"', "the names of label are"),
        (NAMED % '["a", "b", "a"]', "the names of label, name 3: 'a' is also the name in "),
    ],
    ids=["text", "empty", "deep", "no list", "two equal names"],
)
def test_damaged_metadata_raise_a_one_line_error(tmp_path: Path, metadata: str, fault: str):
    file = tmp_path / "a.parquet"
    table = pa.table({"image": pa.array([{"bytes": encoded(1), "path": None}] * 4, CELL), "label": [0, 0, 1, 1]})
    pq.write_table(table.replace_schema_metadata({"huggingface": metadata}), file)
    assert message_of(file, val_share=0.5).startswith(f"{file}: {fault}")


def test_a_null_image_ends_training_with_its_row_or_is_substituted(tmp_path: Path):
    cells = [{"bytes": encoded(number), "path": None} for number in range(5)]
    for split in ("train", "val"):
        write_file(tmp_path / f"{split}.parquet", range(6), cells=[*cells, None])
    train, _ = open_both(tmp_path)
    order = SampleOrder(6, 6, seed=0)
    with pytest.raises(InputError, match=r"train.parquet, row 5: 'image' holds no bytes"):
        list(train.train_batches(order, config_of(tmp_path), range(1)))
    substitutes = train.substitutes(config_of(tmp_path, bad_images="substitute"))
    (batch,) = train.train_batches(order, config_of(tmp_path), range(1), substitutes=substitutes)
    assert batch.image[batch.row == 5, 0, 0, 0].tolist() == [2]


def test_damaged_missing_and_repeated_parquet_files_raise_a_one_line_error(root: Path, tmp_path: Path):
    twice, (first, second) = tmp_path / "twice", sorted((root / "data").glob("train-*"))
    content = first.read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"PAR1" + bytes(40)):
        first.write_bytes(damaged)
        assert message_of(root).startswith(f"{first}: damaged, or not a Parquet file (")
    # This damages the first page of images and not the footer.
    first.write_bytes(content[:200] + bytes(400) + content[600:])
    assert message_of(root).startswith(f"{first}")
    first.write_bytes(content)
    assert [*map(len, open_both(root, val=f"data/{second.name}"))] == [8, 5]
    second.unlink()
    advice = "of train-*.parquet; keep the files of one data set"
    assert message_of(root) == f"{root}/data: part 00001 of 2 is missing {advice}"
    assert sum(map(len, open_both(first, val_share=0.5))) == 8
    for name in ("train-00000-of-00001-aaaa", "train-00000-of-00001-bbbb", "test"):
        write_file(twice / f"{name}.parquet", range(3))
    assert message_of(twice) == f"{twice}: a part of 1 is there twice {advice}"
    (twice / "train-00000-of-00001-bbbb.parquet").rename(twice / "more-00000-of-00001.parquet")
    assert len(open_both(twice, train="*-of-*.parquet", val="test.parquet")[0]) == 6
