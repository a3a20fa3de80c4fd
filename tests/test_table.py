"""Solution files give the right table for any selection, and every bad input raises a one-line error."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from hypothesis import given
from hypothesis import strategies as st
from support.errors import error_line
from support.ilsvrc import IMAGES, synset, write_csv, write_tree

from jaxddp.config import DataConfig
from jaxddp.data.formats import ilsvrc
from jaxddp.data.formats.ilsvrc import train_solutions, val_solutions
from jaxddp.data.opening import open_splits
from jaxddp.data.source import balanced_rows, check_labelled, labels_of
from jaxddp.data.table import ExampleTable

HEADER = "ImageId,PredictionString\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    return write_tree(tmp_path_factory.mktemp("ilsvrc"), classes=4, images=3, val=6, test=2)


@pytest.fixture
def files(tmp_path) -> Path:
    """A root of two classes without images; a test rewrites the files that it needs."""
    (tmp_path / "LOC_synset_mapping.txt").write_text("n02 second, of two\nn01 first\n")
    return tmp_path


def read(root: Path, content: str | bytes, **kwargs) -> ExampleTable:
    data = content if isinstance(content, bytes) else content.encode()
    (root / "LOC_train_solution.csv").write_bytes(data)
    return train_solutions(root, **kwargs)


def test_labels_follow_the_mapping_and_the_paths_of_all_splits_exist(tree):
    table = train_solutions(tree)
    assert (len(table), table.num_classes) == (12, 4)
    assert table.class_ids == tuple(synset(i) for i in range(4))
    assert table.class_names[1] == "class 1, also called 1"
    assert table.labels.dtype == np.int32 and table.labels.tolist() == [0, 1, 2, 3] * 3
    assert table.path[5].decode() == f"{IMAGES}/train/{synset(1)}/{table.id[5].decode()}.JPEG"
    assert table.name(5) == f"{tree}/{table.path[5].decode()}"
    table.check(DataConfig())
    val, listing = val_solutions(tree), ilsvrc.test_listing(tree)
    assert val.labels.tolist() == [0, 1, 2, 3, 0, 1]
    assert val.path[0].decode() == f"{IMAGES}/val/ILSVRC2012_val_00000001.JPEG"
    assert listing.labels.tolist() == [-1, -1] and listing.num_classes == 0
    assert listing.path[1].decode() == f"{IMAGES}/test/ILSVRC2012_test_00000002.JPEG"
    val.check(DataConfig())
    listing.check(DataConfig())
    check_labelled(val, "validation data")


def test_labels_come_from_the_order_of_the_mapping_and_not_of_the_names(files):
    table = read(files, HEADER + "a,n01 1 2 3 4\nb,n02 1 2 3 4 \n")
    assert table.labels.tolist() == [1, 0]
    assert table.class_names == ("second, of two", "first")
    (files / "LOC_synset_mapping.txt").write_text("n02\tsecond, of two \nn01\n")
    assert train_solutions(files).class_names == ("second, of two", "n01")


def test_ids_tell_the_split_of_a_solution_file(tree, files):
    """The predecessors read the validation images by `train_solutions`."""
    train, val = train_solutions(tree), val_solutions(tree)
    assert train_solutions(tree, "LOC_val_solution.csv").fingerprint == val.fingerprint
    assert val_solutions(tree, "LOC_train_solution.csv").fingerprint == train.fingerprint
    mixed = read(files, HEADER + "ILSVRC2012_val_1,n01 1 2 3 4\nn01_1,n02 1 2 3 4\nn02_1,n02 1 2 3 4\n")
    expected = [b"val/ILSVRC2012_val_1.JPEG", b"train/n02/n01_1.JPEG", b"train/n02/n02_1.JPEG"]
    assert mixed.path.tolist() == [f"{IMAGES}/".encode() + path for path in expected]
    in_val = val_solutions(files, "LOC_train_solution.csv").path.tolist()
    assert [path.split(b"/")[3] for path in in_val] == [b"val", b"val", b"train"]
    twice = DataConfig(path=str(tree), val="LOC_train_solution.csv")
    assert error_line(open_splits, twice).startswith("data.val='LOC_train_solution.csv': is also the training split")


def test_usual_variants_of_the_format_are_accepted(files):
    """Several boxes, numbers, white space, a byte order mark, CRLF, quotes, blank lines and other columns."""
    plain = read(files, HEADER + "a,n01 1 2 3 4\nb,n02 1 2 3 4\n")
    boxes = read(files, HEADER + "a,n01 1 2 3 4 n01 -5 6.25 7 8 n01 1 1 1 1 \nb, n02  1\t2 3 4\n")
    odd = '\ufeff"PredictionString",note, ImageId \r\nn01 1 2 3 4,"x, y",a\r\n\r\n"n02 1 2 3 4","two\r\nlines","b"\r\n'
    mapping = files / "LOC_synset_mapping.txt"
    mapping.write_bytes(b"\xef\xbb\xbf" + mapping.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    table = read(files, odd)
    assert table.fingerprint == boxes.fingerprint == plain.fingerprint and table.class_names == plain.class_names


CLASS_IDS = tuple(f"n{i:03d}" for i in range(7))


def small_table(label) -> ExampleTable:
    label = np.array(label, np.int32)
    ids = np.array([b"%d" % row for row in range(len(label))])
    return ExampleTable(None, ids, np.strings.add(b"/d/", ids), label, CLASS_IDS)


LABELS = st.lists(st.integers(0, 6), min_size=1, max_size=40)


@given(label=LABELS, data=st.data())
def test_selected_labels_are_dense_and_lead_back_through_the_mapping(label, data):
    table = small_table(label)
    chosen = data.draw(st.lists(st.sampled_from(sorted({*label, 0, 6})), min_size=1, unique=True))
    if not set(chosen) & set(label):
        chosen.append(label[0])
    selected = table.select(chosen)
    assert [int(i) for i in selected.id] == [row for row, old in enumerate(label) if old in chosen]
    assert [sorted(chosen)[new] for new in selected.labels] == [old for old in label if old in chosen]
    assert selected.class_ids == selected.class_names == tuple(CLASS_IDS[i] for i in sorted(chosen))
    assert selected.labels.dtype == np.int32
    by_name = table.select(",".join(CLASS_IDS[i] for i in chosen))
    assert by_name.fingerprint == selected.fingerprint == table.select(tuple(CLASS_IDS[i] for i in chosen)).fingerprint
    # Multi-hot labels give the same fingerprint.
    several = table.with_several_labels()
    assert labels_of(several).single.tolist() == label
    assert labels_of(several).counts.tolist() == labels_of(table).counts.tolist()
    assert several.select(chosen).labels.tolist() == selected.with_several_labels().labels.tolist()
    assert several.select(chosen).fingerprint == selected.fingerprint


def test_a_range_selects_as_python_does(tree):
    table = train_solutions(tree, classes="1:3")
    assert table.labels.tolist() == [0, 1] * 3
    for same in (range(1, 3), [2, 1], np.array([1, 2]), f" {synset(2)}, {synset(1)},"):
        assert train_solutions(tree, classes=same).fingerprint == table.fingerprint
    twice = table.select([1])
    assert twice.class_ids == (synset(2),) and twice.labels.tolist() == [0] * 3
    assert val_solutions(tree, classes="1:3").class_ids == table.class_ids
    assert table.select(None) is table


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ("0:5", "classes '0:5': out of bounds, there are 4 classes; stay within 0:4"),
        ("2:2", "classes '2:2': selects no class; give a range such as '0:200'"),
        ([1, synset(1)], f"names {synset(1)} twice"),
        ("n01000138", f"unknown class 'n01000138' of 4, did you mean {synset(1)!r}?"),
        ([0.5], "0.5 is neither an index nor a class id"),
        (5, "classes 5: is of type int; give a range"),
    ],
)
def test_an_invalid_selection_raises_a_one_line_error(tree, classes, expected):
    assert expected in error_line(train_solutions, tree, classes=classes)


@given(label=LABELS, data=st.data())
def test_take_keeps_every_class_share_and_grows_by_adding(label, data):
    table = small_table(label)
    small, large = sorted((data.draw(st.integers(1, 45)), data.draw(st.integers(1, 45))))
    rows = [int(i) for i in table.take(small).id]
    assert len(rows) == min(small, len(label)) and rows == sorted(set(rows))
    assert set(rows) <= {int(i) for i in table.take(large).id}
    counts = np.bincount(label, minlength=7)
    share = len(rows) * counts / len(label)
    bound = 1 + len(set(label)) / 2 * counts / len(label)
    assert (abs(np.bincount(table.take(small).labels, minlength=7) - share) <= bound).all()


def test_take_stays_the_same_over_releases_and_refuses_to_take_nothing():
    rows = balanced_rows(np.arange(10_000) % 10, 100)
    golden = "558b82c47c6f5c3f02aaf34fca5503eca2cc603d26d32d1f453db9a432831b07"
    assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest() == golden
    assert "limit 0: selects no example" in error_line(small_table([0]).take, 0)


def test_the_fingerprint_depends_on_the_content_and_not_on_the_folder(tree, files, tmp_path):
    content = HEADER + "a,n01 1 2 3 4\nb,n02 1 2 3 4\n"
    changed = [content.replace(*change) for change in (("a,n01", "c,n01"), ("n01", "n02"), ("b,n02 1 2 3 4\n", ""))]
    assert len({read(files, text).fingerprint for text in (content, *changed)}) == 4
    first, second = train_solutions(tree), train_solutions(write_tree(tmp_path / "b", classes=4, images=3, val=0))
    assert first.fingerprint == second.fingerprint
    golden = "6f70118b7c5368f13b9ef55c1c0b9bf4f8aafe2aeadcec732f802cd7b7c1ff57"
    assert small_table([0, 1, 2]).fingerprint == golden


def test_a_missing_root_or_file_raises_a_one_line_error(tree, files):
    expected = f"{files}/no: no such directory; give the directory that holds LOC_synset_mapping.txt"
    assert expected in error_line(train_solutions, files / "no")
    assert "is not a directory" in error_line(train_solutions, tree / "LOC_train_solution.csv")
    csv_file = files / "LOC_train_solution.csv"
    assert error_line(train_solutions, files) == f"{csv_file}: no such file; check the path"
    write_csv(files / "LOC_train_solutions.csv", [])
    assert error_line(train_solutions, files) == f"{csv_file}: no such file, did you mean 'LOC_train_solutions.csv'?"
    csv_file.mkdir()
    assert "cannot be read (a directory, not a regular file); give" in error_line(train_solutions, files)
    (files / "LOC_synset_mapping.txt").rename(files / "LOC_synset_mapping")
    (files / "LOC_synset_mapping.txt").symlink_to("gone")
    assert error_line(val_solutions, files).endswith("txt: no such file, did you mean 'LOC_synset_mapping'?")
    # A test listing reads no predictions, and needs no mapping.
    (files / "LOC_sample_submission.csv").write_text("ImageId\na\n\nb\n")
    assert ilsvrc.test_listing(files).id.tolist() == [b"a", b"b"]
    (files / "LOC_sample_submission.csv").write_text("ImageId,PredictionString\na,\n../b,\n")
    assert "csv:3: ImageId '../b' cannot name a file" in error_line(ilsvrc.test_listing, files)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\n \n", "LOC_synset_mapping.txt: empty"),
        (b"n01 a\n\nn02 b\nn01 c\n", "txt:4: duplicate synset n01, first on line 1; remove one"),
        (b"n01 a\n.. up\n", "txt:2: synset '..' cannot name a folder; write a plain name"),
        (b"n01 a\nn02 \xff\n", "txt:2: not UTF-8; save the file as UTF-8"),
        (HEADER, "csv: no rows below the header; give each image a row"),
        ("Id,PredictionString\n", "csv:1: no column ImageId, found 'Id,PredictionString'; give the columns ImageId,"),
        (HEADER.encode() + b"a,n01 1 2 3 4\n\xe9,n01 1 2 3 4\n", "csv:3: not UTF-8; save the file as UTF-8"),
        (HEADER.encode("utf-16") + b"a", "csv: damaged UTF-16 (truncated data); save the file as UTF-8"),
        # The field is endless.
        (HEADER + "a," + "n01 1 2 3 4 " * 20_000, "field larger than field limit"),
    ],
    ids=range(9),
)
def test_an_invalid_mapping_or_solution_file_raises_a_one_line_error(files, content, expected):
    if "txt" in expected:
        (files / "LOC_synset_mapping.txt").write_bytes(content)
        content = HEADER + "a,n01 1 2 3 4\n"
    assert expected in error_line(read, files, content)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("a,n03 1 2 3 4", "unknown synset 'n03'; correct it, or add it to LOC_synset_mapping.txt, did you mean 'n0"),
        ("ok,n02 1 2 3 4", "'ok' has other labels than in "),
        ("../x,n01 1 2 3 4", "ImageId '../x' cannot name a file; write a plain name"),
        ("a\0b,n01 1 2 3 4", r"ImageId 'a\x00b' cannot name a file"),
        (f"{'a' * 201},n01 1 2 3 4", "aaa... cannot name a file"),
        ("a", "1 of 2 fields in 'a'; write ImageId,PredictionString"),
        ("a,n01 1 2 3 4,n01 1 2 3 4", "3 of 2 fields"),
        ("a,", "PredictionString '' is no list of boxes of one synset; write 'synset x1 y1 x2 y2' for each box"),
        ("a,n01 1 2 3 4 n02 1 2 3 4", "is no list of boxes of one synset"),
        ("a,n01 1 2 3 1.2.3", "is no list of boxes of one synset"),
        ('a,"n01 1 2 3 4', "correct the quotes of this row"),
    ],
)
def test_an_invalid_row_raises_a_one_line_error(files, row, expected):
    text = error_line(read, files, f"{HEADER}\nok,n01 1 2 3 4\n{row}\n")
    assert text.startswith(f"{files}/LOC_train_solution.csv:4: ") and expected in text


@pytest.fixture
def linked(tmp_path) -> Path:
    write_tree(tmp_path / "real", classes=2, images=2, val=2)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (tmp_path / "root").symlink_to("real")
    return tmp_path / "root"


def replace_by_link(path: Path, target: Path | str) -> None:
    path.rename(path.with_name(path.name + ".moved"))
    path.symlink_to(target)


def test_links_within_a_linked_root_are_followed_and_a_link_out_is_refused(linked):
    replace_by_link(linked / IMAGES / "train" / synset(0), f"{synset(0)}.moved")
    image = linked / IMAGES / "val" / "ILSVRC2012_val_00000001.JPEG"
    replace_by_link(image, f"../train/{synset(1)}/{synset(1)}_0.JPEG")
    train_solutions(linked).check(DataConfig())
    val_solutions(linked).check(DataConfig())
    replace_by_link(linked / IMAGES / "train" / synset(1) / f"{synset(1)}_1.JPEG", linked.parent / "outside" / "secret")
    text = error_line(train_solutions, linked)
    assert text.startswith(f"{linked}/LOC_train_solution.csv:5: a symbolic link leads out of the data set, to ")
    assert f"{linked.parent}/outside/secret'; put the file itself into the root, or remove the row" in text
    assert len(train_solutions(linked, classes="0:1")) == 2
    # So does a link to a folder whose name begins like the root.
    (linked.parent / "real2").mkdir()
    replace_by_link(linked / IMAGES / "val" / "ILSVRC2012_val_00000002.JPEG", linked.parent / "real2" / "x")
    assert "leads out of the data set" in error_line(val_solutions, linked)


def test_check_names_the_first_unusable_image_and_counts_all(linked):
    table = train_solutions(linked)
    first, second, third, fourth = (linked / path.decode() for path in table.path)
    other = third.with_suffix(".jpeg")
    for place, spoil, expected in (
        (fourth, lambda: fourth.write_bytes(b""), "the image is empty (1 of 4 images cannot be used); put these"),
        (third, lambda: third.rename(other), f"the image is missing, did you mean '{other.name}'? (2 of 4 images"),
        (second, lambda: (second.unlink(), second.mkdir()), "the image is not a regular file (3 of 4"),
        (first, lambda: replace_by_link(first, first.name), "the image cannot be read ("),
        (first, lambda: (first.unlink(), first.symlink_to("/etc/passwd")), "a symbolic link leads out of the data set"),
    ):
        spoil()
        assert f"{place}: {expected}" in error_line(table.check, DataConfig())


def test_imagenet_opens_as_people_have_it(tmp_path: Path):
    """Kaggle's archive from its inner folders and with sorted validation images, and the original archive."""
    root = write_tree(tmp_path / "kaggle", classes=3, images=2, val=6)
    before = [table.fingerprint for table in (train_solutions(root), val_solutions(root))]
    for inner in ("ILSVRC", "ILSVRC/Data", str(IMAGES)):
        assert [table.fingerprint for table in open_splits(DataConfig(path=str(root / inner))).values()] == before
    original = tmp_path / "original"
    shutil.copytree(root / IMAGES, original)
    for row, image in enumerate(sorted((root / IMAGES / "val").iterdir())):
        (image.parent / synset(row % 3)).mkdir(exist_ok=True)
        image.rename(image.parent / synset(row % 3) / image.name)
    val_solutions(root).check(DataConfig())
    (root / "LOC_val_solution.csv").unlink()
    by_folders = open_splits(DataConfig(path=str(root)))["val"]
    assert by_folders.labels.tolist() == [0, 0, 1, 1, 2, 2] and by_folders.class_ids == tuple(map(synset, range(3)))
    # The numbers of the kit are not in the order of the synsets, and classes without training images are left out.
    kit = original / "ILSVRC2012_devkit_t12/data"
    kit.mkdir(parents=True)
    rows = [(3 - i, synset(i), 0) for i in range(3)] + [(4, "n09", 2)]
    dtype = [("ILSVRC2012_ID", object), ("WNID", object), ("num_children", object)]
    scipy.io.savemat(kit / "meta.mat", {"synsets": np.array(rows, dtype)})
    (kit / "ILSVRC2012_validation_ground_truth.txt").write_text("3\n2\n1\n" * 2)
    (original / "ILSVRC2012_img_train.tar").touch()
    val = open_splits(DataConfig(path=str(original)))["val"]
    assert val.labels.tolist() == [0, 1, 2, 0, 1, 2] and val.name(0).endswith("val/ILSVRC2012_val_00000001.JPEG")
    val.check(DataConfig())
    shutil.rmtree(original / "train" / synset(0))
    assert open_splits(DataConfig(path=str(original)))["val"].labels.tolist() == [0, 1, 0, 1]
    (kit / "ILSVRC2012_validation_ground_truth.txt").write_text("3\n")
    assert "1 label, but 6 images in" in error_line(open_splits, DataConfig(path=str(original)))
