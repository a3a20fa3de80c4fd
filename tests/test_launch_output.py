"""The output of processes, any bytes, becomes prefixed lines and log files."""

import os
import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launches import HANGING

from jaxddp.cluster.worker import Output, Worker
from jaxddp.core.errors import InputError


class Copied(Output):
    """Output that has been copied to `log` and to `lines`."""

    def __init__(self, log: Path, *chunks: bytes):
        reading, writing = os.pipe()
        self.lines = list[str]()
        super().__init__(0, os.fdopen(reading, "rb", buffering=0), log, shown=False)
        for chunk in chunks:
            os.write(writing, chunk)
        os.close(writing)
        self.join(HANGING)
        self.close()

    def _show(self, text: str) -> None:
        super()._show(text)
        self.lines.append(self.last_lines[-1].removeprefix("[0] "))


def test_a_grandchild_that_keeps_writing_is_not_waited_for(tmp_path, capfd):
    endless = Path("/dev/zero")
    if not endless.exists():
        pytest.skip("no /dev/zero on this system")
    output = Output(0, endless.open("rb", buffering=0), tmp_path / "log")
    output.join(0.1)
    output.close()
    output.join(HANGING)
    assert capfd.readouterr().out.startswith("[0] ")


def test_a_paused_screen_keeps_no_line_from_the_log(tmp_path, capfd):
    reading, writing = os.pipe()
    with Output._screen:
        output = Output(0, os.fdopen(reading, "rb", buffering=0), tmp_path / "log")
        os.write(writing, b"one\ntwo\n")
        os.close(writing)
        while (tmp_path / "log").read_text() != "one\ntwo\n":
            output.join(0.01)
    output.join(HANGING)
    assert capfd.readouterr().out == "[0] one\n[0] two\n"


@given(st.lists(st.binary(min_size=1, max_size=8), max_size=8))
def test_any_bytes_become_lines_and_are_logged_unchanged(chunks):
    with tempfile.TemporaryDirectory() as folder:
        lines = Copied(Path(folder) / "log", *chunks).lines
        assert (Path(folder) / "log").read_bytes() == b"".join(chunks)
    assert not any("\n" in line or "\r" in line for line in lines)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"a\r\nb\r\n"], ["a", "b"]),
        ([b"a\r", b"\nb"], ["a", "b"]),
        ([b"\r10%", b"\r20%", b"\r30%\n", b"done"], ["10%", "30%", "done"]),
        ([b"10%\r20%\r30%\r"], ["10%", "30%"]),
        ([b"10%\r   \rmessage\n"], ["10%", "message"]),
        ([b"\n\n"], ["", ""]),
        ([], []),
        ([b"x" * (1 << 16)], ["x" * (1 << 16)]),
    ],
    ids=lambda value: str(value)[:40],
)
def test_carriage_returns_end_lines(chunks, expected, tmp_path):
    assert Copied(tmp_path / "log", *chunks).lines == expected


def test_a_log_that_fails_does_not_end_the_run(capfd, monkeypatch, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    full = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115
    monkeypatch.setattr("jaxddp.core.files.open_regular", lambda *_, **__: full)
    output = Copied(tmp_path / "log", b"line\n")
    err = capfd.readouterr().err
    assert list(output.last_lines) == ["[0] line"]
    assert f"{tmp_path / 'log'}: cannot be written (No space left on device); the run continues without it" in err
    monkeypatch.setattr(Output, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(InputError, match=r"process 3: cannot be started \(can't start new thread\); start fewer"):
        Worker(3, ["true"], {}, tmp_path / "log")
