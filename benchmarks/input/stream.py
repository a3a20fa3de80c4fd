"""Compares the training stream with a pipeline of tf.data and torch's data loader on the same photographs.

    python benchmarks/input/stream.py DIR

DIR holds solution files (Kaggle's archive, or a part of it). Every contender reads the training images in random order,
draws a crop of random area (8 to 100 percent) and aspect (3:4 to 4:3) and resizes it to 224 pixels, on two threads or
in two workers. Our stream and tf.data yield uint8, which is normalized on the device. The pipeline of tf.data is like
that of Flax's ImageNet example: it decodes only the crop, and resizes without antialiasing. "evaluation" is the
evaluation stream over the same images: short side 256, center crop of 224 pixels. torch's loaders yield the output of
torch's usual recipes. `--torch PYTHON` names a Python with torch, and with torchvision for its two recipes; contenders
that cannot run are listed. Turns alternate. The script prints medians, and the mean area of the crops, because small
crops are fast.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, alternate, compare, machine, table
from benchmarks.input.crops import AREA, ASPECT, BATCH, SIZE, WORKERS
from jaxddp.config import DataConfig
from jaxddp.curate import PackOptions, pack
from jaxddp.data.formats.ilsvrc import train_solutions
from jaxddp.data.formats.packed_records import read_packed
from jaxddp.data.order import EvalOrder, SampleOrder
from jaxddp.data.stream.decode import example_keys, quick_header, random_area_window
from jaxddp.data.table import ExampleTable

TORCH_LOADER = Path(__file__).with_name("torch_loader.py")
# Targets for the speed of the stream, as multiples of the other's.
TARGETS = {
    "tf.data": 1.0,
    "torch pil": 2.5,
    "torch v2": 1.0,
    "torch io": 1.5,
    "first read": 1.0,
}
PACKED_TARGET = 1.5
EPOCHS = 8


class Contenders:
    """A method for a turn of each contender. A turn reads an untimed first batch and `batches` timed batches."""

    def __init__(self, photographs: ExampleTable, batches: int):
        self.photographs, self.batches = photographs, batches
        # A table with the rows of one turn. Verified rows are remembered for this table only.
        count = (batches + 1) * BATCH
        repeated = {name: np.resize(getattr(photographs, name), count) for name in ("id", "path", "labels")}
        self.repeated = dataclasses.replace(photographs, **repeated)
        self.areas: dict[str, list[float]] = {}
        self.turns = 0

    def ours(self, images: ExampleTable) -> float:
        self.turns += 1
        order = SampleOrder(len(images), BATCH, seed=self.turns)
        data, steps = DataConfig(image_size=SIZE, crop_area=AREA), range(self.batches + 1)
        return self._time_on_few_cores(lambda: images.train_batches(order, data, steps))

    def evaluation(self) -> float:
        order, data = EvalOrder(len(self.repeated), BATCH), DataConfig(image_size=SIZE)
        return self._time_on_few_cores(lambda: self.repeated.eval_batches(order, data))

    def first_read(self) -> float:
        """Like `ours`, for files that this process has not read yet: each is verified to its last pixel once."""
        return self.ours(dataclasses.replace(self.photographs))

    def tf_data(self) -> float:
        """Read files, decode a random crop, and resize it."""
        self.turns += 1
        count = (self.batches + 1) * BATCH
        rows = np.random.default_rng(self.turns).integers(0, len(self.photographs), count, np.int32)
        paths = [self.photographs.name(row) for row in rows.tolist()]

        def load(path: Any, key: Any) -> Any:
            data, whole = tf.io.read_file(path), tf.constant([[[0.0, 0.0, 1.0, 1.0]]])
            begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
                tf.image.extract_jpeg_shape(data),
                whole,
                key,
                0.1,
                ASPECT,
                AREA,
                10,
                use_image_if_no_bounding_boxes=True,
            )
            window = tf.concat([begin[:2], size[:2]], 0)
            image = tf.image.decode_and_crop_jpeg(data, window, channels=3)
            return tf.cast(tf.image.resize(image, [SIZE, SIZE]), tf.uint8)

        keys = np.stack([np.full(count, self.turns), np.arange(count)], axis=1)

        options = tf.data.Options()
        options.threading.private_threadpool_size = WORKERS
        options.threading.max_intra_op_parallelism = 1
        dataset = tf.data.Dataset.from_tensor_slices((paths, keys)).map(load, 2 * WORKERS).batch(BATCH).prefetch(2)
        return self._time_batches(dataset.with_options(options).as_numpy_iterator())

    def torch(self, python: str, kind: str) -> float:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as names:
            names.write("\n".join(self.photographs.name(row) for row in range(len(self.photographs))))
            names.flush()
            command = [python, str(TORCH_LOADER), kind, names.name, str(self.batches)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or "no output").splitlines()[-1])
        results = json.loads(done.stdout.splitlines()[-1])
        self.areas.setdefault(f"torch {kind}", []).append(results["area"])
        return results["seconds"]

    def _time_on_few_cores(self, stream: Callable[[], Any]) -> float:
        cores = os.sched_getaffinity(0)
        # A stream has a thread for each available core.
        os.sched_setaffinity(0, sorted(cores)[:WORKERS])
        try:
            return self._time_batches(stream())
        finally:
            os.sched_setaffinity(0, cores)

    def _time_batches(self, batches: Any) -> float:
        iterator = iter(batches)
        next(iterator)
        begin = time.perf_counter()
        assert sum(1 for _ in iterator) == self.batches
        return time.perf_counter() - begin


def mean_area(photographs: ExampleTable) -> float:
    """Return the mean area, in pixels, of the stream's crops in some epochs."""
    rows = np.tile(np.arange(len(photographs), dtype=np.int32), EPOCHS)
    keys = example_keys(0, np.repeat(np.arange(EPOCHS, dtype=np.int32), len(photographs)), rows)
    sizes = [quick_header(photographs.read(row)) for row in range(len(photographs))] * EPOCHS
    windows = [random_area_window(size.height, size.width, key, AREA) for size, key in zip(sizes, keys, strict=True)]
    return float(np.mean([height * width for _, _, height, width in windows]))


def contenders(benchmark: Contenders, python: str, packed: ExampleTable) -> dict[str, Callable[[], float]]:
    """Return the contenders that can run, after a first turn of each, which warms the file cache."""
    turns: dict[str, Callable[[], float]] = {
        "ours": lambda: benchmark.ours(benchmark.photographs),
        "evaluation": benchmark.evaluation,
        "first read": benchmark.first_read,
        "packed": lambda: benchmark.ours(packed),
        "tf.data": benchmark.tf_data,
        **{f"torch {kind}": partial(benchmark.torch, python, kind) for kind in ("pil", "v2", "io")},
    }
    runnable = {}
    for name, turn in turns.items():
        try:
            turn()
            runnable[name] = turn
        except RuntimeError as error:
            print(f"{name}: not run ({error})", file=sys.stderr)
    return runnable


def figures(seconds: dict[str, list[float]], images: int) -> dict[str, Figures]:
    """Compare our stream with each of the others, and the packed copy with our stream."""
    ours = seconds.pop("ours")
    packed = {"packed": seconds.pop("packed"), "ours": ours}
    pairs = {name: {"ours": ours, name: turns} for name, turns in seconds.items()}
    compared = {name: compare(pair, images, TARGETS.get(name)) for name, pair in pairs.items()}
    return compared | {"packed": compare(packed, images, PACKED_TARGET)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20, help=f"batches of {BATCH} images in each turn")
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="a Python with torch")
    parser.add_argument("--json", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    benchmark = Contenders(train_solutions(options.root), options.batches)
    with tempfile.TemporaryDirectory() as folder:
        pack({"train": benchmark.photographs}, Path(folder) / "packed", PackOptions())
        runnable = contenders(benchmark, options.torch, read_packed(Path(folder) / "packed", "train"))
        seconds = alternate(runnable, options.rounds)
    results = figures(seconds, options.batches * BATCH)
    areas = {name: float(np.mean(areas)) for name, areas in benchmark.areas.items()}
    areas = {"ours": mean_area(benchmark.photographs), **areas}
    print(table(results))
    print("mean area of a crop, pixels: " + ", ".join(f"{name} {area:,.0f}" for name, area in areas.items()))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "areas": areas, **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
