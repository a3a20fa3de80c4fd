"""The report of a check: the findings as columns, the duplicates, and the number of images in each class."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxddp.core.wording import counted, plural, some, span
from jaxddp.curate.image_findings import ImageFindings
from jaxddp.data.example_set import labels_of
from jaxddp.data.faults import find_repeats
from jaxddp.data.source import Table

DUPLICATE, CONTRADICTION, LEAK = "duplicate", "contradiction", "leak"
WARNINGS = (CONTRADICTION, LEAK)
"""The kinds of notes on images that distort the measured accuracy. Such images do not stop a run: ImageNet has some."""

_COLUMNS = np.dtype(
    [("sha256", "V32"), ("bytes", "i8"), ("height", "i4"), ("width", "i4"), ("kind", "S5"), ("mode", "S8")]
)
_ADVICE = {
    "row": "take their rows out of the table",
    "file": "take the files out of the folder",
    "record": "write the records again without them",
}
"""The advice for images that cannot be repaired, by `CheckedSplit.made_of`."""


class CheckedSplit:
    """One split and its findings.

    Attributes:
        columns: the `ImageFindings` of each row, as a structured array [N]; a field that is None becomes zero or empty.
        notes, faults: dicts from a row to its notes, and to its fault; rows without notes or a fault are absent.
    """

    def __init__(self, name: str, source: Table):
        self.name, self.source = name, source
        self.columns = np.zeros(len(source), _COLUMNS)
        self.notes: dict[int, tuple[str, ...]] = {}
        self.faults: dict[int, str] = {}
        # Rows with equal notes share one tuple, because a split may have millions of rows.
        self._shared_notes: dict[tuple[str, ...], tuple[str, ...]] = {}

    def add(self, row: int, findings: ImageFindings) -> None:
        size = (findings.height or 0, findings.width or 0)
        formats = ((findings.kind or "").encode(), (findings.mode or "").encode())
        self.columns[row] = (findings.sha256 or bytes(32), findings.size, *size, *formats)
        if findings.notes:
            self.notes[row] = self._shared_notes.setdefault(findings.notes, findings.notes)
        if findings.fault is not None:
            self.faults[row] = findings.fault

    def add_note(self, row: int, note: str) -> None:
        self.notes[row] = (*self.notes.get(row, ()), note)

    def name_of(self, row: int) -> str:
        """Return a readable name of a row's image."""
        name = self.source.name(row)
        # Images of arrays are named by their row alone, so the name of the split is added.
        return f"{self.name} {name}" if self.source.record(row).path is None else name

    def class_of(self, row: int) -> str | None:
        """Return the id of a row's class, or several ids joined by semicolons; None if the class is unknown."""
        labels = labels_of(self.source)
        return ";".join(labels.ids[label] for label in labels.of(row)) or None

    @property
    def made_of(self) -> str:
        """The unit that holds one example: a row, a file, a record or an image."""
        return getattr(self.source, "made_of", "image")

    @property
    def per_class(self) -> np.ndarray:
        """The number of images of each class, int64[K], including images with faults."""
        return labels_of(self.source).counts


class CheckReport:
    """The splits of a check, with a note on each image that has the same content as an earlier image.

    A `duplicate` is in the same split and class as the earlier image, a `contradiction` is in another class, and a
    `leak` is in another split.

    Attributes:
        refused: a message for each row or file of the data set that was rejected and is in no split.
    """

    def __init__(self, splits: Sequence[CheckedSplit], refused: Sequence[str] = ()):
        self.splits, self.refused = tuple(splits), tuple(refused)
        for split, row, first_split, first_row in _repeats(splits):
            this_class, first_class = split.class_of(row), first_split.class_of(first_row)
            where = f"the same content as {first_split.name_of(first_row)}"
            if this_class is not None and first_class is not None and this_class != first_class:
                split.add_note(
                    row, f"{CONTRADICTION}: {where}, which is of class {first_class}, and this of {this_class}"
                )
            if split is not first_split:
                split.add_note(row, f"{LEAK}: {where}, of split {first_split.name}")
            elif this_class == first_class:
                split.add_note(row, f"{DUPLICATE}: {where}")

    @property
    def num_faults(self) -> int:
        return len(self.refused) + sum(len(split.faults) for split in self.splits)

    def summary(self) -> dict[str, Any]:
        """Return the summary of each split, made of JSON types."""
        return {split.name: _summary(split) | _missing_classes(self.splits[0], split) for split in self.splits}

    def lines(self) -> list[str]:
        """Return the summary as readable lines, several for each split."""
        lines = [line for name, summary in self.summary().items() for line in _lines(name, summary)]
        if self.refused:
            lines.insert(
                0,
                f"faults in the listing of images: {len(self.refused):,}; correct them, since a run ends at the first",
            )
        return lines


def _repeats(splits: Sequence[CheckedSplit]) -> list[tuple[CheckedSplit, int, CheckedSplit, int]]:
    """Return (split, row, first split, first row) for every sound image with the content of an earlier image."""
    rows = [np.array([row for row in range(len(s.source)) if row not in s.faults], np.int64) for s in splits]
    digests = np.concatenate([s.columns["sha256"][sound] for s, sound in zip(splits, rows, strict=True)])
    split_index = np.repeat(np.arange(len(splits)), [len(sound) for sound in rows])
    row = np.concatenate(rows)
    return [
        (splits[split_index[repeat]], int(row[repeat]), splits[split_index[first]], int(row[first]))
        for repeat, first in find_repeats(digests)
    ]


def _summary(split: CheckedSplit) -> dict[str, Any]:
    kinds, counts = np.unique(split.columns["kind"], return_counts=True)
    noted = Counter(kind for notes in split.notes.values() for kind in {note.partition(":")[0] for note in notes})
    per_class = split.per_class
    summary: dict[str, Any] = {
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
        summary["images_a_class"] = {
            "least": int(per_class.min()),
            "median": float(np.median(per_class)),
            "most": int(per_class.max()),
        }
        summary["empty_classes"] = [split.source.class_ids[label] for label in np.flatnonzero(per_class == 0)]
    return summary


def _missing_classes(first: CheckedSplit, split: CheckedSplit) -> dict[str, Any]:
    """Return the classes with images in the first split and none in this split."""
    if split is first or not len(split.source.class_ids):
        return {}
    classes = {split.source.class_ids[label] for label in np.flatnonzero(split.per_class)}
    of_first = [first.source.class_ids[label] for label in np.flatnonzero(first.per_class)]
    return {f"classes_of_{first.name}_lacking": [class_id for class_id in of_first if class_id not in classes]}


def _lines(name: str, summary: dict[str, Any]) -> list[str]:
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in summary["kinds"].items())
    images = counted(summary["examples"], summary["made_of"])
    lines = [f"{name}: {images} ({kinds or 'none readable'}), {summary['faults']:,} cannot be used"]
    if summary["faults"] and (advice := _ADVICE.get(summary["made_of"])):
        lines.append(f"{name}: repair or replace the images that cannot be used, or {advice}")
    if balance := summary.get("images_a_class"):
        least, most = balance["least"], balance["most"]
        median = f", median {balance['median']:,g}" if least < most else ""
        images_a_class = f"{span(least, most)} {plural(most, 'image')} a class{median}"
        lines.append(f"{name}: {counted(summary['classes'], 'class')}, {images_a_class}")
    for key, classes in summary.items():
        if isinstance(classes, list) and classes:
            lines.append(f"{name}: {key.replace('_', ' ')}: {len(classes):,} ({some(classes)})")
    for kind, n in summary["notes"].items():
        lines.append(f"{name}: {'warning' if kind in WARNINGS else 'note'}: {kind}: {n:,}")
    return lines
