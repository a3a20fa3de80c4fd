"""Trees of frozen dataclasses, such as a config: copies with keys changed, and their plain values."""

import dataclasses
import types
import typing
from typing import Any, Literal

from jaxddp.duration import Duration
from jaxddp.errors import InputError
from jaxddp.wording import choices


def plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, durations as they are written: what JSON holds."""
    if isinstance(value, Duration):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


def replaced(node: Any, changes: dict[str, Any], prefix: str = "") -> Any:
    """A copy of a tree with keys changed, each value checked against its field's type. Raises: InputError."""
    hints = typing.get_type_hints(type(node))
    values = {}
    for key, value in changes.items():
        if key not in hints:
            raise InputError(f"unknown config key {prefix + key!r}; {choices(key, hints)}")
        if dataclasses.is_dataclass(hints[key]) and hints[key] is not Duration:
            if not isinstance(value, dict):
                raise InputError(f"{prefix}{key}={value!r}: give a dict of its keys to change")
            values[key] = replaced(getattr(node, key), value, f"{prefix}{key}.")
        else:
            values[key] = _checked(value, hints[key], prefix + key)
    return dataclasses.replace(node, **values)


def _checked(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type that `hint` asks for, converted only where nothing can be lost."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _checked(value, args[0], key)
    if origin is Literal and value in args:
        return value
    if origin is tuple and isinstance(value, list | tuple) and (args[-1] is ... or len(value) == len(args)):
        return tuple(_checked(item, args[0], key) for item in value)
    if hint is Duration and isinstance(value, str):
        try:
            return Duration.parse(value)
        except InputError as error:
            raise InputError(f"{key}: {error}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is None and isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    expected = " or ".join(map(repr, args)) if origin is Literal else getattr(hint, "__name__", str(hint))
    raise InputError(f"{key}={value!r}: expected {expected if origin is Literal or origin is None else hint}")


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"train": {"batch_size": 8}}` as `{"train.batch_size": 8}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
