"""Images in tar files of WebDataset: their samples, which are found once and saved for later runs, and their store.

A sample consists of files that follow each other and share a key. The key of `a/b/000017.cls` is `a/b/000017`: the path
up to the first dot of the file's name. A sample has one image and a label: a file `cls` with a number or a name, or a
file `json` with a field `label` or `cls`. The offset of an image is the position of the header block before it.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.files import cache_folder, in_turn
from jaxddp.core.phases import doing, moved
from jaxddp.core.wording import counted, show
from jaxddp.data.faults import Refuse
from jaxddp.data.storage.records import Columns, load_or_build_columns
from jaxddp.data.storage.shards import ShardFile, ShardFolder
from jaxddp.data.storage.store import Fault

IMAGES = frozenset({"jpg", "jpeg", "jpe", "jfif", "png", "webp", "tif", "tiff", "bmp", "ppm", "pgm"})
_OTHER_IMAGES = frozenset({"gif", "heic", "avif", "jxl"})
_LABEL_FIELDS = ("label", "cls")
_LONGEST = 1 << 20
"""The largest size of a file with a label, and of an extended header, in bytes."""
BLOCK = tarfile.BLOCKSIZE
_ADVICE = "write the sample again, or leave it out"
WRITE_AGAIN = "download the shard again, or write it again"
_FORMAT = 1
_THREADS = 16
_SECONDS = 3600.0
"""The longest wait for another process of this machine that indexes the same files; then this process indexes them."""
_COUNT = "count"


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


@dataclass
class _Sample:
    key: str
    images: list[tarfile.TarInfo] = field(default_factory=list)
    label: str | None = None
    fields: list[str] = field(default_factory=list)
    """The suffixes of all files of the sample."""


def find_samples(file: BinaryIO, size: int, name: str) -> tuple[Samples, list[str]]:
    """Read the headers and the labels of a shard; no image is read.

    Long names are read in the formats of GNU and POSIX (pax). Folders, and files whose names begin with a dot, are
    ignored.

    Args:
        size: the size of the shard in bytes.
        name: a readable name of the shard, for messages.

    Returns: the samples, and a message for each fault of the shard or of a sample.
    """
    rows: list[tuple[bytes, bytes, int, int, bytes]] = []
    faults: list[str] = []
    seen: set[str] = set()
    try:
        for sample in _samples(file, size):
            try:
                if sample.key in seen:
                    raise InputError("its key is that of an earlier sample; give each sample a key of its own")
                rows.append(_row(sample))
            except InputError as error:
                faults.append(f"{name}, sample {sample.key}: {error}")
            seen.add(sample.key)
    except InputError as error:
        faults.append(f"{name}: {error}")
    # For damaged extended headers, `tarfile` also raises these errors.
    except (tarfile.TarError, ValueError, IndexError, KeyError, RecursionError, OverflowError) as error:
        faults.append(f"{name}: damaged, or not a tar file without compression ({error}); {WRITE_AGAIN}")
    if not seen and not faults:
        faults.append(f"{name}: holds no sample; {WRITE_AGAIN}")
    keys, suffixes, offsets, lengths, labels = zip(*rows, strict=True) if rows else ((),) * 5
    numbers = (np.array(offsets, np.int64), np.array(lengths, np.int64))
    return Samples(np.array(keys, "S"), np.array(suffixes, "S"), *numbers, np.array(labels, "S")), faults


def _samples(file: BinaryIO, size: int) -> Iterator[_Sample]:
    """Yield the samples of a tar file. Raises: InputError, or an error of `tarfile`, if the file is damaged."""
    sample: _Sample | None = None
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
            key, suffix = _key_and_suffix(member.name)
            is_file = bool(key) and not member.isdir()
            if is_file and (sample is None or key != sample.key):
                if sample is not None:
                    yield sample
                sample = _Sample(key)
            if end > size:
                raise InputError(f"cut short in {show(member.name)}, at byte {size:,}; {WRITE_AGAIN}")
            if is_file and sample is not None:
                _add(sample, suffix, member, tar)
        # The last sample before damage may lack its image or its label.
        _check_end(file, tar.offset, size)
        if sample is not None:
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


def _key_and_suffix(name: str) -> tuple[str, str]:
    """Return (key, suffix in lower case) of the path of a file; an empty key if its name begins with a dot."""
    folder, slash, last = name.rpartition("/")
    first, _, suffix = last.partition(".")
    return (folder + slash + first if first else ""), suffix.lower()


def _add(sample: _Sample, suffix: str, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
    # A label in a file of its own has precedence over one among other fields.
    is_label = suffix == "cls" or (suffix == "json" and "cls" not in sample.fields)
    sample.fields.append(suffix)
    if suffix in IMAGES:
        sample.images.append(member)
    elif is_label and member.isreg() and member.size <= _LONGEST:
        content = tar.extractfile(member)
        text = _label(content.read() if content else b"", suffix)
        sample.label = sample.label if text is None else text


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


def _row(sample: _Sample) -> tuple[bytes, bytes, int, int, bytes]:
    """Return the columns of `Samples` for a sample. Raises: InputError if the sample cannot be used."""
    if len(sample.images) > 1:
        names = " and ".join(show(image.name) for image in sample.images[:2])
        raise InputError(f"has two images, {names}; keep one image per sample")
    if not sample.images:
        other = next((suffix for suffix in sample.fields if suffix in _OTHER_IMAGES), None)
        if other:
            raise InputError(f"its image type .{other} is not supported; convert it to JPEG or PNG")
        raise InputError(f"has no image, but .{', .'.join(sample.fields)}; {_ADVICE}")
    (image,) = sample.images
    if not image.isreg() or image.issparse():
        raise InputError(f"its image {show(image.name)} is a link or a sparse file; {_ADVICE}")
    if "size" in image.pax_headers:
        raise InputError(f"its image {show(image.name)} has its size in an extended header; {_ADVICE}")
    if not image.size:
        raise InputError(f"its image {show(image.name)} is empty; {_ADVICE}")
    if sample.label is None:
        raise InputError(f"has no label; add {show(sample.key + '.cls')}, or a field label to its json")
    try:
        key, label = sample.key.encode(), sample.label.encode()
    except UnicodeEncodeError:
        raise InputError("its key is not UTF-8; rename it") from None
    suffix = image.name[len(sample.key) + 1 :].encode()
    return key, suffix, image.offset_data - BLOCK, image.size, label


def _check_end(file: BinaryIO, offset: int, size: int) -> None:
    """Check that only zeros follow the last file. `tarfile` stops at a damaged or zeroed header without an error.

    Raises: InputError.
    """
    file.seek(offset)
    block = file.read(tarfile.RECORDSIZE)
    if not block:
        raise InputError(f"cut short: no end of the archive at byte {size:,}; {WRITE_AGAIN}")
    if block.strip(b"\0") or len(block) < BLOCK:
        raise InputError(f"damaged: no header of a file at byte {offset:,} of {size:,}; {WRITE_AGAIN}")


class TarFiles:
    """Tar files in a folder, or below a URL. An offset is the position of an image's header in its file.

    Args:
        samples: the samples of each file, by path. Their offsets ascend.
    """

    def __init__(self, folder: ShardFolder, samples: Mapping[bytes, Samples]):
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
            data = self.folder.read(os.fsdecode(path), offset, BLOCK + length)
        if _length(data) != length:
            raise InputError(f"{name}: the shard has changed since it was indexed; start again")
        if len(data) < BLOCK + length:
            raise InputError(f"{name}: cut short; {WRITE_AGAIN}")
        return data[BLOCK:]

    def in_graph(self) -> Callable[[Any, Any], Any] | None:
        return None if self.root is None else _read_op

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        return self.folder.faults(paths, identity)

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
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        length = _length(os.pread(file, BLOCK, int(offset))) or 0
        # The size of a damaged header may be larger than the memory.
        return os.pread(file, min(length, os.fstat(file).st_size), int(offset) + BLOCK) if length > 0 else b""
    except OSError:
        return b""
    finally:
        os.close(file)


def _length(data: bytes) -> int | None:
    """Return the size in the header at the beginning of `data`; None if there is no header with a right checksum."""
    with suppress(tarfile.HeaderError):
        return tarfile.TarInfo.frombuf(data[:BLOCK], "utf-8", "surrogateescape").size


class _Faulty(Exception):
    """Raised with the samples and the faults of shards, whose index is not saved: faults are reported each time."""

    def __init__(self, samples: dict[str, Samples], faults: list[str]):
        super().__init__()
        self.samples, self.faults = samples, faults


def load_or_build_samples(folder: ShardFolder, paths: Sequence[str], refuse: Refuse) -> dict[str, Samples]:
    """Return the samples of each shard, by path; a shard without samples that can be used is left out.

    The first call reads the headers and the labels of all shards. It saves the result beside the shards or, where that
    folder cannot be written, in the cache folder. The index depends on the name, the size and the time of change of
    the shards.

    Args:
        refuse: called with a message for each fault.

    Raises: InputError if no sample can be used, or `refuse` raises it.
    """
    states: dict[str, tuple[int, str]] = {}
    for path in paths:
        try:
            states[path] = folder.state(path)
        except FileNotFoundError:
            refuse(f"{folder.name(path)}: no such shard; download it again, or correct the pattern")
    none_usable = f"{folder.name()}: no sample of {counted(len(paths), 'shard')} can be used; repair a shard"
    if not states:
        raise InputError(none_usable)
    digest = hashlib.sha256("\n".join([folder.name(), *paths]).encode(errors="surrogateescape")).hexdigest()[:16]
    file = f"shards-{digest}.jaxddp-index"
    places = [cache_folder() / file]
    if folder.root is not None:
        # The name depends on no absolute path, so the index of a moved folder is found.
        names = hashlib.sha256("\n".join(paths).encode(errors="surrogateescape")).hexdigest()[:16]
        places.insert(0, folder.root / f"shards-{names}.jaxddp-index")
    stamp = json.dumps([_FORMAT, *states.items()])
    with in_turn(cache_folder() / f"{file}.lock", _SECONDS, "indexing the shards"):
        try:
            columns = load_or_build_columns(places, stamp, lambda: _build(folder, states))
            samples = _samples_by_shard(columns, [*states])
        except _Faulty as faulty:
            samples = faulty.samples
            for fault in faulty.faults:
                refuse(fault)
    if not samples:
        raise InputError(none_usable)
    return samples


def _build(folder: ShardFolder, states: dict[str, tuple[int, str]]) -> Columns:
    """Read all shards. Raises: _Faulty."""

    def read(path: str) -> tuple[Samples, list[str]] | InputError:
        file = ShardFile(folder, path)
        try:
            with folder.open(path) as opened:
                return find_samples(opened, states[path][0], str(file))
        except InputError as error:
            return error
        except OSError as error:
            return InputError(f"{file}: cannot be read ({error.strerror}); make it a readable file")

    samples, faults = dict[str, Samples](), list[str]()
    with ThreadPoolExecutor(_THREADS) as pool:
        total, results = counted(len(states), "shard"), pool.map(read, states)
        for done, path in enumerate(states):
            with doing(f"indexing {total}, once: {done:,} done"):
                result = next(results)
            moved()
            if isinstance(result, InputError):
                faults.append(str(result))
                continue
            samples[path] = result[0]
            faults += result[1]
    if faults:
        raise _Faulty({path: part for path, part in samples.items() if len(part.key)}, faults)
    return _joined([*samples.values()])


def _joined(samples: Sequence[Samples]) -> Columns:
    columns = {name: np.concatenate([getattr(part, name) for part in samples]) for name in Samples._fields}
    return {**columns, _COUNT: np.array([len(part.key) for part in samples], np.int64)}


def _samples_by_shard(columns: Columns, paths: Sequence[str]) -> dict[str, Samples]:
    ends = np.cumsum(columns[_COUNT])[:-1]
    parts = zip(*(np.split(columns[name], ends) for name in Samples._fields), strict=True)
    return dict(zip(paths, map(Samples._make, parts), strict=True))
