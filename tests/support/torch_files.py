"""Small .pth files of `torch.save`, in `torch_files.json`, because CI has no PyTorch.

On a machine with PyTorch, `python tests/support/torch_files.py` writes the file.
"""

import argparse
import base64
import io
import json
import zlib
from pathlib import Path

FILES = Path(__file__).parent / "torch_files.json"


def torch_file(name: str) -> bytes:
    """Return the bytes of a file: "zip" and "old" have the same state dict in the two formats of PyTorch."""
    return zlib.decompress(base64.b64decode(json.loads(FILES.read_text())[name]))


def make() -> None:
    """Write the files."""
    import torch

    grid = torch.arange(12.0).reshape(3, 4)
    tensors = {
        **{"grid": grid, "transposed": grid.t(), "part": torch.arange(10)[2:6], "scalar": torch.tensor(7)},
        **{"half": torch.tensor([0.5, -2.0]).half(), "brain": torch.tensor([1.5, -2.0]).bfloat16()},
        **{"flags": torch.tensor([True, False]), "double": torch.tensor([0.1], dtype=torch.float64)},
        **{"parameter": torch.nn.Parameter(torch.ones(2)), "none": torch.zeros(0, 3)},
        "bytes": torch.tensor([255]).byte(),
    }
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    averaged = {f"module.{name}": value + 5 for name, value in module.state_dict().items()}
    averaged["n_averaged"] = grid[0, 1]
    objects = {
        "zip": tensors,
        "old": tensors,
        "checkpoint": {"args": argparse.Namespace(n=1), "state_dict": module.state_dict(), "state_dict_ema": averaged}
        | {"optimizer": optimizer.state_dict(), "": torch.optim.lr_scheduler.MultiStepLR(optimizer, [3]).state_dict()},
        "module": module,
        "sparse": {"weight": torch.ones(2, 2).to_sparse()},
        "number": 3,
    }
    encoded = {}
    for name, value in objects.items():
        file = io.BytesIO()
        torch.save(value, file, _use_new_zipfile_serialization=name != "old")
        encoded[name] = base64.b64encode(zlib.compress(file.getvalue(), 9)).decode()
    FILES.write_text(json.dumps(encoded, indent=1) + "\n")


if __name__ == "__main__":
    make()
