"""Measures the verification of images: its time, the unused bytes of intact files, and the damage that it finds.

    python benchmarks/input/verify.py DIR [--files 200] [--times 3]

DIR holds solution files (Kaggle's archive, or a part of it). The script verifies all JPEG files. It prints the number
of bytes left over after the last pixel, the longest run of zeros in the data, and the fewest bytes left over if a
header has one row of blocks less. Then it damages some files in every way of `tests/support/damage.py`. It times the
stream over training images that are not verified, verified by this process, or verified by an earlier run, each with
and without a manifest (`data.verify`); turns alternate, and medians are printed. It also times reading a manifest of a
million images."""

import argparse
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import machine
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.files import CACHE_VARIABLE
from jaxddp.curate import CheckedSplit, CheckReport, examine, write_manifest
from jaxddp.data.formats.ilsvrc import train_solutions
from jaxddp.data.images import SOS, bytes_left_over, joined, verify
from jaxddp.data.manifest import ImageManifest, compare_with_manifest
from jaxddp.data.order import SampleOrder
from jaxddp.data.source import Table

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.damage import (  # pyright: ignore[reportMissingImports]: the line above
    HEADERS,
    SMALL,
    STRETCHES,
    other_size,
    segment_of,
)

TURNS, MANY = 7, 1_000_000
DATA = DataConfig()


def is_sound(data: bytes) -> bool:
    try:
        verify(data)
    except InputError:
        return False
    return True


def measure_sound_files(files: list[Path]) -> None:
    left, zeros, rows = Counter[int](), 0, []
    for file in files:
        data = file.read_bytes()
        left[verify(data).left_over] += 1
        scan = segment_of(data, SOS)
        assert scan is not None
        zeros = max([zeros, *map(len, re.findall(rb"\0+", data[scan.end :]))])
        if (shorter := other_size(rows=lambda n: n - 1)(data, random.Random())) != data:
            rows.append(bytes_left_over(joined(shorter)))
    print(f"{len(files)} files accepted; files by bytes left over: {dict(left)}; longest run of zeros {zeros}")
    print(f"fewest bytes left over with one row of blocks less, in {len(rows)} files: {sorted(rows)[:3]}")


def measure_damage(data: list[bytes], times: int) -> None:
    rng = random.Random(5)
    for kinds in (HEADERS, STRETCHES, SMALL):
        for kind, damage in kinds.items():
            tried = [one for whole in times * data if (one := damage(whole, rng)) != whole]
            found = sum(not is_sound(one) for one in tried)
            print(f"{kind:34} {found:6} of {len(tried):6} found" if tried else f"{kind:34} not tried")


def read(table: Table) -> float:
    """Return the images per second of one epoch, without its first batch. Workers continue with the next epoch."""
    steps = len(table) // 32
    batches = iter(table.train_batches(SampleOrder(len(table), 32, seed=0), DATA, range(2 * steps)))
    next(batches)
    begin = time.perf_counter()
    count = sum(len(batch.image) for batch in islice(batches, steps - 1))
    return count / (time.perf_counter() - begin)


def measure_streams(root: Path, manifest: ImageManifest) -> None:
    def open_table(*, is_verified: bool, has_manifest: bool) -> Table:
        table = train_solutions(root).take(1600)
        if is_verified:
            table.check(DATA)
        return compare_with_manifest({"train": table}, manifest, DATA)["train"] if has_manifest else table

    speeds: dict[str, list[float]] = defaultdict(list)
    read(here := open_table(is_verified=True, has_manifest=False))
    for _ in range(TURNS):
        for name, table in {
            "not verified": open_table(is_verified=False, has_manifest=False),
            "not verified, against a manifest": open_table(is_verified=False, has_manifest=True),
            "verified by this process": here,
            "by an earlier run": open_table(is_verified=True, has_manifest=False),
            "by an earlier run, against a manifest": open_table(is_verified=True, has_manifest=True),
        }.items():
            speeds[name].append(read(table))
    for name, speed in speeds.items():
        ratio = median(one / other for one, other in zip(speed, speeds["verified by this process"], strict=True))
        print(f"stream, {name}: {median(speed):.0f} images/s; {ratio:.2f} of the speed when verified by this process")


def write_and_read_manifest(root: Path, file: Path) -> ImageManifest:
    """Write the manifest of the training images, and print the time to read a manifest of a million images."""
    table = train_solutions(root)
    split = CheckedSplit("train", table)
    for row in range(len(table)):
        split.findings.append(examine(table, row))
    write_manifest(CheckReport([split]), file)
    head, *images = file.read_text().splitlines(keepends=True)
    large = file.with_name("large.jsonl")
    with large.open("w") as lines:
        lines.write(head)
        for number in range(MANY // len(images) + 1):
            lines.writelines(line.replace('"path": "', f'"path": "{number}/') for line in images)
    begin = time.process_time()
    count = len(ImageManifest.read(large).of_files)
    seconds = time.process_time() - begin
    print(f"reading a manifest of {count:,} images, {large.stat().st_size / 1e6:.0f} MB: {seconds:.1f} s, CPU time")
    return ImageManifest.read(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    files = sorted(options.dir.rglob("*.JPEG"))
    measure_sound_files(files)
    data = [file.read_bytes() for file in random.Random(0).sample(files, min(options.files, len(files)))]
    spent = []
    for _ in range(TURNS):
        begin = time.process_time()
        for one in data:
            verify(one)
        spent.append((time.process_time() - begin) / len(data))
    print(f"verify: {1e6 * min(spent):.1f} us of CPU time an image, best of {TURNS} turns")
    measure_damage(data, options.times)
    with tempfile.TemporaryDirectory() as cache:
        os.environ[CACHE_VARIABLE] = cache
        measure_streams(options.dir, write_and_read_manifest(options.dir, Path(cache) / "train.jsonl"))


if __name__ == "__main__":
    main()
