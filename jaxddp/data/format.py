"""The protocol of data set formats. A new format is one file in `jaxddp/data/formats/`, and a line of `FORMATS`:

FORMATS.add("idx")(LocalFormat("train-images-idx3-ubyte and its like: IDX, such as MNIST", holds_idx, read_idx))
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jaxddp.core.files as files
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key
from jaxddp.data.faults import Refuse, raise_fault
from jaxddp.data.source import Split, Table
from jaxddp.data.storage.root import Folder, folder_of, is_address
from jaxddp.data.storage.shards import split_address


@dataclass(frozen=True)
class Place:
    """The address of a data set, and the config with which it is opened."""

    address: str
    """A local path, a URL, or NAME:REST such as tfds:cifar10."""
    data: DataConfig
    """The config, with values from datasets.toml for its unset keys."""
    refuse: Refuse = raise_fault
    """The callback for unusable rows and files, for formats that can skip them."""
    found: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What a format has found there by its name, so that it lists a large tree once for all of its methods."""

    @property
    def path(self) -> Path:
        """The absolute path without resolving links. Nothing is there if the address is not a path."""
        return files.expanded(self.address).absolute()

    @property
    def local(self) -> Path | None:
        """The `path`; None if the address is not a path."""
        return None if is_address(self.address) else self.path

    @cached_property
    def shards(self) -> tuple[Folder, str]:
        """The folder or URL of the address, and a pattern of file names or "". Raises: see `Objects.open_url`."""
        folder, pattern = split_address(self.address)
        return folder_of(folder), pattern


def check_unset(data: DataConfig, keys: Iterable[str], fault: str) -> None:
    """Raise `InputError` with a fault if one of some keys has a value, which has no effect."""
    for key in keys:
        if value := getattr(data, key):
            raise InputError(Key(f"data.{key}", value), f": {fault}", advice=("leave ", Key(f"data.{key}"), " out"))


class Match(IntEnum):
    """The degree to which a place matches a format. The format with the highest degree is used; a tie is an error."""

    NONE = 0
    PARTLY = 1
    """The place, or a folder next to it, has some files of the format. `open` reports the missing files."""
    LIKELY = 2
    """The place has all files of the format, and may also be a folder of images without labels."""
    WHOLE = 3
    NAMED = 4
    """The config names the format, or a file that only this format has. Lower degrees are ignored."""


class Format(Protocol):
    """A format of data sets."""

    @property
    def description(self) -> str:
        """A phrase about the files or addresses of this format, for messages such as "give one of: ..."."""
        ...

    def match(self, place: Place) -> Match:
        """Return the degree of the match. The method is called for every place, so it must be fast."""
        ...

    def divided(self, place: Place) -> bool:
        """Return whether the data set has a validation split. If not, "train" is an `ExampleTable` of all examples.

        Raises: InputError if the config names splits that the data set cannot have.
        """
        ...

    def open(self, place: Place, split: Split) -> Table:
        """Return the examples of a split whose classes are in `place.data.classes`, without opening an image file.

        Faults that can be skipped are passed to `place.refuse`.

        Raises:
            InputError: the data have another fault. The message names the file and the line.
        """
        ...


@dataclass(frozen=True)
class LocalFormat:
    """A format of local data sets, defined by functions of a path."""

    description: str
    holds: Callable[[Path], bool]
    """Returns whether a path holds a data set of this format, which has both splits."""
    read: Callable[..., Table]
    """A function `(path, split) -> table`; with `skips_faults`, `(path, split, refuse) -> table`."""
    skips_faults: bool = False
    """Whether `read` passes the faults of unusable rows and files to `refuse`, and skips these rows and files."""

    def match(self, place: Place) -> Match:
        return Match.WHOLE if place.local is not None and self.holds(place.path) else Match.NONE

    def divided(self, place: Place) -> bool:
        check_unset(place.data, ("train", "val"), f"the splits of {place.path} have fixed names in this format")
        return True

    def open(self, place: Place, split: Split) -> Table:
        return self.read(place.path, split, *([place.refuse] if self.skips_faults else [])).select(place.data.classes)
