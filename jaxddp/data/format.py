"""The protocol of data set formats. A new format is one file in `jaxddp/data/formats/` that registers itself:

FORMATS.add("idx")(LocalFormat("train-images-idx3-ubyte and its like: IDX, such as MNIST", holds_idx, read_idx))
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from jaxddp.config import DataConfig
from jaxddp.data.faults import Refuse, at_once
from jaxddp.data.source import SourceTable, Split
from jaxddp.data.storage.home import is_address


@dataclass(frozen=True)
class Place:
    """Where a data set is."""

    address: str
    """A path of this machine, a URL, or NAME:REST such as tfds:cifar10."""
    data: DataConfig
    """The config, completed by what datasets.toml says."""
    refuse: Refuse = at_once
    """What is told of single rows and files that cannot be used, by the formats that can go on without them."""

    @property
    def local(self) -> Path | None:
        """The absolute path, links kept; None where the address is not a path of this machine."""
        return None if is_address(self.address) else Path(self.address).expanduser().absolute()


class Match(IntEnum):
    """How well a place matches a format. The best match reads it; two best matches are an error."""

    NONE = 0
    PARTLY = 1
    """Part of such a data set is there or next to it: reading says what is missing."""
    WHOLE = 2
    NAMED = 3
    """The config names the format, or a file that only this format has; other formats that match are ignored."""


class Format(Protocol):
    """A format of data sets."""

    @property
    def description(self) -> str:
        """What to give as data.path, in one line for messages, as in "give one of: ..."."""
        ...

    def match(self, place: Place) -> Match:
        """Whether the place holds such a data set. It is asked of every place, so it must be quick."""
        ...

    def divided(self, place: Place) -> bool:
        """Whether it has a validation split. Where not, "train" is an `ExampleTable` of all; see `held_out`."""
        ...

    def open(self, place: Place, split: Split) -> SourceTable:
        """The examples of a split, of the classes `place.data.classes`. No image of a file is opened.

        Raises:
            InputError: whatever is wrong with the data, and is not refused; names file and line.
        """
        ...


@dataclass(frozen=True)
class LocalFormat:
    """A format of data sets on this machine: whether a path holds one, and the reader of a split."""

    description: str
    holds: Callable[[Path], bool | Match]
    """Whether a path holds one, wholly where it says no more."""
    read: Callable[..., SourceTable]
    """Of a path and a `Split`; and of a `Refuse`, if it `goes_on`."""
    is_divided: Callable[[Path], bool] = lambda path: True
    """Whether a path has a validation split of its own, as `Format.divided`."""
    goes_on: bool = False
    """Whether `read` goes on without single rows and files that cannot be used, where what it tells of them returns."""

    def match(self, place: Place) -> Match:
        held = place.local is not None and self.holds(place.local)
        return held if isinstance(held, Match) else Match.WHOLE if held else Match.NONE

    def divided(self, place: Place) -> bool:
        return place.local is None or self.is_divided(place.local)

    def open(self, place: Place, split: Split) -> SourceTable:
        assert place.local is not None
        told = [place.refuse] if self.goes_on else []
        return self.read(place.local, split, *told).select(place.data.classes)
