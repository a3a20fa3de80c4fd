"""The weights that torchvision and timm publish for the networks of jaxddp: the names that `model.weights` takes.

`published.csv` has one line for each. `python benchmarks/published_weights.py` writes it. The accuracies are those that
torchvision and timm publish, for ImageNet's validation images of this size.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import nearest

LIBRARIES = ("torchvision", "timm")
_LIST = Path(__file__).parent / "published.csv"
_BYTES_OF_PARAMETER = 4
_DEFAULT = "DEFAULT"
_SUFFIX = "_weights"


@dataclass(frozen=True)
class PublishedWeights:
    """Weights with a name.

    Attributes:
        name: the value of `model.weights`, such as "timm/resnet50.a1_in1k".
        network: the value of `model.name`.
        image_size: pixels of a side of the images that the network was trained for.
        resize, eval_crop, interpolation: the values of the keys of `data` in evaluation.
        mean, std: the normalization of pixels between 0 and 1.
        top1: the published accuracy, percent.
        parameters: the number of parameters, in millions.
        file: the name of torchvision's file, which ends with the first 8 hex digits of its SHA-256; empty for timm.
    """

    name: str
    network: str
    image_size: int
    resize: int
    eval_crop: str
    interpolation: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    top1: float
    parameters: float
    file: str

    @property
    def megabytes(self) -> float:
        """The size of the parameters in float32, 10^6 bytes."""
        return self.parameters * _BYTES_OF_PARAMETER

    @property
    def family(self) -> str:
        """The name of the library's function, with the library: "timm/resnet50", "torchvision/resnet50"."""
        library, _, name = self.name.partition("/")
        return f"{library}/{_function_of(name)}"

    @property
    def digest(self) -> str:
        """The first hex digits of the SHA-256 of torchvision's file."""
        return self.file.rpartition("-")[2].partition(".")[0]


def has_library(text: str) -> bool:
    """Return whether a text begins like a name of the list, with "timm/" or "torchvision/"."""
    return text.partition("/")[0] in LIBRARIES and "/" in text


@cache
def published_weights() -> tuple[PublishedWeights, ...]:
    """Return the list. The default weights of a function come before its other weights."""
    with _LIST.open(encoding="utf-8", newline="") as file:
        return tuple(
            PublishedWeights(
                *(row["name"], row["network"], int(row["image_size"]), int(row["resize"])),
                *(row["eval_crop"], row["interpolation"]),
                *(_numbers(row["mean"]), _numbers(row["std"])),
                *(float(row["top1"]), float(row["parameters"]), row["file"]),
            )
            for row in csv.DictReader(file)
        )


def find_published(name: str) -> PublishedWeights:
    """Return the weights of a name. The name of a function, such as "timm/resnet50", means its default weights.

    Raises: InputError if no weights have this name.
    """
    known = {weights.name: weights for weights in published_weights()}
    for weights in reversed(published_weights()):
        known[weights.family] = weights
    enum, _, member = name.rpartition(".")
    library, _, function = enum.partition("/")
    key = f"{library}/{_function_of(function + '.')}" if member == _DEFAULT else name
    if key not in known:
        raise InputError(
            Key("model.weights", name),
            f": no weights have this name{nearest(name, known)}",
            advice="the command `jaxddp weights` lists the names",
        )
    return known[key]


def _function_of(name: str) -> str:
    """Return the name of the function of weights without their library: "resnet50" for "ResNet50_Weights.X"."""
    function = name.partition(".")[0]
    return function.lower().removesuffix(_SUFFIX) if function.lower().endswith(_SUFFIX) else function


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))
