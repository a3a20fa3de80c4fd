"""Publishes a run, as a repository of the Hugging Face Hub or as a folder with the same files.

These are weights, settings, classes, curves and a model card, whose front matter has the keys of the Hub
(https://huggingface.co/docs/hub/model-cards).
"""

import dataclasses
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from jaxddp.config import goal, registry
from jaxddp.config.layers import SIMSIAM
from jaxddp.core import errors, files, libraries
from jaxddp.core.errors import InputError, counted, some
from jaxddp.inference.exports import IN_PYTHON, arrays_of, write_weights
from jaxddp.inference.trained import TrainedRun, restore_run
from jaxddp.mesh import Topology
from jaxddp.recipe.file import RUN_ID
from jaxddp.recipe.sources import CONFIG_FILE
from jaxddp.training.checkpoints.integrity import CHECKPOINTS, LOCATION_KEYS, Integrity, ValidationFile
from jaxddp.training.listeners.jsonl import CURVES
from jaxddp.weights.download import HubFile, upload
from jaxddp.weights.match import has_published_names
from jaxddp.weights.places import SIGNATURE_FILE, WEIGHTS_FILE, find_published, is_local
from jaxddp.workdir.saved_state import recipe_of_run

CARD_FILE = "README.md"
_PRIVATE_KEYS = {*LOCATION_KEYS, "data.data_dir", "data.local_cache", "data.manifest", "data.classes"}
_PRIVATE_KEYS |= {"objective.teacher"}
"""The keys with paths of this machine, which are not pushed. `model.weights` is not pushed if it is a path."""
_SETTINGS = ("model.name", "model.weights", "data.image_size", "train.batch_size", "train.duration", "train.precision")
_SETTINGS += ("optimizer.name", "optimizer.learning_rate", "optimizer.schedule", "optimizer.warmup")
_SETTINGS += ("optimizer.weight_decay", "seed")


def push_run(directory: Path, which: str, place: HubFile, *, private: bool) -> str:
    """Upload a checkpoint ("latest", "best" or a step) with its model card, and return a line for the user.

    Raises:
        InputError: see `PublishedRun`; also if the token may not write.
        Unreachable: the hub does not answer.
    """
    run = PublishedRun(directory, which, place)
    with tempfile.TemporaryDirectory() as temporary:
        written = run.write(Path(temporary))
        url = upload(Path(temporary), place, private=private, message=f"Step {run.network.step}")
    return f"{place}: {written}; {url}"


def write_folder(directory: Path, which: str, folder: Path, network: TrainedRun | None = None) -> str:
    """Write the files that `push_run` uploads into a new folder, and return a line for the user.

    Args:
        network: a network whose weights take the place of those of the run.

    Raises: InputError, also if the folder exists and is not empty, or cannot be created.
    """
    run = PublishedRun(directory, which, folder.resolve(), network)
    if any(files.create(folder).iterdir()):
        raise InputError(f"{folder}: is not empty; give a new folder")
    try:
        return f"{folder}: {run.write(folder)}, with a model card"
    except BaseException:
        for file in folder.iterdir():
            file.unlink()
        raise


class PublishedRun:
    """A checkpoint of a run, and its model card.

    Args:
        which: "latest", "best" or a step.
        place: the repository of the Hub, or the folder.

    Raises: InputError if there is no such checkpoint, or the run's config does not name its network.
    """

    def __init__(self, directory: Path, which: str, place: HubFile | Path, network: TrainedRun | None = None):
        self.directory, self.place, file = directory, place, recipe_of_run(directory)
        file.check_network(IN_PYTHON)
        self.config, self.hooks = file.config, sorted(file.hooks)
        self.network = network or restore_run(directory, which, Topology.create(1))
        self.arrays, self.runs = arrays_of(self.network), getattr(self.network, "members", ())
        checkpoints = directory / CHECKPOINTS
        validated = {} if self.runs else ValidationFile(checkpoints, Integrity(checkpoints)).by_step
        self.measured = validated.get(self.network.step, {})
        # The metrics of the published parameters, which may be averages of the trained ones.
        self.metrics = {name: value for name, value in goal.of_exported(self.measured).items() if value is not None}
        self.title = place.name if isinstance(place, Path) else place.repo.partition("/")[2]
        name = self.config.data.name or PurePosixPath(self.config.data.path or "data").name
        self.data_set = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "data"
        weights = self.config.model.weights
        self.base = None if weights is None or is_local(weights) else weights

    def write(self, folder: Path) -> str:
        """Write the files, and return a line for the user.

        The weights are the last file, because `model.weights` accepts a folder that has them.
        """
        run_id = files.parse_json(files.read(self.directory / CONFIG_FILE), dict).get(RUN_ID)
        contents = {CONFIG_FILE: self._public_config(), SIGNATURE_FILE: dataclasses.asdict(self.network.signature)}
        for name, content in contents.items():
            files.replace_json(folder / name, {RUN_ID: run_id, **content})
        if (self.directory / CURVES).is_file():
            files.replace(folder / CURVES, files.content_of(self.directory / CURVES, "make it readable"))
        files.replace(folder / CARD_FILE, self._card().encode())
        count = write_weights(folder / WEIGHTS_FILE, self.network.model, self.arrays)
        return f"{counted(count, 'array')} of {self.network.origin}"

    def _public_config(self) -> dict[str, Any]:
        """Return the content of config.json without paths, and without the network if Python code defines it."""
        config: dict[str, Any] = self.config.to_dict() | {"log": {}}
        if "get_model" in self.hooks:
            del config["model"]
        for key in _PRIVATE_KEYS if self.base else _PRIVATE_KEYS | {"model.weights"}:
            section, _, name = key.partition(".")
            config.get(section, {}).pop(name, None)
        return config

    def _card(self) -> str:
        """Return the text of README.md."""
        front = yaml.safe_dump(self._front_matter(), sort_keys=False, allow_unicode=True)
        return f"---\n{front}---\n\n{self._about()}\n\n{self._results()}\n\n{self._loading()}\n\n{self._training()}\n"

    def _front_matter(self) -> dict[str, Any]:
        kind = "feature-extraction" if self.config.objective.name == SIMSIAM else "classification"
        front: dict[str, Any] = {
            "library_name": "jaxddp",
            "pipeline_tag": f"image-{kind}",
            "tags": [f"image-{kind}", "jax", "flax", "jaxddp"],
            "datasets": [self.data_set],
        }
        if (base := self.base) is not None and not base.startswith("torchvision/"):
            front["base_model"] = HubFile.parse(base).repo if base.startswith("hf://") else find_published(base).name
        shares = {key: value for key, value in self.metrics.items() if errors.is_share(key)}
        if shares:
            task = {"type": "image-classification", "name": "Image classification"}
            data_set = {"name": self.data_set, "type": self.data_set, "split": "validation"}
            metrics = [{"type": "accuracy", "name": key, "value": value} for key, value in shares.items()]
            results = {"task": task, "dataset": data_set, "metrics": metrics}
            front |= {"metrics": ["accuracy"], "model-index": [{"name": self.title, "results": [results]}]}
        return front

    def _about(self) -> str:
        names = () if self.network.signature.label_form == "numbers" else self.network.class_names
        classes = f" It classifies images into {counted(len(names), 'class')}: {some(names, 10)}." if names else ""
        classes = " Its head is not trained." if self.config.objective.name == SIMSIAM else classes
        release = f"jaxddp {libraries.installed_version('jaxddp') or ''}".rstrip()
        network = "of the recipe" if "get_model" in self.hooks else self.config.model.name
        count = sum(array.size for path, array in self.arrays.items() if path.startswith("params/"))
        trained = f"The network {network}, with {count:,} parameters, was trained on {self.data_set} with {release}."
        return f"# {self.title}\n\n{trained}{classes}"

    def _results(self) -> str:
        if not self.metrics:
            which = f"of {len(self.runs)} runs, averaged" if self.runs else f"after step {self.network.step:,}"
            return f"## Results\n\nThese are the weights {which}. They were not validated."
        shown = ((name, errors.figure(name, value)) for name, value in self.metrics.items() if name != "count")
        table = _table("metric", shown)
        images = f" on {counted(int(self.metrics['count']), 'image')}" if "count" in self.metrics else ""
        averaged = any(map(goal.is_averaged, self.measured))
        of_which = " of the averaged parameters, which this repository holds," if averaged else ""
        return f"## Results\n\nThe validation{of_which} after step {self.network.step:,}{images}:\n\n{table}"

    def _loading(self) -> str:
        data = self.config.data
        train = f"jaxddp train {'RECIPE' if 'get_model' in self.hooks else 'finetune_folder'}"
        size = data.eval_size or data.image_size
        resize = size if self.network.signature.in_memory else data.resize
        mean, std = (", ".join(f"{value:g}" for value in values) for values in (data.mean, data.std))
        weights = self.title if isinstance(self.place, Path) else str(self.place)
        sides = "Both sides of an image are" if data.eval_crop == "squash" else "The short side of an image is"
        if "params/head/kernel" in self.arrays:
            weights += " --model.new-layers head --optimizer.rate-factors head=10"
        text = f"## How to load it\n\n```\n{train} --data.path PICTURES --model.weights {weights}\n```\n\n"
        text += f"{sides} resized to {resize} pixels ({data.interpolation}), and the central {size}x{size} pixels are "
        text += f"normalized with mean {mean} and standard deviation {std}."
        if has_published_names(self.network.model):
            text += "\n\n`model.safetensors` has the names and the layout of torchvision or timm. PyTorch loads it into"
            text += ' the same network by `model.load_state_dict(safetensors.torch.load_file("model.safetensors"))`.'
        return text

    def _training(self) -> str:
        hidden = {"model.weights"} if self.base is None else set()
        hidden |= {"model.name"} if "get_model" in self.hooks else set()
        settings = registry.effective_settings(type(self.config), self.config.flat(), self.hooks)
        shown = [(key, settings.get(key)) for key in _SETTINGS if key not in hidden]
        table = _table("key", ((key, value) for key, value in shown if value is not None))
        fetch = "" if isinstance(self.place, Path) else f"hf download {self.place.repo} config.json --local-dir .\n"
        train = "jaxddp train config.json --data.path DATA --workdir runs/again"
        end = f"{' of the first run' if self.runs else ''}. To train it again:\n\n```\n{fetch}{train}\n```"
        if self.hooks:
            end = f", except those of the Python code in the recipe ({', '.join(self.hooks)})."
        curves = "\n\n![curves of the training](curves.png)" if (self.directory / CURVES).is_file() else ""
        return f"## How it was trained\n\n{table}\n\n`config.json` has all settings{end}{curves}"


def _table(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    return "\n".join([f"| {title} | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
