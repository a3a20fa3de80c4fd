"""Read and write state dicts: .safetensors files, and .pth files if PyTorch is installed."""

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
# Arrays that PyTorch stores and no network reads: the number of batches, and indices that follow from the window side.
_UNREAD = ("num_batches_tracked", "relative_position_index")
# Keys under which training scripts store a state dict, and prefixes that module wrappers add to each name.
_NESTING_KEYS = ("state_dict", "model", "model_state_dict")
_WRAPPERS = ("module.", "_orig_mod.")


def read(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a file, by name, without PyTorch's batch counters and Swin's indices.

    A state dict may be nested under "state_dict", "model" or "model_state_dict". A prefix "module." or "_orig_mod."
    that all names share is removed.

    Raises:
        InputError: the file is missing, damaged or of another kind, or it is a .pth file and PyTorch is not installed.
    """
    if path.suffix not in (".safetensors", *PICKLED):
        raise InputError(f"{path}: weights cannot be read from this kind of file; give {FORMS}")
    with files.reading(path, "give a readable file", missing=f"no such file; give {FORMS}"):
        arrays = _read_pickled(path) if path.suffix in PICKLED else _read_safetensors(path)
    for wrapper in _WRAPPERS:
        if arrays and all(name.startswith(wrapper) for name in arrays):
            arrays = {name.removeprefix(wrapper): array for name, array in arrays.items()}
    return {name: array for name, array in arrays.items() if not name.endswith(_UNREAD)}


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a .safetensors file atomically, with metadata that marks PyTorch's layout for other libraries.

    Raises:
        InputError: the file cannot be written.
    """
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    files.replace(path, safetensors.numpy.save(dense, {"format": "pt"}))


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    content = files.read(path)
    try:
        entries = dict(safetensors.deserialize(content))
    except safetensors.SafetensorError as error:
        raise InputError(f"{path}: not a complete .safetensors file ({error}); download it again") from None
    return {
        name: np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in entries.items()
        if entry["dtype"] in _DTYPES
    }


def _read_pickled(path: Path) -> dict[str, np.ndarray]:
    with files.open_regular(path):
        pass  # Raise the usual error for a missing file, and for a FIFO, on which torch would block.
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise InputError(
            f"{path}: reading it needs PyTorch, which is not installed; install torch, or convert it on "
            "a machine that has torch: "
            f"safetensors.torch.save_file(torch.load({path.name!r}, weights_only=True), {path.stem + '.safetensors'!r})"
        ) from None
    try:
        content: Any = torch.load(os.fspath(path), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError, struct.error) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(f"{path}: PyTorch cannot load it as plain weights ({reason}); save a state dict") from None
    for key in _NESTING_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    entries = content.items() if isinstance(content, Mapping) else ()
    tensors = {name: value for name, value in entries if torch.is_tensor(value)}
    if not tensors:
        raise InputError(
            f"{path}: contains a {type(content).__name__} and no state dict of named tensors; save a state dict"
        )
    # NumPy has no bfloat16; float32 represents its values exactly.
    return {
        str(name): (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
        for name, tensor in tensors.items()
    }
