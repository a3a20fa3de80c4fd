"""Measures the scaling from one to two processes, splits its losses, and projects a model to many GPUs.

    python benchmarks/processes/scale.py
    python benchmarks/processes/scale.py --repeats 5 --out runs/benchmarks/scale.json

One and two processes of one core each (gloo on the loopback) train a ResNet-18 with the small stem on JPEG files, at a
fixed batch for each process and at a fixed global batch. Efficiency is the speed of two processes over twice
the speed of one. In every group of processes three contenders alternate, which all processes start together:

- full: steps over the stream of files, with its buffers in a steady state;
- resident: the same step over batches on the device;
- local: each process alone, the same step on its own slice, without an all-reduce.

A step's time is split by differences: compute is local; communication is resident - local (including the wait for the
slower process, and packing the buffer); input is full - resident (visible because decoding uses the same core,
unlike with a GPU). One process has no communication: its resident step is its local step.

The report compares the result with the prediction of `programs/projection.py` for two processes: the local step, and a
ring over a link with the latency and bandwidth of all-reduces of 4 kB and 16 MB timed alone. The report ends with the
projection to 8 to 4096 GPUs: for one all-reduce that nothing hides, and for the all-reduces of the compiled program,
each beside the kernels between its start and the wait for it. `benchmarks/large_jobs.py` projects other ways to share
the work, to 100,000 devices. The script reads the all-reduces from the output of

    python benchmarks/gpu_program.py imagenet_resnet50 --topology 1x2x8
"""

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[2]))


from benchmarks.common.harness import Figures, alternate, copy, machine, run_in_processes, take_steps, time_steps
from benchmarks.common.photographs import CLASSES, photograph_table, write_photographs
from benchmarks.programs.communication import ring
from benchmarks.programs.projection import (
    A100_IMAGES_PER_SECOND,
    DGX_A100,
    Message,
    fit_link,
    project,
    project_schedule,
)
from jaxddp.api import prepare_training, resnet
from jaxddp.cluster.doctor import time_all_reduce
from jaxddp.config import DataConfig
from jaxddp.core.peers import joined
from jaxddp.engine.state import TrainState
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.setup.run_setup import RunSetup

SIZE, WIDTH, LOCAL_BATCH = 32, 16, 32
Statistic = Callable[[list[float]], float]
# Other programs only slow a turn down, so on a busy machine the fastest turns vary least.
STATISTICS: dict[str, Statistic] = {"median": statistics.median, "best": min}
# More batches than the stream and the placement buffer together.
BUFFERED = 8
SMALL, LARGE = 4_000, 16_000_000
GPUS, GPU_BATCH = [8 * 2**power for power in range(10)], 256
PROGRAM = Path("runs/benchmarks/gpu_program.json")
TOPOLOGY = "1x2x8"
UNHIDDEN, SCHEDULED = "one all-reduce", "as scheduled"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="starts of each group of processes")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender in a group")
    parser.add_argument("--steps", type=int, default=20, help="steps in a turn")
    parser.add_argument("--program", type=Path, default=PROGRAM, help="output of gpu_program.py")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/scale.json"))
    parser.add_argument("--photographs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--local-batch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.photographs:
        print(json.dumps(measure(options.photographs, options.local_batch, options.rounds, options.steps)))
        return
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "load": [os.getloadavg()]}
    groups = measure_groups(options)
    report["load"].append(os.getloadavg())
    report["measured"] = {name: evaluate(groups, statistic) for name, statistic in STATISTICS.items()}
    report |= {"projection": projection(scheduled(options.program)), "groups": groups}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    for name, figures in report["measured"].items():
        print(f"\n{name} of all turns\n{measured_table(figures)}")
    print(f"\n{projection_table(report['projection'])}\n\nresults: {options.out}")


# --- In the parent ---


def measure_groups(options: argparse.Namespace) -> dict[str, list[Figures]]:
    """Measure one process at either batch, and two processes, `--repeats` times."""
    groups = {"1 process": (1, LOCAL_BATCH), "1 process, both shares": (1, 2 * LOCAL_BATCH)}
    groups["2 processes"] = (2, LOCAL_BATCH)
    results: dict[str, list[Figures]] = {name: [] for name in groups}
    turns = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder))
        for _ in range(options.repeats):
            for name, (count, batch) in groups.items():
                child_options = ["--photographs", folder, "--local-batch", str(batch)]
                results[name].append(run_in_processes(count, [__file__, *child_options, *turns]) | {"processes": count})
    return results


def evaluate(groups: dict[str, list[Figures]], statistic: Statistic) -> Figures:
    """Evaluate the turns of all repeats.

    Efficiency is the speed of two processes over twice that of one, for the full step.
    """
    results = {name: summary(repeats, statistic) for name, repeats in groups.items()}
    speed = {name: group["images_per_second"] for name, group in results.items()}
    half = speed["2 processes"] / 2
    shares = {
        "fixed batch a process": half / speed["1 process"],
        "fixed global batch": half / speed["1 process, both shares"],
    }
    return {"groups": results, "efficiency": shares, "model": check_model(results["2 processes"])}


def summary(repeats: list[Figures], statistic: Statistic) -> Figures:
    """Return a group's seconds per step, split into compute, communication and input."""
    step = {
        name: statistic([turn for each in repeats for turn in each["seconds"][name]]) for name in repeats[0]["seconds"]
    }
    compute = step.get("local", step["resident"])
    split = {"compute": compute, "communication": step["resident"] - compute, "input": step["full"] - step["resident"]}
    setup_alone = {size: statistic([each["all_reduce"][size] for each in repeats]) for size in repeats[0]["all_reduce"]}
    constants = {name: repeats[0][name] for name in ("processes", "global_batch", "averaged_bytes")}
    speed = {"images_per_second": repeats[0]["global_batch"] / step["full"]}
    return constants | speed | {"step": step, "split": split, "all_reduce": setup_alone}


def check_model(two: Figures) -> Figures:
    """Return the predicted and the measured step of two processes, without input."""
    setup_alone = {int(size): seconds for size, seconds in two["all_reduce"].items()}
    link = fit_link((SMALL, setup_alone[SMALL]), (LARGE, setup_alone[LARGE]))
    communication, measured = ring(two["averaged_bytes"], 2, link), two["split"]["communication"]
    steps = {"predicted": two["split"]["compute"] + communication, "measured": two["step"]["resident"]}
    return {
        "link": asdict(link),
        "communication": {
            "predicted": communication,
            "alone": setup_alone[two["averaged_bytes"]],
            "measured": measured,
        },
        "images_per_second": {name: two["global_batch"] / seconds for name, seconds in steps.items()},
    }


def scheduled(program: Path) -> list[Message] | None:
    """Read the all-reduces of a compiled program for two hosts. Without a program, print the command and return None.

    A step is bound by memory, so the bytes of its kernels represent their time.
    """
    results = json.loads(program.read_text()) if program.is_file() else {}
    programs = {each["topology"]: each for each in (results, *results.get("others", {}).values()) if "topology" in each}
    if TOPOLOGY not in programs:
        command = f"python benchmarks/gpu_program.py imagenet_resnet50 --topology {TOPOLOGY} --out {program}"
        print(f"{program} has no program for {TOPOLOGY}, so the projection assumes no overlap; to get one: {command}")
        return None
    two_hosts = programs[TOPOLOGY]
    total = two_hosts["bytes_per_image"] * two_hosts["batch"]
    return [Message(each["bytes"], each["bytes_between"] / total) for each in two_hosts["collectives"]]


def projection(messages: list[Message] | None) -> list[Figures]:
    """Project ResNet-50 on nodes of eight GPUs: a row for each number of GPUs and kind of averaging."""
    model = adapt(resnet("resnet50", 1000))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    compute = GPU_BATCH / A100_IMAGES_PER_SECOND
    sizes = {"compute": compute, "batch_per_gpu": GPU_BATCH}
    projections = [(UNHIDDEN, project(DGX_A100, gpus, num_bytes=num_bytes, **sizes)) for gpus in GPUS]
    if messages is not None:
        projections += [(SCHEDULED, project_schedule(DGX_A100, gpus, messages=messages, **sizes)) for gpus in GPUS]
    shared = {"num_bytes": num_bytes, **sizes}
    return [
        asdict(projected) | {"way": way, "overlap": projected.overlap, "efficiency": projected.efficiency, **shared}
        for way, projected in projections
    ]


def measured_table(figures: Figures) -> str:
    lines = [f"{'group':<24}{'batch':>6}{'images/s':>10}   ms a step: compute  communication  input"]
    for name, group in figures["groups"].items():
        compute, communication, waiting = (1000 * seconds for seconds in group["split"].values())
        speed = f"{group['global_batch']:>6}{group['images_per_second']:>10.1f}"
        lines.append(f"{name:<24}{speed}{compute:>21.1f}{communication:>15.1f}{waiting:>7.1f}")
    lines += [f"efficiency at {name}: {share:.3f}" for name, share in figures["efficiency"].items()]
    link, speeds, seconds = (figures["model"][part] for part in ("link", "images_per_second", "communication"))
    lines.append(f"loopback: {link['bandwidth'] / 1e9:.3f} GB/s, {link['latency'] * 1e6:.0f} us")
    lines.append("communication of two, ms: " + ", ".join(f"{k} {1000 * s:.1f}" for k, s in seconds.items()))
    lines.append("two without input, images/s: " + ", ".join(f"{k} {s:.1f}" for k, s in speeds.items()))
    return "\n".join(lines)


def projection_table(rows: list[Figures]) -> str:
    megabytes = rows[0]["num_bytes"] / 1e6
    lines = [f"projected to DGX A100: ResNet-50, {megabytes:.0f} MB averaged, {GPU_BATCH} images a GPU"]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    head = "".join(f"{way:>38}" for way in ways)
    lines.append(f"{'GPUs':>6}{head}   communication, overlap, efficiency (images/s)")
    for gpus in GPUS:
        cells = (_cell(row) for way in ways for row in rows if (row["gpus"], row["way"]) == (gpus, way))
        lines.append(f"{gpus:>6}{''.join(cells)}")
    return "\n".join(lines)


def _cell(row: Figures) -> str:
    figures = f"{1000 * row['communication']:.1f} ms {row['overlap']:.0%} {row['efficiency']:.3f}"
    return f"{figures:>25} ({row['images_per_second']:>10,.0f})"


# --- In each process of a group ---


def measure(photographs: Path, local_batch: int, rounds: int, steps: int) -> Figures:
    network = resnet("resnet18", CLASSES, width=WIDTH, stem="small")
    data = DataConfig(image_size=SIZE)
    setup = prepare_training(network, photograph_table(photographs), None, optax.sgd(0.01, 0.9), local_batch, data=data)
    step, placed = setup.step(), list(setup.batches(0, 4))
    contenders: dict[str, Callable[[], float]] = {
        "full": functools.partial(full_turn, step, setup, steps),
        "resident": functools.partial(turn, step, setup.state, placed, steps),
    }
    if not setup.topology.peers.is_alone:
        contenders["local"] = functools.partial(turn, *setup_alone(setup, placed), steps)
    for contender in contenders.values():
        contender()
    seconds = alternate(contenders, rounds)
    averaged = (setup.state.params, setup.state.model_state)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(averaged))
    return {
        "global_batch": setup.feed.order.batch_size,
        "averaged_bytes": num_bytes,
        "all_reduce": {str(size): time_all_reduce(setup.topology, size, 25)[0] for size in (SMALL, num_bytes, LARGE)},
        "seconds": {name: [each / steps for each in turns] for name, turns in seconds.items()},
    }


def setup_alone(setup: RunSetup, placed: list[Any]) -> tuple[Any, TrainState, list[Any]]:
    """Return the step, the state and the batches of this process alone."""
    child_options = Topology.create(setup.topology.mesh.local_devices)
    state = child_options.replicate(jax.device_get(setup.state))
    batches = [
        child_options.place(jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), batch)) for batch in placed
    ]
    return setup.changed(resources=replace(setup.resources, topology=child_options)).step(), state, batches


def turn(step: Any, state: TrainState, batches: list[Any], steps: int) -> float:
    joined().exchange("turn", "")
    return time_steps(step, state, islice(cycle(batches), steps))


def full_turn(step: Any, setup: RunSetup, steps: int) -> float:
    # A turn must produce as many batches as it uses, so the buffers are full at its start and at its end.
    stream = setup.batches(0, BUFFERED + steps + BUFFERED)
    state = take_steps(step, copy(setup.state), islice(stream, BUFFERED))
    joined().exchange("turn", "")
    return time_steps(step, state, islice(stream, steps))


if __name__ == "__main__":
    main()
