"""The wire format: a message is a JSON object of a known kind, whose fields are validated.

The length of the object, a big-endian number of 4 bytes, precedes the object.
"""

import dataclasses
import functools
import json
import typing
from typing import Annotated, Any

from jaxddp.core.ranges import Range
from jaxddp.core.wording import on_screen

LENGTH = 4
MOST_PROCESSES = 2**24
"""The largest number of processes in a job."""

ProcessCount = Annotated[int, Range(1, MOST_PROCESSES)]
Number = Annotated[int, Range(0, 2**53)]
ExitCode = Annotated[int, Range(0, 255)]
Elapsed = Annotated[float, Range(0, 1e12)]
"""Seconds."""
Shown = Annotated[str, on_screen]
"""A text that is shown to users. Its control characters are escaped when the message is decoded."""


class Malformed(ValueError):
    """The received bytes are not a message of this protocol."""


def encode(message: Any) -> bytes:
    """Return the bytes of a message, which is a dataclass. The first four bytes are the number of bytes that follow."""
    content = json.dumps({"kind": type(message).__name__, **dataclasses.asdict(message)}).encode()
    return len(content).to_bytes(LENGTH, "big") + content


class Codec:
    """Decodes the messages of one protocol.

    Args:
        kinds: dataclasses whose fields are `str`, `bool`, `dict[str, …]`, or one of the types above.
    """

    def __init__(self, *kinds: type):
        self._kinds = {kind.__name__: kind for kind in kinds}

    def decode(self, content: bytes) -> Any:
        """Return the message in `content`, without its length prefix. Raises Malformed if the message is invalid."""
        try:
            plain = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"no JSON: {error}") from None
        name = plain.pop("kind", None) if isinstance(plain, dict) else None
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            raise Malformed("unknown kind")
        types = _types(kind)
        if plain.keys() != types.keys():
            raise Malformed(f"{name} has other fields")
        for field, hint in types.items():
            if not _is_valid(plain[field], hint):
                raise Malformed(f"{name}.{field} is not as expected")
            if hint == Shown:
                plain[field] = on_screen(plain[field])
        return kind(**plain)


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _is_valid(value: Any, hint: Any) -> bool:
    if hint in (str, Shown):
        return _is_text(value)
    if hint is bool:
        return type(value) is bool
    if typing.get_origin(hint) is dict:
        _, inner = typing.get_args(hint)
        return isinstance(value, dict) and all(_is_text(key) and _is_valid(item, inner) for key, item in value.items())
    number, bounds = typing.get_args(hint)
    # `isinstance(True, int)` is true, so the exact type is compared.
    return type(value) is number and value in bounds


def _is_text(value: Any) -> bool:
    """Return whether a value is a text that can be encoded as UTF-8. An unpaired surrogate cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
