"""`TarFiles`: reads images from tar files at known positions.

The offset of an image is the position of the header block before it.
"""

import os
import tarfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.data.storage.shards import ShardFolder
from jaxddp.data.storage.store import Fault
from jaxddp.data.storage.tar_samples import BLOCK, WRITE_AGAIN, Samples


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
