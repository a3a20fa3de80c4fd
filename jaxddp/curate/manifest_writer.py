"""Writes the manifest of a check as JSON lines. The first describes the data set; each other describes one image."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

from jaxddp.core.errors import InputError
from jaxddp.core.files import readable_errors, replace
from jaxddp.curate.check_report import CheckedSplit, CheckReport
from jaxddp.data.soundness.image_manifest import VERSION, manifest_name


def manifest_place(root: Path, wanted: Path | None) -> Path:
    """Returns the place of a data set's manifest: `wanted`, or a file in the working directory, named after the root.

    Raises: InputError if it cannot be written, or the default place is inside the data set.
    """
    place = (wanted or Path(manifest_name(root))).absolute()
    if wanted is None and place.resolve().is_relative_to(root.resolve()):
        raise InputError(f"{place}: is inside the data set; give the manifest's place with --manifest")
    if place.is_dir():
        raise InputError(f"{place}: is a directory; give --manifest a file")
    # Without this test, an error of writing would appear only after an hour of reading.
    with readable_errors(place):
        probe = place.with_name(f".{place.name}.tmp")
        probe.touch()
        probe.unlink()
    return place


def write_manifest(report: CheckReport, place: Path) -> None:
    """Writes the whole manifest, or nothing. Raises: InputError if it cannot be written.

    The first line holds `manifest`, the version of the format; `splits`, the summary of each split; and `refused`, a
    message for each row or file that was rejected. The other lines are the images in the order of the rows; a missing
    value is null.
    """
    images = (_image(split, row) for split in report.splits for row in range(len(split.source)))
    lines = chain([{"manifest": VERSION, "splits": report.summary(), "refused": report.refused}], images)
    replace(place, (json.dumps(line).encode() + b"\n" for line in lines))


def _image(split: CheckedSplit, row: int) -> dict[str, Any]:
    column = split.columns[row]
    digest = column["sha256"].tobytes()
    return {
        "split": split.name,
        **split.source.record(row)._asdict(),
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
