"""The protocol of data set formats. A new format is one file in `jaxddp/data/formats/` with an entry in `FORMATS`:

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
from jaxddp.data.storage.data_root import is_address


@dataclass(frozen=True)
class Place:
    """The place of a data set, with the config that opens it."""

    address: str
    """A path of this machine, a URL, or NAME:REST such as tfds:cifar10."""
    data: DataConfig
    """The config, completed by the entry of datasets.toml."""
    refuse: Refuse = at_once
    """Called with a message for each row or file that cannot be used, by formats that can leave these out."""

    @property
    def local(self) -> Path | None:
        """The absolute path, links not resolved; None if the address is not a path."""
        return None if is_address(self.address) else Path(self.address).expanduser().absolute()


class Match(IntEnum):
    """How well a place matches a format. The best match opens the place; two equally good matches are an error."""

    NONE = 0
    PARTLY = 1
    """The place, or a folder next to it, holds a part of such a data set. Opening it reports what is missing."""
    WHOLE = 2
    NAMED = 3
    """The config names the format or a file that only this format has; weaker matches are ignored."""


class Format(Protocol):
    """A format of data sets."""

    @property
    def description(self) -> str:
        """The files or addresses that `data.path` names for this format, for messages such as "give one of: ..."."""
        ...

    def match(self, place: Place) -> Match:
        """Returns whether the place holds such a data set. It is called for every place, so it must be quick."""
        ...

    def divided(self, place: Place) -> bool:
        """Returns whether the data set has a validation split; else "train" is an `ExampleTable` of all examples."""
        ...

    def open(self, place: Place, split: Split) -> SourceTable:
        """Returns the examples of a split that are of the classes `place.data.classes`. No image file is opened.

        Raises:
            InputError: the data have a fault that ends the reading, and the message names file and line. Other faults
                go to `place.refuse`.
        """
        ...


@dataclass(frozen=True)
class LocalFormat:
    """A format of data sets on this machine, made of functions of a path."""

    description: str
    holds: Callable[[Path], bool | Match]
    """Whether a path holds such a data set; True stands for `Match.WHOLE`."""
    read: Callable[..., SourceTable]
    """`(path, split) -> table`; with `goes_on`, `(path, split, refuse) -> table`."""
    is_divided: Callable[[Path], bool] = lambda path: True
    """Whether a path has its own validation split; see `Format.divided`."""
    goes_on: bool = False
    """Whether `read` passes rows and files that cannot be used to `refuse`, and then continues without them."""

    def match(self, place: Place) -> Match:
        held = place.local is not None and self.holds(place.local)
        return held if isinstance(held, Match) else Match.WHOLE if held else Match.NONE

    def divided(self, place: Place) -> bool:
        return place.local is None or self.is_divided(place.local)

    def open(self, place: Place, split: Split) -> SourceTable:
        assert place.local is not None
        refuse = [place.refuse] if self.goes_on else []
        return self.read(place.local, split, *refuse).select(place.data.classes)
