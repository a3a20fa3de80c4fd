"""Counts the fusions and bytes of a config's training step as XLA compiles it for TPUs, without a TPU.

    python benchmarks/tpu_program.py imagenet_resnet50 --topology v5e:2x4 v4:2x2x1
    python benchmarks/tpu_program.py imagenet_resnet50 --batch 128 --against-flax
    python benchmarks/tpu_program.py cifar10_fast --classes 10 --data.cache device --topology v5e:2x2

The script compiles one program for each topology (TPU version: chips in each direction), by default v5e:2x4. Options
after the config override its keys, as for `jaxddp train`. With `--against-flax` it also compiles the step of plain Flax
with the same network, batch and precision.

The script prints, and writes as JSON: memory, and how it compares with the memory of a chip; the CPU time of the
compilation and the peak memory of the script, most of which is the compiler's; FLOPs; the bytes that fusions read and
write in HBM; the numbers of fusions and of data movements (copies, transposes and casts by themselves); the padding,
which is the fraction of the FLOPs of convolutions and matrix products that multiply padding; the collectives with what
runs beside each; and the cycles that the compiler estimates, which are a model and not a measurement. With `data.cache`
"device" a call takes several steps; the figures are of one step.
"""

import contextlib
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))

import benchmarks.programs.command as command
from benchmarks.common.harness import Figures
from benchmarks.programs.config_step import Data, compile_step
from benchmarks.programs.flax_program import compile_flax_step
from benchmarks.programs.tpu_counts import HBM_BYTES, count_program
from benchmarks.programs.tpu_plugin import described_devices
from jaxddp.core.errors import InputError
from jaxddp.mesh import Topology
from jaxddp.recipe.file import RecipeFile

TOPOLOGIES = ("v5e:2x4",)
SWITCHES = {"against_flax": "also compile the step of plain Flax"}
_ROWS = {
    "memory_bytes": "{:,}",
    "hbm_fraction": "{:.3f}",
    "temporary_bytes": "{:,}",
    "aliased_bytes": "{:,}",
    "flops_per_image": "{:,.0f}",
    "hbm_bytes_per_image": "{:,.0f}",
    "padding": "{:.3f}",
    "fusions": "{:,}",
    "convolutions": "{:,}",
    "data_movements": "{:,}",
    "prefetches": "{:,}",
    "compiler_cpu_seconds": "{:.0f}",
    "peak_host_bytes": "{:,}",
    "estimated_cycles": "{:,}",
    "estimated_cycles_of_movements": "{:,}",
}


def main() -> None:
    command.main("tpu_program.py", __doc__, TOPOLOGIES, program_figures, table, SWITCHES)


def program_figures(
    file: RecipeFile, topology: str, batch: int | None, data: Data, *, against_flax: bool = False
) -> Figures:
    """Return all figures of one program. Raises InputError for a bad config or topology."""
    devices = command.find_devices(topology, described_devices, "v5e:2x4 or v4:2x2x1")
    config, images = command.config_for(file, batch, len(devices))
    chips = Topology.create(devices)
    begin = time.process_time()
    with readable_errors(topology):
        compiled, steps = compile_step(file, config, chips, data, platform="tpu", compiler_options={})
    compiler = {"compiler_cpu_seconds": time.process_time() - begin, "peak_host_bytes": peak_host_bytes()}
    figures = {"config": str(file.path.name), "topology": topology, "chips": len(devices), "batch": images}
    figures |= {"device_kind": chips.device_kind, "steps_of_a_dispatch": steps, **compiler}
    figures |= figures_of(compiled, images, steps)
    if chips.device_kind in HBM_BYTES:
        figures["hbm_fraction"] = figures["memory_bytes"] / HBM_BYTES[chips.device_kind]
    if against_flax:
        with readable_errors(topology):
            rival = compile_flax_step(config, chips, data.classes)
        figures["flax"] = figures_of(rival, images, 1)
    return figures


def peak_host_bytes() -> int:
    """Return the peak resident memory of this process on Linux, most of which is the compiler's."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def figures_of(compiled: Any, images: int, steps: int) -> Figures:
    """Return the figures of a compiled program with `images` images on each chip."""
    (module,) = compiled.runtime_executable().hlo_modules()
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        **command.memory_figures(compiled),
        "memory_bytes": total + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes,
        **count_program(module.as_serialized_hlo_module_proto(), images, steps_in_a_loop=steps > 1),
    }


@contextlib.contextmanager
def readable_errors(topology: str) -> Iterator[None]:
    """Turn the compiler's error that a program needs too much memory into an InputError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if "RESOURCE_EXHAUSTED" not in lines[0]:
            raise
        raise InputError(f"--topology {topology}: {lines[0]}", advice="give fewer images with --batch") from None


def table(results: Mapping[str, Figures]) -> str:
    """Format a column for each program and for its Flax counterpart, then the largest operations and the collectives
    of the last program.
    """
    columns: dict[str, Figures] = {}
    for name, figures in results.items():
        columns[name] = figures
        if "flax" in figures:
            columns[f"{name} Flax"] = figures["flax"]
    lines = [f"{'':<32}" + "".join(f"{name:>18}" for name in columns)]
    for key, form in _ROWS.items():
        cells = (form.format(figures[key]) if key in figures else "" for figures in columns.values())
        lines.append(f"{key:<32}" + "".join(f"{cell:>18}" for cell in cells))
    name, last = list(results.items())[-1]
    lines += ["", f"of {name}, share of the estimated cycles, kind, operation:"]
    lines += [f"{each['share']:>8.3f}  {each['kind']:<16}{each['operation'][-80:]}" for each in last["largest"]]
    lines += ["", f"{'collective':<28}{'bytes':>14}{'cycles before':>16}{'cycles beside':>16}"] * bool(
        last["collectives"]
    )
    for each in last["collectives"]:
        before, beside = f"{each['cycles_before']:.3f}", f"{each['cycles_beside']:.3f}"
        lines.append(f"{each['name']:<28}{each['bytes']:>14,}{before:>16}{beside:>16}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
