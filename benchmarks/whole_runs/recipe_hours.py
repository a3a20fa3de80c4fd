"""Predicts the memory and the hours of each ImageNet recipe on eight H200s, from its compiled training step.

    python benchmarks/whole_runs/recipe_hours.py --out FILE.json

Each GPU computes its part of the batch at once, or in microbatches of at most 256 images. The time of a step is that of
the roofline of `benchmarks/gpu_program.py` for such a microbatch, multiplied by the factor `MEASURED`. If the images
grow, it is proportional to their pixels. The hours leave out reading the images, validation and checkpoints. The same
command continues an interrupted benchmark.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np

from benchmarks.common.harness import Figures, machine
from benchmarks.gpu_program import program_figures
from benchmarks.programs.config_step import Data
from benchmarks.whole_runs.rehearsal import IMAGENET, RECIPES
from jaxddp.data.batch import Growth
from jaxddp.recipe.file import read_recipe
from jaxddp.training.plan import Plan

GPUS, AT_ONCE = 8, 256
MEASURED = 1.19
"""Predicted relative to measured images per second of ResNet-50 on one H200: 9,695 / 8,160, see RESULTS.md."""
XLA_OPTIONS = ("xla_gpu_enable_triton_gemm=false",)
"""Without a GPU, XLA cannot choose among Triton's kernels for the matrix products of transformers."""


def predict(recipe: str) -> Figures:
    file = read_recipe(recipe)
    file = replace(file, config=file.config.replace(parallel={"xla_options": XLA_OPTIONS}))
    config, plan = file.config, Plan.of(file.config, IMAGENET)
    at_once = min(config.train.batch_size // GPUS, AT_ONCE)
    figures = program_figures(file, f"1x1x{GPUS}", at_once, Data(IMAGENET, 1000))
    speed = figures["roofline"]["images_per_second"] / MEASURED
    growth, side = Growth.of(config.data, config.data.image_size, **plan.lengths), config.data.image_size
    sides = np.array([growth.side(step) if growth else side for step in range(plan.total_steps)])
    hours = float(np.mean((sides / side) ** 2)) * plan.total_steps * plan.batch_size / speed / 3600
    memory = sum(figures[f"{part}_bytes"] for part in ("argument", "temporary")) / 1e9
    return {"images": at_once, "memory_gb": memory, "images_per_second": speed, "side": side, "hours": hours}


def table(found: dict[str, Figures]) -> str:
    lines = [f"{'recipe':<30}{'images a GPU':>13}{'px':>5}{'memory, GB':>12}{'images/s':>10}{'hours':>7}"]
    for recipe, f in found.items():
        numbers = f"{f['memory_gb']:>12.1f}{f['images_per_second']:>10,.0f}{f['hours']:>7.1f}"
        lines.append(f"{recipe:<30}{f['images']:>13}{f['side']:>5}{numbers}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    found: dict[str, Figures] = json.loads(options.out.read_text())["found"] if options.out.exists() else {}
    for recipe in options.recipes:
        if recipe not in found:
            found[recipe] = predict(recipe)
            options.out.write_text(json.dumps({**machine(), "found": found}, indent=2) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
