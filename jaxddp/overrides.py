"""Trees of frozen dataclasses, such as a config: copies with keys changed, and their plain values."""

import contextlib
import dataclasses
import functools
import numbers
import types
import typing
from typing import Annotated, Any, Literal

from jaxddp.duration import Duration
from jaxddp.errors import InputError, about
from jaxddp.ranges import Range
from jaxddp.wording import choices, show

_LONGEST_TEXT = 4096
"""A path can be no longer."""


def plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, durations as they are written: what JSON holds."""
    if isinstance(value, Duration):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


def replaced(node: Any, changes: dict[str, Any], prefix: str = "") -> Any:
    """A copy of a tree with keys changed, each value checked against its field's type.

    Raises:
        InputError: an unknown key (the nearest right one is named), or a value of another type or out of range.
    """
    hints = _hints(type(node))
    values = {}
    for key, value in changes.items():
        if key not in hints:
            raise InputError(f"unknown config key {prefix + key!r}; {choices(key, hints)}")
        if dataclasses.is_dataclass(hints[key]) and hints[key] is not Duration:
            if not isinstance(value, dict):
                raise InputError(f"{prefix}{key}={show(value)}: give a dict of its keys to change")
            values[key] = replaced(getattr(node, key), value, f"{prefix}{key}.")
        else:
            values[key] = checked(value, hints[key], prefix + key)
    return dataclasses.replace(node, **values)


def check_values(node: Any, prefix: str = "") -> None:
    """Check every value of a tree against its field's type and range; `prefix` begins the names of its keys.

    Raises:
        InputError: names the first key that holds something else, its value, and what is expected.
    """
    for key, hint in _hints(type(node)).items():
        value = getattr(node, key)
        if dataclasses.is_dataclass(value) and not isinstance(value, Duration):
            check_values(value, f"{prefix}{key}.")
        else:
            checked(value, hint, prefix + key)


@functools.cache
def _hints(node: type) -> dict[str, Any]:
    return typing.get_type_hints(node, include_extras=True)


def checked(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type that `hint` asks for, converted only where nothing can be lost, and within its range.

    Raises:
        InputError: names the key, the value, and what is expected.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        value = checked(value, args[0], key)
        for bounds in args[1:]:
            if isinstance(bounds, Range) and value not in bounds:
                raise InputError(f"{key}={show(value)}: expected {bounds}")
        return value
    if origin in (types.UnionType, typing.Union):
        return None if value is None else checked(value, args[0], key)
    if origin is Literal and value in args:
        return value
    if origin is tuple and isinstance(value, list | tuple) and (args[-1] is ... or len(value) == len(args)):
        return tuple(checked(item, args[0], key) for item in value)
    if hint is Duration and isinstance(value, str):
        with about(key):
            return Duration.parse(value)
    # NumPy's numbers too.
    if hint is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if hint is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    if hint is str and isinstance(value, str) and not (0 < len(value) <= _LONGEST_TEXT and "\0" not in value):
        raise InputError(f"{key}={show(value)}: expected text of 1 to {_LONGEST_TEXT:,} characters")
    if origin is None and hint not in (int, float) and isinstance(value, hint):
        return value
    raise InputError(f"{key}={show(value)}: expected {_named(hint)}")


def _named(hint: Any) -> str:
    """A type as an error message names it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _named(args[0])
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        return f"a list of {_named(args[0])}" if args[-1] is ... else f"{len(args)} values of {_named(args[0])}"
    return f"a duration, such as {'90 epochs'!r}" if hint is Duration else hint.__name__


def names_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """A terminal's `--log.to jsonl,tensorboard` is one word."""
    return tuple(name.strip() for word in words for name in word.split(",") if name.strip())


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"train": {"batch_size": 8}}` as `{"train.batch_size": 8}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
