"""CSV files that list images: rows and classes, several labels, and errors with line numbers."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.forms import example_tables, refusal

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.curate import PackOptions, pack
from jaxddp.data.opening import open_inputs, open_splits, open_tables
from jaxddp.data.table import ExampleTable

SINGLE = "path,label\nb/2.png,dog\na.png,cat\n"
SEVERAL = "path,label\na.png,cat;dog\nb/2.png, ant \nc.png,dog; ant;cat\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for index, name in enumerate(("set/a.png", "set/b/2.png", "set/c.png", "set/d.png", "else/e.png", "else/f.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), index, np.uint8)).save(tmp_path / name)
    return tmp_path / "set"


def data(path: Path, **more) -> DataConfig:
    return DataConfig(path=str(path), image_size=4, crop="whole", **more)


def open_csv(root: Path, train: str, val: str, **more) -> tuple[ExampleTable, ExampleTable]:
    (root / "train.csv").write_text(train)
    (root / "val.csv").write_text(val)
    return example_tables(data(root, **more))


def test_rows_have_the_order_of_the_file_and_classes_are_its_sorted_labels(root: Path):
    text = "\ufeffid,label,path\n7, dog ,b/2.png\n8,cat,a.png\n\n9,dog,c.png\n"
    train, val = open_csv(root, text, "path,label\nd.png,cat\n")
    assert train.path.tolist() == train.id.tolist() == [b"b/2.png", b"a.png", b"c.png"]
    assert train.class_names == val.class_names == ("cat", "dog")
    assert train.labels.tolist() == [1, 0, 1] and val.labels.tolist() == [0]
    open_tables(data(root))
    # In a folder with several formats, the path must name the CSV file. A folder of both splits is no exception.
    (root / "val").mkdir()
    (root / "train" / "cat").mkdir(parents=True)
    assert "2 formats, csv_listing and folders" in refusal(data(root))
    assert [len(table) for table in open_splits(data(root / "train.csv")).values()] == [3, 1]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("delimiter", [";", "\t"])
@pytest.mark.parametrize(
    ("header", "name"), [("path,label", "train.csv"), ("Class,File_Name", "Train.TSV"), (" id ,target", "train.csv")]
)
def test_usual_headers_delimiters_and_encodings_are_read(root: Path, header: str, name: str, delimiter: str, encoding):
    """Excel writes semicolons in many languages, and UTF-16 with tabs."""
    rows = [("a.png", "cät"), ("b/2.png", "dog"), ("c.png", "dog")]
    lines = [f"{label},{path}" if header[0] == "C" else f"{path},{label}" for path, label in rows]
    text = "\r\n".join([header, *lines, ""]).replace(",", delimiter)
    (root / name).write_bytes(text.encode(encoding))
    (root / "VALID.csv").write_text("Image\tlabel\nd.png\tdog\n")
    train, val = open_splits(data(root)).values()
    assert train.class_names == val.class_names == ("cät", "dog")
    assert train.labels.tolist() == [0, 1, 1] and val.labels.tolist() == [1]
    assert [train.name(row) for row in range(3)] == [f"{root}/{path}" for path, _ in rows]


@pytest.mark.parametrize(
    "text",
    [
        "path,label_a;label_b;label_c;d,label\na.png,1;2;3;4,cat\nb/2.png,,dog\n",
        '"path"\t"a,b,c,d"\t"label"\na.png\t1,2\tcat\nb/2.png\t\tdog\n',
        "a,b,c,d;path;label\n1,2;a.png;cat\n;b/2.png;dog\n",
    ],
)
def test_the_delimiter_is_that_with_which_the_header_has_the_columns(root: Path, text: str):
    (root / "list.csv").write_text(text)
    table = open_splits(DataConfig(str(root / "list.csv")), undivided=True)["all"]
    names = [table.name(row) for row in range(len(table))]
    assert names == [f"{root}/a.png", f"{root}/b/2.png"] and table.class_names == ("cat", "dog")


NO_IMAGES, NO_LABELS = (f":1: no column of {cells} by a usual name, found" for cells in ("images", "labels"))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("picture,kind,label\na.png,a,cat\n", f"train.csv{NO_IMAGES} 'pi"),
        ("id;w;breed\na.png;2;x\n", f"train.csv{NO_LABELS} 'id', 'w', 'b"),
        ("", f"TRAIN.CSV{NO_IMAGES} an empty line; name one by data.columns image=NAME"),
        (b"\xff\xfea", "train.csv: damaged UTF-16"),
        ("a.png\tcat\tx\n", f"train.tsv{NO_IMAGES} 'a.png', 'cat'"),
        ("path,label,Path\na.png,cat,b\n", "train.csv:1: columns 1 and 3 have the same name"),
        ("path,label\n", "train.csv: no rows below the header"),
        ("path,label\na.png\n", "train.csv:2: 1 of 2 fields in 'a.png'"),
        ("path,label\na.png,1\nb/2.png,1.0\n", "train.csv:3: '1.0' (U+0031 U+002E U+0030) looks like '1'"),
        ("path,label\na.png,cat;;dog\n", "train.csv:2: label 'cat;;dog' has an empty name or one name twice"),
        ("path,label\na.png,cat; cat\n", "train.csv:2: label 'cat; cat' has an empty name or"),
        (SINGLE + "./a.png,dog\n", "train.csv:4: 'a.png' has other labels than in ROOT/train.csv:3; write one row for"),
        ("path,label\nb/../../a.png,cat\n", "train.csv:2: path 'b/../../a.png' names no file below a folder"),
        ("path,label\n,cat\n", "train.csv:2: path '' names no file below a folder"),
        ("path,label\na.png,x|y\nc.png,x;y\n", "train.csv: labels hold both ';' and '|'; name the separator of labels"),
        ('{"id": "a", "label": "x", "n": "\\n"}\n{"id": "b", "n": 0}\n', "train.jsonl:2: label '' has an empty name"),
        ("path,label\nout.png,cat\n", "train.csv:2: a symbolic link leads out of the data set"),
    ],
)
def test_a_mistake_in_the_file_is_reported_with_its_line_number(root: Path, content: str | bytes, fault: str):
    """The folders beside a CSV file are no classes."""
    (root / "out.png").symlink_to("/etc/hostname")
    (root / fault.partition(":")[0]).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert refusal(data(root, val_share=0.5)).startswith(f"{root}/{fault.replace('ROOT', str(root))}")


SPREAD = "id_code,diagnosis,fold,patient\na,cat,0,p\nb/2,dog,1,q\nc,cat,2,q\nd,cat,2,r\n"
BITS = "image,cat,dog,age,is_valid\na.png,1,0,3,0\nb/2.png,1.0,1.0,4,1\nc.png,0,0,5,0\nd.png,0,0,6,0\n"
HALVES = "path,label,Split\na.png,cat,train\nb/2.png,dog,Train\nc.png,cat,VAL\nd.png,,test\n"
SHARE = {"val_share": 0.5}


@pytest.mark.parametrize(
    ("text", "keys", "train", "val", "reading"),
    [
        (SPREAD.replace("cat", "dog"), SHARE, "a b/2", "c d", "image=id_code, label=diagnosis, suffix .png"),
        (SPREAD, {"split_column": "Fold", "val_fold": "2"}, "a b/2", "c d", "label=diagnosis, split=fold, suffix .png"),
        (SPREAD, {"split_column": "fold", "val_fold": "1"}, "a c d", "b/2", "label=diagnosis, split=fold, suffix .png"),
        (SPREAD, {**SHARE, "group_column": "patient"}, "b/2 c", "a d", "image=id_code, label=diagnosis, suffix .png"),
        ("id,x,y,z\na,1,,0\nc,1,1,0\n", SHARE, "", "", "train.csv:2: '' in column 'y' of 0 and 1; write 0 or 1, or"),
        (HALVES, {}, "a.png b/2.png", "c.png", "image=path, label=label, split=Split"),
        (HALVES, {"split_column": "split", "val_fold": "VAL"}, "a.png b/2.png", "c.png", "split=Split"),
        (HALVES.replace("cat", "dog"), {"split_column": "split", "val_fold": "train"}, "b/2.png", "a.png", ""),
        (BITS, SHARE, "b/2.png d.png", "a.png c.png", "image=image, 2 columns of 0 and 1 (cat, dog)"),
        (BITS, {"split_column": "is_valid", "val_fold": "1"}, "a.png c.png d.png", "b/2.png", "dog), split=is_valid"),
        (BITS, {**SHARE, "columns": "label=cat,label=is_valid"}, "b/2.png d.png", "a.png c.png", "1 (cat, is_valid)"),
        ("x\ty\na.png\t1\nc.png\t1\n", {**SHARE, "columns": "image=x"}, "a.png", "c.png", "image=x, label=y"),
        ("image,n,findings\na,1,cat dog\nc,2,cat\n", {**SHARE, "columns": ("label=findings",), "label_separator": " "},
         "a", "c", "label=findings, suffix .png"),
        ("file,label\n./a.png,x\nROOT//c.png,x\na.png,x\nb\\2.png,x\n", SHARE, "b/2.png", "a.png c.png", "left out"),
        ("path,label,w\na.png,x,1\na.png,x,2\n", {**SHARE, "weight_column": "w"}, "", "", "another weight than in"),
        (HALVES, SHARE, "", "", "data.val_share=0.5: ROOT/train.csv has its own validation split; leave"),
        ("file,label\nROOT/../else/e.png,x\n", SHARE, "", "", "train.csv:2: path '/"),
        ("file,label,split\nELSE/e.png,x,train\nc.png,x,val\n", {}, "ELSE/e.png", "c.png", "label=label, split=split"),
        ("id,label\ne,x\nf,x\n", {**SHARE, "images": "ELSE", "suffix": ".png"}, "e", "f", "in ELSE/, suffix .png"),
        ("id,label\ne,x\nf,x\n", {**SHARE, "images": "els"}, "", "", "data.images='els': no such folder; "),
        ("path,label\nno.png,x\nno2.png,x\n", SHARE, "", "", "no.png: the image is missing"),
        # c.png counts for x, the first of its classes, and is the second example of y.
        ("path,label\na.png,y\nb/2.png,x\nc.png,y;x\n", SHARE, "b/2.png", "a.png c.png", "label=label"),
        (HALVES.replace("c.png,cat", "c.png,cot"), {}, "", "", "4: no row of train.csv has the label 'cot', did you"),
        (SPREAD, {"split_column": "fold"}, "", "", "its values in ROOT/train.csv are 0, 1, 2; give the one to"),
        (SPREAD, {"split_column": "fold", "val_fold": "3"}, "", "", "data.val_fold='3': column fold of ROOT/train.csv"),
        (SPREAD, {**SHARE, "columns": "image=idcod,label=diagnosis"}, "", "", "no column 'idcod'; did you")
    ]
)  # fmt: skip
def test_a_table_with_one_reading_opens_and_tells_it(tmp_path: Path, root: Path, text, keys, train, val, reading):
    places = {"ROOT": str(root), "ELSE": str(tmp_path / "else")}

    def placed(text: str) -> str:
        return text.replace("ROOT", places["ROOT"]).replace("ELSE", places["ELSE"])

    (root / "train.csv").write_text(placed(text))
    keys = {key: placed(value) if isinstance(value, str) else value for key, value in keys.items()}
    try:
        splits = example_tables(data(root / "train.csv", **keys))
        for table in splits:
            table.check(data(root))
    except InputError as error:
        assert placed(reading) in str(error) and not train
        return
    found = [" ".join(map(os.fsdecode, table.id.tolist())) for table in splits]
    assert found == [placed(train), placed(val)] and splits[0].reading.endswith(placed(reading))


# The head of the second file ends within its second line, in which U+2028 ends no line.
TABLES = {
    ".txt": "a.png x\nb.png x\n",
    ".jsonl": '{"id": "a", "breed": ["x"]}\n{"id": "b", "breed": ["x"], "text": "\u2028%s"}\n' % ("é" * 40_000),
}


@pytest.mark.parametrize(
    ("tables", "images", "reading"),
    [
        ("labels.csv SampleSubmission.csv", "Train/a Train/b Test/x", "labels.csv: image=id, label=breed, images in"),
        ("labels.csv", "images/a images/b", "labels.csv: image=id, label=breed, images in images/, suffix .png"),
        ("labels.csv", "one/a two/b train/c", "labels.csv: image=id, label=breed, images in one/, two/"),
        ("a.csv b.csv", "images/a images/b", "images: images, but no class folders; put the images of each class into"),
        ("train.csv", "train/b test/a test/b old/b", "train.csv: image=id, label=breed, images in train/, "),
        ("train.txt", "jpg/a jpg/b", "train.txt: image=path, label=label, images in jpg/"),
        ("labels.jsonl", "x/x/a x/y/b", "labels.jsonl: image=id, label=breed, images in x/x/, x/y/, suffix .png"),
        ("train/metadata.csv", "train/a train/b", "metadata.csv: image=id, label=breed, suffix .png"),
        ("trainLabels.csv sampleSubmission.csv", "train/a train/b test/a", "trainLabels.csv: image=id, label=breed, i"),
        ("labels.csv", "cat/a dog/b", "labels.csv: may hold other labels than the names of the folders"),
        ("labels.csv", "images/a images/b old/a train/c", "labels.csv: 'a' is both images/a.png and old/a.png; name")
    ]
)  # fmt: skip
def test_a_folder_of_images_with_one_table_is_read_by_the_table(tmp_path: Path, tables: str, images: str, reading: str):
    for name in tables.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TABLES.get(Path(name).suffix, "id,breed\na,x\nb,x\n"))
    for name in images.split():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
    try:
        assert example_tables(data(tmp_path, val_share=0.5))[0].reading.startswith(reading)
    except InputError as error:
        assert str(error).startswith(f"{tmp_path}/{reading}")


def test_unlabelled_images_are_in_the_columns_of_the_config(root: Path):
    for text in ("id,photo\n7,a.png\n8,b/2.png\n", "number,StudyUID\n7,a.png\n8,b/2.png\n", "a.png\nb/2.png\n"):
        (root / "test.csv").write_text(text)
        table = open_inputs([root / "test.csv"], data(root, columns=("image=photo", "label=breed")))
        assert table.path.tolist() == [b"a.png", b"b/2.png"]
    for name, fault in (("a.csv", "no column path, found 'a.png', '1', '2'"), ("a.tar", "is a data set")):
        (root / name).write_text("a.png,1,2\nb/2.png,3,4\n")
        with pytest.raises(InputError, match=fault):
            open_inputs([root / name])


def test_a_test_file_without_labels_is_no_validation_split(root: Path, caplog):
    (root / "train.csv").write_text("id,label\na.png,x\nb/2.png,x\nc.png,x\n")
    (root / "test.csv").write_text("id\nd.png\n")
    assert [len(table) for table in open_splits(data(root, val_share=0.5)).values()] == [1, 2]
    (root / "test.csv").write_text("id,label\nd.png,x\na.png,x\n")
    assert [*map(len, open_splits(data(root)).values())] == [3, 2] and "1 image (a.png) in both splits" in caplog.text
    (root / "test.csv").rename(root / "val.csv")
    (root / "train.csv").unlink()
    assert refusal(data(root)).startswith(f"{root}/train.csv: no such file")


def test_labels_are_single_if_no_row_of_either_split_has_several_of_the_selected_classes(root: Path):
    train, val = open_csv(root, SEVERAL, "path,label\nd.png,ant\n", classes="ant")
    assert train.path.tolist() == [b"b/2.png", b"c.png"] and train.labels.tolist() == [0, 0]
    assert train.labels.dtype == val.labels.dtype == np.int32
    train.check(data(root))


def test_several_labels_become_rows_of_zeros_and_ones_and_cannot_be_packed(root: Path, tmp_path: Path):
    train, val = open_csv(root, SEVERAL, "path,label\nd.png,ant\n")
    expected = (
        f"{root}/a.png: several labels (cat, dog), but packing accepts one label per row (2 of 3 rows have several); "
        "keep one label per row, or set data.classes to classes of which no row has two"
    )
    assert train.labels.tolist() == [[0, 1, 1], [1, 0, 0], [1, 1, 1]] and val.labels.tolist() == [[1, 0, 0]]
    assert train.select("cat,dog").labels.tolist() == [[1, 1], [1, 1]]
    assert len(train.take(2)) == 2 and train.take(3).labels.tolist() == train.labels.tolist()
    with pytest.raises(InputError) as caught:
        pack(open_splits(data(root)), tmp_path / "packed", PackOptions())
    other, _ = open_csv(root, SEVERAL.replace("cat;dog", "ant;dog"), SINGLE)
    assert train.fingerprint != other.fingerprint and str(caught.value) == expected
