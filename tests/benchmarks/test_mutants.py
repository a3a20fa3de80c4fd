"""`benchmarks/mutants.py`: its lists match the package and the tests, and it reports killed and surviving mutants."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import mutants

LISTS = sorted(file.stem for file in mutants.LISTS.glob("*.toml"))


@functools.cache
def names_of_tests(path: Path) -> set[str]:
    """Return the names of a module's tests, with `Class::name` for those in classes."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("name", LISTS)
def test_the_line_of_every_mutant_occurs_once_and_its_tests_exist(name):
    chosen = mutants.mutants([name])
    assert chosen
    for mutant in chosen:
        mutant.apply_to((mutants.ROOT / mutant.file).read_text())
        assert mutant.tests, mutant
        for test in mutant.tests:
            file, _, name = test.partition("[")[0].partition("::")
            path = mutants.ROOT / file
            assert path.is_file() and (not name or name in names_of_tests(path)), f"{mutant}: there is no {test}"


SOURCE = """
def add(a, b):
    return a + b

def double(a):
    return 2 * a

def wait(seconds):
    return seconds - 60
"""
TESTS = """
import time
import pytest
from made import add, double, wait

def test_add():
    assert add(1, 2) == 3

@pytest.mark.parametrize("number", [0, 2])
def test_double(number):
    assert double(number) == number + number

def test_wait():
    time.sleep(max(0, wait(60)))
"""
ENTRY = """
[[mutant]]
promise = {promise}
file = "made.py"
line = "{line}"
broken = "{broken}"
tests = ["tests/test_made.py::{test}"]
"""
KILLED = {"promise": 1, "line": "a + b", "broken": "a - b", "test": "test_add"}
SURVIVES = {"promise": 0, "line": "2 * a", "broken": "a ** 2", "test": "test_double"}


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function that writes lists of mutants for a small tree, runs the benchmark, and returns its exit code."""
    tree, lists = tmp_path / "tree", tmp_path / "lists"
    for folder in (tree / "tests", lists):
        folder.mkdir(parents=True)
    (tree / "made.py").write_text(SOURCE)
    (tree / "tests" / "test_made.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q", tree], check=True)
    monkeypatch.setattr(mutants, "ROOT", tree)
    monkeypatch.setattr(mutants, "LISTS", lists)

    def start(*words, **lists_by_name):
        for name, entries in lists_by_name.items():
            (lists / f"{name}.toml").write_text("".join(ENTRY.format(**entry) for entry in entries))
        monkeypatch.setattr(sys, "argv", ["mutants.py", *words])
        return mutants.main()

    start.tree = tree
    return start


def test_the_output_names_killed_and_surviving_mutants(made, capfd):
    before = (made.tree / "made.py").read_bytes()
    assert made("--jobs", "1", "sums", sums=[KILLED, SURVIVES], others=[KILLED]) == 1
    first, *lines, last = capfd.readouterr().out.splitlines()
    assert first.startswith("2 tests pass without a mutant, ")
    fates = {line.split("made.py: ")[1].split(" -> ")[0]: line.split()[0] for line in lines}
    assert fates == {"'a + b'": "killed", "'2 * a'": "SURVIVED"}
    assert last == "1 killed, 1 survived"
    assert (made.tree / "made.py").read_bytes() == before


def test_tests_that_hang_are_ended_and_kill_the_mutant(made, monkeypatch):
    source = SOURCE.replace("seconds - 60", "seconds")
    (made.tree / "made.py").write_text(source)
    code, _ = mutants.run_tests(made.tree, ["tests/test_made.py::test_wait"], seconds=3)
    assert code is None
    monkeypatch.setattr(mutants, "run_tests", lambda *_: (code, ""))
    mutant = mutants.Mutant("sums", "made.py", "a + b", "a - b", ("tests/test_made.py::test_add",))
    assert mutants.try_mutant(mutant, made.tree) == "killed (hangs)"
    assert (made.tree / "made.py").read_text() == source


def test_if_tests_fail_without_a_mutant_no_mutant_is_tried(made, capfd):
    (made.tree / "tests" / "test_made.py").write_text(TESTS.replace("== 3", "== 4"))
    assert made("--jobs", "1", sums=[KILLED]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.startswith("mutants: the tests do not pass without a mutant")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"line": "a * b"}, "made.py: 'a * b' occurs 0 times instead of once"),
        ({"line": "return"}, "made.py: 'return' occurs 3 times instead of once"),
        ({"broken": "a + b"}, "made.py: 'a + b' is not changed"),
    ],
)
def test_a_line_that_does_not_occur_exactly_once_is_rejected(made, capfd, changes, why):
    assert made(sums=[SURVIVES, KILLED | changes]) == 2
    assert capfd.readouterr().err == f"mutants: {why}\n"


def test_all_mutants_or_a_random_sample_are_listed(made, capfd):
    entries = {"sums": [KILLED, SURVIVES], "waits": [KILLED | {"line": "seconds - 60", "broken": "seconds"}]}
    assert made("--list", **entries) == 0
    whole = capfd.readouterr().out.splitlines()
    assert whole[0] == "sums [promise 1] made.py: 'a + b' -> 'a - b'" and len(whole) == 3
    drawn = []
    for seed in ("0", "0", "1", "2", "3"):
        assert made("--list", "--sample", "1", "--seed", seed) == 0
        drawn += capfd.readouterr().out.splitlines()
    assert len(drawn) == 5 and drawn[0] == drawn[1] and len(set(drawn)) > 1 and set(drawn) <= set(whole)
