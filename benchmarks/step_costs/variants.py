"""Measures the cost of options: compares the step of a config with the step after changes of a key or two.

    python benchmarks/step_costs/variants.py
    python benchmarks/step_costs/variants.py ghost:16 --rounds 15 --steps 10

The config is `cifar10` (ResNet-18 with the small stem, 32 px) at width 16, on one device with resident random images.
The plain step and the named variants, by default all, alternate in one process, without compile time. A ratio below 1
means that the variant is slower. Variants that compute the same numbers are checked first.
"""

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, alternate, check_losses, compare, machine, table, time_steps
from benchmarks.step import losses, make_experiment
from jaxddp.setup.run_setup import RunSetup, initialize, open_recipe

PLAIN = "plain"
BATCH, GATE_STEPS = 64, 3


@dataclass(frozen=True)
class Variant:
    """A change of some keys of the config.

    Attributes:
        tolerance: Relative tolerance of the first losses to the plain step's; None if the variant computes other
        numbers.
    """

    changes: Mapping[str, Any]
    tolerance: float | None = None


VARIANTS = {
    "without the guard": Variant({"train": {"max_bad_steps": 0}}, tolerance=1e-6),
    "float16": Variant({"train": {"precision": "float16"}}),
    "accumulate 4": Variant({"train": {"accumulate": 4}}),
    "reproducible": Variant({"parallel": {"reproducible": True}}),
    "ghost:16": Variant({"model": {"batch_norm": "ghost:16"}}),
    "one ghost batch": Variant({"model": {"batch_norm": f"ghost:{BATCH}"}}, tolerance=1e-4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"variants (default: all): {', '.join(map(repr, VARIANTS))}"
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/variants.json"))
    options = parser.parse_args()
    if unknown := set(options.names) - set(VARIANTS):
        parser.error(f"unknown variants {', '.join(sorted(unknown))}; there are: {', '.join(VARIANTS)}")
    chosen = {name: VARIANTS[name] for name in options.names or VARIANTS}
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    report["comparisons"] = compare_variants(chosen, options.rounds, options.steps)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"results: {options.out}\n\n{table(report['comparisons'])}")


def compare_variants(variants: Mapping[str, Variant], rounds: int, steps: int) -> dict[str, Figures]:
    """Compare each variant with the plain step, in images per second."""
    everything = {PLAIN: Variant({}), **variants}
    with tempfile.TemporaryDirectory() as folder:
        setups = {name: make_setup(Path(folder), steps, each) for name, each in everything.items()}
        placed = {name: list(setup.batches(0, steps)) for name, setup in setups.items()}
    compiled = {name: setup.step() for name, setup in setups.items()}
    states = {name: setup.state for name, setup in setups.items()}
    results = {name: losses(step, states[name], placed[name][:GATE_STEPS]) for name, step in compiled.items()}
    for name, variant in variants.items():
        if variant.tolerance is not None:
            check_losses({PLAIN: results[PLAIN], name: results[name]}, variant.tolerance)
    turns = {name: functools.partial(time_steps, step, states[name], placed[name]) for name, step in compiled.items()}
    seconds = alternate(turns, rounds)
    return {name: compare({each: seconds[each] for each in (name, PLAIN)}, BATCH * steps) for name in variants}


def make_setup(folder: Path, steps: int, variant: Variant) -> RunSetup:
    """Return the setup of the config with the variant's keys; the images are the same at each call."""
    experiment = make_experiment(folder, steps)
    assert experiment.file is not None
    config = experiment.config.replace(train={"batch_size": BATCH}).replace(**variant.changes)
    return initialize(open_recipe(dataclasses.replace(experiment.file, config=config)))


if __name__ == "__main__":
    main()
