"""No two modules or public classes have similar names, and each folder is short and has a docstring."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxddp"
MAX_MODULES = 18
"""The maximum number of modules in a folder, besides its `__init__.py`."""
ENDINGS = ("ings", "ing", "ers", "er", "ed", "es", "s")
COMMANDS = "commands"
"""The folder whose modules have the names of commands. Its modules may share a word with the modules that they call."""


def stem(name: str) -> str:
    """Return a name in lower case without its grammatical ending and without a final "e"."""
    name = name.lower().replace("_", "")
    ending = next((ending for ending in ENDINGS if name.endswith(ending) and len(name) > len(ending) + 2), "")
    return name.removesuffix(ending).removesuffix("e")


def similar_names(names: Iterable[str]) -> list[list[str]]:
    """Return the groups of names that are equal or differ only by an ending."""
    groups = defaultdict(list)
    for name in names:
        groups[stem(name)].append(name)
    return [sorted(group) for group in groups.values() if len(group) > 1]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["watch", "watching", "state"], [["watch", "watching"]]),
        (["table", "tables"], [["table", "tables"]]),
        (["table", "table"], [["table", "table"]]),
        (["Measured", "Measuring", "Measure"], [["Measure", "Measured", "Measuring"]]),
        (["Worker", "Work"], [["Work", "Worker"]]),
        (["image_table", "text_table", "bus", "loss", "los_angeles"], []),
    ],
)
def test_names_that_differ_by_an_ending_are_found(names, expected):
    assert similar_names(names) == expected


def test_no_two_modules_differ_by_an_ending():
    modules = [path for path in PACKAGE.rglob("*.py") if path.parent.name != COMMANDS]
    assert similar_names(path.stem for path in modules if not path.stem.startswith("__")) == []


def test_no_two_public_classes_differ_by_an_ending():
    nodes = [node for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    assert similar_names(n.name for n in nodes if isinstance(n, ast.ClassDef) and not n.name.startswith("_")) == []


def folders() -> list[Path]:
    return sorted({path.parent for path in PACKAGE.rglob("*.py")})


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.relative_to(PACKAGE.parent).as_posix())
def test_a_folder_is_short_and_has_a_docstring(folder):
    assert len([*folder.glob("*.py")]) - 1 <= MAX_MODULES
    if folder != PACKAGE:
        module = ast.parse((folder / "__init__.py").read_text())
        sentence = ast.get_docstring(module) or ""
        assert len(module.body) == 1 and sentence.endswith(".") and "\n" not in sentence
