"""An error in the words of a command line: a key is the option that was typed, or what a line of a recipe file says."""

import ast
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from jaxddp.core.errors import InputError, JaxddpError
from jaxddp.core.message import Key, typed, untyped
from jaxddp.keys import SHORT
from jaxddp.recipe_file import is_built_in, recipe_path

_LONGEST = 80


def line_of(error: JaxddpError, arguments: Sequence[str]) -> str:
    """What a command line says of an error: `--train.batch-size 30 cannot be divided …`, where it gave that option, and
    `my.py:7: train.batch_size=30 cannot be divided …` where that line of its recipe file did."""
    options = dict(_options(arguments))
    place = None if error.key is None or error.key in options else _place(error, arguments)
    error.tell(lambda key: _as_option(key, options))
    return str(error) if place is None else f"{place}: {error}"


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The keys that are given, and what each was called: `--lr`, `--train.batch-size`."""
    for word in words:
        if key := untyped(word):
            section, dot, last = key.rpartition(".")
            whole = SHORT.get(key, f"{section}{dot}{last.removeprefix('no_')}")
            yield whole, word.partition("=")[0] if key in SHORT else typed(whole)


def _as_option(key: Key, options: dict[str, str]) -> str:
    # Commands say some of their own options as they are typed.
    option = options.get(untyped(key.name) or key.name)
    if option is None:
        return str(key)
    return f"{option} {_as_word(key)}" if key.has_value else option


def _as_word(key: Key) -> str:
    """The value as it is typed."""
    values = key.value if isinstance(key.value, list | tuple) else [key.value]
    words = shlex.join(map(str, values))
    return words if len(words) <= _LONGEST and words.isprintable() else key.shown_value


def _place(error: JaxddpError, arguments: Sequence[str]) -> str | None:
    """The line of the user's recipe file that says the key with which an error begins."""
    (first, *_) = error.about[0] if error.about else error.problem
    if not isinstance(first, Key) or first.told is not None:
        return None
    names = [word for word in arguments[1:3] if not word.startswith("-")]
    try:
        path = recipe_path(names[-1] if arguments[:2] == ["data", "show"] else names[0])
        tree = None if path.suffix == ".json" or is_built_in(path) else ast.parse(path.read_bytes())
    except (InputError, IndexError, OSError, SyntaxError, ValueError):
        return None
    lines = [] if tree is None else list(_lines(tree, first.name.split(".")))
    return f"{path}:{lines[-1]}" if lines else None


def _lines(tree: ast.AST, names: Sequence[str]) -> Iterator[int]:
    """Where a key is said: `train={"batch_size": 30}`, or with the dataclass of a section."""
    for node in ast.walk(tree):
        for name, value in _named(node):
            if name == names[0] and len(names) == 1:
                yield value.lineno
            elif name == names[0]:
                yield from _lines(value, names[1:])


def _named(node: ast.AST) -> Iterator[tuple[Any, ast.expr]]:
    if isinstance(node, ast.Call):
        yield from ((keyword.arg, keyword.value) for keyword in node.keywords)
    elif isinstance(node, ast.Dict):
        yield from ((getattr(key, "value", None), each) for key, each in zip(node.keys, node.values, strict=True))
