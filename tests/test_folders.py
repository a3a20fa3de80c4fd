"""Data sets with one folder per class: class names, the order of rows, and rejected files."""

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.errors import error_line

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.data.formats.folders import read_folders
from jaxddp.data.opening import open_splits
from jaxddp.data.table import ExampleTable

SIZE = 8
DATA = DataConfig(image_size=SIZE, crop="whole")
TREE = (
    "train/cat/b.jpg",
    "train/cat/a.JPEG",
    "train/cat/deep/er/z.png",
    "train/ant/x.jpeg",
    "train/ant/é 1.PNG",
    "train/bee/10.jpg",
    "train/bee/9.jpg",
    "val/cat/v.png",
    "val/ant/w.jpg",
)


def color(name: str) -> np.ndarray:
    """Return a color for a path, uint8[3]. JPEG changes a uniform image of a color by a few levels at most."""
    return np.random.default_rng(list(name.encode())).integers(0, 256, 3, np.uint8)


def write(root: Path, *names: str) -> Path:
    for name in names:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.full((SIZE, SIZE, 3), color(name)))
        image.save(file, "PNG" if file.suffix.lower() == ".png" else "JPEG")
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path / "set", *TREE)


def rows(table: ExampleTable) -> list[tuple[str, str]]:
    """Return the path and the class of each row."""
    names = [table.class_ids[label] for label in table.labels]
    return list(zip((path.decode() for path in table.path.tolist()), names, strict=True))


def error_message(root: Path, split: str = "train") -> str:
    message = error_line(read_folders, root, split)
    assert message.startswith(str(root))
    return message


# Flat: cat/0.png to cat/3.png, and dog/4.png to dog/7.png. Divided: the same in train/, and in val/ cat/8.png.
@pytest.mark.parametrize(
    ("listing", "content", "is_refused"),
    [
        ("labels.csv", "path,label\n0.png,cat\n", (True, False)),
        ("noise.csv", 'a,b\n"set/7.png",2\n', (True, False)),
        ("annotations.TSV", "breed\tid\npug\t4\npug\t5\npug\t6\n", (True, False)),
        ("ids.csv", "id,label\n" + "".join(f"{i},{label}\n" for i in range(8) for label in "ab"), (True, False)),
        ("labels.txt", "4.png cat", (True, False)),
        ("labels.json", '{"0": "pug", "1": "tabby"}', (True, False)),
        ("labels.json", '[{"id": "4", "a": 1, "b": 2, "c": 3, "d": 4}, {"id": "5", "a": 1, "b": 2}]', (True, False)),
        ("labels.xlsx", "", (True, False)),
        ("metadata.jsonl", '{"file_name": "train/cat/1.png", "label": 3}', (True, True)),
        ("train/metadata.csv", "file_name,label\ncat/1.png,dog", (False, True)),
        # These list classes, other images, or nothing.
        ("labels.json", '{"0": ["cat", "tabby"], "1": ["dog", "pug"]}', (False, False)),
        ("class_names.csv", "id,name\n0,cat\n1,dog\n", (False, False)),
        ("sample_submission.csv", "id,label\n" + "".join(f"{i}.jpg,0\n" for i in range(20, 99)), (False, False)),
        ("sample_submission.csv", "id,label\n" + "".join(f"test_{i},0\n" for i in range(9)), (False, False)),
        ("scores.xlsx", "", (False, False)),
        ("metadata.csv", "license,year\nMIT,2024\n", (False, False)),
        ("labels.csv", "", (False, False)),
        ("classes.txt", "0.png", (False, False)),
    ],
)
def test_a_file_that_may_hold_the_labels_is_not_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, listing: str, content: str, is_refused: tuple[bool, bool]
):
    """Without and with folders of the splits. Imagenette has a CSV file beside its folders train and val."""
    caplog.set_level("INFO", "jaxddp")
    images = [f"{'cat' if i < 4 else 'dog'}/{i}.png" for i in range(8)]
    flat = write(tmp_path / "flat", *images)
    divided = write(tmp_path / "set", *(f"train/{image}" for image in images), "val/cat/8.png")
    for place, refused in zip((flat, divided), is_refused, strict=True):
        if not (place / listing).parent.is_dir():
            continue
        (place / listing).write_text(content)
        faults: list[str] = []
        caplog.clear()
        assert len(read_folders(place, "train", faults.append)) == 8
        assert [fault.partition(": may hold other labels")[0] for fault in faults] == [f"{place / listing}"] * refused
        is_looked_at = listing[:6] not in ("README", "classe") and (place == flat or "metadata" in listing)
        told = [f"{place / listing}: not read; the names of the folders are the labels"]
        assert {*caplog.messages} == {*told * (is_looked_at and not refused)}


def test_rows_are_the_images_sorted_by_class_and_path_and_val_has_the_classes_of_train(root: Path):
    table = read_folders(root, "train")
    assert rows(table) == [
        ("train/ant/x.jpeg", "ant"),
        ("train/ant/é 1.PNG", "ant"),
        ("train/bee/10.jpg", "bee"),
        ("train/bee/9.jpg", "bee"),
        ("train/cat/a.JPEG", "cat"),
        ("train/cat/b.jpg", "cat"),
        ("train/cat/deep/er/z.png", "cat"),
    ]
    assert [name.decode() for name in table.id.tolist()] == [os.path.splitext(path)[0] for path, _ in rows(table)]
    assert table.class_ids == table.class_names == ("ant", "bee", "cat")
    assert table.labels.dtype == np.int32 and table.offset is None
    table.check(DATA)
    val = read_folders(root, "val")
    assert rows(val) == [("val/ant/w.jpg", "ant"), ("val/cat/v.png", "cat")]
    assert val.labels.tolist() == [0, 2] and val.class_ids == ("ant", "bee", "cat")
    # Files that are not images are ignored, and images that differ in the suffix keep it in their ids.
    write(root, "train/.ipynb_checkpoints/a.png", "train/ant/.hidden/b.png", "train/ant/.c.png")
    for name in ("README.md", "Thumbs.db", ".DS_Store", "labels", "a.png.txt"):
        (root / "train" / name).write_text("no image")
        (root / "train/ant" / name).write_text("no image")
    assert rows(read_folders(root, "train")) == rows(table)
    write(root, "train/cat/b.png", "train/cat/b.jpg.png")
    ids = [name.decode() for name in read_folders(root, "train").id.tolist() if b"cat/b" in name]
    assert ids == ["train/cat/b.jpg", "train/cat/b.jpg.png", "train/cat/b.png"]


@given(names=st.lists(st.tuples(st.sampled_from("abcABC"), st.text("ab0. é-", min_size=1, max_size=5)), min_size=1))
def test_rows_are_in_the_order_of_the_names(tmp_path_factory: pytest.TempPathFactory, names: list[tuple[str, str]]):
    """Rows are sorted by class and then by path, in Python's order of strings. The time of creation does not matter."""
    root = tmp_path_factory.mktemp("tree")
    files = list(dict.fromkeys(f"train/{label}/x{name}.png" for label, name in names))
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(b"")
    table = read_folders(root, "train")
    assert [path for path, _ in rows(table)] == sorted(files, key=lambda file: (file.split("/")[1], file))
    assert list(table.class_ids) == sorted({label for label, _ in names})
    assert len(np.unique(table.id)) == len(files)


def test_an_error_names_a_class_without_images_and_one_of_val_that_train_lacks(root: Path):
    write(root, "val/catt/x.png")
    message = error_message(root, "val")
    assert message.startswith(f"{root / 'val/catt'}: a class") and "did you mean 'cat'?" in message
    shutil.rmtree(root / "val/catt")
    (root / "train/dog/.hidden").mkdir(parents=True)
    (root / "train/dog/README").write_text("none yet")
    assert error_message(root).startswith(f"{root / 'train/dog'}: no image")
    # The folder is still a class: val may have examples of it.
    assert read_folders(root, "val").num_classes == 4
    (root / "val/dog").mkdir()
    assert error_message(root, "val").startswith(f"{root / 'val/dog'}: no image")


LAYOUTS = [
    # A folder and `*` stand for two classes of two images. Their folders follow; None: a share is held out.
    ("Training/* Validation/* Testing/*", {}, "Training", "Validation"),
    ("train/* dev/* test/*", {}, "train", "dev"),
    ("TRAIN/* eval/1.jpg test/*", {}, "TRAIN", "test"),
    (
        "seg_train/seg_train/* seg_test/seg_test/* seg_pred/seg_pred/1.jpg",
        {},
        "seg_train/seg_train",
        "seg_test/seg_test",
    ),
    ("training_set/* test_set/* train_val/*", {}, "training_set", "test_set"),
    ("train2017/* val2017/* test2017/1.jpg", {}, "train2017", "val2017"),
    ("train/* test/1.jpg", {}, "train", None),
    ("train/* val/1.jpg test/test/1.jpg", {}, "train", None),
    ("* Test/1.jpg", {}, "", None),
    ("* val/*", {}, "", "val"),
    ("* train/1.jpg train/2.jpg", {}, "", None),
    ("photos/* kept/*", {"train": "photos", "val": "kept"}, "photos", "kept"),
    ("* kept/*", {"val": "kept"}, "", "kept"),
    ("train/* extra/1.jpg", {"train": "train"}, "train", None),
    ("pets/pets/train/* pets/pets/val/* __MACOSX/pets/train/a/._1.jpg", {}, "train", "val"),
    ("food/images/* food/meta/classes.txt food/README.md", {}, "", None),
    ("@eaDir/a/1.jpg train/* train/@eaDir/a/t.jpg train/a/@eaDir/t.jpg train/a/._1.jpg val/*", {}, "train", "val"),
    ("train/* val/* ILSVRC2012_img_train.tar ILSVRC2012_img_val.tar meta.bin", {}, "train", "val"),
    ("ILSVRC/Data/CLS-LOC/train/* ILSVRC/Data/CLS-LOC/val/* ILSVRC/ImageSets/x.txt", {}, "train", "val"),
    ("pets_train/Images/* pets_test/1.jpg", {}, "pets_train/Images", None),
    ("* set/*", {}, "", None),
    ("rps/* rps/rps/*", {"train": "rps/rps"}, "rps/rps", None),
]


def lay(root: Path, tree: str) -> Path:
    """Write empty files: the formats open none of them."""
    for path in (root / word for word in tree.split()):
        places = [path.parent / name for name in ("a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg")]
        for file in places if path.name == "*" else [path]:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    return root


@pytest.mark.parametrize(("tree", "keys", "train", "val"), LAYOUTS)
def test_a_layout_with_one_reading_opens(tmp_path: Path, tree: str, keys: dict[str, str], train: str, val: str | None):
    data = DataConfig(path=str(lay(tmp_path / "set", tree)), val_share=None if val else 0.5, **keys)
    tables = cast(dict[str, ExampleTable], open_splits(data))
    for table, place in zip(tables.values(), (train, train if val is None else val), strict=True):
        folders = {os.path.dirname(os.path.dirname(path.decode())) for path in table.path.tolist()}
        assert folders == {place} and table.class_ids[:2] == ("a", "b")
        inside = Path(table.store.root).relative_to(tmp_path / "set")
        told = f"class folders in {place or Path(table.store.root).name}/"
        assert table.reading.startswith(told if inside == Path() else f"{inside}/: {told}")
    assert len(tables["train"]) + len(tables["val"]) == (8 if val else 4) + 2 * ("train/2.jpg" in tree)


@pytest.mark.parametrize(
    ("tree", "keys", "message"),
    [
        ("seg_train/* img_train/*", {}, "img_train and seg_train may both be the train split; name one by data.train"),
        ("a/1.jpg test/1.jpg", {}, "a/ and test/ are two classes, or test/ has images without labels; put"),
        ("train/1.jpg test/2.jpg", {}, "/train: images, but no class folders; put the images of each class into"),
        ("x/train/* y/train/*", {}, "holds 2 data sets; give --data.path as {root}/x or {root}/y"),
        ("1.jpg", {}, "of a known format, but images without folders of classes; put them into a folder for each"),
        ("a/1.jpg b/1.jpg", {"path": "a"}, "a: holds no data set .* of classes; {root} would open"),
        ("a/1.jpg", {"path": "a"}, "images without folders of classes; put them"),
        ("pets.zip", {"path": "pets.zip"}, "of a known format; unpack pets.zip, and give its folder"),
        ("x/cifar-10-batches-py/data_batch_1", {}, "holds pickles, which are never read; get it by `jaxddp data get`"),
        ("x.tfrecord", {}, "format; write the images of x.tfrecord to class folders or .tar files"),
        (
            "images/1.jpg annotations/1.png a.csv",
            {},
            "annotations: images, but no class folders; .*, or give {root}/a.csv",
        ),
        ("cars_train/1.jpg cars_test/1.jpg devkit/a.mat", {}, "cars_train: images, but no .* list path,label in train"),
        ("train/*", {"train": "trian"}, "data.train='trian': .*/trian: no such folder, did you mean 'train'"),
        ("train/* kept/1.jpg", {"val": "kept"}, "data.val='kept': .*/kept: no class folders; name a folder with"),
        ("train/*", {"val": "../x"}, "data.val='../x': is no folder below .*; give a folder that holds both splits"),
        ("train/*", {"train": "train", "val": "train"}, "data.val='train': is also the training split"),
        ("train/* val/c/1.jpg", {}, "/val/c: a class that .*/train does not have"),
        ("train/* train/a/3.heic val/*", {}, "/a/3.heic: Pillow reads HEIC with pillow-heif; pip install it, or"),
        ("val/*", {}, "no folder train/ or training/; put the train images there"),
    ],
)
def test_an_error_names_both_readings_or_what_would_open(tmp_path: Path, tree: str, keys: dict[str, str], message: str):
    root = lay(tmp_path / "set", tree)
    with pytest.raises(InputError, match=message.format(root=root)):
        open_splits(DataConfig(**{**keys, "path": str(root / keys.get("path", ""))}))


def test_one_class_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    open_splits(DataConfig(path=str(lay(tmp_path, "a/1.jpg a/2.gif")), val_share=0.5))
    assert "the only class is 'a'" in caplog.text
    assert read_folders(tmp_path, "train").reading.endswith("; of a GIF, the first frame")
    (tmp_path / "t.csv").write_text("path,label\na/1.jpg,0;1\na/2.gif,1;0\n")
    open_splits(DataConfig(path=str(tmp_path / "t.csv"), val_share=0.5))
    assert "every training image has all of the classes 0, 1; if the labels are lists of 0 and 1" in caplog.text


@pytest.mark.parametrize(("folder", "listing"), [("val/images", "val/val_annotations.txt"), ("val", "val.txt")])
def test_a_text_file_lists_the_classes_of_a_flat_validation_folder(tmp_path: Path, folder: str, listing: str):
    lay(tmp_path, f"train/* {folder}/1.jpg {folder}/2.jpg test/images/3.jpg")
    for labels in ("ba", "10"):
        (tmp_path / listing).write_text("".join(f"{number}.jpg\t{of}\t0\n" for number, of in enumerate(labels, 1)))
        table = cast(ExampleTable, open_splits(DataConfig(path=str(tmp_path)))["val"])
        assert rows(table) == [(f"{folder}/1.jpg", "b"), (f"{folder}/2.jpg", "a")]
        assert table.reading == f"2 images in {folder}/ by {Path(listing).name}"
    for name, number in ("a1", "b2"):
        (tmp_path / "train" / name).rename(tmp_path / "train" / number)
    table = cast(ExampleTable, open_splits(DataConfig(path=str(tmp_path)))["val"])
    assert rows(table) == [(f"{folder}/1.jpg", "2"), (f"{folder}/2.jpg", "1")]


def test_links_are_followed_wherever_they_lead(root: Path, tmp_path: Path):
    write(tmp_path / "pool", "dogs/d.png")
    (root / "train/dog").symlink_to(tmp_path / "pool/dogs")
    (root / "train/ant/same.png").symlink_to("../../../pool/dogs/d.png")
    table = read_folders(root, "train")
    assert ("train/dog/d.png", "dog") in rows(table) and ("train/ant/same.png", "ant") in rows(table)
    table.check(DATA)


@pytest.mark.parametrize("link", ["train/dog", "train/cat/deep/out", "train/cat/out.png"])
def test_a_link_that_leads_nowhere_is_refused(root: Path, link: str):
    (root / link).symlink_to("nowhere")
    assert error_message(root).startswith(f"{root / link}: a symbolic link that leads nowhere, to 'nowhere'")


@pytest.mark.parametrize("target", ["..", "../../.."])
def test_a_link_into_a_folder_above_itself_is_refused(root: Path, target: str):
    (root / "train/cat/deep/loop").symlink_to(target)
    assert error_message(root).startswith(f"{root / 'train/cat/deep/loop'}: a symbolic link leads into a folder above")


def test_a_tree_of_classes_is_listed_for_its_layout_and_for_its_images_alone(tmp_path: Path, monkeypatch):
    lay(tmp_path, "a/1.jpg a/2.jpg b/1.jpg b/2.jpg")
    listed, scandir = Counter[str](), os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": listed.update([os.fspath(path)]) or scandir(path))
    open_splits(DataConfig(path=str(tmp_path), val_share=0.5))
    # The third listing looks for solution files one level below the root.
    assert all(2 <= listed[str(tmp_path / name)] <= 3 for name in "ab")
