"""Publish a run, on the Hugging Face Hub or as a folder: weights, settings, classes, a model card, and curves.

The front matter of the model card has the keys of the Hub (https://huggingface.co/docs/hub/model-cards).
"""

import dataclasses
import json
import re
import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

import jaxddp.core.files as files
from jaxddp.config.choices import effective_settings
from jaxddp.config.goal import VAL_EMA, by_split, of_exported
from jaxddp.config.values import flatten
from jaxddp.core.errors import InputError
from jaxddp.core.libraries import installed_version
from jaxddp.core.wording import counted, figure, is_share, some
from jaxddp.inference.exports import weights_of_run, write_weights
from jaxddp.recipe.file import RUN_ID
from jaxddp.recipe.sources import CONFIG_FILE
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


class PublishedRun:
    """A checkpoint of a run, with what its model card says.

    Args:
        which: "latest", "best" or a step.
        place: the repository of the Hub, or the folder.

    Attributes:
        metrics: the metrics of the published parameters by name, with `count`; empty without a validation.
        averaged: whether the published parameters are averages of the trained ones.
        own_network: whether Python code of the recipe defines the network.

    Raises:
        InputError: there is no such checkpoint, or the run's config does not name its network.
    """

    def __init__(self, directory: Path, which: str, place: HubFile | Path):
        self.directory, self.place, self.weights = directory, place, weights_of_run(directory, which)
        file, checkpoints = recipe_of_run(directory), directory / CHECKPOINTS
        self.config, self.hooks, self.own_network = file.config, sorted(file.hooks), "get_model" in file.hooks
        self.step, self.signature = self.weights.step, Signature.read(directory)
        measured = ValidationFile(checkpoints, Integrity(checkpoints)).of(self.step)
        self.metrics = {name: value for name, value in of_exported(measured).items() if value is not None}
        self.averaged = VAL_EMA in by_split(measured)
        self.has_curves = (directory / CURVES).is_file()
        self.title = place.name if isinstance(place, Path) else place.repo.partition("/")[2]
        name = self.config.data.name or PurePosixPath(self.config.data.path or "data").name
        self.data_set = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "data"

    def write(self, folder: Path) -> str:
        """Write the files, and return a line for the user.

        The weights are the last file, because `model.weights` accepts a folder that has them.
        """
        run_id = files.parse_json(files.read(self.directory / CONFIG_FILE), dict).get(RUN_ID)
        files.replace(folder / CONFIG_FILE, _json({RUN_ID: run_id, **self._public_config()}))
        if self.signature is not None:
            files.replace(folder / SIGNATURE_FILE, _json({RUN_ID: run_id, **dataclasses.asdict(self.signature)}))
        if self.has_curves:
            shutil.copyfile(self.directory / CURVES, folder / CURVES)
        files.replace(folder / CARD_FILE, model_card(self).encode())
        count = write_weights(folder / WEIGHTS_FILE, self.weights.model, self.weights.arrays)
        return f"{counted(count, 'array')} of step {self.step} of {self.directory}"

    def _public_config(self) -> dict[str, Any]:
        """Return the content of config.json without paths, and without the network if Python code defines it."""
        config = self.config.to_dict()
        if self.own_network:
            del config["model"]
        hidden = {key for key in flatten(config) if key in _PRIVATE_KEYS or key.startswith("log.")}
        weights = self.config.model.weights
        if weights is not None and is_local(weights):
            hidden.add("model.weights")
        for section, values in config.items():
            if isinstance(values, dict):
                config[section] = {key: value for key, value in values.items() if f"{section}.{key}" not in hidden}
        return config


def push_run(directory: Path, which: str, place: HubFile, *, private: bool) -> str:
    """Upload a checkpoint ("latest", "best" or a step) with its model card, and return a line for the user.

    Raises:
        InputError: see `PublishedRun`; also if the token may not write.
        Unreachable: the hub does not answer.
    """
    run = PublishedRun(directory, which, place)
    with tempfile.TemporaryDirectory() as temporary:
        written = run.write(Path(temporary))
        url = upload(Path(temporary), place, private=private, message=f"Step {run.step}")
    return f"{place}: {written}; {url}"


def write_folder(directory: Path, which: str, folder: Path) -> str:
    """Write the files that `push_run` uploads into a new folder, and return a line for the user.

    Raises: InputError, also if the folder exists and is not empty, or cannot be created.
    """
    run = PublishedRun(directory, which, folder.resolve())
    if any(files.create(folder).iterdir()):
        raise InputError(f"{folder}: is not empty; give a new folder")
    try:
        return f"{folder}: {run.write(folder)}, with a model card"
    except BaseException:
        for file in folder.iterdir():
            file.unlink()
        raise


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def model_card(run: PublishedRun) -> str:
    """Return the text of README.md."""
    front = yaml.safe_dump(_front_matter(run), sort_keys=False, allow_unicode=True)
    sections = [_about(run), _results(run), _loading(run), _training(run)]
    return f"---\n{front}---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(run: PublishedRun) -> dict[str, Any]:
    front: dict[str, Any] = {
        "library_name": "jaxddp",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "jax", "flax", "jaxddp"],
        "datasets": [run.data_set],
    }
    weights = run.config.model.weights
    if weights is not None and not is_local(weights) and not weights.startswith("torchvision/"):
        front["base_model"] = HubFile.parse(weights).repo if weights.startswith("hf://") else weights
    shares = {key: value for key, value in run.metrics.items() if is_share(key)}
    if shares:
        front["metrics"] = ["accuracy"]
        front["model-index"] = [
            {
                "name": run.title,
                "results": [
                    {
                        "task": {"type": "image-classification", "name": "Image classification"},
                        "dataset": {"name": run.data_set, "type": run.data_set, "split": "validation"},
                        "metrics": [{"type": "accuracy", "name": key, "value": value} for key, value in shares.items()],
                    }
                ],
            }
        ]
    return front


def _about(run: PublishedRun) -> str:
    names = () if run.signature is None else run.signature.class_names
    listed = some(names, _SHOWN_CLASSES)
    classes = f" It classifies images into {counted(len(names), 'class')}: {listed}." if names else ""
    release = f"jaxddp {installed_version('jaxddp') or ''}".rstrip()
    network = "The network of the recipe" if run.own_network else f"The network {run.config.model.name}"
    count = sum(array.size for path, array in run.weights.arrays.items() if path.startswith("params/"))
    trained = f"{network}, with {count:,} parameters, was trained on {run.data_set} with {release}."
    return f"# {run.title}\n\n{trained}{classes}"


def _results(run: PublishedRun) -> str:
    if not run.metrics:
        return f"## Results\n\nThese are the weights after step {run.step:,}. They were not validated."
    rows = [f"| {name} | {figure(name, value)} |" for name, value in run.metrics.items() if name != _COUNT]
    images = f" on {counted(int(run.metrics[_COUNT]), 'image')}" if _COUNT in run.metrics else ""
    table = "\n".join(["| metric | value |", "|---|---|", *rows])
    of_which = " of the averaged parameters, which this repository holds," if run.averaged else ""
    return f"## Results\n\nThe validation{of_which} after step {run.step:,}{images}:\n\n{table}"


def _loading(run: PublishedRun) -> str:
    data = run.config.data
    size = data.eval_size or data.image_size
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (data.mean, data.std))
    weights = run.title if isinstance(run.place, Path) else str(run.place)
    sides, resized = ("Both sides", "are resized") if data.eval_crop == "squash" else ("The short side", "is resized")
    text = (
        "## How to load it\n\n```\njaxddp train finetune_folder --data.path PICTURES --model.weights "
        f"{weights}\n```\n\n{sides} of an image {resized} to {data.resize} pixels ({data.interpolation}), and the "
        f"central {size}x{size} pixels are normalized with mean {mean} and standard deviation {std}."
    )
    if has_published_names(run.weights.model):
        text += (
            "\n\nThe arrays in `model.safetensors` have the names and the layout of torchvision or timm. PyTorch loads "
            'them into the same network by `model.load_state_dict(safetensors.torch.load_file("model.safetensors"))`.'
        )
    return text


def _training(run: PublishedRun) -> str:
    settings = effective_settings(type(run.config), flatten(run.config.to_dict()), run.hooks)
    rows = []
    for key in _SETTINGS:
        value = settings.get(key)
        is_path = key == "model.weights" and value is not None and is_local(value)
        if value is not None and not is_path and not (run.own_network and key == "model.name"):
            rows.append(f"| {key} | {value} |")
    table = "\n".join(["| key | value |", "|---|---|", *rows])
    train = "jaxddp train config.json --data.path DATA --workdir runs/again"
    fetch = "" if isinstance(run.place, Path) else f"hf download {run.place.repo} config.json --local-dir .\n"
    text = f"## How it was trained\n\n{table}\n\n`config.json` has all settings"
    text += (
        f", except those of the Python code in the recipe ({', '.join(run.hooks)})."
        if run.hooks
        else f". To train it again:\n\n```\n{fetch}{train}\n```"
    )
    return text + ("\n\n![curves of the training](curves.png)" if run.has_curves else "")
