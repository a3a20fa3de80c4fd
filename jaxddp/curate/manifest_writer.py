"""The manifest of a check: JSON lines, the first of the data set, every other of one image."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

from jaxddp.core.errors import InputError
from jaxddp.core.files import readable_errors, replace
from jaxddp.curate.check_report import CheckedSplit, CheckReport
from jaxddp.data.soundness.image_manifest import VERSION, manifest_name


def manifest_place(root: Path, wanted: Path | None) -> Path:
    """The place of a data set's manifest: as wanted, otherwise in the working directory, named after the root.

    Raises `InputError` where it cannot be written, or would be inside the data set without being wanted there.
    """
    place = (wanted or Path(manifest_name(root))).absolute()
    if wanted is None and place.resolve().is_relative_to(root.resolve()):
        raise InputError(f"{place}: is inside the data set; give the manifest's place with --manifest")
    if place.is_dir():
        raise InputError(f"{place}: is a directory; give --manifest a file")
    # Otherwise this would fail only after an hour of reading.
    with readable_errors(place):
        probe = place.with_name(f".{place.name}.tmp")
        probe.touch()
        probe.unlink()
    return place


def write_manifest(report: CheckReport, place: Path) -> None:
    """Writes the manifest whole, or not at all. Raises: InputError.

    The first line holds `manifest`, the version of the format, `splits`, the summary of each, and `refused`, a line for
    each fault of what lists the images. The others are the images in the order of the rows; a value is null where there
    is none.
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
