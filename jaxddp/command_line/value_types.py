"""How the words of a command line become durations, numbers and paths, for tyro."""

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
    """What is no number stays the word that it is: it is refused where every value is checked, as from Python."""

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
"""How a word becomes a value; raises ValueError, of which InputError is one."""


def rules() -> ConstructorRegistry:
    """Of the types that a word is read for here, alone, or None in its place, or several in a tuple."""
    registry = ConstructorRegistry()
    registry.primitive_rule(lambda info: _spec(info.type))
    return registry


def _spec(kind: Any) -> PrimitiveConstructorSpec | None:
    """How words become a value of a type; None where there is no reader for it.

    In tyro's own way what a reader raises is lost in a union and in a tuple, and a union of a dataclass and None is a
    choice of subcommands.
    """
    optional = typing.get_origin(kind) in (types.UnionType, typing.Union) and typing.get_args(kind)[1:] == (type(None),)
    inner = _bare(typing.get_args(kind)[0] if optional else kind)
    several = typing.get_origin(inner) is tuple
    parts = [_bare(part) for part in typing.get_args(inner)] if several else [inner]
    one: Any = parts[0] if parts else None
    if one not in _READERS or {*parts} - {one, ...}:
        return None
    read, name, many = _READERS[one], one.__name__.upper(), several and parts[-1] is ...
    metavar = f"[{name} [{name} ...]]" if many else " ".join([name] * len(parts)) if several else name

    def value(words: list[str]) -> Any:
        if optional and words == ["None"]:
            return None
        return tuple(map(read, words)) if several else read(words[0])

    def is_one(value: Any) -> bool:
        return isinstance(value, int | float if one is float else one)

    def is_instance(value: Any) -> bool:
        return optional if value is None else all(map(is_one, value if several else [value]))

    return PrimitiveConstructorSpec(
        nargs="*" if many else len(parts) if several else 1,
        metavar=f"{{None}}|{metavar}" if optional else metavar,
        instance_from_str=value,
        is_instance=is_instance,
        str_from_instance=lambda found: [*map(str, found)] if several and found is not None else [str(found)],
    )


def _bare(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind
