"""Tables of the commands fit the width of the terminal, and show all their text."""

import io
import sys
from collections import Counter

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
    rows = [[path, "done", "47 of 47", "top1 39.33%", "47", "top1 39.33%", "1", "2.3 s"]]
    lines = lines_of(columns, rows, width, capsys, monkeypatch)
    assert max(map(len, lines)) <= width
    if width == 40:
        assert "  best val: top1 39.33%" in [line.rstrip() for line in lines]
    if width == 200:
        (row,) = [line for line in lines if path in line]
        # A number ends below the end of its title.
        assert lines[1].index("at step") + len("at step") == row.rindex(" 47 ") + len(" 47")
