"""Read and write state dicts: .safetensors files, and PyTorch's .pth files in both of their formats, without PyTorch.

A .pth file holds a pickled object, whose tensors refer to storages, and the bytes of the storages. A pickle can name
any function of Python. This module resolves only the names that a state dict needs, and refuses all others, so reading
a file runs no code of it.

Source of the formats: `torch.save` of PyTorch 2.15, with and without `_use_new_zipfile_serialization`.
"""

import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, first_line

PICKLED = (".pth", ".pt", ".bin", ".ckpt", ".tar")
FORMS = "a .safetensors file, a .pth file of PyTorch's, or the work directory of a run"
_DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": ml_dtypes.bfloat16, "BOOL": "?"}
_DTYPES |= {f"F8_{kind}": f"float8_{name}" for kind, name in (("E4M3", "e4m3fn"), ("E5M2", "e5m2"))}
_DTYPES |= {f"{kind}{bits}": f"{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)}
_OF_STORAGE = {"DoubleStorage": "<f8", "FloatStorage": "<f4", "BFloat16Storage": ml_dtypes.bfloat16}
_OF_STORAGE |= {"HalfStorage": "<f2", "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2"}
_OF_STORAGE |= {"CharStorage": "i1", "ByteStorage": "u1", "BoolStorage": "?"}
# Arrays that PyTorch stores and no network reads: numbers of batches and of averages, and Swin's indices.
_UNREAD = ("num_batches_tracked", "n_averaged", "relative_position_index")
# Keys under which training scripts store a state dict. Averaged weights come first, as in timm.
_NESTING_KEYS = ("state_dict_ema", "model_ema", "state_dict", "model", "model_state_dict")
# Prefixes that module wrappers add to each name. Wrappers may be nested.
_WRAPPERS = ("module.", "_orig_mod.")
_ZIP_BEGIN = b"PK\x03\x04"
_OLD_MAGIC = 0x1950A86A20F9469CFC6C
_OLD_VERSION = 1001
# An expanded tensor repeats the elements of a small storage. It may have this many, or as many as the file has bytes.
_SMALL = 1 << 20


def read(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a file, by name, without PyTorch's counters and Swin's indices.

    A state dict may be nested: averaged weights under "state_dict_ema" or "model_ema", others under "state_dict",
    "model" or "model_state_dict". Prefixes "module." and "_orig_mod." that all names share are removed.

    Raises: InputError if the file is missing, damaged or of another kind; see also `read_state_dict`.
    """
    if path.suffix not in (".safetensors", *PICKLED) and os.path.exists(path):
        raise InputError(f"{path}: weights cannot be read from this kind of file; give {FORMS}")
    with files.reading(path, "give a readable file", missing=f"no such file; give {FORMS}"):
        arrays = read_state_dict(path) if path.suffix in PICKLED else _read_safetensors(path)
    arrays = {name: array for name, array in arrays.items() if not name.endswith(_UNREAD)}
    while wrapper := next((each for each in _WRAPPERS if arrays and all(name.startswith(each) for name in arrays)), ""):
        arrays = {name.removeprefix(wrapper): array for name, array in arrays.items()}
    return arrays


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a .safetensors file atomically, with metadata that marks PyTorch's layout for other libraries.

    Raises: InputError if the file cannot be written.
    """
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    files.replace(path, safetensors.numpy.save(dense, {"format": "pt"}))


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    arrays = {}
    try:
        # The library returns them in random order.
        for name, entry in sorted(safetensors.deserialize(files.read(path))):
            if entry["dtype"] not in _DTYPES:
                problem = f"{path}: {name} has dtype {entry['dtype']}, which cannot be read"
                raise InputError(problem, advice="save it as F32 or BF16")
            arrays[name] = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    except InputError:
        raise
    # NumPy refuses a shape such as (0, 2**62).
    except (safetensors.SafetensorError, ValueError) as error:
        raise InputError(f"{path}: not a complete .safetensors file ({error}); download it again") from None
    return arrays


class _Refused(Exception):
    """A pickle names a function or a class that no state dict needs."""


def read_state_dict(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a state dict by name, which may be nested; see `read`.

    bfloat16 tensors have the dtype of ml_dtypes.

    Raises:
        InputError: the file is damaged, is not a file of `torch.save`, contains another object than a state dict of
            dense tensors, or its pickle names a function or a class that a state dict does not need.
        OSError: the file cannot be read.
    """
    advice = "save a state dict: torch.save(model.state_dict(), FILE)"
    with files.open_regular(path) as file:
        try:
            is_zip = file.read(len(_ZIP_BEGIN)) == _ZIP_BEGIN
            file.seek(0)
            content = _read_zip(file) if is_zip else _read_old(file)
        except _Refused as error:
            raise InputError(f"{path}: contains {error}, which is not part of plain weights; {advice}") from None
        except OSError:
            raise
        # A damaged pickle can make Python raise almost any error.
        except Exception as error:
            reason = first_line(error)[:200]
            raise InputError(f"{path}: not a complete .pth file ({reason}); download it again, or {advice}") from None
    for key in _NESTING_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    entries = content.items() if isinstance(content, Mapping) else ()
    arrays = {str(name): value for name, value in entries if isinstance(value, np.ndarray)}
    if not arrays:
        raise InputError(f"{path}: contains a {type(content).__name__} and no state dict of named tensors; {advice}")
    return arrays


def _read_zip(file: BinaryIO) -> Any:
    """Return the object of a file in the zip format."""
    archive = zipfile.ZipFile(file)
    entries = {entry.filename: entry for entry in archive.infolist()}
    folder = next(name for name in entries if name.endswith("/data.pkl")).removesuffix("data.pkl")

    def read(name: str) -> bytes:
        # PyTorch does not compress. A compressed entry could be larger than the memory.
        if entries[folder + name].compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed")
        return archive.read(folder + name)

    if folder + "byteorder" in entries and read("byteorder") != b"little":
        raise ValueError("its numbers are big-endian")
    unpickler = _Unpickler(io.BytesIO(read("data.pkl")), os.fstat(file.fileno()).st_size)
    content = unpickler.load()
    for key in unpickler.storages:
        unpickler.fill(key, read(f"data/{key}"))
    return content


def _read_old(file: BinaryIO) -> Any:
    """Return the object of a file in the format before PyTorch 1.6."""
    size = os.fstat(file.fileno()).st_size
    if _Unpickler(file, size).load() != _OLD_MAGIC or _Unpickler(file, size).load() != _OLD_VERSION:
        raise ValueError("its first bytes are of another format")
    if not _Unpickler(file, size).load()["little_endian"]:
        raise ValueError("its numbers are big-endian")
    unpickler = _Unpickler(file, size)
    content = unpickler.load()
    for key in _Unpickler(file, size).load():
        _check_key(key)
        file.seek(8, os.SEEK_CUR)  # The number of elements, which the pickle has too.
        unpickler.fill(key, file.read(unpickler.storages[key].nbytes))
    return content


_IN_PYTHON: Any = pickle._Unpickler


def _with_checked_keys(operation: bytes) -> Callable[[Any], None]:
    """Return an operation of a pickle that puts items of the stack into a dict."""
    load = _IN_PYTHON.dispatch[operation[0]]

    def checked(unpickler: Any) -> None:
        for key in unpickler.stack[-2:-1] if operation == pickle.SETITEM else unpickler.stack[::2]:
            _check_key(key)
        load(unpickler)

    return checked


def _refused(what: str) -> Callable[[Any], None]:
    def refused(unpickler: Any) -> None:
        raise _Refused(what)

    return refused


class _Unpickler(_IN_PYTHON):
    """An unpickler that knows only the names in a state dict, and returns a read-only array for each tensor.

    The arrays are parts of `storages`, by key, which `fill` gives their content after the pickle is read. It is that in
    Python, which refuses keys that take for ever to hash (nested tuples), and allocates no memory for missing objects.

    Args:
        size: the size of the file, which bounds that of the storages.
    """

    dispatch = _IN_PYTHON.dispatch | {
        operation[0]: _with_checked_keys(operation) for operation in (pickle.SETITEM, pickle.SETITEMS, pickle.DICT)
    }
    # The items of a set can also take for ever to hash, and a few bytes determine the size of a buffer.
    dispatch |= dict.fromkeys((pickle.ADDITEMS[0], pickle.FROZENSET[0]), _refused("a set"))
    dispatch |= {pickle.BYTEARRAY8[0]: _refused("a bytearray")}

    def __init__(self, file: BinaryIO, size: int):
        super().__init__(file)
        self.storages: dict[str, np.ndarray] = {}
        self.unread, self.most = size, max(size, _SMALL)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _OF_STORAGE:
            return name
        known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): _ordered_dict,
            ("collections", "Counter"): lambda counts: counts,  # The milestones of a schedule.
            ("argparse", "Namespace"): type("Unread", (), {"__slots__": (), "__setstate__": lambda *_: None}),
            ("torch", "Size"): tuple,
            ("torch._utils", "_rebuild_tensor_v2"): self.tensor,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
        }
        if (module, name) not in known:
            raise _Refused(f"{module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, kind, key, _, elements = pid[:5]
        _check_key((kind, key))
        if kind not in _OF_STORAGE:
            raise _Refused(f"a storage of kind {kind}")
        if key not in self.storages:
            dtype = np.dtype(_OF_STORAGE[kind])
            if not 0 <= elements * dtype.itemsize <= self.unread:
                raise ValueError(f"storage {key} of {elements} elements is larger than the file")
            self.unread -= elements * dtype.itemsize
            self.storages[key] = np.empty(elements, dtype)
        return self.storages[key]

    def fill(self, key: str, content: bytes) -> None:
        """Give a storage its content. Raises: ValueError if the content has another size."""
        if len(content) != self.storages[key].nbytes:
            raise ValueError(f"storage {key} has another size")
        self.storages[key].view("u1")[:] = np.frombuffer(content, "u1")

    def tensor(
        self, storage: np.ndarray, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
    ) -> np.ndarray:
        """Return the part of a storage that is a tensor. Offset and strides are numbers of elements.

        Raises: ValueError if the tensor is not within its storage, or has more than `most` elements.
        """
        if len(shape) != len(strides) or any(type(size) is not int or size < 0 for size in (*shape, *strides, offset)):
            raise ValueError(f"a tensor has shape {shape} and strides {strides}")
        if 0 in shape:
            return np.empty(shape, storage.dtype)
        last = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        # With strides of zero, a small storage could become a tensor larger than the memory.
        if last >= len(storage) or math.prod(shape) > self.most:
            raise ValueError(f"a tensor of shape {shape} in a storage of {len(storage)} elements")
        steps = [stride * storage.itemsize for stride in strides]
        return np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)


def _check_key(key: Any) -> None:
    parts = key if isinstance(key, tuple) else (key,)
    if not all(isinstance(part, str | int | float | bytes | None) for part in parts):
        raise _Refused(f"a {type(key).__name__} as a key")


def _ordered_dict(items: Sequence[tuple[Any, Any]] = ()) -> OrderedDict[Any, Any]:
    """Return an OrderedDict; files of Python 2 give its items."""
    for key, _ in items:
        _check_key(key)
    return OrderedDict(items)
