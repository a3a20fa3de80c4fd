"""Finds the line of a recipe file that sets a key."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.recipe_files.find_recipe import CONFIG_FILE, TEXT_FILES
from jaxddp.recipe_files.text_file import TextRecipe


def line_of(path: Path, key: str) -> int | None:
    """Return the last line of a recipe file that sets a key, from 1; None for another file, or if none is found."""
    if path.name == CONFIG_FILE:
        return None
    try:
        if path.suffix in TEXT_FILES:
            return TextRecipe.read(path).line_of(key)
        lines = [*_lines(ast.parse(files.read(path)), key.split("."))]
    except (InputError, OSError, SyntaxError, ValueError, RecursionError):
        return None
    return lines[-1] if lines else None


def _lines(tree: ast.AST, names: Sequence[str]) -> Iterator[int]:
    """Yield the lines that set a key: in a dict, `train={"batch_size": 30}`, or in the dataclass of a section."""
    for node in ast.walk(tree):
        for name, value in _entries(node):
            if name == names[0] and len(names) == 1:
                yield value.lineno
            elif name == names[0]:
                yield from _lines(value, names[1:])


def _entries(node: ast.AST) -> Iterator[tuple[Any, ast.expr]]:
    """Yield the names and values of the keyword arguments of a call, or of the items of a dict."""
    if isinstance(node, ast.Call):
        yield from ((keyword.arg, keyword.value) for keyword in node.keywords)
    elif isinstance(node, ast.Dict):
        yield from ((getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True))
