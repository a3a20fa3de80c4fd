"""Images in tar files of WebDataset: their samples, which are found once and saved for later runs, and their store.

A sample consists of files that follow each other and share a key. The key of `a/b/000017.cls` is `a/b/000017`: the path
up to the first dot of the file's name. A sample has one image and a label: a file `cls` with a number or a name, or a
file `json` with a field `label` or `cls`. The offset of an image is the position of the header block before it.
"""

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, counted, show
from jaxddp.data.faults import Refuse
from jaxddp.data.storage.root import Folder
from jaxddp.data.storage.shards import Columns, load_or_build_index
from jaxddp.data.storage.store import Fault, faults_of_shards

IMAGES = frozenset({"jpg", "jpeg", "jpe", "jfif", "png", "webp", "tif", "tiff", "bmp", "ppm", "pgm"})
_LABEL_FIELDS = ("label", "cls")
_LONGEST = 1 << 20
"""The largest size of a file with a label, and of an extended header, in bytes."""
BLOCK = tarfile.BLOCKSIZE
_ADVICE = "write the sample again, or leave it out"
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


@dataclass
class _Sample:
    key: str
    images: list[tarfile.TarInfo] = field(default_factory=list)
    label: str | None = None
    fields: list[str] = field(default_factory=list)
    """The suffixes of all files of the sample."""

    def add(self, suffix: str, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        # A label in a file of its own has precedence over one among other fields.
        is_label = suffix == "cls" or (suffix == "json" and "cls" not in self.fields)
        self.fields.append(suffix)
        if suffix in IMAGES:
            self.images.append(member)
        elif is_label and member.isreg() and member.size <= _LONGEST:
            content = tar.extractfile(member)
            self.label = _label(content.read() if content else b"", suffix) or self.label

    def row(self) -> tuple[bytes, bytes, int, int, bytes]:
        """Return the columns of `Samples`. Raises: InputError if the sample cannot be used."""
        if len(self.images) > 1:
            names = " and ".join(show(image.name) for image in self.images[:2])
            raise InputError(f"has two images, {names}; keep one image per sample")
        if not self.images:
            raise InputError(f"has no image of a supported type, but .{', .'.join(self.fields)}; {_ADVICE}")
        (image,) = self.images
        if not image.isreg() or image.issparse() or "size" in image.pax_headers or not image.size:
            raise InputError(f"its image {show(image.name)} is empty, or a link or sparse file; {_ADVICE}")
        if self.label is None:
            raise InputError(f"has no label; add {show(self.key + '.cls')}, or a field label to its json")
        try:
            key, label = self.key.encode(), self.label.encode()
        except UnicodeEncodeError:
            raise InputError("its key is not UTF-8; rename it") from None
        return key, image.name[len(self.key) + 1 :].encode(), image.offset_data - BLOCK, image.size, label


def find_samples(file: BinaryIO, size: int, name: str) -> tuple[Samples, list[str]]:
    """Read the headers and the labels of a shard; no image is read.

    Long names are read in the formats of GNU and POSIX (pax). Folders, and files whose names begin with a dot, are
    ignored.

    Args:
        size: the size of the shard in bytes.
        name: a readable name of the shard, for messages.

    Returns: the samples, and a message for each fault of the shard or of a sample.
    """
    rows: dict[str, tuple[bytes, bytes, int, int, bytes] | None] = {}
    faults: list[str] = []
    try:
        for sample in _samples(file, size):
            try:
                if sample.key in rows:
                    raise InputError("its key is that of an earlier sample; give each sample a key of its own")
                rows[sample.key] = None
                rows[sample.key] = sample.row()
            except InputError as error:
                faults.append(f"{name}, sample {sample.key}: {error}")
    except InputError as error:
        faults.append(f"{name}: {error}")
    # For damaged extended headers, `tarfile` also raises these errors.
    except (tarfile.TarError, ValueError, LookupError, RecursionError, OverflowError) as error:
        faults.append(f"{name}: damaged, or not a tar file without compression ({error}); {WRITE_AGAIN}")
    if not rows and not faults:
        faults.append(f"{name}: holds no sample; {WRITE_AGAIN}")
    columns = [*zip(*filter(None, rows.values()), strict=True)] or [()] * len(_KINDS)
    return Samples(*map(np.array, columns, _KINDS)), faults


def _samples(file: BinaryIO, size: int) -> Iterator[_Sample]:
    """Yield the samples of a tar file. Raises: InputError, or an error of `tarfile`, if the file is damaged."""
    sample = _Sample("")
    end = 0
    bounded: Any = _Bounded(file)
    with tarfile.open(fileobj=bounded, mode="r:", errors="surrogateescape") as tar:
        while (member := tar.next()) is not None:
            # The archive would keep all its members in memory.
            tar.members.clear()  # pyright: ignore[reportAttributeAccessIssue]: typeshed lacks it
            # A header may have a negative size, also in an extended header. `tarfile` then reads the same headers for
            # ever (CVE-2025-8194).
            if member.size < 0 or tar.offset <= end:
                raise InputError(f"damaged: {show(member.name)} has {member.size:,} bytes; {WRITE_AGAIN}")
            end = tar.offset
            folder, slash, last = member.name.rpartition("/")
            first, _, suffix = last.partition(".")
            key, is_file = folder + slash + first, bool(first) and not member.isdir()
            if is_file and key != sample.key:
                if sample.key:
                    yield sample
                sample = _Sample(key)
            if end > size:
                raise InputError(f"cut short in {show(member.name)}, at byte {size:,}; {WRITE_AGAIN}")
            if is_file:
                sample.add(suffix.lower(), member, tar)
        # The last sample before damage may lack its image or its label. `tarfile` stops at a damaged or zeroed header
        # without an error, so only zeros may follow.
        file.seek(tar.offset)
        block = file.read(tarfile.RECORDSIZE)
        if block.strip(b"\0") or len(block) < BLOCK:
            raise InputError(f"damaged: no header of a file at byte {tar.offset:,} of {size:,}; {WRITE_AGAIN}")
        if sample.key:
            yield sample


@dataclass(frozen=True)
class _Bounded:
    """A file for `tarfile`, which reads extended headers at once, with the size that a header states."""

    file: BinaryIO

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _LONGEST:
            raise InputError(f"damaged: an extended header of {size:,} bytes; {WRITE_AGAIN}")
        return self.file.read(size)

    def seek(self, offset: int) -> int:
        return self.file.seek(offset)

    def tell(self) -> int:
        return self.file.tell()


def _label(content: bytes, suffix: str) -> str | None:
    """Return the text of a label; None if there is none."""
    try:
        if suffix == "cls":
            return content.decode().strip() or None
        fields = files.parse_json(content)
    except ValueError:
        return None
    values = [fields.get(name) for name in _LABEL_FIELDS] if isinstance(fields, dict) else [fields]
    for value in values:
        if isinstance(value, str | int) and not isinstance(value, bool):
            return str(value).strip() or None
    return None


class TarFiles:
    """Tar files in a folder, or below a URL. An offset is the position of an image's header in its file.

    Args:
        samples: the samples of each file, by path. Their offsets ascend.
    """

    def __init__(self, folder: Folder, samples: Mapping[bytes, Samples]):
        self.folder, self._samples = folder, samples

    @property
    def root(self) -> Path | None:
        return self.folder.root

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

    def in_graph(self) -> Callable[[Any, Any], Any] | None:
        return None if self.root is None else _read_op

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        return faults_of_shards(self.folder, paths, identity)

    def _row(self, path: bytes, offset: int) -> int:
        return int(np.searchsorted(self._samples[path].offset, offset))


def _read_op(path: Any, offset: Any) -> Any:
    """Read one image with a Python function, because TensorFlow has no op that reads a range of bytes."""
    from jaxddp.data.stream.tensorflow_cpu import tf

    return tf.ensure_shape(tf.numpy_function(_read_image, [path, offset], tf.string), [])


def _read_image(path: bytes, offset: np.int64) -> bytes:
    """Return the image whose header is at an offset; no bytes if it cannot be read.

    TensorFlow would print the traceback of an error. No bytes are no image, so `TarFiles.read` then finds the fault.
    """
    with suppress(OSError), files.open_regular(os.fsdecode(path), buffering=0) as file:
        length = _length(os.pread(file.fileno(), BLOCK, int(offset))) or 0
        # The size of a damaged header may be larger than the memory.
        length = min(length, os.fstat(file.fileno()).st_size)
        return os.pread(file.fileno(), length, int(offset) + BLOCK) if length > 0 else b""
    return b""


def _length(data: bytes) -> int | None:
    """Return the size in the header at the beginning of `data`; None if there is no header with a right checksum."""
    with suppress(tarfile.HeaderError):
        return tarfile.TarInfo.frombuf(data[:BLOCK], "utf-8", "surrogateescape").size


def load_or_build_samples(folder: Folder, paths: Sequence[str], refuse: Refuse) -> dict[str, Samples]:
    """Return the samples of each shard, by path; a shard without samples that can be used is left out.

    The first call reads the headers and the labels of all shards; see `load_or_build_index`.

    Raises: InputError if no sample can be used, or `refuse` raises it.
    """

    def read(path: str, size: int) -> tuple[Columns, list[str]]:
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
