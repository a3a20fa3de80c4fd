"""Irregular files, such as FIFOs and devices, never block a command. The tests replace files of data sets and runs."""

import errno
import shutil

import pytest
from support.cases import rare_case
from support.data import random_table
from support.forms import write_solutions
from support.irregular import KINDS
from support.networks import linear_model
from support.shared import sgd, shared

import jaxddp
import jaxddp.core.files as files
from jaxddp.cli import main
from jaxddp.core.errors import InputError

# A test that waits fails after 60 seconds; a passing test takes less than a second.
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["rb", "ab"])
def test_only_regular_files_are_opened(kind, mode, tmp_path):
    KINDS[kind](tmp_path / "x")
    with pytest.raises(InputError, match="x: cannot be written .*, not a regular file"):
        files.replace(tmp_path / "x", b"")
    with pytest.raises(OSError) as error:
        files.open_regular(tmp_path / "x", mode)
    # A FIFO without a reader cannot be opened, so its kind is not checked. The device is behind a link.
    assert "not a regular file" in str(error.value) or error.value.errno in (errno.ENXIO, errno.EISDIR, errno.ELOOP)
    (tmp_path / "y").write_bytes(b"whole")
    for link in ("z", ".w.tmp"):
        (tmp_path / link).symlink_to(tmp_path / "y")
    with pytest.raises(InputError, match="w: cannot be written .a symbolic link"):
        files.replace(tmp_path / "w", b"")
    assert files.read(tmp_path / "z") == b"whole" and files.read("/proc/self/maps").endswith(b"\n")


@pytest.mark.parametrize("kind", KINDS)
def test_irregular_files_that_the_user_names_raise_a_one_line_error(kind, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = write_solutions(tmp_path / "set")
    KINDS[kind](tmp_path / "odd.csv")
    KINDS[kind](tmp_path / "odd.py")
    KINDS[kind](tmp_path / "config.json")
    KINDS[kind](tmp_path / "odd.toml")
    monkeypatch.setenv("JAXDDP_DATASETS", str(tmp_path / "odd.toml"))
    commands = [
        ["data", "check", str(root), "--train", str(tmp_path / "odd.csv")],
        ["data", "check", str(tmp_path / "odd.csv")],
        ["train", "odd.py", "--data.path", str(root)],
        ["eval", "config.json", "--workdir", "."],
        ["train", "digits", "--data.name", "mine"],
        ["train", "digits", "--data.path", str(root), "--data.val", str(tmp_path / "odd.csv")],
    ]
    for words in commands:
        assert main(words) == 2, words
        last = capfd.readouterr().err.rstrip("\n").split("\n")[-1]
        assert last.startswith("jaxddp: ") and ("odd" in last or "config.json" in last), (words, last)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains one step in a work directory, and the work directory of a trained run."""
    setup = shared(jaxddp.prepare_training(linear_model(), random_table(8), 1, sgd(0.1), 8))

    def train(directory):
        jaxddp.train(jaxddp.softmax_cross_entropy, setup, val=random_table(4), workdir=directory, listeners=())

    train(workdir := tmp_path_factory.mktemp("trained") / "run")
    return train, workdir


TEXTS = {"deeply nested JSON": "[" * 100_000, "a list": "[5]", "another object": '{"metrics": 5, "recipe": 5}'}
RUN_FILES = (
    *("config.json", "signature.json", "result.json", "metrics.jsonl", ".lock", ".metrics.jsonl.tmp"),
    *("checkpoints/validation.json", "checkpoints/manifests.json", "checkpoints/1/manifest.json"),
    *("checkpoints/1/_CHECKPOINT_METADATA", "checkpoints/1/progress/metadata"),
)


@pytest.mark.parametrize(
    "kind", ["a FIFO", "a directory", *map(rare_case, ("a socket", "a device", "a link to a FIFO", *TEXTS))]
)
@pytest.mark.parametrize("name", RUN_FILES)
def test_a_run_with_an_irregular_file_is_used_or_raises_a_one_line_error(name, kind, trained, tmp_path, capfd):
    train, workdir = trained
    copy = shutil.copytree(workdir, tmp_path / "run")
    file = copy / name
    if file.exists():
        file.unlink()
    KINDS[kind](file) if kind in KINDS else file.write_text(TEXTS[kind])
    uses = [lambda: jaxddp.load_run(copy, model=linear_model()), lambda: train(copy), lambda: jaxddp.History.read(copy)]
    for use in uses:
        try:
            use()
        except InputError as error:
            assert str(copy) in str(error) and "\n" not in str(error)
    assert [main(words) in (0, 2) for words in (["checkpoints", str(copy)], ["runs", str(tmp_path)])] == [True, True]
    assert "Traceback" not in capfd.readouterr().err
