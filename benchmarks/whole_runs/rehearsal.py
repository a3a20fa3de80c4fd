"""Rehearses the ImageNet recipes: each trains for 200 steps on a few photographs, which it is validated on afterwards.

    python benchmarks/whole_runs/rehearsal.py --photographs DIR --out FILE.json

DIR has a photograph of each class of ImageNet, as `nXXXXXXXX_name.JPEG` (the public repository
EliSchwartz/imagenet-sample-images). A run has the network, loss, optimizer, augmentation and averages of its recipe.
Its images have 64 pixels and its batch `--batch` images. The peak learning rate is multiplied by the square root of the
change of the batch. The schedule, the growth of images and the averages are compressed to the length of the run. Ghost
batch norms have half a batch.

The same command continues an interrupted benchmark: FILE.json keeps the results, and FILE.runs the runs. A recipe that
fails does not end it. The loss of training includes mixed and smoothed labels, and cannot fall to 0.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, machine
from jaxddp.config import Config
from jaxddp.core.duration import Duration
from jaxddp.recipe.file import read_recipe
from jaxddp.schedules import batch_factor
from jaxddp.training.listeners.jsonl import parse

IMAGENET = 1_281_167
SIDE, SIDE_STEP = 64, 16
RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "configs").glob("imagenet_*.py"))


def settings(config: Config, steps: int, batch: int) -> Iterator[tuple[str, object]]:
    """Yield the keys in which a rehearsal differs from its recipe."""
    lengths = {"num_examples": IMAGENET, "batch_size": config.train.batch_size}
    total = config.train.duration.steps(**lengths)

    def share(duration: Duration) -> str:
        return f"{100 * duration.steps(**lengths, total_steps=total) / total:.6g}%"

    data, train, scale = config.data, config.train, SIDE / config.data.image_size
    yield "data.image_size", SIDE
    yield "data.resize", round(data.resize * scale)
    if data.eval_size is not None:
        yield "data.eval_size", round(data.eval_size * scale)
    if data.grow_from is not None:
        yield "data.grow_from", SIDE_STEP * round(data.grow_from * scale / SIDE_STEP)
        yield "data.grow_by", SIDE_STEP
        yield from (("data.grow_start", share(data.grow_start)), ("data.grow_end", share(data.grow_end)))
    if config.model.batch_statistics.group is not None:
        yield "model.batch_norm", f"ghost:{batch // 2}"
    yield from (("train.duration", f"{steps} steps"), ("train.batch_size", batch))
    if train.ema is not None:
        yield "train.ema", train.ema ** (total / steps)
        yield "train.ema_every", math.ceil(train.ema_every * steps / total)
    yield from (("optimizer.warmup", share(config.optimizer.warmup)), ("optimizer.reference_batch", None))
    peak = config.optimizer.learning_rate * batch_factor(config)
    yield "optimizer.learning_rate", peak * math.sqrt(batch / config.train.batch_size)


def lay_out(photographs: Path, count: int, root: Path) -> None:
    """Link `count` of the photographs as Kaggle's archive, with the same photographs for training and validation."""
    images = sorted(photographs.rglob("n*_*.JPEG"))
    classes = [image.name[:9] for image in images]
    chosen = images[:: len(images) // count][:count]
    root.mkdir(parents=True, exist_ok=True)
    (root / "LOC_synset_mapping.txt").write_text("".join(f"{synset} {synset}\n" for synset in classes))
    for split, prefix in (("train", "{}/"), ("val", "")):
        folder = root / "ILSVRC/Data/CLS-LOC" / split
        for image in chosen:
            link = folder / prefix.format(image.name[:9]) / image.name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                os.link(image, link)
        rows = [f"{image.stem},{image.name[:9]} 0 0 1 1\n" for image in chosen]
        (root / f"LOC_{split}_solution.csv").write_text("ImageId,PredictionString\n" + "".join(rows))


def rehearse(recipe: str, options: argparse.Namespace) -> Figures:
    """Train a recipe, and return what it showed. The loss of training is the mean of a tenth of the steps."""
    folder = options.out.with_suffix(".runs")
    changed = dict(settings(read_recipe(recipe).config, options.steps, options.batch))
    words = [word for key, value in changed.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    words += ["--data.path", folder / "photographs", "--workdir", folder / recipe, "--log.to", "jsonl"]
    words += ["--log.every", "10%", "--checkpoint.every", "25%", "--eval.every", "100%", "--eval.batch-size", "100"]
    words += ["--log.gradient-norm", "true", "--train.max-bad-steps", "0"]
    command = [sys.executable, "-m", "jaxddp", "train", recipe, *map(str, words)]
    environ: dict[str, str] = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, timeout=2 * 3600)
    figures: Figures = {"changed": changed, "exit_code": done.returncode}
    if done.returncode:
        return {**figures, "error": done.stderr.strip().splitlines()[-1]}
    rows = [row for _, row in parse(folder / recipe / "metrics.jsonl")]
    train = [row for row in rows if row["split"] == "train" and row["step"] % (options.steps // 10) == 0]
    validations = {row["split"]: row for row in rows if row["split"] != "train"}
    values = [value for row in rows for value in row.values() if isinstance(value, float)]
    return figures | {
        "steps": train[-1]["step"],
        "losses": [row["loss"] for row in train],
        "gradient_norms": [row["gradient_norm"] for row in train],
        "image_sizes": sorted({row.get("image_size", SIDE) for row in train}),
        "finite": all(map(math.isfinite, values)),
        **{split: {name: row[name] for name in ("loss", "top1", "count")} for split, row in validations.items()},
    }


def table(results: dict[str, Figures]) -> str:
    """Format the losses at the beginning and the end, and the validations."""
    lines = [f"{'recipe':<30}{'loss from':>10}{'to':>9}{'val loss':>10}{'top-1':>8}{'averaged':>10}"]
    for recipe, found in results.items():
        if found["exit_code"]:
            lines.append(f"{recipe:<30}exit code {found['exit_code']}: {found['error']}")
            continue
        averaged = f"{found['val_ema']['top1']:>10.1%}" if "val_ema" in found else ""
        losses = f"{found['losses'][0]:>10.3f}{found['losses'][-1]:>9.3f}{found['val']['loss']:>10.3f}"
        lines.append(f"{recipe:<30}{losses}{found['val']['top1']:>8.1%}{averaged}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photographs", type=Path, required=True)
    parser.add_argument("--count", type=int, default=16, help="number of photographs; they are spread over classes")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    about = {"count": options.count, "steps": options.steps, "batch": options.batch}
    results: dict[str, Figures] = {}
    if options.out.exists():
        before = json.loads(options.out.read_text())
        if any(before[name] != value for name, value in about.items()):
            sys.exit(f"{options.out}: was written with other options; give another --out")
        results = before["found"]
    lay_out(options.photographs, options.count, options.out.with_suffix(".runs") / "photographs")
    for recipe in options.recipes:
        if results.get(recipe, {"exit_code": -1})["exit_code"]:
            results[recipe] = rehearse(recipe, options)
            # Written after each run, because a long benchmark may be cut off.
            options.out.write_text(json.dumps({**about, **machine(), "found": results}, indent=2) + "\n")
            print(table(results), flush=True)


if __name__ == "__main__":
    main()
