"""Measures the cost of input with the training set in device memory, and its speed relative to a stream.

    python benchmarks/input/resident.py
    python benchmarks/input/resident.py --rounds 9 --linear-batch 16

There are three comparisons, each of contenders that alternate in one process on one device:

- input: `fit` on resident images, against the jitted step on one resident batch, for a ResNet-18 of width 16 at 32
  pixels. The target is 0.97 of the step's speed.
- files: softmax regression by `fit` on resident images, against the stream that reads and decodes the same JPEG files
  of 32 pixels for every batch. The target is 5 times its speed.
- arrays: the same regression against batches gathered from arrays in host memory. The smaller the batch, the larger
  the fraction of a step that the transfer to the device takes.

In the last two comparisons, both contenders must first compute the same losses.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, alternate, compare, copy, machine, random_images, table, time_steps
from benchmarks.common.photographs import photograph_table, write_photographs
from jaxddp.api import AugmentConfig, DataConfig, prepare_training, resnet
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.source import Source
from jaxddp.setup.run_setup import RunSetup
from jaxddp.setup.run_training import make_run
from jaxddp.training.listeners.jsonl import History
from jaxddp.training.loop import fit

EXAMPLES, CLASSES, SIZE, WIDTH = 10_000, 10, 32, 16
FILE_STEPS_DIVISOR = 10
"""The comparison with files takes `--linear-steps` divided by this number, because its stream is slow."""
INPUT_BATCH = 128
INPUT_TARGET, LINEAR_TARGET = 0.97, 5.0
LOG_STEPS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=60, help="steps in a turn of the first comparison")
    parser.add_argument("--linear-steps", type=int, default=1000, help="steps in a turn of the other comparisons")
    parser.add_argument("--linear-batch", type=int, default=256, help="batch size of the other comparisons")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/resident.json"))
    options = parser.parse_args()
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine()}
    report["comparisons"] = {
        "input": compare_input(options.rounds, options.steps),
        "arrays": compare_linear(array_table(), options.rounds, options.linear_steps, options.linear_batch),
    }
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), EXAMPLES, SIZE)
        files = photograph_table(Path(folder), EXAMPLES)
        steps = max(options.linear_steps // FILE_STEPS_DIVISOR, 10)
        report["comparisons"]["files"] = compare_linear(
            files, options.rounds, steps, options.linear_batch, LINEAR_TARGET
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"results: {options.out}\n\n{table(report['comparisons'])}")


# --- Comparisons ---


def compare_input(rounds: int, steps: int) -> Figures:
    """Compare training on resident images with the bare step on a fixed batch, in images per second."""
    setup = make_setup(resnet("resnet18", CLASSES, width=WIDTH, stem="small"), array_table(), INPUT_BATCH, "device")
    step, placed = setup.step(), list(setup.batches(0, 1))
    turns = {"resident": Training(setup, steps), "bare step": lambda: time_steps(step, setup.state, placed * steps)}
    for turn in turns.values():
        turn()
    return compare(alternate(turns, rounds), INPUT_BATCH * steps, INPUT_TARGET)


def compare_linear(images: Source, rounds: int, steps: int, batch_size: int, target: float | None = None) -> Figures:
    """Compare training on resident images with training on the stream, in images per second."""
    turns = {
        "resident": Training(make_setup(linear(), images, batch_size, "device"), steps),
        "streamed": Training(make_setup(linear(), images, batch_size, "none"), steps),
    }
    for turn in turns.values():
        turn()
    np.testing.assert_allclose(turns["resident"].losses, turns["streamed"].losses, rtol=1e-4)
    return compare(alternate(turns, rounds), batch_size * steps, target) | {"batch_size": batch_size}


# --- Parts of the comparisons ---


class Training:
    """A timed turn of `fit` from the setup's initial state. The first turn compiles the program."""

    def __init__(self, setup: RunSetup, steps: int):
        changes = {"train": {"duration": f"{steps} steps"}, "log": {"every": f"{LOG_STEPS} steps"}}
        self._history, self._initial = History(), setup.state
        self._run = make_run(setup.changed(config=setup.config.replace(**changes)), listeners=[self._history])

    @property
    def losses(self) -> np.ndarray:
        """Return the losses that the last turn logged."""
        return self._history.train["loss"]

    def __call__(self) -> float:
        run = dataclasses.replace(self._run, state=copy(self._initial))
        begin = time.perf_counter()
        jax.block_until_ready(fit(run))
        return time.perf_counter() - begin


def array_table() -> ArrayTable:
    return ArrayTable(*random_images(EXAMPLES, SIZE, CLASSES), tuple(map(str, range(CLASSES))))


def make_setup(model: Any, images: Source, batch_size: int, cache: Literal["none", "device"]) -> RunSetup:
    """Return the setup of a network on whole images and one device."""
    data = DataConfig(image_size=SIZE, crop="whole", augment=AugmentConfig(flip=False), cache=cache)
    return prepare_training(model, images, 1, optax.sgd(0.001), batch_size, data=data)


def linear() -> Any:
    """Return softmax regression as a pair of functions."""

    def init(key: jax.Array, example: jax.Array) -> Any:
        return {"weight": jnp.zeros((example[0].size, CLASSES)), "bias": jnp.zeros(CLASSES)}

    def apply(params: Any, images: jax.Array) -> jax.Array:
        return images.reshape(len(images), -1) @ params["weight"] + params["bias"]

    return init, apply


if __name__ == "__main__":
    main()
