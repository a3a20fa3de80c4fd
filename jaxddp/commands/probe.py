"""`jaxddp probe TRAIN VAL`: measure how well features separate classes, with scikit-learn."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxddp.command_line.parse import parse
from jaxddp.core.errors import InputError, counted
from jaxddp.core.phases import doing
from jaxddp.core.ranges import Range


@dataclass(frozen=True)
class ProbeFeatures:
    """Train a classifier on the features of training images, and measure its top-1 accuracy on validation images.

    Both files are written by `jaxddp features`.
    """

    train: tyro.conf.Positional[Path] = tyro.MISSING
    """The features of the training images, .npz or .parquet."""
    val: tyro.conf.Positional[Path] = tyro.MISSING
    """The features of the validation images."""
    method: Literal["knn", "linear"] = "knn"
    """knn: the weighted vote of the nearest training images by cosine similarity. linear: logistic regression on
    standardized features."""
    neighbours: Annotated[int, Range(1, 100_000)] | None = None
    """knn: the number of nearest images that vote; 20 by default."""


def run(arguments: list[str]) -> None:
    """Run the command. Raises: InputError."""
    options = parse(ProbeFeatures, ProbeFeatures(), "jaxddp probe", arguments)
    if options.neighbours is not None and options.method != "knn":
        raise InputError(f"--neighbours {options.neighbours}: applies to --method knn only; leave it out")
    from jaxddp.inference.predictions import read_features
    from jaxddp.inference.probes import NEIGHBOURS, knn, linear

    with doing("reading the features"):
        train, val = read_features(options.train), read_features(options.val)
    with doing("training the classifier"):
        probe = linear(train, val) if options.method == "linear" else knn(train, val, options.neighbours or NEIGHBOURS)
    images = f"{counted(len(val.labels), 'image')}, {counted(len(train.labels), 'training image')}"
    print(f"{options.method}: top-1 {probe.top1:.2%} of {images} ({probe.settings})")
    for file in (train, val):
        if file.omitted:
            print(f"{file.path}: {counted(file.omitted, 'image')} without features or label left out")
