"""Publish a run, on the Hugging Face Hub or as a folder: weights, settings, classes, a model card, and curves.

The front matter of the model card has the keys of the Hub (https://huggingface.co/docs/hub/model-cards).
"""

import dataclasses
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

import jaxddp.core.files as files
from jaxddp.choices import effective_settings
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.libraries import installed_version
from jaxddp.core.wording import counted, figure, is_share, some
from jaxddp.inference.exports import RunWeights, weights_of_run, write_weights
from jaxddp.overrides import flatten
from jaxddp.recipe_file import RUN_ID
from jaxddp.recipe_files.find_recipe import CONFIG_FILE
from jaxddp.sections.goal import VAL_EMA, by_split, of_exported
from jaxddp.training.checkpoints.integrity import CHECKPOINTS, LOCATION_KEYS, Integrity
from jaxddp.training.checkpoints.validation_file import ValidationFile
from jaxddp.training.listeners.workdir_files import CURVES
from jaxddp.weights.download import HubFile, upload
from jaxddp.weights.match import has_published_names
from jaxddp.weights.places import SIGNATURE_FILE, WEIGHTS_FILE, is_local
from jaxddp.workdir.saved_state import recipe_of_run
from jaxddp.workdir.signature import Signature

CARD_FILE = "README.md"
_PRIVATE_KEYS = frozenset(
    (*LOCATION_KEYS, "data.data_dir", "data.local_cache", "data.manifest", "data.classes", "objective.teacher")
)
"""The keys with paths of this machine, which are not pushed. `model.weights` is not pushed if it is a path."""
_COUNT = "count"
_SETTINGS = (
    *("model.name", "model.weights", "data.image_size", "train.batch_size", "train.duration", "train.precision"),
    *("optimizer.name", "optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup", "optimizer.weight_decay"),
    "seed",
)
_SHOWN_CLASSES = 10


@dataclass(frozen=True)
class CardFacts:
    """The content of a model card.

    Attributes:
        place: the repository of the Hub, or the folder.
        config: the config of the run.
        own_network: whether Python code of the recipe defines the network.
        hooks: the names of the recipe's hooks.
        step: the step of the checkpoint.
        metrics: the metrics of the published parameters by name, with `count`; empty without a validation.
        averaged: whether the published parameters are averages of the trained ones.
        parameters: the number of trained parameters.
        class_names: the names of the classes, for display.
        has_published_names: whether the arrays have the names of torchvision or timm.
        has_curves: whether there is a file curves.png beside the card.
    """

    place: HubFile | Path
    config: Config
    own_network: bool
    hooks: tuple[str, ...]
    step: int
    metrics: Mapping[str, float]
    averaged: bool
    parameters: int
    class_names: tuple[str, ...]
    has_published_names: bool
    has_curves: bool

    @property
    def title(self) -> str:
        """The name of the repository or of the folder."""
        return self.place.name if isinstance(self.place, Path) else self.place.repo.partition("/")[2]

    @property
    def network(self) -> str:
        """The name of the network, for the text."""
        return "The network of the recipe" if self.own_network else f"The network {self.config.model.name}"

    @property
    def data_set(self) -> str:
        """The last part of the path of the data set; "data" if it has none."""
        place = self.config.data.name or PurePosixPath(self.config.data.path or "data").name
        return re.sub(r"[^\w.-]+", "-", place).strip("-.") or "data"


def push_run(directory: Path, which: str, place: HubFile, *, private: bool) -> str:
    """Upload a checkpoint ("latest", "best" or a step) with its model card, and return a line for the user.

    Raises:
        InputError: there is no such checkpoint, the run's config does not name its network, or the token may not write.
        Unreachable: the hub does not answer.
    """
    weights = weights_of_run(directory, which)
    with tempfile.TemporaryDirectory() as temporary:
        count = _write(directory, weights, place, Path(temporary))
        url = upload(Path(temporary), place, private=private, message=f"Step {weights.step}")
    return f"{place}: {counted(count, 'array')} of step {weights.step} of {directory}; {url}"


def write_folder(directory: Path, which: str, folder: Path) -> str:
    """Write the files that `push_run` uploads into a new folder, and return a line for the user.

    Raises: InputError, also if the folder exists and is not empty, or cannot be created.
    """
    weights = weights_of_run(directory, which)
    if any(files.create(folder).iterdir()):
        raise InputError(f"{folder}: is not empty; give a new folder")
    try:
        count = _write(directory, weights, folder.resolve(), folder)
    except BaseException:
        for file in folder.iterdir():
            file.unlink()
        raise
    return f"{folder}: {counted(count, 'array')} of step {weights.step} of {directory}, with a model card"


def _write(directory: Path, weights: RunWeights, place: HubFile | Path, folder: Path) -> int:
    """Write the files of a published run, and return the number of its arrays.

    The weights are the last file, because `model.weights` accepts a folder that has them.
    """
    files.replace(folder / CONFIG_FILE, _json(_public_config(directory)))
    signature = Signature.read(directory)
    if signature is not None:
        files.replace(folder / SIGNATURE_FILE, _json({RUN_ID: _run_id(directory), **dataclasses.asdict(signature)}))
    has_curves = (directory / CURVES).is_file()
    if has_curves:
        shutil.copyfile(directory / CURVES, folder / CURVES)
    card = model_card(_facts(directory, weights, place, signature, has_curves=has_curves))
    files.replace(folder / CARD_FILE, card.encode())
    return write_weights(folder / WEIGHTS_FILE, weights.model, weights.arrays)


def _facts(
    directory: Path, weights: RunWeights, place: HubFile | Path, signature: Signature | None, *, has_curves: bool
) -> CardFacts:
    """Return the content of the model card."""
    file = recipe_of_run(directory)
    checkpoints = directory / CHECKPOINTS
    measured = ValidationFile(checkpoints, Integrity(checkpoints)).of(weights.step)
    return CardFacts(
        place=place,
        config=file.config,
        own_network="get_model" in file.hooks,
        hooks=tuple(sorted(file.hooks)),
        step=weights.step,
        metrics={name: value for name, value in of_exported(measured).items() if value is not None},
        averaged=VAL_EMA in by_split(measured),
        parameters=sum(array.size for path, array in weights.arrays.items() if path.startswith("params/")),
        class_names=() if signature is None else signature.class_names,
        has_published_names=has_published_names(weights.model),
        has_curves=has_curves,
    )


def _public_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json without paths, and without the network if Python code defines it."""
    file = recipe_of_run(directory)
    config = file.config.to_dict()
    if "get_model" in file.hooks:
        del config["model"]
    hidden = {key for key in flatten(config) if key in _PRIVATE_KEYS or key.startswith("log.")}
    weights = file.config.model.weights
    if weights is not None and is_local(weights):
        hidden.add("model.weights")
    content: dict[str, Any] = {RUN_ID: _run_id(directory)}
    for section, values in config.items():
        if isinstance(values, dict):
            values = {key: value for key, value in values.items() if f"{section}.{key}" not in hidden}
        content[section] = values
    return content


def _run_id(directory: Path) -> str | None:
    return files.parse_json(files.read(directory / CONFIG_FILE), dict).get(RUN_ID)


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def model_card(facts: CardFacts) -> str:
    """Return the text of README.md."""
    front = yaml.safe_dump(_front_matter(facts), sort_keys=False, allow_unicode=True)
    sections = [_about(facts), _results(facts), _loading(facts), _training(facts)]
    return f"---\n{front}---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(facts: CardFacts) -> dict[str, Any]:
    front: dict[str, Any] = {
        "library_name": "jaxddp",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "jax", "flax", "jaxddp"],
        "datasets": [facts.data_set],
    }
    weights = facts.config.model.weights
    if weights is not None and not is_local(weights) and not weights.startswith("torchvision/"):
        front["base_model"] = HubFile.parse(weights).repo if weights.startswith("hf://") else weights
    shares = {key: value for key, value in facts.metrics.items() if is_share(key)}
    if shares:
        front["metrics"] = ["accuracy"]
        front["model-index"] = [
            {
                "name": facts.title,
                "results": [
                    {
                        "task": {"type": "image-classification", "name": "Image classification"},
                        "dataset": {"name": facts.data_set, "type": facts.data_set, "split": "validation"},
                        "metrics": [{"type": "accuracy", "name": key, "value": value} for key, value in shares.items()],
                    }
                ],
            }
        ]
    return front


def _about(facts: CardFacts) -> str:
    classes = ""
    if facts.class_names:
        classes = f" It classifies images into {counted(len(facts.class_names), 'class')}: "
        classes += f"{some(facts.class_names, _SHOWN_CLASSES)}."
    release = f"jaxddp {installed_version('jaxddp') or ''}".rstrip()
    trained = f"{facts.network}, with {facts.parameters:,} parameters, was trained on {facts.data_set} with {release}."
    return f"# {facts.title}\n\n{trained}{classes}"


def _results(facts: CardFacts) -> str:
    if not facts.metrics:
        return f"## Results\n\nThese are the weights after step {facts.step:,}. They were not validated."
    rows = [f"| {name} | {figure(name, value)} |" for name, value in facts.metrics.items() if name != _COUNT]
    images = f" on {counted(int(facts.metrics[_COUNT]), 'image')}" if _COUNT in facts.metrics else ""
    table = "\n".join(["| metric | value |", "|---|---|", *rows])
    of_which = " of the averaged parameters, which this repository holds," if facts.averaged else ""
    return f"## Results\n\nThe validation{of_which} after step {facts.step:,}{images}:\n\n{table}"


def _loading(facts: CardFacts) -> str:
    data = facts.config.data
    size = data.eval_size or data.image_size
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (data.mean, data.std))
    weights = facts.title if isinstance(facts.place, Path) else str(facts.place)
    sides, resized = ("Both sides", "are resized") if data.eval_crop == "squash" else ("The short side", "is resized")
    text = (
        "## How to load it\n\n```\njaxddp train finetune_folder --data.path PICTURES --model.weights "
        f"{weights}\n```\n\n{sides} of an image {resized} to {data.resize} pixels ({data.interpolation}), and the "
        f"central {size}x{size} pixels are normalized with mean {mean} and standard deviation {std}."
    )
    if facts.has_published_names:
        text += (
            "\n\nThe arrays in `model.safetensors` have the names and the layout of torchvision or timm. PyTorch loads "
            'them into the same network by `model.load_state_dict(safetensors.torch.load_file("model.safetensors"))`.'
        )
    return text


def _training(facts: CardFacts) -> str:
    settings = effective_settings(flatten(facts.config.to_dict()), facts.hooks)
    rows = []
    for key in _SETTINGS:
        value = settings.get(key)
        is_path = key == "model.weights" and value is not None and is_local(value)
        if value is not None and not is_path and not (facts.own_network and key == "model.name"):
            rows.append(f"| {key} | {value} |")
    table = "\n".join(["| key | value |", "|---|---|", *rows])
    train = "jaxddp train config.json --data.path DATA --workdir runs/again"
    fetch = "" if isinstance(facts.place, Path) else f"hf download {facts.place.repo} config.json --local-dir .\n"
    text = f"## How it was trained\n\n{table}\n\n`config.json` has all settings"
    text += (
        f", except those of the Python code in the recipe ({', '.join(facts.hooks)})."
        if facts.hooks
        else f". To train it again:\n\n```\n{fetch}{train}\n```"
    )
    return text + ("\n\n![curves of the training](curves.png)" if facts.has_curves else "")
