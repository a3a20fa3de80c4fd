"""Finds the GPUs of this machine, without starting a JAX backend, and divides them."""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TypeVar

from jaxddp.core.tpu import permits

Item = TypeVar("Item")
_GPU = re.compile(r"[0-9]+|(GPU|MIG)-.+")


def local_gpus(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[str]:
    """Return the visible NVIDIA GPUs of this machine, in the notation of CUDA_VISIBLE_DEVICES.

    The list is empty if JAX_PLATFORMS excludes GPUs. If CUDA_VISIBLE_DEVICES is set, return its entries up to the
    first that names no GPU, such as -1, where CUDA ends the list, too. Otherwise count the device files, or the
    driver's entries in `/proc` if there are no device files yet. In a container, both show only the container's GPUs,
    which CUDA numbers from 0. `root` is the folder that holds `dev` and `proc`.
    """
    if not permits(environ, "cuda", "gpu"):
        return []
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return list(takewhile(_GPU.fullmatch, (word.strip() for word in visible.split(","))))
    count = len(list(root.glob("dev/nvidia[0-9]*"))) or len(list(root.glob("proc/driver/nvidia/gpus/*")))
    return [str(index) for index in range(count)]


def divide(items: Sequence[Item], count: int) -> list[Sequence[Item]]:
    """Divide items into contiguous parts with lengths that differ by at most one."""
    return [items[start:stop] for start, stop in pairwise(part * len(items) // count for part in range(count + 1))]
