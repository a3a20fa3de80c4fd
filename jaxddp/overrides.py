"""Trees of frozen dataclasses, such as a config: copies with keys changed, and their plain values."""

import contextlib
import dataclasses
import functools
import numbers
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, about
from jaxddp.core.message import Key
from jaxddp.core.ranges import Range, real_number
from jaxddp.core.wording import choices, nearest
from jaxddp.keys import near

_LONGEST_TEXT = 4096
"""A path can be no longer."""
_WORDS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("True or False", "truth values"),
}
"""What one value of a type is called, and what several."""


def plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, durations as they are written: what JSON holds."""
    if isinstance(value, Duration):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


def replaced(node: Any, changes: dict[str, Any], prefix: str = "", root: Any = None) -> Any:
    """A copy of a tree, or of a part of `root`, with keys changed, each value checked against its field's type.

    Raises:
        InputError: an unknown key (the nearest right one is named), or a value of another type or out of range.
    """
    hints, root = _hints(type(node)), node if root is None else root
    values = {}
    for key, value in changes.items():
        if key not in hints:
            elsewhere = [] if nearest(key, hints) else near(prefix + key, dict(keys_of(type(root))))
            meant = f"did you mean {' or '.join(map(repr, elsewhere))}? " if elsewhere else ""
            unknown = Key(prefix + key, told=repr(prefix + key))
            raise InputError("unknown config key ", unknown, advice=f"{meant}{choices(key, hints)}")
        if is_tree(hints[key]):
            if not isinstance(value, dict):
                raise InputError(Key(prefix + key, value), ": give a dict of its keys to change")
            values[key] = replaced(getattr(node, key), value, f"{prefix}{key}.", root)
        else:
            values[key] = checked(value, hints[key], prefix + key)
    return dataclasses.replace(node, **values)


def check_values(node: Any, prefix: str = "") -> None:
    """Check every value of a tree against its field's type and range; `prefix` begins the names of its keys.

    What says a value in another form, such as "1 epoch", becomes that value: the tree may be frozen.

    Raises:
        InputError: names the first key that holds something else, its value, and what is expected.
    """
    for key, hint in _hints(type(node)).items():
        value = getattr(node, key)
        if dataclasses.is_dataclass(value) and not isinstance(value, Duration):
            check_values(value, f"{prefix}{key}.")
        else:
            object.__setattr__(node, key, checked(value, hint, prefix + key))


def keys_of(tree: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a tree of dataclasses, "train.batch_size", and the type of its values."""
    for name, hint in _hints(tree).items():
        node = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
        if is_tree(node):
            yield from keys_of(node, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def is_tree(hint: Any) -> bool:
    """Whether a type is that of a part of a tree, and of no single value."""
    return dataclasses.is_dataclass(hint) and hint is not Duration


@functools.cache
def _hints(node: type) -> dict[str, Any]:
    return typing.get_type_hints(node, include_extras=True)


def checked(value: Any, hint: Any, key: str, named: Any = None) -> Any:
    """`value` as the type that `hint` asks for, converted only where nothing can be lost, and within its range.

    What is expected is told as `named`, the whole of a type whose part `hint` is.

    Raises:
        InputError: names the key, the value, and what is expected.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    named = hint if named is None else named
    if origin is Annotated:
        value = checked(value, args[0], key, named)
        for bounds in args[1:]:
            if isinstance(bounds, Range) and value not in bounds:
                raise InputError(Key(key, value), f": expected {bounds}")
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None else checked(value, args[0], key)
    if origin is Literal and value in args:
        return value
    if origin is Literal and isinstance(value, str):
        near_one = nearest(value, map(str, args))
        raise InputError(Key(key, value), f": expected {_named(named)}{near_one}")
    if origin is tuple and isinstance(value, list | tuple) and (args[-1] is ... or len(value) == len(args)):
        return tuple(checked(item, args[0], key) for item in value)
    if hint is Duration and isinstance(value, str):
        with about(Key(key)):
            return Duration.parse(value)
    # NumPy's numbers too.
    if hint is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if hint is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    if hint is str and isinstance(value, str) and not (0 < len(value) <= _LONGEST_TEXT and "\0" not in value):
        raise InputError(Key(key, value), f": expected text of 1 to {_LONGEST_TEXT:,} characters")
    if origin is None and hint not in (int, float) and isinstance(value, hint):
        return value
    raise InputError(Key(key, value), f": expected {_named(named)}")


def read_number(text: str, kind: Any, key: str) -> float:
    """A number of a type with its range, such as a `Share`, as it is written in a longer text. Raises: InputError."""
    try:
        value: Any = real_number(text)
    except ValueError:
        value = text
    return checked(value, kind, key)


def _named(hint: Any, *, several: bool = False) -> str:
    """A type as an error message names it, with its range: `a whole number, 1 to 4,096`."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bounds = [f", {each}" for each in args[1:] if isinstance(each, Range)]
        return "".join([_named(args[0], several=several), *bounds])
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        number = "a list of" if args[-1] is ... else f"{len(args)}"
        return f"{number} {_named(args[0], several=True)}"
    if hint is Duration:
        return f"a duration, such as {'90 epochs'!r}"
    return _WORDS[hint][several] if hint in _WORDS else hint.__name__


def names_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """A terminal's `--log.to jsonl,tensorboard` is one word."""
    return tuple(name.strip() for word in words for name in word.split(",") if name.strip())


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"train": {"batch_size": 8}}` as `{"train.batch_size": 8}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
