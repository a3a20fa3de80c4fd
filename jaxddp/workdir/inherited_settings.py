"""The network and image settings that a run takes over together with its initial weights."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.choices import without_unread
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.overrides import flatten, plain
from jaxddp.recipe_file import RecipeFile, TakenSettings, read_config
from jaxddp.recipe_files.find_recipe import CONFIG_FILE
from jaxddp.sections.data_section import IMAGE_KEYS, RESIZING_KEYS
from jaxddp.sections.model_section import NETWORK_KEYS
from jaxddp.training.checkpoints.integrity import RunIdentity
from jaxddp.weights.download import SCHEME, HubFile
from jaxddp.weights.places import WEIGHTS_FILE, PublishedWeights, fetch_settings, find_published, has_library, is_local
from jaxddp.workdir.paths import absolute
from jaxddp.workdir.signature import Signature


def with_settings_of_weights(
    file: RecipeFile, weights: str, workdir: Path | None, *, offline: bool = False
) -> RecipeFile:
    """Return a recipe file with the network and the image settings of `weights`, if they are known.

    They are known for published weights, for a run, and for a folder or a repository of the Hub that has the files of a
    published run.

    If `workdir` has a run that began with these weights, its settings are read, because the earlier run may be gone.

    Args:
        offline: whether nothing is fetched.

    Raises:
        InputError: no published weights have this name, the repository does not exist, or the config.json of the run
            cannot be read.
        Unreachable: the Hub does not answer.
    """
    own_network = "get_model" in file.hooks
    started_here = workdir is not None and _started_from(workdir, weights)
    if has_library(weights) and not started_here:
        changes = _settings_of_published(find_published(weights), own_network=own_network)
    else:
        place = workdir if started_here else _folder_of(weights, offline=offline)
        if place is None or not os.path.isfile(place / CONFIG_FILE):
            return file
        changes = _settings(place, own_network=own_network)
    before, config = flatten(file.config.to_dict()), file.config.replace(**changes)
    after = flatten(config.to_dict())
    taken = frozenset(key for key in after if after[key] != before[key])
    return dataclasses.replace(file, config=config, taken=TakenSettings(taken))


def _folder_of(weights: str, *, offline: bool) -> Path | None:
    """Return the folder with the config.json of the run that trained the weights, if there is one."""
    if not weights.startswith(SCHEME):
        return files.expanded(weights)
    place = HubFile.parse(weights)
    if place.file not in (None, WEIGHTS_FILE):
        return None
    folder = fetch_settings(place, offline=offline)
    # Another library's config.json has other keys.
    return folder if folder is not None and RunIdentity.in_workdir(folder) is not None else None


def _settings_of_published(weights: PublishedWeights, *, own_network: bool) -> dict[str, dict[str, Any]]:
    """Return the settings of published weights as changes of a config."""
    of_weights = ("image_size", "resize", "eval_crop", "interpolation", "mean", "std")
    images = {key: getattr(weights, key) for key in of_weights}
    changes: dict[str, dict[str, Any]] = {"data": {**images, "eval_size": None, "channels": 3, "bits": 8}}
    if not own_network:
        changes["model"] = {**dict.fromkeys(NETWORK_KEYS), "name": weights.network}
    return plain(changes)


def with_notice(file: RecipeFile, weights: str) -> RecipeFile:
    """Return the recipe file with a line that lists the settings that were taken over, if there are any."""
    now, keys = flatten(file.config.to_dict()), file.taken.keys
    listed = ", ".join(f"{key}={now[key]}" for key in sorted(keys) if now[key] is not None)
    whose = "the run's" if is_local(weights) else "the"
    notice = f"{weights}: {whose} settings are taken over: {listed}" if listed else ""
    return dataclasses.replace(file, taken=TakenSettings(keys, notice))


def _started_from(workdir: Path, weights: str) -> bool:
    if not os.path.isfile(workdir / CONFIG_FILE):
        return False
    config, content = read_config(workdir / CONFIG_FILE)
    first = config.model.weights
    if "model" not in content or first is None:
        return False
    return first == weights or (is_local(weights) and absolute(first) == absolute(weights))


def _settings(place: Path, *, own_network: bool) -> dict[str, dict[str, Any]]:
    """Return the settings of a run as changes of a config.

    The network's settings are left out if only one of the two recipes defines the network in code.
    """
    config, content = read_config(place / CONFIG_FILE)
    images = _images(place, config.data)
    changes = {"data": {key: getattr(images, key) for key in (*IMAGE_KEYS, *RESIZING_KEYS)}}
    if "model" in content and ("get_model" in (content.get("recipe") or {}).get("hooks", ())) == own_network:
        model = config.model if own_network else without_unread(config).model
        changes["model"] = {key: getattr(model, key) for key in NETWORK_KEYS}
    return plain(changes)


def _images(place: Path, data: DataConfig) -> DataConfig:
    """Return the config that reads images like the run's. If the run trained on arrays, files are resized to match."""
    signature = Signature.read(place)
    if signature is None or not signature.in_memory:
        return data
    try:
        return signature.data(data)
    except InputError:
        return data  # Image files cannot have the shape of the arrays.
