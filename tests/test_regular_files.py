"""What is no regular file is never waited for: each file of each form of data set, and of a run, replaced in turn."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from test_opening import SIZE, write_cifar, write_folders, write_idx, write_npz, write_packed, write_solutions

import jaxddp.files as files
from jaxddp.cli import main
from jaxddp.config import DataConfig
from jaxddp.data.opening import open_tables
from jaxddp.errors import InputError

# What waits is ended by pytest; nothing here takes a second.
pytestmark = pytest.mark.timeout(60)


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        # Its address may be short only.
        here = os.getcwd()
        os.chdir(path.parent)
        bound.bind(path.name)
        os.chdir(here)


def link_to_fifo(path: Path) -> None:
    target = path.with_name(f"{path.name}.fifo")
    os.mkfifo(target)
    path.symlink_to(target)


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a directory": Path.mkdir,
    "a socket": socket_at,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to a FIFO": link_to_fifo,
}


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


FORMS = {
    "solutions": write_solutions,
    "folders": write_folders,
    "packed": write_packed,
    "idx": write_idx,
    "cifar": write_cifar,
    "npz": lambda folder: write_npz(folder.with_suffix(".npz")),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_data_set_in_which_one_file_is_no_file_is_refused_in_one_line(form, kind, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = FORMS[form](tmp_path / "set")
    whole = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    size = 32 if form == "cifar" else SIZE
    data = DataConfig(path=str(root), image_size=size, resize=size, crop="whole")
    # Of many images of one folder the first stands for all.
    folders = {path.parent: path for path in reversed(whole) if path.suffix in (".JPEG", ".jpg")}
    chosen = [path for path in whole if path.suffix not in (".JPEG", ".jpg") or folders[path.parent] == path]
    for path in chosen:
        kept = path.rename(path.with_name("kept-aside"))
        KINDS[kind](path)
        refused = False
        try:
            open_tables(data)
        except InputError:
            refused = True
        code = main(["data", "check", str(root)])
        said = capfd.readouterr()
        assert "Traceback" not in said.err and code in (0, 1, 2)
        # Where the names of classes are absent, most forms do without; and a folder may lie in a class's.
        optional = path.suffix == ".txt" or (form, kind) == ("folders", "a directory")
        assert (refused and code > 0) or optional, (path, said)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
        path.with_name(f"{path.name}.fifo").unlink(missing_ok=True)
        kept.rename(path)
    open_tables(data)


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", ".lock"])
def test_a_work_directory_with_what_is_no_file_is_one_line(name, kind, tmp_path, capfd):
    write_npz(tmp_path / "set.npz")
    workdir = tmp_path / "run"
    workdir.mkdir()
    KINDS[kind](workdir / name)
    words = ["train", "digits", "--data.path", str(tmp_path / "set.npz"), "--workdir", str(workdir)]
    words += ["--data.image-size", str(SIZE), "--data.crop", "whole", "--train.batch-size", "4"]
    words += ["--model.name", "resnet10", "--model.width", "1", "--train.duration", "1 step", "--log.to", "jsonl"]
    code = main([*words, "--eval.batch-size", "4", "--parallel.devices", "4"])
    last = capfd.readouterr().err.rstrip("\n").split("\n")[-1]
    # A file that is written whole takes the place of what stood there, unless that is a directory.
    assert code == 0 or (code == 2 and last.startswith("jaxddp: ") and name in last), last
