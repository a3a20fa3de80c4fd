"""Counts the kernels, bytes and collectives of a scheduled program, and formats the counts as a table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from benchmarks.common.harness import Figures
from benchmarks.programs.schedule import COLLECTIVE, KERNEL_GRADIENT, Kernel, Schedule
from jaxddp.engine.gradients import AVERAGING

LARGEST = 20
LAST = 3
"""Number of kernel gradients at the end of a step. Computation hardly hides an all-reduce that starts there."""
MOVERS = {"transposes": "transpose", "copies": "copy", "converts": "convert"}


def count(schedule: Schedule, images: int) -> Figures:
    """Return the counts of one device, whose slice of the batch has `images` images."""
    kernels = schedule.kernels
    kinds = {kind: [each for each in kernels if each.kind == kind] for kind in sorted({each.kind for each in kernels})}
    largest = sorted(kernels, key=lambda kernel: -kernel.num_bytes)[:LARGEST]
    return {
        "kernels": len(kernels),
        "bytes_per_image": total_bytes(kernels) / images,
        "flops_per_image": sum(kernel.flops for kernel in kernels) / images,
        "conditionals": schedule.conditionals,
        "trip_counts": schedule.trip_counts,
        **{name: len(kinds.get(kind, [])) for name, kind in MOVERS.items()},
        "kinds": {
            kind: {"kernels": len(results), "bytes_per_image": total_bytes(results) / images}
            for kind, results in kinds.items()
        },
        "largest": [asdict(kernel) | {"bytes_per_image": kernel.num_bytes / images} for kernel in largest],
        **communication(kernels),
    }


def total_bytes(kernels: Sequence[Kernel]) -> int:
    return sum(kernel.num_bytes for kernel in kernels)


def communication(kernels: Sequence[Kernel]) -> Figures:
    """Return the collectives, each with the kernels launched between its start and the wait for it.

    `overlapped` is the fraction of the gradients' bytes whose all-reduce starts before the last kernel gradients, or
    None without a collective.
    """
    gradients = [place for place, kernel in enumerate(kernels) if kernel.kind == KERNEL_GRADIENT]
    last = gradients[-LAST] if len(gradients) >= LAST else 0
    collectives = [(place, kernel) for place, kernel in enumerate(kernels) if kernel.kind == COLLECTIVE]
    averaging = [(place, kernel.message) for place, kernel in collectives if AVERAGING in kernel.operation]
    gradient_bytes = sum(size for _, size in averaging)
    early = sum(size for place, size in averaging if place < last)
    return {
        "gradient_bytes": gradient_bytes,
        "overlapped": early / gradient_bytes if gradient_bytes else None,
        "collectives": [_collective(kernels, place, kernel) for place, kernel in collectives],
    }


def between(kernels: Sequence[Kernel], place: int) -> Sequence[Kernel]:
    """Return the kernels launched between the start of a collective and the wait for it."""
    return kernels[place + 1 : kernels[place].done or place + 1]


def _collective(kernels: Sequence[Kernel], place: int, kernel: Kernel) -> Figures:
    meanwhile = between(kernels, place)
    return {
        "name": kernel.name,
        "kind": kernel.collective,
        "operation": kernel.operation,
        "bytes": kernel.message,
        "dtype": kernel.dtype,
        "kernels_before": place,
        "kernels_between": len(meanwhile),
        "kernel_gradients_between": sum(each.kind == KERNEL_GRADIENT for each in meanwhile),
        "bytes_between": total_bytes(meanwhile),
        "flops_between": sum(each.flops for each in meanwhile),
    }


# --- Table ---

_ROWS = {
    "kernels": "{:,}",
    "transposes": "{:,}",
    "copies": "{:,}",
    "converts": "{:,}",
    "conditionals": "{:,}",
    "trip_counts": "{}",
    "bytes_per_image": "{:,.0f}",
    "flops_per_image": "{:,.0f}",
    "argument_bytes": "{:,}",
    "temporary_bytes": "{:,}",
    "aliased_bytes": "{:,}",
    "gradient_bytes": "{:,}",
    "overlapped": "{}",
}


def table(results: Mapping[str, Figures]) -> str:
    """Format a column for each topology, then the kinds, largest kernels and collectives of the last topology."""
    lines = [_row("", results)] + [
        _row(key, (form.format(each[key]) for each in results.values())) for key, form in _ROWS.items()
    ]
    for key in next(iter(results.values()))["roofline"]:
        cells = (f"{each['roofline'][key]:,.6g}" for each in results.values())
        lines.append(_row(f"model: {key}", cells))
    name, last = list(results.items())[-1]
    return "\n".join([*lines, "", f"of {name}, MB an image:", *_kinds(last), "", *_largest(last), *_collectives(last)])


def _row(head: str, cells: Iterator[str] | Mapping[str, Figures]) -> str:
    return f"{head:<34}" + "".join(f"{cell:>18}" for cell in cells)


def _kinds(figures: Figures) -> Iterator[str]:
    for kind, results in sorted(figures["kinds"].items(), key=lambda item: -item[1]["bytes_per_image"]):
        yield f"{results['bytes_per_image'] / 1e6:>8.2f}  {kind:<16}{results['kernels']:>6} kernels"


def _largest(figures: Figures) -> Iterator[str]:
    for kernel in figures["largest"]:
        head = f"{kernel['bytes_per_image'] / 1e6:>8.2f}  {kernel['kind']:<16}{kernel['source']:<34}"
        yield f"{head}{kernel['operation'].rpartition('shard_map/')[2]}"


def _collectives(figures: Figures) -> Iterator[str]:
    if figures["collectives"]:
        yield f"\n{'collective':<28}{'bytes':>14}{'before':>8}{'between':>9}{'kernel gradients between':>26}"
    for each in figures["collectives"]:
        between = f"{each['kernels_between']:>9}{each['kernel_gradients_between']:>26}"
        yield f"{each['name']:<28}{each['bytes']:>14,}{each['kernels_before']:>8}{between}"
