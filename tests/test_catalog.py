"""The catalog maps names of data sets to paths, and a bad catalog raises a one-line error."""

from pathlib import Path

import pytest
from support.errors import error_line
from support.ilsvrc import write_tree

import jaxddp
from jaxddp.cli import main
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.data.opening import open_one_split, open_splits
from jaxddp.data.storage.root import CATALOG_VARIABLE, DatasetEntry, find_dataset, resolve

CATALOG = """
[imagenet]
path = "/data/imagenet"

[digits]
path = "sets/digits"
train = "mine.csv"
val = "other.csv"
classes = "0:5"

[bucket]
path = "s3://bucket/imagenet"

[shouted]
path = "S3://bucket/imagenet"
"""


@pytest.fixture
def catalog(tmp_path) -> Path:
    file = tmp_path / "datasets.toml"
    file.write_text(CATALOG)
    return file


def resolve_in(name: str, file: Path) -> DatasetEntry:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CATALOG_VARIABLE, str(file))
        return resolve(name)


def test_an_entry_has_a_path_and_may_have_solution_files_and_classes(catalog, tmp_path):
    assert resolve_in("imagenet", catalog) == DatasetEntry("/data/imagenet")
    assert resolve_in("digits", catalog) == DatasetEntry(f"{tmp_path}/sets/digits", "mine.csv", "other.csv", "0:5")
    assert resolve_in("bucket", catalog).path == "s3://bucket/imagenet"
    # A URL is not checked before it is opened.
    assert resolve_in("shouted", catalog).path == "S3://bucket/imagenet"


def test_the_python_api_finds_the_same_catalog_names(tmp_path, monkeypatch):
    root = write_tree(tmp_path / "tree", classes=3, images=4, val=3)
    (root / "LOC_train_solution.csv").rename(root / "mine.csv")
    content = '[pets]\npath = "tree"\ntrain = "mine.csv"\nclasses = "0:2"\n'
    monkeypatch.setenv(CATALOG_VARIABLE, str(tmp_path / "datasets.toml"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=f"^{tmp_path}/pets: no such directory; give the directory that holds LOC_syn"):
        jaxddp.train_solutions("pets")
    (tmp_path / "datasets.toml").write_text(content)
    expected = open_splits(DataConfig(name="pets"))
    for train, val in (jaxddp.open_data("pets"), (jaxddp.train_solutions("pets"), jaxddp.val_solutions("pets"))):
        assert train.fingerprint == expected["train"].fingerprint and val.fingerprint == expected["val"].fingerprint
    assert open_one_split([str(root)], DataConfig(name="pets")).fingerprint == expected["val"].fingerprint
    assert main(["data", "check", "pets"]) == 0 and Path("tree.manifest.jsonl").is_file()
    # Keys of the config override those of the catalog.
    train, _ = jaxddp.open_data("pets", classes="0:3")
    monkeypatch.setenv("HOME", str(root))
    assert train.num_classes == jaxddp.val_solutions("pets", "~/LOC_val_solution.csv", "0:3").num_classes
    for read in (jaxddp.open_data, jaxddp.train_solutions, jaxddp.val_solutions, jaxddp.test_listing):
        with pytest.raises(InputError, match=r"^'petz' is not a path: .*: no data set 'petz', did you mean 'pets'\?"):
            read("petz")
    # A Path or a string with a slash is never a name, and an existing folder takes precedence over a name.
    assert find_dataset(Path("pets")) == DatasetEntry("pets")
    assert find_dataset("./pets") == DatasetEntry("./pets")
    (tmp_path / "pets").mkdir()
    assert find_dataset("pets") == DatasetEntry("pets")


def test_the_environment_variable_takes_precedence_over_the_working_directory(catalog, tmp_path, monkeypatch):
    monkeypatch.delenv("JAXDDP_DATASETS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert resolve("digits").path == f"{tmp_path}/sets/digits"
    elsewhere = tmp_path / "elsewhere" / "mine.toml"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(b"\xef\xbb\xbf[digits]\r\npath = '../d'\r\n")
    monkeypatch.setenv("JAXDDP_DATASETS", str(elsewhere))
    assert resolve("digits").path == f"{tmp_path}/elsewhere/../d"
    assert resolve_in("digits", catalog).path == f"{tmp_path}/sets/digits"


def test_a_catalog_that_cannot_be_read_raises_a_one_line_error(catalog, tmp_path):
    missing = tmp_path / "no.toml"
    advice = "create it, name another by JAXDDP_DATASETS, or give --data.path"
    assert error_line(resolve_in, "x", missing) == f"{missing}: cannot be read (No such file or directory); {advice}"
    assert f"cannot be read (a directory, not a regular file); {advice}" in error_line(resolve_in, "x", tmp_path)
    catalog.write_bytes(b"[a]\npath = '\xff'\n")
    assert error_line(resolve_in, "a", catalog).startswith(
        f"{catalog}: not TOML in UTF-8: 'utf-8' codec can't decode byte 0xff"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[a]\npath = /data\n", ": not TOML in UTF-8: Invalid value (at line 2, column 8); correct it"),
        pytest.param(f"a = {'[' * 20_000}", ": not TOML in UTF-8: maximum recursion depth exceeded", id="deep"),
        ("a = '/data'\n", """: a is '/data'; write [a], below it path = "..." and, if needed, train, val, cl"""),
        ("[a]\n", ": a is {}; write [a]"),
        ("[a]\npath = 3\n", ": a is {'path': 3}; write [a]"),
        ("[a]\npath = '/d'\nclases = '0:1'\n", ": a is {'path': '/d', 'clases': '0:1'}; write [a]"),
    ],
)
def test_a_bad_entry_raises_a_one_line_error(catalog, content, expected):
    catalog.write_text(content)
    line = error_line(resolve_in, "a", catalog)
    assert line.startswith(f"{catalog}{expected}")
    assert "\n" not in line
