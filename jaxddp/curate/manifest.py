"""The manifest of a check: JSON lines, the first of the data set, every other of one image."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxddp.curate.report import CheckedSplit, CheckReport
from jaxddp.data.arrays import ArrayTable
from jaxddp.errors import InputError
from jaxddp.files import readable_errors, replace

VERSION = 1


def manifest_place(root: Path, wanted: Path | None) -> Path:
    """Where the manifest of a data set goes: where it is wanted, else into the working directory, named after the root.

    Raises:
        InputError: it cannot be written there, or would unasked lie within the data set.
    """
    place = (wanted or Path(f"{root.resolve().name or 'data'}.manifest.jsonl")).absolute()
    if wanted is None and place.resolve().is_relative_to(root.resolve()):
        raise InputError(f"{place}: lies within the data set; say with --manifest where the manifest shall go")
    if place.is_dir():
        raise InputError(f"{place}: is a directory; give --manifest a file")
    # An hour of reading later is too late to find out.
    with readable_errors(place):
        probe = place.with_name(f".{place.name}.tmp")
        probe.touch()
        probe.unlink()
    return place


def write_manifest(report: CheckReport, place: Path) -> None:
    """Writes it whole, or not at all.

    The first line holds `manifest`, the version of the form, and `splits`, the figures of each with its table's
    fingerprint. The others hold `split`, `id`, `path` and `offset` as the table has them, `bytes`, `sha256`, `kind`,
    `height`, `width`, `mode`, `notes` and `fault`, null where there is none; in the order of the rows.

    Raises:
        InputError: it cannot be written.
    """
    replace(place, _lines(report))


def _lines(report: CheckReport) -> Iterator[bytes]:
    yield _line({"manifest": VERSION, "splits": report.summary()})
    for split in report.splits:
        for row in range(len(split.table)):
            yield _line(_image(split, row))


def _image(split: CheckedSplit, row: int) -> dict[str, Any]:
    table, column = split.table, split.columns[row]
    arrays = isinstance(table, ArrayTable)
    digest = column["sha256"].tobytes()
    return {
        "split": split.name,
        "id": row if arrays else os.fsdecode(table.id[row]),
        "path": None if arrays else os.fsdecode(table.path[row]),
        "offset": None if arrays or table.offset is None else int(table.offset[row]),
        "class": split.class_of(row),
        "bytes": int(column["bytes"]),
        "sha256": digest.hex() if any(digest) else None,
        "kind": column["kind"].decode() or None,
        "height": int(column["height"]) or None,
        "width": int(column["width"]) or None,
        "mode": column["mode"].decode() or None,
        "notes": split.notes.get(row, ()),
        "fault": split.faults.get(row),
    }


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
