"""The parts of a message: text and keys. The command line shows a key as an option, the Python API as an argument."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxddp.core.wording import show

_ABSENT = object()


@dataclass(frozen=True)
class Key:
    """A key of a config, such as "train.batch_size", or another name in a message.

    Attributes:
        value: the value in the message, if the message has a value.
        shown: the text of the value; None for its `repr`.
        rendered: the text that replaces the name and the value, such as an option; None until the key is translated
            for the command line or the Python API.
    """

    name: str
    value: Any = _ABSENT
    shown: str | None = None
    rendered: str | None = None

    @classmethod
    def plain(cls, name: str, value: Any) -> "Key":
        """Return a key whose value has no quotes in the message."""
        return cls(name, value, str(value))

    @classmethod
    def of(cls, kind: str, name: str, *value: Any) -> "Key":
        """Return a key from the result of `to_plain`."""
        return (Option if kind == "option" else Key)(name, *value)

    def to_plain(self) -> list[Any]:
        """Return the key as a list of JSON types. A value of another type is replaced by its text in the message."""
        kind = "option" if isinstance(self, Option) else "key"
        if not self.has_value:
            return [kind, self.name]
        is_json = self.value is None or isinstance(self.value, str | int | float)
        return [kind, self.name, self.value if is_json else self.shown_value, self.shown_value]

    @property
    def has_value(self) -> bool:
        """Whether the message shows a value."""
        return self.value is not _ABSENT

    @property
    def shown_value(self) -> str:
        """The text of the value in the message."""
        return show(self.value) if self.shown is None else self.shown

    def __str__(self) -> str:
        if self.rendered is not None:
            return self.rendered
        return f"{self.name}={self.shown_value}" if self.has_value else self.name


class Option(Key):
    """A key in the form of a command-line option, for advice: `--train.accumulate 4`."""

    def __str__(self) -> str:
        if self.rendered is not None:
            return self.rendered
        return f"{format_option(self.name)} {self.value}" if self.has_value else format_option(self.name)


Words = str | Key | tuple["Words", ...]
"""A part of a message: text, a key, or a tuple of parts."""


def joined(between: str, words: Iterable[Words]) -> tuple[Words, ...]:
    """Return the parts with the text `between` between every two of them."""
    return tuple(part for each in words for part in (between, each))[1:]


def format_option(key: str) -> str:
    """Return the option of a key: "--train.batch-size"."""
    return "--" + key.replace("_", "-")


def key_of_option(word: str) -> str:
    """Return the key of an option such as "--train.batch-size=8"; an empty string for a word that is no option."""
    return word.partition("=")[0][2:].replace("-", "_") if word.startswith("--") else ""


def flat(words: Any) -> tuple[str | Key, ...]:
    """Flatten nested parts to a tuple. Objects other than keys are converted to text."""
    if isinstance(words, tuple):
        return tuple(part for each in words for part in flat(each))
    return (words if isinstance(words, Key) else str(words),)


def plain(parts: tuple[str | Key, ...]) -> list[Any]:
    """Return parts as a list of JSON types. A renamed key becomes text."""
    return [part.to_plain() if isinstance(part, Key) and part.rendered is None else str(part) for part in parts]


def parts_of(plain: list[Any]) -> tuple[str | Key, ...]:
    """Convert the result of `plain` back to parts."""
    return tuple(part if isinstance(part, str) else Key.of(*part) for part in plain)


def text_of(words: Words) -> str:
    """Return the text of a message."""
    return "".join(map(str, flat(words)))
