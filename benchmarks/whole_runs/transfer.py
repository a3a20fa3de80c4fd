"""Measures what pretrained weights give on few images: several ways to fine-tune, and training from scratch.

    python benchmarks/whole_runs/transfer.py WEIGHTS DATA --out FILE.json [--images 5000] [--side 96] [--draws 3] \
        [--epochs 8] [--name tf_efficientnet_lite0] [--last LAYERS] [-- OPTION …]

DATA has class folders in train/ and test/. A draw is a random subset of the training images, with equally many of each
class. All runs are validated on all images of test/. The linear probe is a logistic regression on the features of the
unchanged network. All other ways train with `jaxddp train finetune_folder`. Training from scratch takes as many epochs
as that of the whole network, and so as many CPU minutes. The same command continues an interrupted benchmark.
"""

import argparse
import functools
import json
import os
import re
import resource
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, machine, parse_with_overrides, run_jaxddp
from jaxddp.reports.tables import Estimate

run = functools.partial(run_jaxddp, seconds=2 * 3600)
PROBE, SCRATCH = "linear probe", "from scratch"
SCRATCH_RATE, HEAD_RATE, RATE = "0.05", "0.004", "0.008"
"""Peak learning rates for batches of 32 images: from scratch, of the head alone, and of pretrained layers. The last two
had the best accuracy of 0.0005, 0.002 and 0.008, and of 0.002 and 0.008, in 3 epochs on draw 0 of CIFAR-10."""


def words_of(way: str, options: argparse.Namespace) -> list[str]:
    """Return the options of a way of training."""
    # The recipe names the head "fc". A factor of 1 replaces its factor.
    words = ["--model.new-layers", "head", "--optimizer.rate-factors", "head=1", "--optimizer.learning-rate"]
    if way == SCRATCH:
        return [*words, SCRATCH_RATE]
    weights = ["--model.weights", options.weights]
    match way:
        case "frozen":
            return [*words, HEAD_RATE, *weights, "--model.freeze", "all but head"]
        case "last stage":
            weights += ["--model.freeze", f"all but {options.last},head"]
    return [*words, RATE, *weights]


WAYS = (PROBE, "frozen", "last stage", "whole network", SCRATCH)


def draw(number: int, options: argparse.Namespace) -> Path:
    """Make the folder of a draw, whose images are symbolic links."""
    folder = options.out.with_suffix(".runs").absolute() / f"draw{number}"
    if not folder.exists():
        rng, unfinished = np.random.default_rng(number), folder.with_suffix(".part")
        classes = sorted(path for path in (options.data.absolute() / "train").iterdir() if path.is_dir())
        for source in classes:
            (unfinished / "train" / source.name).mkdir(parents=True, exist_ok=True)
            files = sorted(source.iterdir())
            for index in rng.choice(len(files), options.images // len(classes), replace=False):
                link = unfinished / "train" / source.name / files[index].name
                link.unlink(missing_ok=True)
                link.symlink_to(files[index])
        if not (unfinished / "val").is_symlink():
            (unfinished / "val").symlink_to(options.data.absolute() / "test")
        os.replace(unfinished, folder)
    return folder


def measure(way: str, number: int, options: argparse.Namespace) -> Figures:
    """Train one way on a draw. Returns the top-1 accuracy, and the CPU seconds of the whole command."""
    folder, before = draw(number, options), cpu_seconds()
    workdir = folder.parent / f"{way.replace(' ', '-')}-{number}"
    network = ["--model.name", options.name, "--train.precision", "float32", "--data.interpolation", "bicubic"]
    network += ["--data.image-size", options.side, "--data.resize", options.side, "--data.eval-size", options.side]
    network += ["--data.mean", *["0.498039"] * 3, "--data.std", *["0.501961"] * 3]
    if way == PROBE:
        for split in ("train", "val"):
            out = folder / f"{split}.npz" if split == "train" else folder.parent / "val.npz"
            if split == "train" or not out.exists():
                run("features", options.weights, folder, "--split", split, "--out", out, *network)
        percent = re.search(r"top-?1 ([\d.]+)%", run("probe", folder / "train.npz", out, "--method", "linear"))
        assert percent is not None
        return {"top1": float(percent[1]) / 100, "cpu_seconds": cpu_seconds() - before}
    words = ["train", "finetune_folder", "--data.path", folder, "--workdir", workdir, *network, *words_of(way, options)]
    words += ["--seed", number, "--train.duration", f"{options.epochs} epochs", "--eval.every", "100%"]
    words += ["--log.to", "jsonl", "--checkpoint.every", "1 epoch", *options.overrides]
    run(*words)
    # The last step is validated.
    top1 = json.loads((workdir / "result.json").read_text())["val"]["top1"]
    return {"top1": top1, "cpu_seconds": cpu_seconds() - before}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(found: dict[str, dict[str, Figures]]) -> str:
    """Format the mean accuracy of each way with its standard error over the draws, and the median CPU time."""
    lines = [f"{'way':<16}{'draws':>6}{'top-1':>18}{'CPU minutes':>14}"]
    for way, of_draws in found.items():
        values, seconds = ([each[key] for each in of_draws.values()] for key in ("top1", "cpu_seconds"))
        top1 = str(Estimate.of("top1", values))
        lines.append(f"{way:<16}{len(values):>6}{top1:>18}{statistics.median(seconds) / 60:>14.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", help="a value of model.weights")
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="tf_efficientnet_lite0", help="the network")
    parser.add_argument("--last", default="stage6.3,stage7,last_conv", help="the layers of the last stage")
    for name, default in (("images", 5000), ("side", 96), ("draws", 3), ("epochs", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parse_with_overrides(parser)
    found: dict[str, dict[str, Figures]] = {}
    if options.out.exists():
        found = json.loads(options.out.read_text())["found"]
    settings = {key: str(value) for key, value in vars(options).items()} | machine()
    for number in range(options.draws):
        for way in options.ways:
            of_draws = found.setdefault(way, {})
            if str(number) not in of_draws:
                of_draws[str(number)] = measure(way, number, options)
                # Written after each run, because a long benchmark may be cut off.
                options.out.write_text(json.dumps({**settings, "found": found}, indent=2) + "\n")
                print(table(found), flush=True)


if __name__ == "__main__":
    main()
