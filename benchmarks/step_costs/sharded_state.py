"""Counts the memory and the communication of a step with and without `parallel.shard_optimizer`, on 8 devices.

    python benchmarks/step_costs/sharded_state.py
    python benchmarks/step_costs/sharded_state.py --platform cpu --out runs/benchmarks/sharded_state.json

XLA compiles the steps of ResNet-50 and ViT-B/16 with AdamW, for simulated CPU devices and, with its compiler for GPUs
(`programs/gpu_plugin.py`), for 8 described H200s. Nothing is run.

- `state`: bytes of the state on a device, which the program updates in place.
- `peak`: arguments and temporaries of the program on a device.
- `sent`: bytes that a device sends in a step if every collective is a ring: 2 (n - 1) / n of an all-reduce's array, and
  (n - 1) / n of the whole array of a reduce-scatter or an all-gather.
- `kernels`: kernels of a step, on GPUs.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, machine
from benchmarks.programs.command import Overrides, config_for, memory_figures
from benchmarks.programs.config_step import Data, compile_step
from benchmarks.programs.gpu_plugin import compiler_options, described_devices, is_present
from benchmarks.programs.schedule import Schedule, read_schedule
from jaxddp.command_line.parse import parse_recipe
from jaxddp.engine.compilation import unoptimized_options
from jaxddp.mesh import Topology, simulate_cpu_devices

DEVICES = 8
NO_TRITON = ("--parallel.xla-options", "xla_gpu_enable_triton_gemm=false")
"""This compiler for described GPUs finds no tiles for a product of ViT-B."""
CASES = {
    "ResNet-50, AdamW": ("imagenet_resnet50", "--optimizer.name", "adamw"),
    "ViT-B/16, AdamW": ("imagenet_vit_s16", "--model.name", "vit_b16"),
}
SMALL = ("--data.image-size", "64", "--data.resize", "64", "--train.precision", "float32")
"""On CPUs images are small, because the compilation takes less time. A ViT then has fewer positions."""
BATCH = {"cpu": 2, "gpu": 128}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", nargs="+", default=["cpu", "gpu"], choices=("cpu", "gpu"))
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/sharded_state.json"))
    options = parser.parse_args()
    simulate_cpu_devices(DEVICES)
    platforms = [name for name in options.platform if name == "cpu" or is_present()]
    results = {f"{case}, {platform}": compared(case, platform) for platform in platforms for case in CASES}
    report = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "results": results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(lines(results)))


def compared(case: str, platform: str) -> Figures:
    """Return the figures of a case without and with the option."""
    words = [*CASES[case], *(SMALL if platform == "cpu" else NO_TRITON)]
    return {"whole": figures(words, platform), "sharded": figures([*words, "--parallel.shard-optimizer"], platform)}


def figures(words: list[str], platform: str) -> Figures:
    _, file = parse_recipe(Overrides, Path(__file__).name, words)
    config, images = config_for(file, BATCH[platform], DEVICES)
    devices = jax.devices() if platform == "cpu" else described_devices(f"1x1x{DEVICES}")
    options = unoptimized_options("cpu") if platform == "cpu" else compiler_options()
    topology, data = Topology.create(devices), Data(50_000, 1000)
    compiled, _ = compile_step(file, config, topology, data, platform=platform, compiler_options=options)
    (module,) = compiled.runtime_executable().hlo_modules()
    schedule, memory = read_schedule(module.as_serialized_hlo_module_proto()), memory_figures(compiled)
    return {
        "state": memory["aliased_bytes"],
        "peak": memory["argument_bytes"] + memory["temporary_bytes"],
        "sent": bytes_sent(schedule),
        "collectives": [kernel.collective for kernel in schedule.kernels if kernel.collective],
        "kernels": len(schedule.kernels) if platform == "gpu" else None,
        "images": images,
    }


def bytes_sent(schedule: Schedule) -> float:
    shares = {"all-reduce": 2 * (DEVICES - 1) / DEVICES}
    collectives = (kernel for kernel in schedule.kernels if kernel.collective)
    return sum(shares.get(each.collective, (DEVICES - 1) / DEVICES) * each.message for each in collectives)


def lines(results: Figures) -> Iterator[str]:
    yield f"{'':28}{'state, MB':>20}{'peak, MB':>20}{'sent, MB':>18}{'kernels':>16}"
    for name, pair in results.items():
        cells: Any = [[pair[way][key] for way in ("whole", "sharded")] for key in ("state", "peak", "sent", "kernels")]
        shown = [" -> ".join("" if each is None else f"{each / 1e6:,.1f}" for each in cell) for cell in cells[:3]]
        kernels = "" if cells[3][0] is None else " -> ".join(map(str, cells[3]))
        yield f"{name:28}{shown[0]:>20}{shown[1]:>20}{shown[2]:>18}{kernels:>16}"


if __name__ == "__main__":
    main()
