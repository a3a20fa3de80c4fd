"""Compares the first steps of a recipe with those of airbench's own script, from equal parameters and equal images.

    python benchmarks/whole_runs/airbench_steps.py airbench95.py --recipe cifar10_95 --data FILE.npz --torch PYTHON \
        [--steps 12] [--out FILE.json]

The script and the recipe run on the CPU in float32 without augmentation, with the script's number of steps in all
(48 in an epoch). The losses of all steps must agree within rounding: they depend on the network, the loss, the learning
rate, the weight decay, the momentum of each group of parameters, and on Lookahead.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import machine
from jaxddp.recipe.file import read_recipe
from jaxddp.setup.recipe import Recipe
from jaxddp.setup.run_setup import initialize, open_recipe

CONTENDER = Path(__file__).parents[1] / "rivals" / "contenders" / "torch_airbench_steps.py"
TOLERANCE = 1e-3
"""The largest relative difference of a loss. Differences of rounding grow with the steps."""


def unaugmented(options: argparse.Namespace) -> Recipe:
    """Return the recipe without augmentation, with the number of steps of the script."""
    file = read_recipe(options.recipe)
    hooks = {name: hook for name, hook in file.hooks.items() if name != "get_augmentation"}
    # With batches of 1,024 images, 48 steps of the script are an epoch, and the remaining images are left out.
    steps = file.config.train.duration.steps(num_examples=48, batch_size=1)
    config = file.config.replace(
        data={"path": str(options.data), "cache": "none", "augment": {"alternate_flip": False, "pad": 0}},
        train={"duration": f"{steps} steps", "precision": "float32"},
        parallel={"devices": 1},
        log={"to": ("jsonl",)},
    )
    return open_recipe(dataclasses.replace(file, config=config, hooks=hooks))


def named(params: Any) -> dict[str, Any]:
    """Return parameters with the names and the layout of the script."""
    result, leaves = {}, traverse_util.flatten_dict(jax.tree.map(np.asarray, params))
    for (module, kind), value in leaves.items():
        assert isinstance(value, np.ndarray)
        if module == "whiten":
            name = "0"
        elif module == "head":
            name = "7"
        else:
            layer, _, number = module.partition("_")
            name = f"{int(layer[-1]) + 1}.{layer[:-1]}{number}"
        transposed = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
        result[f"{name}.{'bias' if kind == 'bias' else 'weight'}"] = np.ascontiguousarray(transposed)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--torch", required=True, help="an interpreter with torch and torchvision")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    setup = initialize(unaugmented(options))
    state, step, ours, given = setup.state, setup.step(), [], named(setup.state.params)
    images, labels = [], []
    for batch in setup.batches(0, options.steps):
        images.append(np.asarray(batch.image))
        labels.append(np.asarray(batch.label, np.int64))
        state, results = step(state, batch)
        total, weight = np.asarray(results.values)[0, :2]
        ours.append(float(total / weight))
    with tempfile.TemporaryDirectory() as folder:
        inputs, output = Path(folder) / "given.npz", Path(folder) / "losses.npz"
        np.savez(inputs, images=np.stack(images), labels=np.stack(labels), **given)
        command = [options.torch, CONTENDER, options.script, "--given", inputs, "--out", output]
        subprocess.run([str(word) for word in command], check=True, timeout=3600)
        theirs = np.load(output)["losses"].tolist()
    print(f"{'step':<6}{'jaxddp':>10}{'airbench':>10}")
    for number, pair in enumerate(zip(ours, theirs, strict=True), start=1):
        print(f"{number:<6}{pair[0]:>10.5f}{pair[1]:>10.5f}")
    difference = max(abs(one - other) / other for one, other in zip(ours, theirs, strict=True))
    print(f"largest relative difference {difference:.2g}")
    if options.out is not None:
        figures = {"recipe": options.recipe, "jaxddp": ours, "airbench": theirs, "difference": difference}
        options.out.write_text(json.dumps(figures | machine(), indent=2) + "\n")
    if difference > TOLERANCE:
        sys.exit(f"airbench_steps.py: the losses of {options.recipe} differ by more than {TOLERANCE:g}")


if __name__ == "__main__":
    main()
