"""Data sets of the library `datasets`: saved in a folder, in files of a folder, or of a hub on the loopback."""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from support.forms import CLASSES, FORMS, Pictures, example_tables, pictures, refusal, write_folders, write_hub

from jaxddp.core.errors import InputError, Unreachable
from jaxddp.curate import check
from jaxddp.data.opening import open_splits, open_tables
from jaxddp.data.order import SampleOrder
from jaxddp.data.table import ExampleTable

datasets.disable_progress_bars()
FEATURES = {"image": datasets.Image(), "label": datasets.ClassLabel(names=[*CLASSES])}
TRUTH = pictures()
config_of = FORMS["Hugging Face"].data


def make(
    pictures: Pictures, labels: Sequence[Any] | None = None, features: dict[str, Any] | None = None
) -> datasets.Dataset:
    """Return a data set of some pictures, with other labels or features."""
    features = features or FEATURES
    cells = [{"bytes": pictures.encoded(row), "path": None} for row in range(len(pictures))]
    columns = [cells, pictures.labels.tolist() if labels is None else labels]
    return datasets.Dataset.from_dict(dict(zip(features, columns, strict=True)), features=datasets.Features(features))


def save(folder: Path, **splits: datasets.Dataset) -> Path:
    datasets.DatasetDict(splits).save_to_disk(str(folder))
    (folder / "._data.arrow").touch()  # As of macOS.
    return folder


def open_both(path: object, **more: Any) -> tuple[ExampleTable, ExampleTable]:
    return example_tables(config_of(path, **more))


def message_of(path: object, **more: Any) -> str:
    return refusal(config_of(path, **more))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return write_hub(tmp_path_factory.mktemp("hub") / "pets", TRUTH)


def test_rows_are_those_of_the_split_and_the_fingerprint_changes_with_an_image(saved: Path, tmp_path: Path):
    train, val = open_both(saved)
    assert train.class_names == val.class_names == CLASSES
    assert [train.read(row) for row in range(len(train))] == [TRUTH["train"].encoded(row) for row in range(10)]
    assert val.labels.tolist() == TRUTH["val"].labels.tolist()
    assert (train.id[3], train.name(3)) == (b"train__3", f"{saved}, train, row 3")
    assert [table.fingerprint for table in open_both(f"hf:{saved}")] == [train.fingerprint, val.fingerprint]
    changed = Pictures(TRUTH["train"].images.copy(), TRUTH["train"].labels)
    changed.images[4] = 0
    after = open_both(save(tmp_path / "set", train=make(changed), validation=make(TRUTH["val"])))
    assert train.fingerprint != after[0].fingerprint and val.fingerprint == after[1].fingerprint


def test_other_splits_are_named_and_one_split_is_divided(tmp_path: Path):
    whole = make(TRUTH["train"])
    folder = save(tmp_path / "set", first=whole, second=make(TRUTH["val"]))
    train, val = open_both(folder, train="first", val="second")
    assert (len(train), len(val)) == (10, 5)
    fault = f"data.train='frist': {folder} has no such split, did you mean 'first'?; the splits are first, second"
    assert message_of(folder, train="frist", val="second") == fault
    fault = f"{folder}: no split train; its splits are first, second; name one by data.train"
    assert message_of(folder, val="second") == fault
    fault = "data.val='first': is also the training split; the splits are first, second"
    assert message_of(folder, train="first", val="first") == fault
    train, val = open_both(save(tmp_path / "test", test=whole), train="test", val_share=0.3)
    assert len(train) + len(val) == 10
    whole.save_to_disk(str(tmp_path / "alone"))
    assert "has no validation split" in message_of(tmp_path / "alone")
    train, val = open_both(tmp_path / "alone", val_share=0.3)
    assert sorted([*train.id.tolist(), *val.id.tolist()]) == sorted(b"train__%d" % row for row in range(10))


def test_labels_are_strings_or_numbers_without_names(tmp_path: Path):
    words = {"img": datasets.Image(), "labels": datasets.Value("string")}
    names = np.array(["dog", "ant", "cat"])
    written = {split: names[TRUTH[split].labels].tolist() for split in ("train", "val")}
    splits = {split: make(TRUTH[split], labels, words) for split, labels in written.items()}
    train, val = open_both(save(tmp_path / "words", **splits))
    assert train.class_names == val.class_names == ("ant", "cat", "dog")
    assert [train.class_names[label] for label in train.labels] == written["train"]
    numbers = {"image": datasets.Image(), "label": datasets.Value("int32")}
    splits = {"train": make(TRUTH["train"], None, numbers), "test": make(TRUTH["val"], [4, 0, 0, 0, 0], numbers)}
    assert {table.class_names for table in open_both(save(tmp_path / "numbers", **splits))} == {tuple("01234")}


def test_faults_of_columns_and_labels_are_one_line(tmp_path: Path):
    where, good = tmp_path / "set", make(TRUTH["val"])
    other = {"photo": datasets.Value("string"), "label": FEATURES["label"]}
    text = datasets.Dataset.from_dict({"photo": ["a"], "label": [0]}, features=datasets.Features(other))
    expected = "no column of images, found photo, label; choose a set with an Image"
    assert message_of(save(where, train=text, test=good)) == f"{where}, train: {expected}"
    none = make(TRUTH["train"], [*TRUTH["train"].labels.tolist()[:9], None])
    where = tmp_path / "none"
    fault = f"{where}, train, row 9: no label; give each row one, or leave the row out"
    assert message_of(save(where, train=none, test=good)) == fault
    faults: list[str] = []
    assert len(open_splits(config_of(where), faults.append)["train"]) == 9 and len(faults) == 1
    unknown = make(TRUTH["train"], [-1] * 10)
    assert open_both(save(tmp_path / "unknown", train=unknown, test=good))[0].labels.tolist() == [-1] * 10
    empty = datasets.Dataset.from_dict({"image": [None] * 3, "label": [0, 1, 2]}, features=datasets.Features(FEATURES))
    where = tmp_path / "empty"
    assert message_of(save(where, train=empty, test=good)).startswith(f"{where}, train, row 0: holds no image; ")
    assert check(open_splits(config_of(where))).num_faults == 3


def test_images_in_other_files_are_read_and_verified_again_by_each_run(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = write_folders(tmp_path / "pets", TRUTH)
    (folder / "val").rename(folder / "validation")
    train, _ = open_tables(config_of(f"hf:{folder}"))
    assert sorted(map(train.read, range(10))) == sorted(TRUTH["train"].encoded(row) for row in range(10))
    assert train.class_names == CLASSES and train.store.root is None  # type: ignore[attr-defined]
    order = SampleOrder(len(train), 4, seed=1)
    rows = np.concatenate([batch.row for batch in train.train_batches(order, config_of(folder), range(5))])
    assert np.bincount(rows).tolist() == [2] * 10
    next(folder.rglob("train/*/*.png")).unlink()
    with pytest.raises(InputError, match=r"row \d: missing image|\.png: missing image; put it back"):
        [train.read(row) for row in range(10)]


def test_a_missing_library_is_one_line(saved: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert message_of(saved) == f"{saved}: datasets is not installed; pip install 'jaxddp[datasets]'"
    expected = "hf:a b:c:d: not an address; write hf:OWNER/NAME[:CONFIG][@REVISION], or hf:FOLDER"
    assert message_of("hf:a b:c:d") == expected


def test_a_data_set_of_the_hub_is_prepared_by_one_process_at_a_time(tmp_path: Path, monkeypatch):
    """Threads stand for the processes of a machine."""
    made = {"train": make(TRUTH["train"]), "validation": make(TRUTH["val"])}
    calls, inside, faults = [], [], {"owner/gone": ConnectionError("no route"), "owner/none": ValueError("not found")}

    def load(*arguments: Any, **named: Any) -> Any:
        inside.append(1)
        time.sleep(0.2)
        calls.append((*arguments, named["revision"], len(inside)))
        inside.pop()
        if fault := faults.get(arguments[0]):
            raise fault
        return made

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with ThreadPoolExecutor(2) as pool:
        both = [*pool.map(lambda _: open_splits(config_of("hf:owner/pets:small@main"))["train"], range(2))]
    assert both[0].fingerprint == both[1].fingerprint and {*calls} == {("owner/pets", "small", "main", 1)}
    with pytest.raises(Unreachable, match=r"hf:owner/gone: the hub cannot be reached, .*no route.*; check the"):
        open_splits(config_of("hf:owner/gone"))
    assert message_of("hf:owner/none").startswith("hf:owner/none: cannot be opened ('not found'); write hf:OWNER/NAME")
