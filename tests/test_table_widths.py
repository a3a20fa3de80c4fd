"""Tables of the commands fit the width of the terminal, and show all their text."""

import io
import os
import re
import sys
from collections import Counter

import pexpect
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from jaxddp.command_line.terminal import print_table

FRAME = Counter("─:")
LETTERS = st.sampled_from("ab/.-_0 日é")
TEXT = st.text(LETTERS, max_size=12) | st.text(LETTERS, min_size=30, max_size=60)
WIDTHS = (40, 80, 120, 200)


def lines_of(columns, rows, width, capsys, monkeypatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    capsys.readouterr()
    print_table(columns, rows)
    return capsys.readouterr().out.splitlines()


@settings(max_examples=15, deadline=None)
@given(data=st.data(), width=st.sampled_from((20, *WIDTHS)), number=st.integers(1, 8))
def test_no_line_is_wider_than_the_terminal_and_no_text_is_lost(data, width, number):
    columns = data.draw(
        st.lists(st.text(st.sampled_from("abc "), min_size=1, max_size=12), min_size=number, max_size=number)
    )
    rows = data.draw(st.lists(st.lists(TEXT, min_size=number, max_size=number), min_size=1, max_size=3))
    with pytest.MonkeyPatch.context() as patch, _Captured() as captured:
        patch.setenv("COLUMNS", str(width))
        print_table(columns, rows)
    lines = captured.text.splitlines()
    assert max(map(cell_len, lines)) <= width
    shown = Counter("".join("".join(lines).split())) - FRAME
    assert Counter("".join("".join("".join(row) for row in rows).split())) <= shown


class _Captured:
    """Captures standard output, in each example of a property."""

    def __enter__(self) -> "_Captured":
        self._before, sys.stdout = sys.stdout, io.StringIO()
        return self

    def __exit__(self, *_: object) -> None:
        self.text, sys.stdout = sys.stdout.getvalue(), self._before


@pytest.mark.parametrize("width", WIDTHS)
def test_a_wide_table_of_runs_folds_or_becomes_lines(width, capsys, monkeypatch):
    columns = ["run", "status", "step", "best val", "at step", "last val", "epoch", "train + val time"]
    path = "experiments/2026/imagenet_resnet50_with_a_long_name/seed-0"
    lines = lines_of(
        columns,
        [[path, "done", "47 of 47", "top1 39.33%", "47", "top1 39.33%", "1", "2.3 s"]],
        width,
        capsys,
        monkeypatch,
    )
    assert max(map(len, lines)) <= width
    if width == 40:
        assert "  best val: top1 39.33%" in [line.rstrip() for line in lines]
    if width == 200:
        assert sum(path in line for line in lines) == 1


@pytest.mark.ci
@pytest.mark.parametrize("command", [["config", "digits"], ["runs", "."], ["checkpoints", "run"]])
def test_commands_fit_real_terminals(command, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text('{"seed": 0, "data": {}}')
    for width in WIDTHS:
        environ = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
        arguments = ["-m", "jaxddp", *command]
        terminal = pexpect.spawn(
            sys.executable,
            arguments,
            env=environ,
            encoding="utf8",
            cwd=str(tmp_path),
            dimensions=(24, width),
            timeout=60,
        )
        lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", terminal.read()).splitlines()
        terminal.close()
        assert terminal.exitstatus == 0 and lines
        assert max(map(cell_len, lines)) <= width
