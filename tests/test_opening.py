"""The content of data.path determines its format, and every format opens as a training and a validation table."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.data import random_table, write_arrays
from support.forms import write_folders, write_idx, write_solutions
from support.ilsvrc import IMAGES, synset, write_tree

import jaxddp
from jaxddp.config import Config, DataConfig
from jaxddp.core.errors import InputError, Unreachable
from jaxddp.data.opening import open_splits, open_tables
from jaxddp.data.order import EvalOrder
from jaxddp.mesh import Topology
from jaxddp.setup.resources import open_resources


def test_the_python_api_divides_a_folder_as_a_config_does(tmp_path: Path):
    folder = write_folders(tmp_path / "data") / "train"
    train, val = jaxddp.open_data(folder, 0.3)
    assert (len(train), len(val)) == (7, 3)
    splits = open_splits(DataConfig(path=str(folder), val_share=0.3))
    assert [val.name(row) for row in range(3)] == [splits["val"].name(row) for row in range(3)]
    fault = f"val_share=0.3: {folder.parent} has its own validation split; leave val_share out, which is for"
    with pytest.raises(InputError, match=f"^{fault} data without this split$"):
        jaxddp.open_data(folder.parent, 0.3)


def test_solution_files_take_precedence_over_folders_of_classes(tmp_path: Path):
    """Otherwise the folders of an ILSVRC archive would be read as folders of classes."""
    root = write_solutions(tmp_path / "data")
    (root / "train" / "cat").mkdir(parents=True)
    (root / "val").mkdir()
    assert len(open_splits(DataConfig(path=str(root)))["train"]) == 9


def test_a_selection_of_classes_lists_only_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The folders of the other classes may be on a slow disk, or missing."""
    root, listed, scandir = write_tree(tmp_path, classes=5, val=10), set[Path](), os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.add(Path(os.fsdecode(path))) or scandir(path))
    train, val = open_tables(DataConfig(path=str(root), classes="1:3"))
    assert (len(train), len(val)) == (8, 4)
    images = root / IMAGES
    expected = {images / "train" / synset(1), images / "train" / synset(2), images / "val"}
    assert {path for path in listed if images in path.parents} == expected


def test_limited_validation_keeps_the_class_shares_on_any_number_of_devices(tmp_path: Path):
    """Every chosen example is counted once, even if the last batch has padding."""
    train, val = random_table(16), random_table(40, seed=1)
    path, counts = str(write_arrays(tmp_path / "data.npz", train, val)), []
    for limit, devices in ((None, 1), (13, 1), (13, 4), (100, 1)):
        config = Config().replace(
            data={"path": path, "image_size": 6, "crop": "whole"},
            train={"batch_size": 4},
            eval={"limit": limit, "batch_size": 8},
            parallel={"devices": devices},
        )
        source = open_resources(config, Topology.create(devices)).val
        assert source is not None
        counts.append(sum(batch.mask.sum() for batch in source.eval_batches(EvalOrder(len(source), 8), config.data)))
        np.testing.assert_array_equal(source.labels, (val.take(limit) if limit else val).labels)
    assert counts == [40, 13, 13, 40]


def test_the_error_for_an_unknown_format_lists_the_formats(tmp_path: Path):
    with pytest.raises(InputError, match="holds no data set of a known format; give one of: ") as caught:
        open_tables(DataConfig(path=str(tmp_path)))
    formats = ("LOC_train_solution.csv", "packed.json", "train/CLASS/IMAGE", "train-images-idx3-ubyte", "tfds:NAME")
    assert all(name in str(caught.value) for name in formats)
    with pytest.raises(InputError, match="^s3:/bucket: holds no data set .*; a URL has two slashes, and is text"):
        jaxddp.open_data(Path("s3://bucket"))
    # A solution file in the config determines the format.
    with pytest.raises(InputError, match="LOC_synset_mapping.txt: no such file"):
        open_tables(DataConfig(path=str(write_folders(tmp_path / "data")), train="first100.csv", val_share=0.1))
    with pytest.raises(InputError, match="no such directory"):
        open_tables(DataConfig(path=str(tmp_path / "absent")))


NEW_FORMAT = """
from pathlib import Path
import numpy as np
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.format import LocalFormat
from jaxddp.data.source import Split
from jaxddp.config.registry import FORMATS

def read(path: Path, split: Split) -> ArrayTable:
    rows = np.loadtxt(path / f"{split}.rows", int, delimiter=",", ndmin=2)
    return ArrayTable(rows[:, 1:].reshape(-1, 2, 2, 1).astype(np.uint8), rows[:, 0], ("ant", "bee"))

FORMATS.add("text")(LocalFormat("a directory with train.rows", lambda path: (path / "train.rows").is_file(), read))
"""


def test_a_file_in_the_folder_of_formats_adds_a_format(tmp_path: Path):
    """The test starts a new process, because it adds a line to the table of modules in the registry."""
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats" / "text_files.py").write_text(NEW_FORMAT)
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.rows").write_text("0,1,2,3,4\n1,5,6,7,8\n0,9,10,11,12\n")
    (data / "val.rows").write_text("0,13,14,15,16\n")
    with_two_formats = write_idx(tmp_path / "both")
    shutil.copy(data / "train.rows", with_two_formats)
    code = f"""
import sys
import jaxddp.data.formats
from jaxddp.config.registry import FORMATS
from jaxddp.config import DataConfig
from jaxddp.data.opening import open_tables
from jaxddp.core.errors import InputError
jaxddp.data.formats.__path__.append({str(tmp_path / "formats")!r})
FORMATS._modules["text"] = "text_files"
train, val = open_tables(DataConfig(path={str(data)!r}, image_size=2, crop="whole", classes="0:1"))
print(train.images.tolist(), train.labels.tolist(), train.class_names)
for place in ({str(tmp_path / "formats")!r}, {str(with_two_formats)!r}):
    try:
        open_tables(DataConfig(path=place))
    except InputError as error:
        print(error)
heavy = {{"tensorflow", "tensorflow_datasets", "obstore", "PIL"}} & {{*sys.modules}}
print(heavy or "quick")
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    table, unknown_format, two_formats, imports = process.stdout.splitlines()
    assert table == "[[[[1], [2]], [[3], [4]]], [[[9], [10]], [[11], [12]]]] [0, 0] ('ant',)"
    assert unknown_format.startswith(f"{tmp_path}/formats: holds no data set of a known format")
    assert "a directory with train.rows" in unknown_format
    assert two_formats.startswith(f"{with_two_formats}: holds data sets of 2 formats, idx and text; give")
    assert imports == "quick"


def test_an_unknown_address_and_a_mistyped_path_are_rejected(tmp_path: Path):
    with pytest.raises(InputError, match="^fdst:digits: holds no data set of a known format; give one of: .*tfds:NAME"):
        open_splits(DataConfig(path="fdst:digits"))
    (tmp_path / "digits").mkdir()
    with pytest.raises(InputError, match=rf"^{tmp_path}/digit: no such directory or file.*'digits'"):
        open_splits(DataConfig(path=str(tmp_path / "digit")))
    # Like the shell, leave `~user` of an unknown user unchanged.
    with pytest.raises(InputError, match=r"^\S*~no-such-user/digits: no such directory or file"):
        open_splits(DataConfig(path="~no-such-user/digits"))


def test_a_path_without_permission_raises_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> bool:
        raise OSError(code, os.strerror(code), str(path))

    code = errno.EACCES
    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(InputError, match=rf"{tmp_path}/\S+: may not be read \(Permission denied\); ask its owner"):
        open_tables(DataConfig(path=str(tmp_path)))
    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(InputError, match=rf"{tmp_path}: may not be read"):
        jaxddp.train_solutions(tmp_path)
    code = errno.ESTALE
    with pytest.raises(Unreachable, match=f"{tmp_path}: cannot be read .* check the disk"):
        jaxddp.train_solutions(tmp_path)
