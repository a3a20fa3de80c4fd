"""Publish a run, on the Hugging Face Hub or as a folder: weights, settings, classes, a model card, and curves."""

import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted
from jaxddp.inference.exported_weights import RunWeights, weights_of_run, write_weights
from jaxddp.inference.model_card import CardFacts, model_card
from jaxddp.overrides import flatten
from jaxddp.recipe_file import RUN_ID
from jaxddp.recipe_files.find_recipe import CONFIG_FILE
from jaxddp.sections.goal import VAL_EMA, by_split, of_exported
from jaxddp.training.checkpoints.integrity import CHECKPOINTS, Integrity
from jaxddp.training.checkpoints.run_identity import LOCATION_KEYS
from jaxddp.training.checkpoints.validation_file import ValidationFile
from jaxddp.training.listeners.curves import CURVES
from jaxddp.weights.hub_files import HubFile
from jaxddp.weights.hub_upload import upload
from jaxddp.weights.places import SIGNATURE_FILE, WEIGHTS_FILE, is_local
from jaxddp.weights.torch_layout import has_published_names
from jaxddp.workdir.saved_state import recipe_of_run
from jaxddp.workdir.signature import Signature

CARD_FILE = "README.md"
_PRIVATE_KEYS = frozenset(
    (*LOCATION_KEYS, "data.data_dir", "data.local_cache", "data.manifest", "data.classes", "objective.teacher")
)
"""The keys with paths of this machine, which are not pushed. `model.weights` is not pushed if it is a path."""


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
