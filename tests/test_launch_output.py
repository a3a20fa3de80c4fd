"""The output of processes, any bytes, becomes prefixed lines and log files."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launches import HANGING

from jaxddp.cluster.worker import Lines, Output


def test_a_grandchild_that_keeps_writing_is_not_waited_for(tmp_path, capfd):
    endless = Path("/dev/zero")
    if not endless.exists():
        pytest.skip("no /dev/zero on this system")
    output = Output(0, endless.open("rb", buffering=0), tmp_path / "log")
    output.drain(0.01)
    output.close()
    assert capfd.readouterr().out.startswith("[0] ")


def lines_of(*chunks: bytes) -> list[str]:
    lines = Lines()
    return [line for chunk in chunks for line in lines.feed(chunk)] + lines.finish()


@given(st.lists(st.text("ab\né", max_size=8), max_size=8))
def test_lines_do_not_depend_on_how_they_arrive(chunks):
    whole = "".join(chunks)
    expected = whole.split("\n")
    assert lines_of(*(chunk.encode() for chunk in chunks)) == (expected if expected[-1] else expected[:-1])


@given(st.lists(st.binary(max_size=8), max_size=8))
def test_any_bytes_become_lines(chunks):
    lines = lines_of(*chunks)
    assert not any("\n" in line or "\r" in line for line in lines)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"a\r\nb\r\n"], ["a", "b"]),
        ([b"a\r", b"\nb"], ["a", "b"]),
        ([b"\r10%", b"\r20%", b"\r30%\n", b"done"], ["10%", "30%", "done"]),
        ([b"10%\r20%\r30%\r"], ["20%", "30%"]),
        ([b"\r10%\r20%\r30%\nx"], ["30%", "x"]),
        ([b"10%\r   \rmessage\n"], ["message"]),
        ([b"\n\n"], ["", ""]),
        ([], []),
    ],
)
def test_carriage_returns_end_lines(chunks, expected):
    assert lines_of(*chunks) == expected


def test_a_long_line_is_returned_before_its_end():
    assert Lines().feed(b"x" * 100_000) == ["x" * 100_000]


def test_a_log_that_fails_does_not_end_the_run(capfd, monkeypatch, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    reading, writing = os.pipe()
    os.write(writing, b"line\n")
    os.close(writing)
    full = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115
    monkeypatch.setattr("jaxddp.core.files.open_regular", lambda *_, **__: full)
    output = Output(0, os.fdopen(reading, "rb", buffering=0), tmp_path / "log")
    output.drain(HANGING)
    output.close()
    out, err = capfd.readouterr()
    assert out == "[0] line\n" and list(output.last_lines) == ["[0] line"]
    assert f"{tmp_path / 'log'}: cannot be written (No space left on device); the run continues without it" in err
