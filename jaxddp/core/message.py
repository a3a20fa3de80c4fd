"""The parts of a message to a user: text, and keys, which each door calls what its user wrote."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxddp.core.wording import show

_ABSENT = object()


@dataclass(frozen=True)
class Key:
    """A key of a config, "train.batch_size", or the name of what is given, in a message: each door calls it in its own
    words.

    Attributes:
        value: that it has, or might be given; none where the message says none.
        shown: the value as the message shows it, where that is not its `repr`.
        told: what a door calls it.
    """

    name: str
    value: Any = _ABSENT
    shown: str | None = None
    told: str | None = None

    @classmethod
    def plain(cls, name: str, value: Any) -> "Key":
        """With a value that is shown without quotes."""
        return cls(name, value, str(value))

    @classmethod
    def of(cls, kind: str, name: str, *value: Any) -> "Key":
        """The inverse of `to_plain`."""
        return (Option if kind == "option" else Key)(name, *value)

    def to_plain(self) -> list[Any]:
        """As JSON holds it; a value that it does not hold is the text that is shown."""
        kind = "option" if isinstance(self, Option) else "key"
        if not self.has_value:
            return [kind, self.name]
        held = self.value is None or isinstance(self.value, str | int | float)
        return [kind, self.name, self.value if held else self.shown_value, self.shown_value]

    @property
    def has_value(self) -> bool:
        """Whether the message says a value of it."""
        return self.value is not _ABSENT

    @property
    def shown_value(self) -> str:
        """The value as the message shows it."""
        return show(self.value) if self.shown is None else self.shown

    def __str__(self) -> str:
        if self.told is not None:
            return self.told
        return f"{self.name}={self.shown_value}" if self.has_value else self.name


class Option(Key):
    """A key in the words of the terminal, for advice: `--train.accumulate 4`."""

    def __str__(self) -> str:
        if self.told is not None:
            return self.told
        return f"{typed(self.name)} {self.value}" if self.has_value else typed(self.name)


Words = str | Key | tuple["Words", ...]
"""A part of a message: text, a key, or several parts."""


def joined(between: str, words: Iterable[Words]) -> tuple[Words, ...]:
    """Several parts, with a text between them."""
    return tuple(part for each in words for part in (between, each))[1:]


def typed(key: str) -> str:
    """A key as it is typed: "--train.batch-size"."""
    return "--" + key.replace("_", "-")


def untyped(word: str) -> str:
    """The key of an option as it is typed, "--train.batch-size=8"; empty of another word."""
    return word.partition("=")[0][2:].replace("-", "_") if word.startswith("--") else ""


def flat(words: Any) -> tuple[str | Key, ...]:
    """The parts in a row; what is neither text nor a key is the text that it is as one."""
    if isinstance(words, tuple):
        return tuple(part for each in words for part in flat(each))
    return (words if isinstance(words, Key) else str(words),)


def plain(parts: tuple[str | Key, ...]) -> list[Any]:
    """As JSON holds them; a key that a door has told is text."""
    return [part.to_plain() if isinstance(part, Key) and part.told is None else str(part) for part in parts]


def parts_of(plain: list[Any]) -> tuple[str | Key, ...]:
    """The inverse of `plain`."""
    return tuple(part if isinstance(part, str) else Key.of(*part) for part in plain)


def text_of(words: Words) -> str:
    """What they say."""
    return "".join(map(str, flat(words)))
