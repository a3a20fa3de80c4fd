"""Summarizes a trace of JAX's profiler by the kernels that take most of the time."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

MOST = 25
# On a CPU a trace has no device plane; these threads run the operations.
DEVICE, HOST_THREADS = "/device:GPU", ("tf_XLAPjRtCpuClient", "tf_XLAExecute")
STREAM = "Stream"
WAITING = ("ThunkExecutor", "ThreadpoolListener")


@contextmanager
def traced(folder: Path) -> Iterator[dict[str, Any]]:
    """Trace a block, which must wait for the device. Yields a dict that contains the summary afterwards."""
    results: dict[str, Any] = {}
    folder.mkdir(parents=True, exist_ok=True)
    with jax.profiler.trace(str(folder)):
        yield results
    (path,) = sorted(folder.rglob("*.xplane.pb"))[-1:]
    results |= {"file": str(path)} | summarize(ProfileData.from_file(str(path)))


def summarize(data: Any) -> dict[str, Any]:
    """Return the milliseconds from the first to the last kernel, those with a running kernel, and the longest kernels.

    Each of `kernels` is (name, total milliseconds, number of launches).
    """
    events = list(kernels(data))
    if not events:
        return {"kernels": []}
    total: defaultdict[str, float] = defaultdict(float)
    for name, _, duration in events:
        total[name] += duration
    count = Counter(name for name, _, _ in events)
    span = max(start + duration for _, start, duration in events) - min(start for _, start, _ in events)
    longest = sorted(total, key=lambda name: -total[name])[:MOST]
    return {
        "span": span / 1e6,
        "busy": busy(events) / 1e6,
        "in_all": sum(total.values()) / 1e6,
        "kernels": [(name, total[name] / 1e6, count[name]) for name in longest],
    }


def kernels(data: Any) -> Iterator[tuple[str, float, float]]:
    """Yield (name, start, duration), in nanoseconds, of all kernels of a device. The name is the instruction's."""
    planes = [plane for plane in data.planes if plane.name.startswith(DEVICE)]
    starts = (STREAM,) if planes else HOST_THREADS
    for plane in planes or [plane for plane in data.planes if plane.name == "/host:CPU"]:
        for line in plane.lines:
            if line.name.startswith(starts):
                operations = (e for e in line.events if e.duration_ns and not e.name.startswith(WAITING))
                yield from ((dict(e.stats).get("hlo_op", e.name), e.start_ns, e.duration_ns) for e in operations)


SHAPE, INSTRUCTION = re.compile(r"\b[a-z]+(\d*)\w*\[([\d,]*)\]"), re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*)$")


def instruction_bytes(program: str) -> dict[str, int]:
    """Return the bytes of the operands and the results of each instruction in the text of a compiled program."""
    lines = [match.groups() for match in map(INSTRUCTION.match, program.splitlines()) if match]
    # The types of the results and the operands; attributes follow.
    heads = {name: text.partition("), ")[0] for name, text in lines}
    results = {name: sum(map(array_bytes, SHAPE.finditer(head))) for name, head in heads.items()}
    operands = {name: re.findall(r"%([\w.-]+)", head) for name, head in heads.items()}
    return {name: results[name] + sum(results.get(each, 0) for each in operands[name]) for name in heads}


def array_bytes(shape: re.Match[str]) -> int:
    return math.prod(int(side) for side in shape[2].split(",") if side) * int(shape[1] or 8) // 8


def busy(events: list[tuple[str, float, float]]) -> float:
    """Return the length of the union of all intervals."""
    covered, until = 0.0, float("-inf")
    for _, start, duration in sorted(events, key=lambda event: event[1]):
        covered += max(0.0, start + duration - max(start, until))
        until = max(until, start + duration)
    return covered
