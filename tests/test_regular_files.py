"""What is no regular file is never waited for: each file of each form of data set, and of a run, replaced in turn."""

import errno

import pytest
from support.cases import rarely
from support.forms import SIZE, write_npz, write_solutions
from support.irregular import KINDS
from support.networks import linear_model

import jaxddp.files as files
from jaxddp.cli import main

# What waits is ended by pytest; nothing here takes a second.
pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["rb", "ab"])
def test_only_regular_files_are_opened(kind, mode, tmp_path):
    KINDS[kind](tmp_path / "x")
    with pytest.raises(OSError) as error:
        files.open_regular(tmp_path / "x", mode)
    # Nobody reads the FIFO, which is found out before it could be looked at.
    assert "not a regular file" in str(error.value) or error.value.errno in (errno.ENXIO, errno.EISDIR)
    (tmp_path / "y").write_bytes(b"whole")
    (tmp_path / "z").symlink_to(tmp_path / "y")
    assert files.read(tmp_path / "z") == b"whole"


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_the_user_names_are_regular(kind, tmp_path, capfd, monkeypatch):
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
        assert (last.startswith("jaxddp: ") and "odd" in last) or "config.json" in last, (words, last)


NAMES = ("metrics.jsonl", "config.json", ".lock")
# Every kind is told by `open_regular`, above; what is to be shown of each file is that it is opened so.
TELLING = {("metrics.jsonl", "a link to a FIFO"), ("config.json", "a device"), (".lock", "a socket")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind) if kind in ("a FIFO", "a directory") or (name, kind) in TELLING else rarely(name, kind)
        for name in NAMES
        for kind in KINDS
    ],
)
def test_a_work_directory_with_what_is_no_file_is_one_line(name, kind, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("jaxddp.models.resnet.build", lambda settings, classes, *_: linear_model(classes))
    write_npz(tmp_path / "set.npz")
    workdir = tmp_path / "run"
    workdir.mkdir()
    KINDS[kind](workdir / name)
    words = ["train", "digits", "--data.path", str(tmp_path / "set.npz"), "--workdir", str(workdir)]
    words += ["--data.image-size", str(SIZE), "--data.crop", "whole", "--train.batch-size", "4"]
    words += ["--train.duration", "1 step", "--log.to", "jsonl", "--parallel.self-test", "never"]
    code = main([*words, "--eval.batch-size", "4", "--parallel.devices", "1"])
    last = capfd.readouterr().err.rstrip("\n").split("\n")[-1]
    # A file that is written whole takes the place of what stood there, unless that is a directory.
    assert code == 0 or (code == 2 and last.startswith("jaxddp: ") and name in last), last
    assert kind != "a directory" or code == 2
