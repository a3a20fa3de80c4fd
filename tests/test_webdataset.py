"""Tar files of WebDataset: the index of samples, exact order and resume, names of shards, and damage."""

import gzip
import io
import json
import os
import tarfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.errors import error_line
from support.forms import CLASSES, FORMS, add_to_tar, example_tables, pictures

from jaxddp.core.errors import InputError
from jaxddp.core.files import in_turn
from jaxddp.curate import check
from jaxddp.data.formats.splits import expand
from jaxddp.data.opening import open_splits, open_tables
from jaxddp.data.order import SampleOrder
from jaxddp.data.storage import tar
from jaxddp.data.storage.tar import find_samples
from jaxddp.data.table import ExampleTable

pytestmark = pytest.mark.usefixtures("own_cache")
TRUTH = pictures()
config_of = FORMS["WebDataset"].data
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def image(row: int) -> bytes:
    return TRUTH["train"].encoded(row)


def write_shard(file: Path, samples: Iterable[tuple[str, dict[str, bytes]]], **options: Any) -> Path:
    """Write a shard of samples (key, fields by suffix)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w", **options) as shard:
        for key, fields in samples:
            add_to_tar(shard, key, fields)
    return file


def sample(row: int, label: str | None = None, **fields: bytes) -> tuple[str, dict[str, bytes]]:
    label = str(TRUTH["train"].labels[row]) if label is None else label
    return f"{row:04d}", {"cls": label.encode(), **(fields or {"png": image(row)})}


def open_both(path: object, **more: Any) -> tuple[ExampleTable, ExampleTable]:
    return example_tables(config_of(path, **more))


def message_of(path: object, **more: Any) -> str:
    return error_line(open_splits, config_of(path, **more))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return FORMS["WebDataset"].write(tmp_path / "set", TRUTH)


@pytest.mark.parametrize("tar_format", FORMATS)
def test_each_sample_is_read_once_with_its_label(tar_format: int, tmp_path: Path):
    long = "folder/" * 12 + "a" * 60 + "é"
    keys = [f"{row:04d}" if tar_format == tarfile.USTAR_FORMAT else f"{long}{row}" for row in range(10)]
    samples = [(key, sample(row)[1]) for row, key in enumerate(keys)]
    write_shard(tmp_path / "set/a.tar", samples[:4], format=tar_format)
    write_shard(tmp_path / "set/b.tar", samples[4:], format=tar_format)
    train, val = open_both(tmp_path / "set", val_share=0.3)
    ids = [*train.id.tolist(), *val.id.tolist()]
    assert sorted(ids) == sorted(f"{'a' if row < 4 else 'b'}.tar/{key}".encode() for row, key in enumerate(keys))
    for table in (train, val):
        for row in range(len(table)):
            number = keys.index(table.id[row].decode()[6:])
            assert table.read(row) == image(number) and table.labels[row] == TRUTH["train"].labels[number]
            assert table.name(row) == f"{tmp_path}/set/{'a' if number < 4 else 'b'}.tar, {keys[number]}.png"


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"cls": b" 2\n"}, 2),
        ({"json": b'{"label": 2, "width": 3}'}, 2),
        ({"json": b'{"cls": "2"}'}, 2),
        ({"json": b'{"label": 1}', "cls": b"2"}, 2),
        ({"cls": b"-1", "txt": b"a cat"}, -1),
        ({"cls": b"2", "seg.png": b"mask", "json": b"not json"}, 2),
        ({"json": b"[" * 500_000, "cls": b"2"}, 2),
    ],
)
def test_a_label_is_a_field_of_the_sample(fields: dict[str, bytes], label: int, tmp_path: Path):
    others = [sample(row) for row in range(1, 10)]
    write_shard(tmp_path / "set/train-0.tar", [("first", {**fields, "PNG": image(0)}), *others])
    write_shard(tmp_path / "set/val-0.tar", others)
    train, _ = open_both(tmp_path / "set")
    assert train.labels[0] == label and train.read(0) == image(0)


def test_names_of_classes_come_from_a_file_or_the_labels(root: Path, tmp_path: Path):
    assert open_both(root)[0].class_names == CLASSES
    (root / "classes.txt").unlink()
    file = root / "classes.json"
    file.write_text(json.dumps({"0": "x", "2": "z", "1": "y"}))
    assert open_both(root)[0].class_names == ("x", "y", "z")
    for content, fault in (
        ('{"0": "x", "2": "z"}', ': no list of names; write ["cat", "dog"]'),
        ("[" * 500_000, ": damaged (it is nested too deeply)"),
    ):
        file.write_text(content)
        assert message_of(root).startswith(f"{file}{fault}")
    file.unlink()
    assert open_both(root)[1].class_names == tuple("012")
    for split in ("train", "val"):
        words = [sample(row, ("dog", "ant", "cat")[row % 3]) for row in range(6)]
        write_shard(tmp_path / f"words/{split}/0.tar", words)
    train, val = open_both(tmp_path / "words")
    assert train.class_names == val.class_names == ("ant", "cat", "dog")
    assert train.labels.tolist() == val.labels.tolist() == [2, 0, 1, 2, 0, 1]
    write_shard(tmp_path / "words/val/0.tar", [sample(0, "cow")])
    fault = "sample 0000: label 'cow' is none of the 3 classes; correct it"
    assert message_of(tmp_path / "words") == f"{tmp_path}/words/val/0.tar, {fault}"


def test_digits_are_names_if_another_label_is_a_name(tmp_path: Path):
    names, whole = ("10", "2", "3", "4", "jack", "queen"), tmp_path / "cards"
    for shard, words in (("train-0", "2 3 4"), ("train-1", "jack queen 10"), ("val-0", "4 10 -1")):
        write_shard(whole / f"{shard}.tar", [sample(row, word) for row, word in enumerate(words.split())])
    train, val = open_both(whole)
    assert train.class_names == val.class_names == names
    assert [names[label] for label in train.labels] == ["2", "3", "4", "jack", "queen", "10"]
    assert val.labels.tolist() == [3, 0, -1]
    # A mistyped label does not turn the other labels into names.
    (whole / "classes.txt").write_text("\n".join((*"234", "jack", "queen", "10")))
    assert open_both(whole)[0].labels.tolist() == [0, 1, 2, 3, 4, 5]
    write_shard(whole / "train-1.tar", [sample(0, "0"), sample(1, "jak")])
    fault = "label 'jak' is none of the 6 classes, did you mean 'jack'?; correct it"
    assert message_of(whole) == f"{whole}/train-1.tar, sample 0001: {fault}"


def test_a_pattern_is_expanded_or_is_one_line():
    assert expand("s-{008..011}.tar") == ["s-008.tar", "s-009.tar", "s-010.tar", "s-011.tar"]
    assert expand("{0..1}/{a,b}.tar") == ["0/a.tar", "0/b.tar", "1/a.tar", "1/b.tar"]
    for pattern, message in (
        ("a{3..1}.tar", "a{3..1}.tar: '3..1' is neither list nor ascending range; write {000..146} or {a,b}"),
        ("a{1..9.tar", "'a{1..9.tar' is neither list"),
        ("{0..99999999}", "has more than 100,000 names"),
    ):
        with pytest.raises(InputError, match=".") as caught:
            expand(pattern)
        assert message in str(caught.value)


def test_shards_are_found_by_folder_name_and_pattern(tmp_path: Path):
    def shards(*names: str) -> Path:
        folder = tmp_path / f"set{len([*tmp_path.iterdir()])}"
        for number, name in enumerate(names):
            write_shard(folder / name, [sample(number + 3 * label, str(label)) for label in range(3)])
        return folder

    def counts(folder: Path, path: str = "", **more: Any) -> list[list[str]]:
        tables = open_both(folder / path, **more)
        return [sorted({name.decode() for name in table.path.tolist()}) for table in tables]

    in_folders = shards("train/0.tar", "train/1.tar", "valid/0.tar")
    assert counts(in_folders) == [["train/0.tar", "train/1.tar"], ["valid/0.tar"]]
    named = shards("imagenet1k-train-0.tar", "imagenet1k-Validation-0.tar", "trainable.tar")
    assert counts(named) == [["imagenet1k-train-0.tar"], ["imagenet1k-Validation-0.tar"]]
    plain = shards("s-0.tar", "s-1.tar", "s-2.tar")
    assert "has no validation split" in message_of(plain)
    assert sum(map(len, open_both(plain / "s-{0..1}.tar", val_share=0.5))) == 6
    assert counts(plain, train="s-{0,1}.tar", val="s-[2-9].tar") == [["s-0.tar", "s-1.tar"], ["s-2.tar"]]
    assert counts(plain, "s-{0..1}.tar", val="s-2.tar") == [["s-0.tar", "s-1.tar"], ["s-2.tar"]]
    assert message_of(plain, train="t-*.tar").startswith(f"data.train: no file of {plain} matches t-*.tar; ")
    missing = f"{plain}/s-3.tar: no such file; download it again, or correct its name"
    assert message_of(plain / "s-{0..3}.tar", val_share=0.5) == missing
    assert counts(plain, val="s-0.tar") == [["s-1.tar", "s-2.tar"], ["s-0.tar"]]
    partly_named = shards("s-0.tar", "s-1.tar", "val-0.tar")
    assert counts(partly_named, val="val-0.tar") == [["s-0.tar", "s-1.tar"], ["val-0.tar"]]
    deeper = shards("data/train-0.tar", "data/test-0.tar", "data/validation-0.tar")
    assert counts(deeper, val="data/test-*.tar") == [["data/train-0.tar"], ["data/test-0.tar"]]
    both = message_of(plain / "s-{0..1}.tar", val="s-1.tar")
    assert both == f"data.val='s-1.tar': {plain}/s-1.tar is also in the training split"
    assert message_of(shards("val-0.tar"), val="val-0.tar").endswith("s of its train split; call them train-*.tar")


def test_shards_are_indexed_once_until_one_changes(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reads = []
    monkeypatch.setattr(tar, "find_samples", lambda *arguments: reads.append(arguments[2]) or find_samples(*arguments))
    tables = [open_both(root) for _ in range(3)]
    assert len(reads) == 4
    assert {one.fingerprint for one, _ in tables} == {tables[0][0].fingerprint}
    moved = root.rename(tmp_path / "moved")
    open_both(moved)
    assert len(reads) == 4
    os.utime(moved / "train-000001.tar", ns=(1, 1))
    open_both(moved)
    assert sorted(Path(name).name for name in reads[4:]) == ["train-000000.tar", "train-000001.tar"]


def test_one_process_works_while_others_wait_for_a_bounded_time(tmp_path: Path):
    """A lock is that of an open file, so threads stand for processes."""
    file, until = tmp_path / "folder/lock", threading.Event()

    def work(patience: float) -> tuple[bool, bool]:
        with in_turn(file, patience, "working") as is_held:
            return is_held, until.is_set()

    with ThreadPoolExecutor(1) as pool:
        with in_turn(file, 1, "working") as is_first:
            started = time.monotonic()
            assert is_first and work(0.3) == (False, False) and time.monotonic() - started >= 0.3
            other = pool.submit(work, 30)
            until.set()
        assert other.result(30) == (True, True)
    (tmp_path / "file").touch()
    with in_turn(tmp_path / "file/lock", 1, "") as is_held:
        assert is_held, "without a lock, every process works"


@pytest.mark.parametrize(
    ("samples", "fault"),
    [
        ([("a", {"png": image(0), "cls": b" "})], "sample a: has no label; add 'a.cls', or a field label to its json"),
        ([("a", {"cls": b"0", "jxl": b"x"})], "sample a: has no image of a supported type, but .cls, .jxl; write"),
        ([("a", {"cls": b"0", "png": b""})], "sample a: its image 'a.png' is empty, or a link or sparse file; write"),
        ([("a", {"cls": b"0", "png": b"x", "jpg": b"x"})], "sample a: has two images, 'a.png' and 'a.jpg'; keep one"),
        ([sample(0), sample(1), sample(0)], "sample 0000: its key is that of an earlier sample; keep a sample's"),
        ([sample(0, "7")], "sample 0000: label 7 is none of the 3 classes; correct it"),
    ],
)
def test_a_sample_that_cannot_be_used_is_one_line(samples: list, fault: str, root: Path):
    shard = write_shard(root / "train-000001.tar", [sample(8), *samples, sample(9)])
    assert message_of(root).startswith(f"{shard}, {fault}")
    faults: list[str] = []
    tables = open_splits(config_of(root), faults.append)
    assert len({*faults}) == 1 and faults[0].startswith(f"{shard}, {fault}")
    # The other samples of the shard are used.
    assert len(tables["train"]) == 5 + 2 + (len(samples) - 1)
    assert check(tables, refused=faults).num_faults == 1


def test_a_cut_or_damaged_shard_is_one_line(root: Path):
    shard = root / "train-000001.tar"
    content = shard.read_bytes()
    offsets = open_both(root)[0].offset
    assert offsets is not None
    for at in (0, 100, int(offsets[-1]) + 3, int(offsets[-1]) + 600, len(content) - 1024):
        shard.write_bytes(content[:at])
        assert message_of(root).startswith(f"{shard}: "), at
    flipped = bytearray(content)
    flipped[int(offsets[-1]) + 130] ^= 1
    shard.write_bytes(flipped)
    assert message_of(root).startswith(f"{shard}: damaged: no header of a file at byte {offsets[-1]:,} of ")
    shard.write_bytes(gzip.compress(content))
    assert "damaged, or not a tar file without compression" in message_of(root)
    write_shard(shard, [("a", {"png": image(0)}), sample(1), ("a", {"cls": b"0"})])
    assert message_of(root).startswith(f"{shard}, sample a: its key is that of an earlier sample; keep a")
    write_shard(shard, [])
    assert message_of(root).startswith(f"{shard}: holds no sample; ")
    # As in `jaxddp data check`, which lists all faults.
    faults: list[str] = []
    with pytest.raises(InputError, match=r"none of 2 files can be used; repair one$"):
        open_splits(config_of(root, train="gone-{0..1}.tar", val_share=0.5), faults.append)
    assert [fault.rpartition("/")[2][:24] for fault in faults] == [f"gone-{i}.tar: no such file" for i in range(2)]


def forged(size: bytes = b"%011o\0" % 5, name: bytes = b"0001.png", kind: bytes = b"0") -> bytes:
    """Return a header of a file, with the 12 bytes of its size, and the right checksum."""
    header = bytearray(512)
    header[: len(name)], header[124:136], header[156:157], header[257:265] = name, size, kind, b"ustar  \0"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def base_256(size: int) -> bytes:
    return (size & ((1 << 95) - 1) | 1 << 95).to_bytes(12) if size >= 0 else (size + (1 << 96)).to_bytes(12)


def pax(*records: bytes) -> bytes:
    content = b"".join(b"%d %b\n" % (len(record) + 4, record) for record in records)
    return forged(b"%011o\0" % len(content), kind=b"x") + content.ljust(512, b"\0")


FORGED = {
    "negative size": forged(base_256(-512)),
    "negative size of a long name": forged(base_256(-512), kind=b"L"),
    "size beyond the end": forged(base_256(1 << 50)),
    "large size of a long name": forged(base_256(1 << 94), kind=b"L"),
    "large size of a pax header": forged(b"77777777777\0", kind=b"x"),
    "pax record of a negative size": pax(b"size=-512") + forged(),
    "sparse map of GNU": forged(b"%011o\0" % 5, kind=b"S")[:-30] + b"\xff" * 30,
    "sparse map of pax 1.0": pax(b"GNU.sparse.major=1", b"GNU.sparse.minor=0") + forged() + b"x" * 512,
    "long names without end": (forged(kind=b"L") + b"name\0".ljust(512, b"\0")) * 1500,
    "zeros in place of a header": bytes(512) + image(0) * 40,
}


@pytest.mark.parametrize("damage", FORGED)
def test_a_forged_header_is_one_line_and_ends(damage: str):
    """A negative size sends `tarfile` back, so it reads the same headers for ever (CVE-2025-8194)."""
    good = io.BytesIO()
    with tarfile.open(fileobj=good, mode="w") as shard:
        add_to_tar(shard, "0000", {"cls": b"0", "png": image(0)})
        end = shard.offset
    content = good.getvalue()[:end] + FORGED[damage] + bytes(1024)
    samples, faults = find_samples(io.BytesIO(content), len(content), "shard")
    assert len(faults) == 1 and faults[0].startswith("shard") and "; download the shard again" in faults[0]
    assert len(faults[0]) < 300 and samples.key.tolist() in ([b"0000"], [])


def test_a_size_in_base_256_is_read(tmp_path: Path):
    files = {b"1.cls": b"2", b"1.png": b"pixels"}
    content = b"".join(forged(base_256(len(data)), name) + data.ljust(512, b"\0") for name, data in files.items())
    (tmp_path / "set").mkdir()
    for split in ("train", "val"):
        (tmp_path / f"set/{split}-0.tar").write_bytes(content + bytes(1024))
    train, _ = open_both(tmp_path / "set")
    assert train.labels.tolist() == [2] and train.read(0) == b"pixels"


def test_a_shard_that_changes_during_a_run_is_one_line(root: Path):
    train, _ = open_tables(config_of(root))
    shard, offset = root / "train-000001.tar", int(train.record(9).offset or 0)
    content = shard.read_bytes()
    flipped = bytearray(content)
    # The bit is in the name, so the size is still right.
    flipped[offset + 3] ^= 1
    shard.write_bytes(flipped)
    with pytest.raises(InputError, match=r"images/0009\.png: the shard has changed since it was indexed; start again"):
        train.read(9)
    for changed in (content[:offset], content[: offset + 512], content[:1000] + b"x" + content[1000:], b""):
        shard.write_bytes(changed)
        with pytest.raises(InputError, match=r"train-000001\.tar, images/0009\.png: (the shard has changed|cut short)"):
            train.read(9)
    with pytest.raises(InputError, match=r"train-000001\.tar, images/\d+\.png: the shard has changed since it was"):
        list(train.train_batches(SampleOrder(10, 10, seed=0), config_of(root), range(1)))
    shard.unlink()
    with pytest.raises(InputError, match="its shard is missing"):
        train.read(9)
