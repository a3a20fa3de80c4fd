"""Images in tar files of WebDataset: their samples, which are found once and saved for later runs, and their store.

A sample consists of files that follow each other and share a key. The key of `a/b/000017.cls` is `a/b/000017`: the path
up to the first dot of the file's name. A sample has one image and a label: a file `cls` with a number or a name, or a
file `json` with a field `label` or `cls`. The offset of an image is the position of the header block before it.
"""

import hashlib
import io
import itertools
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, counted, show
from jaxddp.data.faults import Refuse
from jaxddp.data.storage.root import Folder
from jaxddp.data.storage.shards import Contents, load_or_build_index
from jaxddp.data.storage.store import ShardStore

_SUFFIXES = "jpg jpeg jpe jfif png webp tif tiff bmp ppm pgm gif avif heic heif"
IMAGES = frozenset(_SUFFIXES.split())
_LABEL_FIELDS = ("label", "cls")
_LONGEST = 1 << 20
"""The largest size of a file with a label, and of an extended header, in bytes."""
BLOCK = tarfile.BLOCKSIZE
_ADVICE = "write the sample again, or leave it out"
_REPEATED = "its key is that of an earlier sample; keep a sample's files together (tar --sort=name), and keys different"
WRITE_AGAIN = "download the shard again, or write it again"


class Samples(NamedTuple):
    """The N samples of a shard that can be used."""

    key: np.ndarray
    """bytes 'S'[N]."""
    suffix: np.ndarray
    """bytes 'S'[N], the suffix of the image's name, such as `jpg`."""
    offset: np.ndarray
    """int64[N], the position of the last header block of the image."""
    length: np.ndarray
    """int64[N], the size of the image in bytes."""
    label: np.ndarray
    """bytes 'S'[N], the text of the label in UTF-8."""


_KINDS = ("S", "S", np.int64, np.int64, "S")


def find_samples(file: Any, size: int, name: str) -> tuple[Samples, list[str]]:
    """Read the headers and the labels of a shard; no image is read.

    Long names may be GNU's or POSIX's (pax). Folders, and files whose names begin with a dot, are ignored.

    Args:
        file: a binary file; its reads need not be buffered.
        size: the size of the shard in bytes.
        name: a readable name of the shard, for messages.

    Returns: the samples, and a message for each fault of the shard or of a sample.
    """
    rows: dict[str, tuple[bytes, bytes, int, int, bytes] | None] = {}
    faults: list[str] = []
    try:
        with tarfile.open(fileobj=_Bounded(file, BLOCK), mode="r:", errors="surrogateescape") as tar:
            for key, group in itertools.groupby(_members(tar, file, size), _key):
                members = [*group]
                try:
                    if key in rows:
                        raise InputError(_REPEATED)
                    rows[key] = None
                    rows[key] = _row(key, members, tar)
                except InputError as error:
                    faults.append(f"{name}, sample {key}: {error}")
    except InputError as error:
        faults.append(f"{name}: {str(error).removeprefix(f'{name}: ')}")
    # For damaged extended headers, `tarfile` also raises these errors.
    except (tarfile.TarError, ValueError, LookupError, RecursionError, OverflowError) as error:
        faults.append(f"{name}: damaged, or not a tar file without compression ({error}); {WRITE_AGAIN}")
    if not rows and not faults:
        faults.append(f"{name}: holds no sample; {WRITE_AGAIN}")
    columns = [*zip(*filter(None, rows.values()), strict=True)] or [()] * len(_KINDS)
    # If files are not in the order of names, samples also lack the label that is elsewhere in the shard.
    return Samples(*map(np.array, columns, _KINDS)), sorted(faults, key=lambda fault: not fault.endswith(_REPEATED))


class _Bounded(io.BufferedReader):
    """A file for `tarfile`, which reads extended headers at once, with the size that a header states."""

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _LONGEST:
            raise InputError(f"damaged: an extended header of {size:,} bytes; {WRITE_AGAIN}")
        return super().read(size)


def _key(member: tarfile.TarInfo) -> str:
    folder, slash, last = member.name.rpartition("/")
    return folder + slash + last.partition(".")[0]


def _members(tar: tarfile.TarFile, file: BinaryIO, size: int) -> Iterator[tarfile.TarInfo]:
    """Yield the files of a tar file. Raises: InputError, or an error of `tarfile`, if the tar file is damaged."""
    end = 0
    while (member := tar.next()) is not None:
        # The archive would keep all its members in memory.
        tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]: typeshed lacks it
        # A header may have a negative size, also in an extended header. `tarfile` then reads the same headers for
        # ever (CVE-2025-8194).
        if member.size < 0 or tar.offset <= end:
            raise InputError(f"damaged: {show(member.name)} has {member.size:,} bytes; {WRITE_AGAIN}")
        end = tar.offset
        if end > size:
            raise InputError(f"cut short in {show(member.name)}, at byte {size:,}; {WRITE_AGAIN}")
        if not member.isdir() and not member.name.rpartition("/")[2].startswith("."):
            yield member
    # The last sample before damage may lack its image or its label. `tarfile` stops at a damaged or zeroed header
    # without an error, also behind an extended header, so only zeros may follow the last file.
    file.seek(end)
    block = file.read(tarfile.RECORDSIZE)
    if block.strip(b"\0") or len(block) < BLOCK:
        raise InputError(f"damaged: no header of a file at byte {end:,} of {size:,}; {WRITE_AGAIN}")


def _row(key: str, members: Sequence[tarfile.TarInfo], tar: tarfile.TarFile) -> tuple[bytes, bytes, int, int, bytes]:
    """Return the columns of `Samples` for the files of a sample. Raises: InputError if the sample cannot be used."""
    suffixes = [member.name[len(key) + 1 :].lower() for member in members]
    images = [member for member, suffix in zip(members, suffixes, strict=True) if suffix in IMAGES]
    if len(images) > 1:
        names = " and ".join(show(image.name) for image in images[:2])
        raise InputError(f"has two images, {names}; keep one image per sample")
    if not images:
        raise InputError(f"has no image of a supported type, but .{', .'.join(suffixes)}; {_ADVICE}")
    (image,) = images
    if not image.isreg() or image.issparse() or "size" in image.pax_headers or not image.size:
        raise InputError(f"its image {show(image.name)} is empty, or a link or sparse file; {_ADVICE}")
    label = None
    # A label in a file of its own has precedence over one among other fields.
    for kind in ("json", "cls"):
        for member, suffix in zip(members, suffixes, strict=True):
            if suffix == kind and member.isreg() and member.size <= _LONGEST and (file := tar.extractfile(member)):
                label = _label(file.read(), kind) or label
    if label is None:
        raise InputError(f"has no label; add {show(key + '.cls')}, or a field label to its json")
    try:
        return key.encode(), image.name[len(key) + 1 :].encode(), image.offset_data - BLOCK, image.size, label.encode()
    except UnicodeEncodeError:
        raise InputError("its key is not UTF-8; rename it") from None


def _label(content: bytes, suffix: str) -> str | None:
    """Return the text of a label; None if there is none."""
    try:
        if suffix == "cls":
            return content.decode().strip() or None
        fields = files.parse_json(content)
    except ValueError:
        return None
    values = [fields.get(name) for name in _LABEL_FIELDS] if isinstance(fields, dict) else [fields]
    texts = (str(value).strip() for value in values if isinstance(value, str | int) and not isinstance(value, bool))
    return next(texts, None) or None


class TarFiles(ShardStore):
    """Tar files in a folder, or below a URL. An offset is the position of an image's header in its file.

    Args:
        samples: the samples of each file, by path. Their offsets ascend.
    """

    def __init__(self, folder: Folder, samples: Mapping[bytes, Samples]):
        self.folder, self._samples = folder, samples

    def name(self, path: bytes, offset: int = 0) -> str:
        samples, row = self._samples[path], self._row(path, offset)
        image = os.fsdecode(samples.key[row] + b"." + samples.suffix[row])
        return f"{self.folder.name(os.fsdecode(path))}, {image}"

    def read(self, path: bytes, offset: int = 0) -> bytes:
        name, length = self.name(path, offset), int(self._samples[path].length[self._row(path, offset)])
        with files.reading(name, WRITE_AGAIN, missing=f"its shard is missing; {WRITE_AGAIN}"):
            data = self.folder.read_range(os.fsdecode(path), offset, BLOCK + length)
        if _length(data) != length:
            raise InputError(f"{name}: the shard has changed since it was indexed; start again")
        if len(data) < BLOCK + length:
            raise InputError(f"{name}: cut short; {WRITE_AGAIN}")
        return data[BLOCK:]

    def _row(self, path: bytes, offset: int) -> int:
        return int(np.searchsorted(self._samples[path].offset, offset))


def _length(data: bytes) -> int | None:
    """Return the size in the header at the beginning of `data`; None if there is no header with a right checksum."""
    with suppress(tarfile.HeaderError):
        return tarfile.TarInfo.frombuf(data[:BLOCK], "utf-8", "surrogateescape").size


def load_or_build_samples(folder: Folder, paths: Sequence[str], refuse: Refuse) -> dict[str, Samples]:
    """Return the samples of each shard, by path; a shard without samples that can be used is left out.

    The first call reads the headers and the labels of all shards; see `load_or_build_index`.

    Raises: InputError if no sample can be used, or `refuse` raises it.
    """

    def read(path: str, size: int) -> Contents:
        with folder.open(path) as file:
            samples, faults = find_samples(file, size, folder.name(path))
        return samples._asdict(), faults

    # The name depends on no absolute path, so the index of a moved folder is found.
    digest = hashlib.sha256("\n".join(paths).encode(errors="surrogateescape")).hexdigest()[:16]
    index = load_or_build_index(f"shards-{digest}", folder, paths, "", read, refuse)
    samples = {path: Samples(**columns) for path, columns in index.items() if len(columns["key"])}
    if not samples:
        raise InputError(f"{folder.name()}: no sample of {counted(len(paths), 'shard')} can be used; repair a shard")
    return samples
