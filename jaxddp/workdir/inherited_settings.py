"""What a run that another one starts from knows of its network and its images, which the other need not say again."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.choices import of_release
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.overrides import flatten, plain
from jaxddp.recipe_file import CONFIG_FILE, COPY_FOLDER, RecipeFile, TakenSettings, read_config
from jaxddp.sections.data_section import IMAGE_KEYS
from jaxddp.sections.model_section import NETWORK_KEYS
from jaxddp.workdir.paths import absolute
from jaxddp.workdir.signature import Signature


def with_settings_of_run(file: RecipeFile, weights: str, workdir: Path | None) -> RecipeFile:
    """A recipe file with the settings of the run that its weights are of; as it is, where they are of no run.

    Where the `workdir` has a run that began with these weights, it says the settings: the other run may have gone.

    Raises: InputError; the config.json of the run cannot be read.
    """
    place = Path(os.path.expanduser(weights))
    if workdir is not None and _began_with(workdir, weights):
        place = workdir
    if not os.path.isfile(place / CONFIG_FILE):
        return file
    changes = _known(place, own_network="get_model" in file.hooks)
    before, config = flatten(file.config.to_dict()), file.config.replace(**changes)
    after = flatten(config.to_dict())
    taken = frozenset(key for key in after if after[key] != before[key])
    return dataclasses.replace(file, config=config, taken=TakenSettings(taken))


def with_notice(file: RecipeFile, weights: str) -> RecipeFile:
    """The recipe file with a line that lists the settings that were taken over, if there are any."""
    now, keys = flatten(file.config.to_dict()), file.taken.keys
    listed = ", ".join(f"{key}={now[key]}" for key in sorted(keys) if now[key] is not None)
    notice = f"{weights}: the run's settings are taken over: {listed}" if listed else ""
    return dataclasses.replace(file, taken=TakenSettings(keys, notice))


def _began_with(workdir: Path, weights: str) -> bool:
    if not os.path.isfile(workdir / CONFIG_FILE):
        return False
    config, content = read_config(workdir / CONFIG_FILE)
    own = config.model.weights
    return "model" in content and own is not None and absolute(own) == absolute(weights)


def _known(place: Path, *, own_network: bool) -> dict[str, dict[str, Any]]:
    """As changes of a config. Where one of two recipes brings the network as code, its name says nothing."""
    config, content = read_config(place / CONFIG_FILE)
    images = _images(place, config.data)
    changes = {"data": {key: getattr(images, key) for key in (*IMAGE_KEYS, "eval_size", "resize")}}
    if "model" in content and _brings_network(place) == own_network:
        model = config.model if own_network else of_release(config).model
        changes["model"] = {key: getattr(model, key) for key in NETWORK_KEYS}
    return plain(changes)


def _images(place: Path, data: DataConfig) -> DataConfig:
    """Images of files like those of the run. What it was given as arrays has the size that they had."""
    signature = Signature.read(place)
    if signature is None or not signature.in_memory:
        return data
    try:
        return signature.data(data)
    except InputError:
        return data  # No file has such images.


def _brings_network(place: Path) -> bool:
    """Whether a run's copy of its recipe has such a hook, without running it: its modules may be named as others'."""
    return any(b"get_model" in files.read(copy) for copy in sorted((place / COPY_FOLDER).rglob("*.py")))
