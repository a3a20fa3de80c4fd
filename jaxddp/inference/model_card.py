"""The model card of a published run: what it is, how it was trained, what it reaches, and how to load it.

The front matter has the keys of the Hugging Face Hub (https://huggingface.co/docs/hub/model-cards).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from jaxddp.choices import effective_settings
from jaxddp.config import Config
from jaxddp.core.libraries import installed_version
from jaxddp.core.wording import counted, figure, is_share, some
from jaxddp.overrides import flatten
from jaxddp.weights.hub_files import HubFile
from jaxddp.weights.places import is_local

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
