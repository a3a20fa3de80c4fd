"""Measures ways to read images from a tar file at random, without decoding, and the time of its index.

    python benchmarks/input/tar_reading.py
    python benchmarks/input/tar_reading.py --bytes 110000 --images 2000

There are two ways: TensorFlow's data set of records of a fixed length, one for each image; and 32 threads that call
`TarFiles.read`. Each prints microseconds for an image: the best of three rounds, and its CPU time.
"""

import argparse
import io
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxddp.data.storage.store import LocalFiles
from jaxddp.data.storage.tar import BLOCK, Samples, TarFiles, find_samples
from jaxddp.data.stream.tensorflow_cpu import tf


def write_shard(file: Path, images: int, size: int) -> None:
    """Write a shard with noise in place of images."""
    rng = np.random.default_rng(0)
    with tarfile.open(file, "w") as tar:
        for row in range(images):
            for suffix, content in (("cls", b"3"), ("jpg", rng.bytes(size))):
                member = tarfile.TarInfo(f"{row:06d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def read_in_graph(read: Callable[..., Any], samples: Samples, order: np.ndarray) -> None:
    """Read all images in an order, with an op of a graph."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = 2
    columns = samples.offset[order], samples.length[order]
    dataset = tf.data.Dataset.from_tensor_slices(columns).map(read, num_parallel_calls=4, deterministic=True)
    for _ in dataset.batch(64).with_options(options):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--bytes", type=int, default=110_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shard.tar"
        write_shard(file, arguments.images, arguments.bytes)
        size, start = file.stat().st_size, time.process_time()
        with file.open("rb", buffering=0) as opened:
            samples, _ = find_samples(opened, size, str(file))
        print(f"index: {(time.process_time() - start) / arguments.images * 1e6:.0f} us of CPU time for each sample")
        store = TarFiles(LocalFiles(Path(folder)), {b"shard.tar": samples})
        order, path = np.random.default_rng(1).permutation(arguments.images), os.fsencode(file)

        def fixed_length(offset: Any, length: Any) -> Any:
            head = offset + BLOCK
            records = tf.raw_ops.FixedLengthRecordDatasetV2(
                filenames=[path],
                header_bytes=head,
                record_bytes=length,
                footer_bytes=size - head - length,
                buffer_size=0,
                compression_type="",
            )
            kinds: dict[str, Any] = {"output_types": [tf.string], "output_shapes": [[]]}
            return tf.raw_ops.DatasetToSingleElement(dataset=records, **kinds)[0]

        def threads() -> None:
            with ThreadPoolExecutor(32) as pool:
                list(pool.map(lambda row: len(store.read(b"shard.tar", int(samples.offset[row]))), order.tolist()))

        ways = {
            "records of a fixed length": lambda: read_in_graph(fixed_length, samples, order),
            "32 threads": threads,
        }
        for name, way in ways.items():
            rounds = []
            for _ in range(3):
                wall, cpu = time.perf_counter(), time.process_time()
                way()
                rounds.append((time.perf_counter() - wall, time.process_time() - cpu))
            wall, cpu = (seconds / arguments.images * 1e6 for seconds in min(rounds))
            print(f"{name}: {wall:.0f} us, {cpu:.0f} us of CPU time")


if __name__ == "__main__":
    main()
