"""The places that `model.weights` names: a file, the work directory of a run, the Hub, or published weights.

`published.csv` has a line for each of the weights that torchvision and timm publish for the networks of jaxddp.
`python benchmarks/published_weights.py` writes it. The accuracies are those that torchvision and timm publish, for
ImageNet's validation images of this size. Weights without an accuracy have no head for ImageNet's classes.
"""

import csv
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Key, nearest
from jaxddp.recipe.sources import CONFIG_FILE, TEXT_FILES
from jaxddp.weights.download import SCHEME, HubFile, download, fetch
from jaxddp.weights.state_dict import PICKLED

WEIGHTS_FILE = "model.safetensors"
"""The file of weights in a repository of the Hub."""
SIGNATURE_FILE = "signature.json"
"""The classes of a run, in its directory and in a repository that `jaxddp push` wrote."""
_CHECKPOINTS = "checkpoints"
OFFLINE_VARIABLE = "HF_HUB_OFFLINE"
LIBRARIES = ("torchvision", "timm")
_LIST = Path(__file__).parent / "published.csv"
_DEFAULT = "DEFAULT"
_SUFFIX = "_weights"
IMAGENET = 1000
"""The number of ImageNet's classes, which published heads have."""


def is_local(weights: str) -> bool:
    """Return whether a value of `model.weights` is a path of this machine, and no name."""
    return not weights.startswith(SCHEME) and not has_library(weights)


def is_weights(name: str) -> bool:
    """Return whether the first word of a command names weights, and not a run or a recipe.

    Weights are published weights, a file of weights, or a folder with one that is no work directory.
    """
    path = file_of_folder(files.expanded(name))
    is_file = os.path.isfile(path) and path.suffix not in (".py", *TEXT_FILES)
    return not is_local(name) or is_file or path.suffix in (".safetensors", *PICKLED)


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set, which huggingface_hub reads too."""
    return os.environ.get(OFFLINE_VARIABLE, "").lower() in ("1", "on", "yes", "true")


def local_weights(weights: str, *, offline: bool = False) -> Path:
    """Return the path of the weights on this machine, and fetch them if they are not there.

    On each host one process fetches a file, and the others wait for it.

    Args:
        weights: the value of `model.weights`.
        offline: whether nothing is fetched; also if HF_HUB_OFFLINE is set.

    Raises:
        InputError: there are no such weights, or they are not on this machine and `offline` is True.
        Unreachable: the server does not answer.
    """
    if is_local(weights):
        return file_of_folder(files.expanded(weights))
    offline = offline or is_offline()  # The library may be imported before the variable is set.
    if weights.startswith(SCHEME):
        place = HubFile.parse(weights)
    else:
        published = find_published(weights)
        if published.file:
            return download(published.file, published.digest, offline=offline)
        place = HubFile(published.name)
    file = HubFile(place.repo, place.file or WEIGHTS_FILE, place.revision)
    try:
        path = fetch(file, offline=offline)
    except FileNotFoundError:
        advice = f"name a file of it: {SCHEME}{place.repo}/FILE"
        raise InputError(f"{file}: the repository has no such file; {advice}") from None
    if weights.startswith(SCHEME) and place.file is None:
        fetch_settings(HubFile(place.repo, revision=path.parent.name), offline=offline)
    return path


def file_of_folder(path: Path) -> Path:
    """Return the file of weights in a folder that `jaxddp export --format hub` wrote, or else the path itself."""
    file = path / WEIGHTS_FILE
    # The weights of a run are in its checkpoints. A file beside them may be of an earlier one.
    return file if os.path.isfile(file) and not os.path.isdir(path / _CHECKPOINTS) else path


def fetch_settings(repository: HubFile, *, offline: bool = False) -> Path | None:
    """Fetch the settings and the classes of the weights in a repository, and return their folder.

    Returns None if the repository has no such files, or they are not in the cache and nothing is fetched offline.

    Raises: see `local_weights`.
    """
    offline = offline or is_offline()
    try:
        config = fetch(HubFile(repository.repo, CONFIG_FILE, repository.revision), offline=offline)
        fetch(HubFile(repository.repo, SIGNATURE_FILE, config.parent.name), offline=offline)  # Of the same commit.
    except FileNotFoundError:
        return None
    except InputError:
        if offline:
            return None
        raise
    return config.parent


@dataclass(frozen=True)
class PublishedWeights:
    """Weights with a name.

    Attributes:
        name: the value of `model.weights`, such as "timm/resnet50.a1_in1k".
        network: the value of `model.name`.
        image_size: pixels of a side of the images that the network was trained for.
        resize, eval_crop, interpolation: the values of the keys of `data` in evaluation.
        mean, std: the normalization of pixels between 0 and 1.
        top1: the published accuracy, percent; None for weights without a head for ImageNet's classes.
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
    top1: float | None
    parameters: float
    file: str

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
    kinds: dict[str, Any] = {"image_size": int, "resize": int, "parameters": float}
    kinds |= dict.fromkeys(("mean", "std"), lambda text: tuple(map(float, text.split())))
    kinds["top1"] = lambda text: float(text) if text else None
    with _LIST.open(encoding="utf-8", newline="") as file:
        rows = [{key: kinds.get(key, str)(text) for key, text in row.items()} for row in csv.DictReader(file)]
    return tuple(PublishedWeights(**row) for row in rows)


def find_published(name: str) -> PublishedWeights:
    """Return the weights of a name. The name of a function, such as "timm/resnet50", means its default weights.

    Raises: InputError if no weights have this name.
    """
    known = {weights.name: weights for weights in published_weights()}
    known |= {weights.family: weights for weights in reversed(published_weights())}
    enum, _, member = name.rpartition(".")
    library, _, function = enum.partition("/")
    key = f"{library}/{_function_of(function + '.')}" if member == _DEFAULT else name
    if key not in known:
        problem = f": no weights have this name{nearest(name, known)}"
        raise InputError(Key("model.weights", name), problem, advice="the command `jaxddp weights` lists the names")
    return known[key]


_HEAD = re.compile(r"_?(fc|heads?|classifier)\b.*weight")
_ROUNDING = 0.005001


def recognized(shapes: Mapping[str, tuple[int, ...]]) -> tuple[PublishedWeights, ...]:
    """Return the published weights with as many parameters as a file, and with the file's library if it is known.

    The head of a file may have another number of classes than ImageNet's.

    Args:
        shapes: the shapes of the arrays of the file, by name.
    """
    count = sum(math.prod(shape) for name, shape in shapes.items() if ".running_" not in name)
    heads = [shape for name, shape in shapes.items() if len(shape) == 2 and _HEAD.fullmatch(name)]
    counts = {count, *(count + (IMAGENET - classes) * (features + 1) for classes, features in heads)}
    alike = [one for one in published_weights() if bool(heads) == (one.top1 is not None)]
    found = [one for one in alike if any(abs(number / 1e6 - one.parameters) < _ROUNDING for number in counts)]
    # efficientnet_pytorch has TensorFlow's padding.
    begins = {"features.": "torchvision/", "_conv_stem.": "timm/tf_"}
    library = next((begins[mark] for mark in begins if any(name.startswith(mark) for name in shapes)), "")
    return tuple(one for one in found if one.name.startswith(library))


def _function_of(name: str) -> str:
    """Return the name of the function of weights without their library: "resnet50" for "ResNet50_Weights.X"."""
    function = name.partition(".")[0]
    return function.lower().removesuffix(_SUFFIX) if function.lower().endswith(_SUFFIX) else function
