"""Counts the kernels and bytes of a config's training step as XLA compiles it for H200s, without a GPU.

    python benchmarks/gpu_program.py imagenet_resnet50
    python benchmarks/gpu_program.py imagenet_resnet50 --topology 1x2x8 --out runs/benchmarks/2x8.json
    python benchmarks/gpu_program.py cifar10 --classes 10 --data.cache device --topology 1x1x1

The script compiles one program for each topology (partitions x hosts x GPUs of a host), by default 1x1x1, 1x1x8 and
1x2x8. Options after the config override its keys, as for `jaxddp train`.

The script prints, and writes as JSON: the kernels and the bytes that they move; the largest kernels; the collectives,
and the kernels between the start of each collective and the wait for it; and a roofline (`programs/roofline.py`), which
is a model and not a measurement. With `data.cache` "device" a call takes several steps; the figures are of one step.

`overlapped` is the fraction of the gradients' bytes whose all-reduce starts before the last three gradients of
convolution kernels. The file has the figures of the first topology at its top level, and those of the others in
"others"."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import benchmarks.programs.command as command
from benchmarks.common.harness import Figures
from benchmarks.programs.config_step import Data, compile_step
from benchmarks.programs.counts import count, table
from benchmarks.programs.gpu_plugin import compiler_options, described_devices
from benchmarks.programs.roofline import predict
from benchmarks.programs.schedule import read_schedule
from jaxddp.mesh import Topology
from jaxddp.recipe.file import RecipeFile

TOPOLOGIES = ("1x1x1", "1x1x8", "1x2x8")


def main() -> None:
    command.main("gpu_program.py", __doc__, TOPOLOGIES, program_figures, table)


def program_figures(file: RecipeFile, topology: str, batch: int | None, data: Data) -> Figures:
    """Return all figures of one program. Raises InputError for a bad config or topology."""
    devices = command.find_devices(topology, described_devices, ", ".join(TOPOLOGIES))
    config, images = command.config_for(file, batch, len(devices))
    compiled, steps = compile_step(
        file, config, Topology.create(devices), data, platform="gpu", compiler_options=compiler_options()
    )
    (module,) = compiled.runtime_executable().hlo_modules()
    schedule = read_schedule(module.as_serialized_hlo_module_proto(), steps_in_a_loop=steps > 1)
    return {
        "config": str(file.path.name),
        "topology": topology,
        "batch": images,
        "steps_of_a_dispatch": steps,
        **command.memory_figures(compiled),
        **count(schedule, images),
        "roofline": predict(schedule, images, len(devices), precision=str(config.train.precision)),
    }


if __name__ == "__main__":
    main()
