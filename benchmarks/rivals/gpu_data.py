"""Packs small images, encoded, into one file, for a machine that accepts no large files.

    python benchmarks/rivals/gpu_data.py pack DATA FILE.packed.npz [--jpeg QUALITY]
    python benchmarks/rivals/gpu_data.py unpack FILE.packed.npz FILE.npz

DATA is any `data.path`. Encoded files, such as JPEG in the ILSVRC layout, are kept; plain pixels are encoded as PNG, or
with --jpeg as JPEG, which changes them equally for all contenders. Unpacking decodes everything once with Pillow, and
needs neither JAX nor TensorFlow.
"""

import argparse
import io
import json
import os
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

MOST_BYTES = 60_000_000
SPLITS = ("train", "val")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing, unpacking = commands.add_parser("pack"), commands.add_parser("unpack")
    for command in (packing, unpacking):
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
    packing.add_argument("--jpeg", type=int, metavar="QUALITY", help="for plain pixels, 1 to 95 (default: PNG)")
    unpacking.add_argument("--tell", type=Path, help="file for the results, which benchmarks/gpu.py reads")
    options = parser.parse_args()
    if options.command == "unpack":
        unpack(options.source, options.target)
    else:
        pack(options.source, options.target, options.jpeg)
    size = options.target.stat().st_size
    print(f"{options.target}: {size / 1e6:.1f} MB")
    if options.command == "unpack" and options.tell:
        with options.tell.open("a") as results:
            results.write(json.dumps({"bytes": size, "packed_bytes": options.source.stat().st_size}) + "\n")
    if options.command == "pack" and size > MOST_BYTES:
        sys.exit(
            f"gpu_data.py: the file is larger than {MOST_BYTES / 1e6:.0f} MB; give --jpeg 75 or a source of JPEG files"
        )


def pack(source: Path, target: Path, quality: int | None) -> None:
    """Pack both splits of a data set."""
    # Imported here, because unpacking must work without the libraries of every format.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from jaxddp.config import DataConfig
    from jaxddp.data.opening import open_splits

    arrays: dict[str, np.ndarray] = {}
    for split, table in open_splits(DataConfig(path=str(source))).items():
        files = [table.read(row) for row in range(len(table))]
        if table.pixel_shape is not None:
            pixels = (np.frombuffer(each, np.uint8).reshape(table.pixel_shape) for each in files)
            files = [encode(each, quality) for each in pixels]
        arrays |= join_files(split, files, table.labels)
        arrays["class_names"] = np.array(table.class_names)
    save(target, arrays)


def join_files(split: str, files: Sequence[bytes], labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays of a split: its files concatenated, the end of each, and its labels."""
    return {
        f"{split}_files": np.frombuffer(b"".join(files), np.uint8),
        f"{split}_ends": np.cumsum([len(file) for file in files]),
        f"{split}_labels": np.asarray(labels, np.int32),
    }


def encode(pixels: np.ndarray, quality: int | None = None) -> bytes:
    """Encode uint8[H, W, 1 or 3] as PNG, or as JPEG with `quality`."""
    file = io.BytesIO()
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    if quality is None:
        image.save(file, "PNG", optimize=True)
    else:
        image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def unpack(source: Path, target: Path) -> None:
    """Decode a packed data set to arrays for `data.path`: uint8[N, H, W, 3], int32[N], and class names."""
    arrays: dict[str, np.ndarray] = {}
    with np.load(source) as packed:
        arrays["class_names"] = packed["class_names"]
        for split in SPLITS:
            arrays[f"{split}_labels"] = packed[f"{split}_labels"]
            arrays[f"{split}_images"] = decode(packed[f"{split}_files"], packed[f"{split}_ends"])
    save(target, arrays, compressed=False)


def decode(files: np.ndarray, ends: np.ndarray) -> np.ndarray:
    data, starts = files.tobytes(), [0, *ends[:-1]]
    images = (Image.open(io.BytesIO(data[start:end])) for start, end in zip(starts, ends, strict=True))
    return np.stack([np.asarray(image.convert("RGB")) for image in images])


def save(target: Path, arrays: dict[str, Any], *, compressed: bool = True) -> None:
    """Write an .npz file atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.part.npz")
    (np.savez_compressed if compressed else np.savez)(unfinished, **arrays)
    os.replace(unfinished, target)


def is_packed(path: Path) -> bool:
    """Return whether `pack` wrote a file."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return "train_files.npy" in archive.namelist()


if __name__ == "__main__":
    main()
