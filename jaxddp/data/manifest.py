"""The manifest of `jaxddp data check`, and the comparison of images with it.

A manifest is a JSON Lines file, written by `jaxddp.curate`. The first line describes the data set, and
each further line describes one image.
"""

import hashlib
import logging
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key, counted
from jaxddp.data.soundness import Digests
from jaxddp.data.source import Splits
from jaxddp.data.storage.root import is_address
from jaxddp.data.table import ExampleTable

VERSION = 1
_WRITE_AGAIN = "write it again with `jaxddp data check`"
_NO_DIGEST = bytes(32)
_log = logging.getLogger("jaxddp.data")


@dataclass(frozen=True)
class ImageManifest:
    """The SHA-256 digests, 32 bytes each, of the images that `jaxddp data check` could read.

    Attributes:
        of_files: digests of image files, by (file, offset); the offset is 0 if the whole file is the image. If two
            splits have folders of their own, that of the same file in the later one is by (file, offset, split).
        of_pixels: digests of images in arrays.
    """

    file: Path
    of_files: dict[tuple[bytes | int | str, ...], bytes] = field(default_factory=dict)
    of_pixels: set[bytes] = field(default_factory=set)

    @classmethod
    def read(cls, file: Path) -> "ImageManifest":
        """Read a manifest. Raises: InputError with the path, if the file is missing or a line is invalid."""
        manifest, number = cls(file), 1
        missing = ("no such file; give ", Key("data.manifest"), " what `jaxddp data check` wrote")
        with files.reading(file, _WRITE_AGAIN, missing=missing), files.open_regular(file, buffering=-1) as lines:
            try:
                if files.parse_json(next(lines, b"{}"))["manifest"] != VERSION:
                    raise ValueError
                for number, line in enumerate(lines, 2):  # noqa: B007
                    image = files.parse_json(line)
                    digest = bytes.fromhex(image["sha256"] or "")
                    if len(digest) not in (0, len(_NO_DIGEST)):
                        raise ValueError
                    if digest and image["path"] is None:
                        manifest.of_pixels.add(digest)
                    elif digest:
                        place = os.fsencode(image["path"]), int(image["offset"] or 0)
                        if manifest.of_files.setdefault(place, digest) != digest:
                            manifest.of_files[*place, image["split"]] = digest
            except (ValueError, ArithmeticError, KeyError, TypeError):
                raise InputError(f"{file}, line {number}: not a line of a manifest; {_WRITE_AGAIN}") from None
        return manifest


def manifest_name(address: str | os.PathLike[str]) -> str:
    """Return the default file name of a data set's manifest, from its path or URL."""
    return f"{Path(address).resolve().name or 'data'}.manifest.jsonl"


def find_manifest(address: str, wanted: str | None) -> Path:
    """Return the path of a manifest: `wanted`, or a file in the working directory or beside the data set.

    Raises: InputError if there is none.
    """
    if wanted is not None:
        return files.expanded(wanted).absolute()
    folders = [Path.cwd(), *([] if is_address(address) else [files.expanded(address).resolve().parent])]
    name = manifest_name(address)
    if manifest := next((folder / name for folder in folders if (folder / name).is_file()), None):
        return manifest
    fault = f": no {name} in {' or '.join(dict.fromkeys(map(str, folders)))}"
    advice = f"run `jaxddp data check {address}`, or give ", Key("data.manifest")
    raise InputError(Key.plain("data.verify", "manifest"), fault, advice=advice)


def compare_with_manifest(splits: Splits, manifest: ImageManifest, data: DataConfig) -> Splits:
    """Return the splits with the checksums of a manifest. Files are compared when they are read, arrays immediately.

    Raises:
        InputError: the manifest has no digest of an image that may not be substituted, or of an image in an array.
    """
    compared = dict(splits)
    for split, source in splits.items():
        if isinstance(source, ExampleTable):
            offsets = [0] * len(source) if source.offset is None else source.offset.tolist()
            places = zip(source.path.tolist(), offsets, strict=True)
            known = manifest.of_files
            sha256 = [known.get((*place, split)) or known.get(place, _NO_DIGEST) for place in places]
            compared[split] = replace(source, digests=Digests(str(manifest.file), np.array(sha256, "V32")))
            missing = [row for row, digest in enumerate(sha256) if digest == _NO_DIGEST]
            if len(missing) and (split != "train" or data.bad_images == "fail"):
                others = f", nor {counted(len(missing) - 1, 'other')}" if len(missing) > 1 else ""
                fault = f"{manifest.file} does not list it{others}; run `jaxddp data check` again"
                raise InputError(f"{source.name(missing[0])}: {fault}")
        elif source.pixel_shape is None:
            _log.warning(f"data.verify=manifest: the {split} images are not compared with {manifest.file}")
        else:
            # The table may be a part of the data set in the manifest, so digests are looked up in a set.
            for row in range(len(source)):
                digest = hashlib.sha256(source.read(row)).digest()
                if digest not in manifest.of_pixels:
                    fault = f"{manifest.file} lists no image with these pixels (SHA-256 {digest.hex()[:12]}…)"
                    advice = "restore the data or, if the change is intended, run `jaxddp data check` again"
                    raise InputError(f"{source.name(row)}: {fault}; {advice}")
    return compared
