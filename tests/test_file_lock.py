"""A lock lets one process at a time run a block, and no wait for it is endless."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from jaxddp.core.errors import InputError, Unreachable
from jaxddp.core.files import in_turn, one_at_a_time, reading, whole_folder

HOLDS = """
import pathlib, sys, time
from jaxddp.core.files import one_at_a_time
with one_at_a_time(pathlib.Path(sys.argv[1]), 9):
    print("locked", flush=True)
    time.sleep(60)
"""

WRITES = """
import pathlib, sys, time
from jaxddp.core.files import whole_folder
with whole_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "large").write_text("x")
    (folder / "deep").mkdir()
    print("written", flush=True)
    time.sleep(60)
"""


def test_the_remains_of_a_killed_process_are_removed(tmp_path, caplog):
    path = tmp_path / "set"
    writer = subprocess.Popen([sys.executable, "-c", WRITES, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "written\n"
    with pytest.raises(InputError, match="set: another command is writing there; wait for it"), whole_folder(path):
        pass
    writer.kill()
    writer.wait()
    with whole_folder(path) as folder:
        (folder / "small").write_text("y")
    (tmp_path / ".link.tmp").symlink_to(path)
    with whole_folder(tmp_path / "link"):
        pass
    assert [file.name for file in path.iterdir()] == ["small"] and {*tmp_path.iterdir()} == {path, tmp_path / "link"}
    assert f"{tmp_path}/.set.tmp: the remains of an earlier command" in caplog.text


def test_the_wait_for_another_process_has_an_end(tmp_path):
    path = tmp_path / "new" / "w.lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDS, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
    with (
        pytest.raises(Unreachable, match="w.lock: locked by another process for 0 s; end it, and start again"),
        one_at_a_time(path, 0.2),
    ):
        pass
    holder.kill()
    holder.wait()
    # The lock ends with its process.
    with one_at_a_time(path, 0):
        pass


def test_a_file_server_that_is_away_holds_locks_and_is_no_fault_of_a_file(tmp_path, monkeypatch):
    def stale(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "mkdir", stale)
    with in_turn(tmp_path / "new" / "w.lock", 0) as is_held:
        assert is_held
    with pytest.raises(Unreachable, match="a.jpg: cannot be read .* check the disk"), reading("a.jpg", ""):
        stale()


def test_without_a_writable_folder_nothing_is_locked(tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "w.lock"
    # A second lock of the same file would fail.
    with one_at_a_time(path, 0), one_at_a_time(path, 0):
        assert not path.exists()
