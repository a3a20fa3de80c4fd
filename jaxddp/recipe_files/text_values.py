"""Converts text to the value of a config key, by the type of the key, for recipe files in YAML or JSON.

The text is read like a word of the command line. So `1e-3` is a number, although YAML reads it as text, and `no` is a
name, although YAML reads it as false.
"""

import contextlib
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

from jaxddp.core.duration import Duration
from jaxddp.core.ranges import real_number, whole_number
from jaxddp.overrides import checked

_TRUTHS = {"true": True, "false": False}
_READERS: dict[Any, Callable[[str], Any]] = {
    int: whole_number,
    float: real_number,
    bool: lambda text: _TRUTHS.get(text.lower(), text),
}


def value_of(content: str | list[str] | None, hint: Any, key: str) -> Any:
    """Return the value of a key, converted from text and checked.

    Args:
        content: the text of a value, the texts of a list of values, or None for an empty value.
        hint: the type of the key.
        key: the key, for messages.

    Raises:
        InputError: the text is no value of this type, or the value is out of range.
    """
    inner = _bare(hint)
    optional = typing.get_origin(inner) in (types.UnionType, typing.Union)
    if content is None:
        return checked(None, hint, key)
    if optional:
        return value_of(content, typing.get_args(inner)[0], key)
    if typing.get_origin(inner) is tuple:
        parts = typing.get_args(inner)
        # A list of names can be a single name: `to: jsonl`.
        words = [content] if isinstance(content, str) and parts[0] is str else content
        value = [_converted(word, parts[0]) for word in words] if isinstance(words, list) else words
        return checked(value, hint, key)
    return checked(_converted(content, hint) if isinstance(content, str) else content, hint, key)


def _converted(text: str, hint: Any) -> Any:
    """Return the value of a text; the text itself if it is no value of this type. `checked` then raises the error."""
    kind = _bare(hint)
    if typing.get_origin(kind) is Literal:
        return next((choice for choice in typing.get_args(kind) if str(choice) == text), text)
    if kind is Duration:
        return text
    with contextlib.suppress(ValueError):
        return _READERS.get(kind, str)(text)
    return text


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
