"""Examples of several classes each, as a CSV file lists them."""

from dataclasses import dataclass, replace

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.wording import counted


@dataclass(frozen=True, eq=False)
class LabelSets:
    """The classes of each of N examples."""

    members: np.ndarray
    """object[N], of tuples of class indices, ascending; none is empty."""
    file: str
    """Where they are listed, for messages."""
    line: np.ndarray
    """int64[N], the line of the file of each example."""

    def __repr__(self) -> str:
        return f"LabelSets({counted(len(self.members), 'example')}, {self.several.sum():,} of several classes)"

    @property
    def several(self) -> np.ndarray:
        """Which examples are of more than one class, bool[N]."""
        return np.array([len(classes) > 1 for classes in self.members], bool)

    @property
    def first(self) -> np.ndarray:
        """The first class of each example, int32[N]."""
        return np.array([classes[0] for classes in self.members], np.int32)

    @property
    def labels(self) -> np.ndarray:
        """int32[N], the class of an example that has only one; -1 where it has several."""
        return np.where(self.several, np.int32(-1), self.first)

    def first_of(self, chosen: np.ndarray) -> np.ndarray:
        """The first class of each example that is among int[n] chosen ones, int32[N]; -1 where none is."""
        wanted = set(chosen.tolist())
        return np.array([next((one for one in own if one in wanted), -1) for own in self.members], np.int32)

    def rows(self, rows: np.ndarray) -> "LabelSets":
        """Those of int[n] rows, in that order."""
        return replace(self, members=self.members[rows], line=self.line[rows])

    def select(self, chosen: np.ndarray) -> "LabelSets":
        """With int[n] chosen classes alone, ascending, made dense; each example has one of them."""
        dense = {label: place for place, label in enumerate(chosen.tolist())}
        return replace(self, members=as_members([[dense[one] for one in own if one in dense] for own in self.members]))

    def rows_of_classes(self, num_classes: int) -> np.ndarray:
        """uint8[N, K], 1 for each class of an example."""
        hot = np.zeros((len(self.members), num_classes), np.uint8)
        for row, members in enumerate(self.members):
            hot[row, list(members)] = 1
        return hot

    def check_single(self, class_names: tuple[str, ...]) -> None:
        """Raises `InputError` where an example is of several classes; names file and line."""
        several = np.flatnonzero(self.several)
        if len(several):
            names = ", ".join(class_names[label] for label in self.members[several[0]])
            raise InputError(
                f"{self.file}:{self.line[several[0]]}: several labels ({names}), and packing takes one a row "
                f"({len(several)} of {len(self.members)} rows have several)",
                advice=("leave one in each, or set ", Key("data.classes"), " to some that no row shares"),
            )


def as_members(sets: list[list[int]]) -> np.ndarray:
    """Lists of class indices as `LabelSets.members`."""
    # NumPy would take tuples of one length for rows of a matrix.
    return np.fromiter((tuple(sorted(own)) for own in sets), object, len(sets))
