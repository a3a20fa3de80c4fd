"""Measures how many images a core reads, decodes and crops per second, and which host feeds eight GPUs.

    python benchmarks/input/feeding.py DIR

DIR holds solution files of photographs (Kaggle's archive, or a part of it). The photographs are read as files, from a
packed copy of JPEG images of 256 pixels, and from a packed copy of their pixels. Each is read by one process on one
core, by two processes on a core each (which halve the batches), and by one process with two workers on two cores.
Every turn is a fresh process; it is timed between two batches while others are being loaded. Turns alternate. The
script prints images per second, the scaling (the speed on two cores divided by twice that on one core), and, for
`--needed` images per second, the cores and the bytes per second that a host needs. Files come from the cache of the
operating system.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import alternate, machine
from jaxddp.config import DataConfig
from jaxddp.curate import PackOptions, pack
from jaxddp.data.formats.ilsvrc import train_solutions
from jaxddp.data.formats.packed_records import read_packed
from jaxddp.data.order import SampleOrder, Shard
from jaxddp.data.table import ExampleTable

BATCH, UNTIMED = 128, 2
KINDS = ("files", "packed JPEG", "packed pixels")
WAYS = {"1 core": (1, 0), "2 processes": (2, 0), "2 workers": (1, 2)}
"""The number of processes, and of the workers of each."""
H200 = 8 * 8160
"""The images per second that eight H200s take if each trains ResNet-50 as fast as one alone (benchmarks/RESULTS.md)."""


def open_table(root: Path, kind: str) -> ExampleTable:
    return train_solutions(root / "files") if kind == "files" else read_packed(root / kind, "train")


def child(root: Path, kind: str, way: str, index: int, batches: int) -> None:
    """Read the batches of one process. Write "ready", wait for a line, and then write the seconds."""
    processes, workers = WAYS[way]
    os.sched_setaffinity(0, {index} if workers == 0 else {0, 1})
    table, data = open_table(root, kind), DataConfig(verify="never", workers=workers)
    steps = range(batches + 3 * UNTIMED)
    order = SampleOrder(len(table), BATCH, seed=0)
    stream = iter(table.train_batches(order, data, steps, Shard(index, processes)))
    next(stream)
    print("ready", flush=True)
    sys.stdin.readline()
    # These were loaded during the wait.
    for _ in range(UNTIMED):
        next(stream)
    begin = time.perf_counter()
    for _ in range(batches):
        next(stream)
    print(time.perf_counter() - begin, flush=True)


def speed(root: Path, kind: str, way: str, batches: int) -> float:
    """Return the images per second of one turn."""
    command = [sys.executable, __file__, str(root), "--child", kind, way, "--batches", str(batches)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started: list[Any] = [subprocess.Popen([*command, "--index", str(at)], **pipes) for at in range(WAYS[way][0])]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("\n")
        process.stdin.flush()
    seconds = max(float(process.stdout.readline()) for process in started)
    assert not any(process.wait(60) for process in started)
    return batches * BATCH / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=12, help=f"batches of {BATCH} images in each turn")
    parser.add_argument("--needed", type=int, default=H200, help="images per second that the host must feed")
    parser.add_argument("--json", type=Path, help="JSON file for the results")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, way = options.child
        return child(options.root, kind, way, options.index, options.batches)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "files").symlink_to(options.root.absolute())
        tables = {"train": train_solutions(options.root)}
        pack(tables, root / KINDS[1], PackOptions())
        pack(tables, root / KINDS[2], PackOptions(pixels=True))
        opened = {kind: open_table(root, kind) for kind in KINDS}
        sizes = {kind: sum(len(table.read(row)) for row in range(len(table))) for kind, table in opened.items()}
        bytes_each = {kind: size / len(tables["train"]) for kind, size in sizes.items()}
        turns = {f"{kind}, {way}": partial(speed, root, kind, way, options.batches) for kind in KINDS for way in WAYS}
        speeds = alternate(turns, options.rounds)
    results = {}
    for kind in KINDS:
        of_kind = {way: speeds[f"{kind}, {way}"] for way in WAYS}
        medians = {way: statistics.median(values) for way, values in of_kind.items()}
        scaling = [two / one / 2 for one, two in zip(of_kind["1 core"], of_kind["2 processes"], strict=True)]
        workers = [two / one / 2 for one, two in zip(of_kind["1 core"], of_kind["2 workers"], strict=True)]
        cores, rate = options.needed / medians["1 core"], options.needed * bytes_each[kind] / 1e9
        results[kind] = {"images/s": medians, "scaling": scaling, "scaling of workers": workers}
        results[kind] |= {"bytes": bytes_each[kind], "cores": cores, "GB/s": rate}
        print(f"{kind}: " + ", ".join(f"{way} {value:,.0f} images/s" for way, value in medians.items()))
        for name, values in (("2 processes", scaling), ("2 workers", workers)):
            print(f"  scaling of {name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        needs = f"{cores:.0f} cores, {rate:.1f} GB/s, {bytes_each[kind] / 1e3:.0f} kB an image"
        print(f"  for {options.needed:,} images/s: {needs}")
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine(), "needed": options.needed, **results}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
