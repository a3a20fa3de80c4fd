"""Tyro's constructors for durations, numbers and paths on a command line."""

import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from jaxddp.core.duration import Duration
from jaxddp.core.files import check_path
from jaxddp.core.ranges import real_number, whole_number


def _number(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader of numbers that returns other words unchanged.

    `check_values` rejects these words later, with the same message as in Python.
    """

    def number(word: str) -> Any:
        try:
            return read(word)
        except ValueError:
            if not word.isascii():
                raise
            return word

    return number


_READERS: dict[Any, Callable[[str], Any]] = {
    int: _number(whole_number),
    float: _number(real_number),
    Duration: Duration.parse,
    Path: lambda word: Path(check_path(word, "path")),
}
"""Functions that convert a word to a value, by type. They raise ValueError or its subclass InputError."""


def rules() -> ConstructorRegistry:
    """Return the constructors for the types of `_READERS`, for their unions with None, and for their tuples."""
    registry = ConstructorRegistry()
    registry.primitive_rule(lambda info: _spec(info.type))
    return registry


def _spec(kind: Any) -> PrimitiveConstructorSpec | None:
    """Return tyro's specification of a type; None for a type without a reader.

    Tyro's own constructors drop the error of a reader within a union or a tuple. They turn a union of a dataclass and
    None into subcommands.
    """
    optional = typing.get_origin(kind) in (types.UnionType, typing.Union) and typing.get_args(kind)[1:] == (type(None),)
    inner = _bare(typing.get_args(kind)[0] if optional else kind)
    several = typing.get_origin(inner) is tuple
    parts = [_bare(part) for part in typing.get_args(inner)] if several else [inner]
    element: Any = parts[0] if parts else None
    if element not in _READERS or {*parts} - {element, ...}:
        return None
    read, name, many = _READERS[element], element.__name__.upper(), several and parts[-1] is ...
    metavar = f"[{name} [{name} ...]]" if many else " ".join([name] * len(parts)) if several else name

    def value(words: list[str]) -> Any:
        if optional and words == ["None"]:
            return None
        return tuple(map(read, words)) if several else read(words[0])

    def is_element(value: Any) -> bool:
        return isinstance(value, int | float if element is float else element)

    def is_instance(value: Any) -> bool:
        return optional if value is None else all(map(is_element, value if several else [value]))

    return PrimitiveConstructorSpec(
        nargs="*" if many else len(parts) if several else 1,
        metavar=f"{{None}}|{metavar}" if optional else metavar,
        instance_from_str=value,
        is_instance=is_instance,
        str_from_instance=lambda value: [*map(str, value)] if several and value is not None else [str(value)],
    )


def _bare(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind
