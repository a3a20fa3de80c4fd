"""Writes the manifest of a check as JSON lines: first a line about the data set, then a line for each image."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

from jaxddp.core.errors import InputError
from jaxddp.core.files import readable_errors, replace
from jaxddp.curate.check_report import CheckedSplit, CheckReport
from jaxddp.data.soundness.image_manifest import VERSION, manifest_name


def manifest_path(root: Path, override: Path | None) -> Path:
    """Return the path of a data set's manifest: `override`, or a file named after the root in the working directory.

    Raises: InputError if the file cannot be written, or the default path is inside the data set.
    """
    path = (override or Path(manifest_name(root))).absolute()
    if override is None and path.resolve().is_relative_to(root.resolve()):
        raise InputError(f"{path}: is inside the data set; give the manifest's place with --manifest")
    if path.is_dir():
        raise InputError(f"{path}: is a directory; give --manifest a file")
    # Test writing here. Otherwise an error would appear only after the check, which may take an hour.
    with readable_errors(path):
        probe = path.with_name(f".{path.name}.tmp")
        probe.touch()
        probe.unlink()
    return path


def write_manifest(report: CheckReport, path: Path) -> None:
    """Write the manifest atomically. Raises: InputError if it cannot be written.

    The first line holds `manifest`, the version of the format; `splits`, the summary of each split; and `refused`, a
    message for each row or file that was rejected. Each other line describes an image, in the order of the rows; a
    missing value is null.
    """
    images = (_image(split, row) for split in report.splits for row in range(len(split.source)))
    lines = chain([{"manifest": VERSION, "splits": report.summary(), "refused": report.refused}], images)
    replace(path, (json.dumps(line).encode() + b"\n" for line in lines))


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
