"""Measures the reading of images from a tar file at random, without decoding, and the time of its index.

    python benchmarks/input/tar_reading.py
    python benchmarks/input/tar_reading.py --bytes 110000 --images 2000

32 threads call `TarFiles.read`. The script prints microseconds and CPU time for an image: the best of three rounds.
"""

import argparse
import io
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxddp.data.storage.store import LocalFiles
from jaxddp.data.storage.tar import TarFiles, find_samples


def write_shard(file: Path, images: int, size: int) -> None:
    """Write a shard with noise in place of images."""
    rng = np.random.default_rng(0)
    with tarfile.open(file, "w") as tar:
        for row in range(images):
            for suffix, content in (("cls", b"3"), ("jpg", rng.bytes(size))):
                member = tarfile.TarInfo(f"{row:06d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


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
        order = np.random.default_rng(1).permutation(arguments.images)

        def threads() -> None:
            with ThreadPoolExecutor(32) as pool:
                list(pool.map(lambda row: len(store.read(b"shard.tar", int(samples.offset[row]))), order.tolist()))

        rounds = []
        for _ in range(3):
            wall, cpu = time.perf_counter(), time.process_time()
            threads()
            rounds.append((time.perf_counter() - wall, time.process_time() - cpu))
        wall, cpu = (seconds / arguments.images * 1e6 for seconds in min(rounds))
        print(f"reading: {wall:.0f} us, {cpu:.0f} us of CPU time")


if __name__ == "__main__":
    main()
