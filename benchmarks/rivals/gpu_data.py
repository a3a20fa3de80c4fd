"""Packs small images, encoded, into files of at most 60 MB, for a machine that accepts no larger ones.

    python benchmarks/rivals/gpu_data.py pack DATA FILE.packed.npz [--jpeg QUALITY]
    python benchmarks/rivals/gpu_data.py unpack FILE.packed.npz… FILE.npz

DATA is any `data.path`. JPEG files are kept; PNG files and plain pixels are encoded as WebP without loss (CIFAR-10 has
1,774 bytes an image, and 2,255 as PNG), or with --jpeg as JPEG, which changes them equally for all contenders. If one
file would be too large, several are written, FILE.1.packed.npz and so on, each with every so manieth image. Unpacking
decodes everything once with Pillow, and needs neither JAX nor TensorFlow.
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

MOST_BYTES, SUFFIX, PNG = 60_000_000, ".packed.npz", b"\x89PNG"
SPLITS = ("train", "val")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing, unpacking = commands.add_parser("pack"), commands.add_parser("unpack")
    packing.add_argument("source", type=Path)
    unpacking.add_argument("sources", type=Path, nargs="+")
    for command in (packing, unpacking):
        command.add_argument("target", type=Path)
    packing.add_argument(
        "--jpeg", type=int, metavar="QUALITY", help="for plain pixels, 1 to 95 (default: without loss)"
    )
    unpacking.add_argument("--tell", type=Path, help="file for the results, which benchmarks/gpu.py reads")
    options = parser.parse_args()
    if options.command == "pack":
        written = pack(options.source, options.target, options.jpeg)
    else:
        unpack(options.sources, options.target)
        written = [options.target]
    for path in written:
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    if options.command == "unpack" and options.tell:
        packed = sum(path.stat().st_size for path in options.sources)
        with options.tell.open("a") as results:
            results.write(json.dumps({"bytes": options.target.stat().st_size, "packed_bytes": packed}) + "\n")


def pack(source: Path, target: Path, quality: int | None = None, most: int = MOST_BYTES) -> list[Path]:
    """Pack both splits of a data set into files of at most `most` bytes. Returns their paths."""
    # Imported here, because unpacking must work without the libraries of every format.
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from jaxddp.config import DataConfig
    from jaxddp.data.opening import open_splits

    splits: dict[str, tuple[list[bytes], np.ndarray]] = {}
    names = np.zeros(0, str)
    for split, table in open_splits(DataConfig(path=str(source))).items():
        files = [table.read(row) for row in range(len(table))]
        if table.pixel_shape is not None:
            files = [encode(np.frombuffer(each, np.uint8).reshape(table.pixel_shape), quality) for each in files]
        elif files and files[0].startswith(PNG):
            files = [encode(np.asarray(Image.open(io.BytesIO(each))), quality) for each in files]
        splits[split], names = (files, table.labels), np.array(table.class_names)
    # Labels, ends and headers take some bytes, too.
    size = lambda part: sum(len(file) + 16 for files, _ in splits.values() for file in files[part::count]) + 10_000  # noqa: E731
    count = 1
    while max(map(size, range(count))) > most:
        count += 1
    paths = [target]
    if count > 1:
        stem = target.name.removesuffix(SUFFIX)
        paths = [target.with_name(f"{stem}.{part}{SUFFIX}") for part in range(1, count + 1)]
    for part, path in enumerate(paths):
        arrays = {"class_names": names, "part": np.array([part, count])}
        for split, (files, labels) in splits.items():
            arrays |= join_files(split, files[part::count], labels[part::count])
        save(path, arrays)
    return paths


def join_files(split: str, files: Sequence[bytes], labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays of a split: its files concatenated, the end of each, and its labels."""
    return {
        f"{split}_files": np.frombuffer(b"".join(files), np.uint8),
        f"{split}_ends": np.cumsum([len(file) for file in files]),
        f"{split}_labels": np.asarray(labels, np.int32),
    }


def encode(pixels: np.ndarray, quality: int | None = None) -> bytes:
    """Encode uint8[H, W] or uint8[H, W, 1 or 3] as WebP without loss, or as JPEG with `quality`."""
    file = io.BytesIO()
    image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    if quality is None:
        image.save(file, "WEBP", lossless=True, quality=100)
    else:
        image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def unpack(sources: Sequence[Path], target: Path) -> None:
    """Decode a packed data set to arrays for `data.path`: uint8[N, H, W, 3], int32[N], and class names."""
    parts, count = {}, 0
    for source in sources:
        with np.load(source) as packed:
            part, count = packed["part"].tolist()
            parts[part] = dict(packed)
    if sorted(parts) != list(range(count)):
        sys.exit(f"gpu_data.py: {len(parts)} of {count} files are given; give all of them")
    arrays: dict[str, np.ndarray] = {"class_names": parts[0]["class_names"]}
    for split in SPLITS:
        total = sum(len(packed[f"{split}_labels"]) for packed in parts.values())
        decoded = {part: decode(packed[f"{split}_files"], packed[f"{split}_ends"]) for part, packed in parts.items()}
        labels, images = np.empty(total, np.int32), np.empty((total, *decoded[0].shape[1:]), np.uint8)
        for part, packed in parts.items():
            images[part::count], labels[part::count] = decoded[part], packed[f"{split}_labels"]
        arrays |= {f"{split}_images": images, f"{split}_labels": labels}
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
