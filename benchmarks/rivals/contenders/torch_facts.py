"""Measures the device's limits in torch: bfloat16 matrix products and memory. `benchmarks/gpu.py` starts it."""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.rivals.contenders.case import Task
from benchmarks.rivals.contenders.outcome import add_result, attempt

RUNS, REPEATS = 5, 10


def main(task: Task) -> None:
    large = torch.cuda.is_available()
    device = torch.device("cuda" if large else "cpu")
    side, count = (8192, 1 << 30) if large else (512, 1 << 22)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    x = torch.ones(count, dtype=torch.bfloat16, device=device)
    scaled = torch.empty_like(x)
    figures = {
        "device": torch.cuda.get_device_name() if large else "cpu",
        "matmul_flops_a_second": 2 * side**3 / seconds(lambda: torch.mm(a, b, out=product)),
        "memory_bytes_a_second": 4 * count / seconds(lambda: torch.mul(x, 3, out=scaled)),
    }
    add_result(task.out, figures | {"version": torch.__version__})


def seconds(call: Callable[[], torch.Tensor]) -> float:
    """Return the median seconds of a call, without the first, which loads the kernel."""
    wait(call())
    found = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        for _ in range(REPEATS):
            call()
        wait(call())
        found.append((time.perf_counter() - begin) / (REPEATS + 1))
    return statistics.median(found)


def wait(result: torch.Tensor) -> None:
    if result.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    attempt(main, Task.parse())
