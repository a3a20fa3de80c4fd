"""Files of named arrays, as PyTorch's users publish weights: .safetensors, and .pth where torch is installed."""

import os
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

import jaxddp.core.files as files
from jaxddp.core.errors import InputError

PICKLED = (".pth", ".pt", ".bin")
FORMS = "a .safetensors file, a .pth file of PyTorch's, or the work directory of a run"

_DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": ml_dtypes.bfloat16, "BOOL": "?"}
_DTYPES |= {f"{kind}{bits}": f"{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)}
_COUNTER = "num_batches_tracked"
# What training scripts wrap a state dict in, and what wrappers of modules put before each name.
_WITHIN = ("state_dict", "model", "model_state_dict")
_WRAPPERS = ("module.", "_orig_mod.")


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, by name, but for PyTorch's counters of batches.

    A dict that holds the state dict under "state_dict" or "model" is looked into, and the "module." that every name
    begins with is taken off.

    Raises:
        InputError: no such file, one that is damaged or of another kind, or a .pth file where torch is not installed.
    """
    if path.suffix not in (".safetensors", *PICKLED):
        raise InputError(f"{path}: not a kind of file that weights are read from; give {FORMS}")
    with files.reading(path, "give a readable file", missing=f"no such file; give {FORMS}"):
        arrays = _pickled(path) if path.suffix in PICKLED else _safetensors(path)
    for wrapper in _WRAPPERS:
        if arrays and all(name.startswith(wrapper) for name in arrays):
            arrays = {name.removeprefix(wrapper): array for name, array in arrays.items()}
    return {name: array for name, array in arrays.items() if not name.endswith(_COUNTER)}


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a whole .safetensors file, with the metadata by which other libraries know PyTorch's layout.

    Raises:
        InputError: it cannot be written.
    """
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    files.replace(path, safetensors.numpy.save(dense, {"format": "pt"}))


def _safetensors(path: Path) -> dict[str, np.ndarray]:
    content = files.read(path)
    try:
        found = dict(safetensors.deserialize(content))
    except safetensors.SafetensorError as error:
        raise InputError(f"{path}: not a whole .safetensors file ({error}); download it again") from None
    return {
        name: np.frombuffer(each["data"], _DTYPES[each["dtype"]]).reshape(each["shape"])
        for name, each in found.items()
        if each["dtype"] in _DTYPES
    }


def _pickled(path: Path) -> dict[str, np.ndarray]:
    with files.open_regular(path):
        pass  # Of a missing file torch says something else, and it would wait for a FIFO.
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError(
            f"{path}: reading it takes PyTorch, which is not installed; install torch, or convert it where torch is: "
            f"safetensors.torch.save_file(torch.load({path.name!r}, weights_only=True), {path.stem + '.safetensors'!r})"
        ) from None
    try:
        held: Any = torch.load(os.fspath(path), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, struct.error) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"{path}: PyTorch cannot load it as plain weights ({reason}); save a state dict") from None
    for key in _WITHIN:
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
    tensors = (
        {} if not isinstance(held, Mapping) else {name: each for name, each in held.items() if torch.is_tensor(each)}
    )
    if not tensors:
        raise InputError(
            f"{path}: holds no state dict, names with a tensor each, but a {type(held).__name__}; save one"
        )
    # NumPy has no bfloat16, and float32 holds its values.
    return {
        str(name): (each.float() if each.dtype == torch.bfloat16 else each).detach().numpy()
        for name, each in tensors.items()
    }
