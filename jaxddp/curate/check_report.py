"""What a check found, as compact columns, and what all images together show: duplicates and balance."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxddp.core.wording import counted, plural, some, span
from jaxddp.curate.look import Look
from jaxddp.data.example_set import labels_of
from jaxddp.data.faults import repeats
from jaxddp.data.source import Table

DUPLICATE, CONTRADICTION, LEAK = "duplicate", "contradiction", "leak"
WARNINGS = (CONTRADICTION, LEAK)
"""Kinds of notes that distort a measured accuracy but do not stop a run: ImageNet itself has some."""

_COLUMNS = np.dtype(
    [("sha256", "V32"), ("bytes", "i8"), ("height", "i4"), ("width", "i4"), ("kind", "S5"), ("mode", "S8")]
)
_ADVICE = {
    "row": "take their rows out of the table",
    "file": "take the files out of the folder",
    "record": "write the records again without them",
}
"""What becomes of images that cannot be mended, by what the data set is made of."""


class CheckedSplit:
    """One split and what was found in it.

    Attributes:
        columns: what `Look` says of each row, as a structured array [N]; zero or empty where it says nothing.
        notes, faults: by row, as in `Look`, in the rows that have any.
    """

    def __init__(self, name: str, source: Table):
        self.name, self.source = name, source
        self.columns = np.zeros(len(source), _COLUMNS)
        self.notes: dict[int, tuple[str, ...]] = {}
        self.faults: dict[int, str] = {}
        # Millions of rows may share a few notes.
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}

    def add(self, row: int, look: Look) -> None:
        sides = (look.height or 0, look.width or 0)
        words = ((look.kind or "").encode(), (look.mode or "").encode())
        self.columns[row] = (look.sha256 or bytes(32), look.size, *sides, *words)
        if look.notes:
            self.notes[row] = self._known.setdefault(look.notes, look.notes)
        if look.fault is not None:
            self.faults[row] = look.fault

    def add_note(self, row: int, note: str) -> None:
        self.notes[row] = (*self.notes.get(row, ()), note)

    def name_of(self, row: int) -> str:
        """What a person calls a row's image."""
        name = self.source.name(row)
        # Where no file has the image, another split has the same name.
        return f"{self.name} {name}" if self.source.record(row).path is None else name

    def class_of(self, row: int) -> str | None:
        """The id of a row's class, its name where classes have no ids; None where it is unknown. Of several, all."""
        labels = labels_of(self.source)
        return ";".join(labels.ids[label] for label in labels.of(row)) or None

    @property
    def made_of(self) -> str:
        """What an image is in its data set: a row, a file or a record."""
        return getattr(self.source, "made_of", "image")

    @property
    def per_class(self) -> np.ndarray:
        """Images a class, int64[K], faulty ones among them."""
        return labels_of(self.source).counts


class CheckReport:
    """Splits in which every row was looked at, with a note on each image of the same content as an earlier one.

    A `duplicate` lies in the same split and class; a `contradiction` is of another class; a `leak` of another split.

    Attributes:
        refused: what the data set lists and no split has, as lines that say why.
    """

    def __init__(self, splits: Sequence[CheckedSplit], refused: Sequence[str] = ()):
        self.splits, self.refused = tuple(splits), tuple(refused)
        for split, row, first_split, first_row in _repeats(splits):
            found, before = split.class_of(row), first_split.class_of(first_row)
            where = f"the same content as {first_split.name_of(first_row)}"
            if found is not None and before is not None and found != before:
                split.add_note(row, f"{CONTRADICTION}: {where}, which is of class {before}, and this of {found}")
            if split is not first_split:
                split.add_note(row, f"{LEAK}: {where}, of split {first_split.name}")
            elif found == before:
                split.add_note(row, f"{DUPLICATE}: {where}")

    @property
    def num_faults(self) -> int:
        return len(self.refused) + sum(len(split.faults) for split in self.splits)

    def summary(self) -> dict[str, Any]:
        """What is known of each split, in JSON's types."""
        return {split.name: _summary(split) | _lacking(self.splits[0], split) for split in self.splits}

    def lines(self) -> list[str]:
        """The summary for people, some lines a split."""
        lines = [line for name, found in self.summary().items() for line in _lines(name, found)]
        if self.refused:
            lines.insert(
                0, f"faults of what lists the images: {len(self.refused):,}; mend them, as runs end at the first"
            )
        return lines


def _repeats(splits: Sequence[CheckedSplit]) -> list[tuple[CheckedSplit, int, CheckedSplit, int]]:
    """(split, row, split and row of the first with that content) of every sound image that is not the first."""
    rows = [np.array([row for row in range(len(s.source)) if row not in s.faults], np.int64) for s in splits]
    digests = np.concatenate([s.columns["sha256"][some] for s, some in zip(splits, rows, strict=True)])
    owner = np.repeat(np.arange(len(splits)), [len(some) for some in rows])
    row = np.concatenate(rows)
    return [
        (splits[owner[again]], int(row[again]), splits[owner[first]], int(row[first]))
        for again, first in repeats(digests)
    ]


def _summary(split: CheckedSplit) -> dict[str, Any]:
    kinds, counts = np.unique(split.columns["kind"], return_counts=True)
    noted = Counter(kind for notes in split.notes.values() for kind in {note.partition(":")[0] for note in notes})
    per_class = split.per_class
    found: dict[str, Any] = {
        "examples": len(split.source),
        "made_of": split.made_of,
        "fingerprint": split.source.fingerprint,
        "bytes": int(split.columns["bytes"].sum()),
        "faults": len(split.faults),
        "kinds": {os.fsdecode(kind): int(n) for kind, n in zip(kinds, counts, strict=True) if kind},
        "notes": dict(noted.most_common()),
        "classes": len(per_class),
    }
    if len(per_class):
        found["images_a_class"] = {
            "least": int(per_class.min()),
            "median": float(np.median(per_class)),
            "most": int(per_class.max()),
        }
        found["empty_classes"] = [split.source.class_ids[label] for label in np.flatnonzero(per_class == 0)]
    return found


def _lacking(first: CheckedSplit, split: CheckedSplit) -> dict[str, Any]:
    """The classes with images in the first split and none in this one."""
    if split is first or not len(split.source.class_ids):
        return {}
    there = {split.source.class_ids[label] for label in np.flatnonzero(split.per_class)}
    here = [first.source.class_ids[label] for label in np.flatnonzero(first.per_class)]
    return {f"classes_of_{first.name}_lacking": [one for one in here if one not in there]}


def _lines(name: str, found: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in found["kinds"].items())
    images = counted(found["examples"], found["made_of"])
    lines = [f"{name}: {images} ({kinds or 'none readable'}), {found['faults']:,} cannot be used"]
    if found["faults"] and (advice := _ADVICE.get(found["made_of"])):
        lines.append(f"{name}: mend or replace the images that cannot be used, or {advice}")
    if balance := found.get("images_a_class"):
        least, most = balance["least"], balance["most"]
        median = f", median {balance['median']:,g}" if least < most else ""
        each = f"{span(least, most)} {plural(most, 'image')} a class{median}"
        lines.append(f"{name}: {counted(found['classes'], 'class')}, {each}")
    for key, classes in found.items():
        if isinstance(classes, list) and classes:
            lines.append(f"{name}: {key.replace('_', ' ')}: {len(classes):,} ({some(classes)})")
    for kind, n in found["notes"].items():
        lines.append(f"{name}: {'warning' if kind in WARNINGS else 'note'}: {kind}: {n:,}")
    return lines
