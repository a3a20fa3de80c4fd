"""`benchmarks/suite.py`: the tables for a test file, and the counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import suite

TESTS = """
import subprocess
import sys

import jax
import pytest

@pytest.fixture
def compiled():
    return jax.jit(lambda x: x + 1)(1.0)

def test_that_compiles(compiled):
    assert compiled == 2

@pytest.mark.parametrize("code", [0, 1])
def test_that_starts_a_program(code):
    assert subprocess.run([sys.executable, "-S", "-c", f"import sys; sys.exit({code})"]).returncode == 0
"""


def rows_of(text: str, title: str) -> dict[str, list[str]]:
    """Return the cells of a table by the names in its first column."""
    (table,) = (part for part in text.split("\n\n") if part.lstrip("\n").startswith(f"| {title} |"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: values for name, *values in cells}


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.exhaustive)])
def test_the_tables_have_the_seconds_and_counts_of_a_files_tests(tmp_path, workers):
    (tmp_path / "test_tiny.py").write_text(TESTS)
    command = [sys.executable, suite.__file__, "--out", str(tmp_path / "out.json"), "--top", "2", "--"]
    command += ["-n", workers, "-q", "-p", "no:cacheprovider", str(tmp_path / "test_tiny.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1 and done.stdout.endswith(" s in total, exit code 1\n"), done.stderr
    printed = done.stdout[done.stdout.index("| file |") :]
    files, tests, fixtures = (rows_of(printed, title) for title in ("file", "test", "fixture"))
    # Pytest names a file relative to its root folder.
    assert [(Path(name).name, row[0]) for name, row in files.items()] == [("test_tiny.py", "3"), ("all 1", "1")]
    # Two of the three tests, and the sum of all.
    assert len(tests) == 3 and tests["all 3"][0] == "3"
    assert [name for name in fixtures if "compiled (function)" in name]

    rows = json.loads((tmp_path / "out.json").read_text())
    by_name = {row["name"].split("::")[1]: row for row in rows["test"]}
    assert next(iter(by_name)) == max(by_name, key=lambda name: by_name[name]["seconds"])
    assert {name: row["starts"] for name, row in by_name.items()} == {
        "test_that_compiles": 0,
        "test_that_starts_a_program[0]": 1,
        "test_that_starts_a_program[1]": 1,
    }
    parts = by_name["test_that_compiles"]
    assert min(parts[kind] for kind in ("tracing", "lowering", "compiling", "cpu")) > 0
    assert parts["seconds"] > parts["tracing"] + parts["lowering"] + parts["compiling"]
    assert rows["exit_code"] == 1 and rows["wall"] > rows["file"][0]["seconds"]


def test_an_event_that_ends_within_another_is_counted_once(monkeypatch):
    now = iter([3.0, 4.0, 10.0, 12.0])
    monkeypatch.setattr(suite.time, "perf_counter", lambda: next(now))
    clock, (trace, lower, _) = suite.Clock(), suite.KINDS
    clock.timed(trace, 1.0)  # From 2 to 3.
    clock.timed(trace, 0.5)
    clock.timed(trace, 9.0)  # From 1 to 10, with both others inside.
    clock.timed(lower, 1.0)
    clock.timed("/jax/another", 5.0)
    assert dict(clock.totals) == {"tracing": 9.0, "lowering": 1.0}
