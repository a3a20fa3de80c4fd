"""Runs a recipe several times in one process, timed as airbench times its runs. `benchmarks/gpu.py` starts it:

    python jax_cifar.py cifar10_fast --data FILE --out FILE --keys 0 1 2 [--set model.width=32 …] [--trace DIR]

The time of each seed includes the network's initialization, with statistics of the images that the recipe needs, which
are computed again for each seed; all of training; and one evaluation of the last state with the recipe's test-time
augmentation, until its metrics are on the host. It excludes a first run, which compiles everything; reading the file;
copying the images to the device as uint8 if the recipe keeps them there (`data.cache`), which happens once and is
reported separately; and validation during training, which is off.
"""

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.rivals.contenders.outcome import add_result, attempt
from benchmarks.rivals.contenders.trace_summary import traced
from jaxddp.config import Config
from jaxddp.data.source import Source
from jaxddp.recipe.file import RecipeFile, read_recipe
from jaxddp.setup.run_setup import RunSetup, initialize, open_recipe
from jaxddp.setup.run_training import make_run
from jaxddp.training.loop import fit

FIRST_SEED = 1_000_000
"""Seed of the run that compiles."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", help="a name in configs/, or the path of a recipe file")
    parser.add_argument("--data", required=True, help="as data.path")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--keys", nargs="*", type=int, default=[], help="the seeds")
    parser.add_argument("--trace", type=Path, help="trace one run into this folder, and time none")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main(options: argparse.Namespace) -> None:
    file = with_settings(read_recipe(options.recipe), options.set, options.data)
    experiment = open_recipe(file)
    setup, val = initialize(experiment), experiment.resources.val
    assert val is not None  # A config has both splits.
    placed = place(setup, val)
    begin = time.perf_counter()
    train_once(setup, val, FIRST_SEED)
    first = time.perf_counter() - begin
    if options.trace is not None:
        with traced(options.trace) as summary:
            train_once(setup, val, FIRST_SEED)
        add_result(options.out, summary)
    common = {"images_placed": placed, "first_run": first, "device": setup.topology.device_kind, "set": options.set}
    for seed in options.keys:
        add_result(options.out, train_once(setup, val, seed) | common, str(seed))


def with_settings(file: RecipeFile, words: Sequence[str], data: str, *, validates: bool = False) -> RecipeFile:
    """Return the recipe for one device and other data, by default without validation during training."""
    config = file.config
    for word in words:
        key, _, value = word.partition("=")
        config = replace_key(config, key, value)
    config = config.replace(data={"path": data}, parallel={"devices": 1})
    config = config if validates else config.replace(eval={"every": "0 steps"})
    return dataclasses.replace(file, config=config)


def replace_key(config: Config, key: str, value: str) -> Config:
    """Replace a key of a config by a value, given as JSON or text."""
    try:
        change: Any = json.loads(value)
    except ValueError:
        change = value
    for name in reversed(key.split(".")):
        change = {name: change}
    return config.replace(**change)


def place(setup: RunSetup, val: Source) -> float | None:
    """Return the seconds to copy all images to the device, or None if the recipe reads them batch by batch."""
    if setup.config.data.cache != "device":
        return None
    begin = time.perf_counter()
    setup.feed.place(val)
    jax.block_until_ready([resident.images for resident in setup.feed.resident.values()])
    return time.perf_counter() - begin


def prepare_state(setup: RunSetup, seed: int) -> RunSetup:
    """Return the setup with a new state. Statistics of the images are constants of its compiled initialization."""
    seeded = setup.with_seed(seed)
    if seeded.initialize is None:
        return seeded
    fresh = seeded.initialize(seeded.state.params, seeded.state.model_state)
    params, model_state = setup.topology.replicate(fresh)
    return dataclasses.replace(seeded, state=seeded.state.replace(params=params, model_state=model_state))


def train_once(setup: RunSetup, val: Source, seed: int) -> dict[str, Any]:
    """Train one run, and return its seconds and the metrics of its last state."""
    gc.collect()
    begin = time.perf_counter()
    seeded = prepare_state(setup, seed)
    jax.block_until_ready(seeded.state)
    ready = time.perf_counter()
    state = jax.block_until_ready(fit(make_run(seeded)))
    trained = time.perf_counter()
    resident, size = setup.config.data.cache == "device", setup.config.eval.batch_size
    metrics = seeded.evaluator(val, size, resident=resident)(state)
    end = time.perf_counter()
    seconds = {"prepare": ready - begin, "train": trained - ready, "evaluate": end - trained}
    return {"seconds": end - begin, "top1": metrics["top1"], "of_it": seconds, "steps": setup.layout.plan.total_steps}


if __name__ == "__main__":
    attempt(main, parse())
