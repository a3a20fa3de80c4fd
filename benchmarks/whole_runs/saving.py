"""Measures the cost of manifests: seconds to save a checkpoint of ResNet-50 with and without hashing.

    python benchmarks/whole_runs/saving.py
    python benchmarks/whole_runs/saving.py --rounds 15 --folder /scratch

Both kinds of saves alternate, in a directory each. The time of a save includes its manifest. The state is an
initialized ResNet-50 of 1000 classes (102 MB of parameters and statistics) with random momentum, which compresses as
little as a trained one. The target is at most 1.05 of a save without hashing. `blocked` is the part of a hashed save in
which the loop waits, and `verify` the time to compare the checkpoint with its manifest, as before a restore.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, alternate, machine
from jaxddp.api import resnet
from jaxddp.engine.initial_state import make_init
from jaxddp.engine.state import TrainState
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.training.checkpoints.integrity import Integrity
from jaxddp.training.checkpoints.manager import Checkpoints

TARGET = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="saves of each kind")
    parser.add_argument("--folder", type=Path, default=None, help="default: the system's temporary folder")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/saving.json"))
    options = parser.parse_args()
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        report |= compare_saves(Path(folder), options.rounds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"results: {options.out}\n\n{table(report)}")


def compare_saves(folder: Path, rounds: int) -> Figures:
    """Return the seconds of each save and verification, without a first warm-up save of each kind."""
    state = state_to_save()
    places = {name: folder / name for name in ("hashed", "plain")}
    verified: list[float] = []
    blocked: list[float] = []
    cpu: dict[str, list[float]] = {name: [] for name in places}

    def save(name: str) -> float:
        shutil.rmtree(places[name], ignore_errors=True)
        with Checkpoints(places[name]) as checkpoints, without_manifests(name == "plain"):
            begin, worked = time.perf_counter(), time.process_time()
            checkpoints.save(1, state, {})
            returned = time.perf_counter() - begin
            checkpoints.wait()
            seconds = time.perf_counter() - begin
            cpu[name].append(time.process_time() - worked)
        if name == "hashed":
            blocked.append(returned)
            begin = time.perf_counter()
            assert Integrity(places[name]).check(1) is None
            verified.append(time.perf_counter() - begin)
        return seconds

    seconds = alternate({name: lambda name=name: save(name) for name in places}, rounds + 1)
    seconds = {name: turns[1:] for name, turns in seconds.items()}
    written = sum(file.stat().st_size for file in (places["hashed"] / "1").rglob("*") if file.is_file())
    hashed, plain = (seconds[name] for name in places)
    return {
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "written_bytes": written,
        "seconds": seconds | {"blocked": blocked[1:], "verify": verified[1:]},
        "cpu_seconds": {name: turns[1:] for name, turns in cpu.items()},
        "ratio": statistics.median(hashed) / statistics.median(plain),
        "ratio_of_best_turns": min(hashed) / min(plain),
        "ratio_of_each_round": [a / b for a, b in zip(hashed, plain, strict=True)],
        "target": TARGET,
    }


def state_to_save() -> TrainState:
    """Return an initialized ResNet-50 with random momentum."""
    topology = Topology.create(1)
    model, optimizer = adapt(resnet("resnet50", 1000)), optax.sgd(0.1, momentum=0.9)
    state = make_init(model, optimizer, (32, 32, 3), topology)(jax.random.key(0))
    rng = np.random.default_rng(0)
    random = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), state.opt_state)
    return jax.block_until_ready(jax.device_put(state.replace(opt_state=random), topology.replicated))


@contextmanager
def without_manifests(without: bool) -> Iterator[None]:
    if not without:
        yield
        return
    with (
        mock.patch.object(Integrity, "write", lambda self, step: None),
        mock.patch.object(Integrity, "forget", lambda self, step: None),
    ):
        yield


def table(report: Figures) -> str:
    """Format the medians, and the ratio with its range over the rounds."""
    medians = {name: statistics.median(turns) for name, turns in report["seconds"].items()}
    medians |= {f"{name}, CPU": statistics.median(turns) for name, turns in report["cpu_seconds"].items()}
    low, high = min(report["ratio_of_each_round"]), max(report["ratio_of_each_round"])
    lines = [f"{name:<14}{value:>7.3f} s" for name, value in medians.items()]
    lines.append(f"{report['state_bytes'] / 1e6:.0f} MB of state, {report['written_bytes'] / 1e6:.0f} MB written")
    best = f"best turns {report['ratio_of_best_turns']:.3f}, rounds {low:.3f} to {high:.3f}"
    lines.append(f"ratio {report['ratio']:>15.3f} ({best}; target at most {report['target']})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
