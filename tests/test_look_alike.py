"""Every format rejects names that look alike, with their code points, and columns with the same name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.errors import error_line

from jaxddp.config import DataConfig
from jaxddp.config.registry import FORMATS as REGISTERED
from jaxddp.core.errors import appearance, nearest, on_screen
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.format import Place
from jaxddp.data.formats.array_files import read_names
from jaxddp.data.formats.folders import read_folders
from jaxddp.data.formats.ilsvrc import train_solutions
from jaxddp.data.formats.numpy_files import read_numpy
from jaxddp.data.formats.packed_records import MANIFEST, read_packed
from jaxddp.data.storage.root import CATALOG_VARIABLE, resolve

CELL = pa.struct([("bytes", pa.binary())])
ALIKE = {
    "NFC and NFD": ("caf\u00e9", "cafe\u0301", "U+0063 U+0061 U+0066 U+0065 U+0301"),
    "zero width": ("ant", "an\u200bt", "U+0061 U+006E U+200B U+0074"),
    "no break": ("red ant", "red\u00a0ant", "U+0072 U+0065 U+0064 U+00A0 U+0061 U+006E U+0074"),
    "soft hyphen": ("ant", "an\u00adt", "U+0061 U+006E U+00AD U+0074"),
    "variation selector": ("\u2764", "\u2764\ufe0f", "U+2764 U+FE0F"),
    "wide letter": ("ant", "\uff41nt", "U+FF41 U+006E U+0074"),
    "a long name": ("ant " * 9 + "x", "ant " * 9 + "x\u200b", "…U+0078 U+200B"),
}
CSV = REGISTERED.get("csv_listing")
APART = (("Ant", "ant"), ("x2", "x\u00b2"), ("H", "\u210d"), ("caf\u00e9", "cafe"), ("a b", "ab"))


def listing(root: Path, *names: str) -> tuple[Callable[[], Any], str]:
    (root / "train.csv").write_text("path,label\n" + "".join(f"{row}.png,{name}\n" for row, name in enumerate(names)))
    return lambda: CSV.open(Place(str(root / "train.csv"), DataConfig()), "train"), "train.csv:3"


def folders(root: Path, *names: str) -> tuple[Callable[[], Any], str]:
    for name in names:
        (root / "train" / name).mkdir(parents=True)
        (root / "train" / name / "a.png").touch()
    (root / "val").mkdir()
    return lambda: read_folders(root, "train"), f"train/{max(names)}"


def solutions(root: Path, *names: str) -> tuple[Callable[[], Any], str]:
    synsets = [name.replace(" ", "_").replace("\u00a0", "_") for name in names]
    (root / "LOC_synset_mapping.txt").write_text("".join(f"{synset} insect\n" for synset in synsets))
    (root / "LOC_train_solution.csv").write_text("ImageId,PredictionString\n")
    return lambda: train_solutions(root), "LOC_synset_mapping.txt:2"


def open_parquet(root: Path) -> Any:
    return REGISTERED.get("parquet_files").open(Place(str(root), DataConfig()), "train")


def schema_of_parquet(root: Path, *names: str) -> tuple[Callable[[], Any], str]:
    table = pa.table({"image": pa.array([{"bytes": b""}], CELL), "label": pa.array([0])})
    metadata = {"info": {"features": {"label": {"_type": "ClassLabel", "names": names}}}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(metadata)}), root / "train.parquet")
    return lambda: open_parquet(root), "train.parquet: the names of label"


def packed(root: Path, *names: str) -> tuple[Callable[[], Any], str]:
    (root / "train.tfrecord").touch()
    rows = {"id": np.array([b"a"]), **{key: np.zeros(1, np.int32) for key in ("label", "shard", "offset")}}
    np.savez(root / "train.npz", **rows)
    classes = {"ids": names, "names": names}
    splits = {"train": {"files": {"train.tfrecord": 0}}}
    (root / MANIFEST).write_text(json.dumps({"classes": classes, "splits": splits}))
    return lambda: read_packed(root, "train"), MANIFEST


def names_file(root: Path, *names: str) -> tuple[Callable[[], Any], str]:
    (root / "classes.txt").write_text("\n".join(names))
    return lambda: read_names(root / "classes.txt"), "classes.txt:2"


def numpy_file(root: Path, *names: str) -> tuple[Callable[[], Any], str]:
    images, labels = np.zeros((1, 2, 2, 1), np.uint8), np.zeros(1, int)
    np.savez(root / "a.npz", train_images=images, train_labels=labels, class_names=np.array(names))
    return lambda: read_numpy(root / "a.npz", "train"), "a.npz: class_names[1]"


def arrays(root: Path, *names: str) -> tuple[Callable[[], Any], str]:
    return lambda: ArrayTable(np.zeros((1, 2, 2, 1), np.uint8), np.zeros(1, int), names), "class_names"


def catalog(root: Path, *names: str) -> tuple[Callable[[], Any], str]:
    (root / "datasets.toml").write_text("".join(f'["{name}"]\npath = "/data"\n' for name in names))
    return lambda: resolve(names[0]), "datasets.toml"


FORMATS = (*(listing, folders, solutions, schema_of_parquet, packed, names_file), *(numpy_file, arrays, catalog))


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_two_names_that_look_alike_raise_an_error_with_their_location(write, tmp_path: Path, monkeypatch):
    monkeypatch.setenv(CATALOG_VARIABLE, str(tmp_path / "datasets.toml"))
    one, other, points = ALIKE["NFC and NFD"]
    read, location = write(tmp_path, one, other)
    line = error_line(read)
    assert on_screen(location) in line and f"({points})" in line and " looks like " in line
    assert line.endswith("spell both the same, or rename one")


@pytest.mark.parametrize("kind", ALIKE)
def test_names_that_differ_in_invisible_or_equivalent_characters_look_alike(kind: str, tmp_path: Path):
    one, other, points = ALIKE[kind]
    assert appearance(one) == appearance(other)
    assert f"({points})" in error_line(names_file(tmp_path, one, other)[0])
    assert f"did you mean {one!r} (" in nearest(other, [one])


@pytest.mark.parametrize(("one", "other"), APART)
def test_names_that_differ_in_visible_characters_look_different(one: str, other: str):
    assert appearance(one) != appearance(other)


def test_an_error_gives_the_code_points_of_a_validation_class_in_another_spelling(tmp_path: Path):
    (tmp_path / "train.csv").write_text("path,label\na.png,caf\u00e9\n")
    (tmp_path / "val.csv").write_text("path,label\nb.png,cafe\u0301\n")
    line = error_line(lambda: CSV.open(Place(str(tmp_path / "train.csv"), DataConfig()), "val"))
    assert line.startswith(f"{tmp_path}/val.csv:2: no row of train.csv has the label ")
    assert "(U+0063 U+0061 U+0066 U+00E9, where this is U+0063 U+0061 U+0066 U+0065 U+0301)?" in line


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("path,label,label", "columns 2 and 3 have the same name, 'label'"),
        ("pa th,path,label", "columns 2 and 1 have the same name, 'path' (U+0070 U+0061 U+0074 U+0068) and 'pa th'"),
        ("path,label,la\u200bbel", "columns 2 and 3 have the same name, 'label'"),
    ],
)
def test_a_column_that_appears_twice_is_rejected(header: str, message: str, tmp_path: Path):
    (tmp_path / "train.csv").write_text(f"{header}\na.png,cat,dog\n")
    place = Place(str(tmp_path / "train.csv"), DataConfig())
    assert error_line(lambda: CSV.open(place, "train")).startswith(f"{tmp_path}/train.csv:1: {message}")


def test_a_column_of_parquet_that_appears_twice_is_rejected(tmp_path: Path):
    label = pa.array([0])
    table = pa.Table.from_arrays([pa.array([{"bytes": b""}], CELL), label, label], ["image", "label", "label"])
    pq.write_table(table, tmp_path / "train.parquet")
    message = f"{tmp_path}/train.parquet: columns 2 and 3 have the same name, 'label'"
    assert error_line(lambda: open_parquet(tmp_path)).startswith(message)


def test_a_class_name_that_appears_twice_in_a_file_is_rejected(tmp_path: Path):
    assert "classes.txt:3: 'ant' is also the name in " in error_line(names_file(tmp_path, "ant", "bee", "ant")[0])
    read, _ = numpy_file(tmp_path, "ant", "bee", "ant")
    assert "a.npz: class_names[2]: 'ant' is also the name in " in error_line(read)


def test_a_name_without_visible_characters_is_rejected(tmp_path: Path):
    message = f"{tmp_path}/train.csv:3: the name '\\u200b' has no visible character; write one that can be read"
    assert error_line(listing(tmp_path, "ant", "\u200b")[0]) == message
