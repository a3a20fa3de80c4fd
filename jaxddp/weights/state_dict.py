"""Read and write state dicts: .safetensors files and .pth files."""

from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.weights.torch_file import read_state_dict

PICKLED = (".pth", ".pt", ".bin")
FORMS = "a .safetensors file, a .pth file of PyTorch's, or the work directory of a run"

_DTYPES = {"F64": "f8", "F32": "f4", "F16": "f2", "BF16": ml_dtypes.bfloat16, "BOOL": "?"}
_DTYPES |= {f"F8_{kind}": f"float8_{name}" for kind, name in (("E4M3", "e4m3fn"), ("E5M2", "e5m2"))}
_DTYPES |= {f"{kind}{bits}": f"{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)}
# Arrays that PyTorch stores and no network reads: the number of batches, and indices that follow from the window side.
_UNREAD = ("num_batches_tracked", "relative_position_index")
# Prefixes that module wrappers add to each name.
_WRAPPERS = ("module.", "_orig_mod.")


def read(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a file, by name, without PyTorch's batch counters and Swin's indices.

    A state dict may be nested under "state_dict", "model" or "model_state_dict". A prefix "module." or "_orig_mod."
    that all names share is removed.

    Raises:
        InputError: the file is missing, damaged or of another kind; see also `read_state_dict`.
    """
    if path.suffix not in (".safetensors", *PICKLED):
        raise InputError(f"{path}: weights cannot be read from this kind of file; give {FORMS}")
    with files.reading(path, "give a readable file", missing=f"no such file; give {FORMS}"):
        arrays = read_state_dict(path) if path.suffix in PICKLED else _read_safetensors(path)
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
    try:
        entries = dict(safetensors.deserialize(files.read(path)))
        for name, entry in entries.items():
            if entry["dtype"] not in _DTYPES:
                problem = f"{path}: {name} has dtype {entry['dtype']}, which cannot be read"
                raise InputError(problem, advice="save it as F32 or BF16")
        return {
            name: np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
            for name, entry in entries.items()
        }
    except InputError:
        raise
    # NumPy refuses a shape such as (0, 2**62).
    except (safetensors.SafetensorError, ValueError) as error:
        raise InputError(f"{path}: not a complete .safetensors file ({error}); download it again") from None
