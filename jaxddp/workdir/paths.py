"""Absolute paths in the config of a run, so that it can be loaded from any directory."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import jaxddp.core.files as files
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.peers import ALONE, Peers
from jaxddp.data.manifest import find_manifest
from jaxddp.data.opening import TRAIN
from jaxddp.data.storage import root
from jaxddp.data.storage.root import is_address
from jaxddp.overrides import flatten
from jaxddp.weights.places import is_local

_PATH_KEYS = (
    *("data.path", "data.unlabelled", "data.data_dir", "data.local_cache", "data.manifest", "model.weights"),
    "objective.teacher",
)


def absolute(place: str) -> str:
    """Return the absolute path of a file without resolving links; a URL or tfds:NAME is unchanged."""
    if is_address(place):
        return place
    path = str(files.expanded(place).absolute())
    # After a link, ".." leads to the parent of its target.
    plain = os.path.normpath(path)
    return plain if os.path.realpath(plain) == os.path.realpath(path) else path


def with_absolute_paths(config: Config, peers: Peers = ALONE) -> Config:
    """Return a config with absolute paths. `data.name` becomes a path, and the manifest for `data.verify` is added.

    `data.name` stays if the hosts of a job have different paths for it. All processes of a job must call this
    function together.

    Raises:
        InputError: no data set has this name, or there is no manifest.
    """
    changes: dict[str, dict[str, Any]] = {"data": {}}
    for key, place in _absolute_paths(flatten(config.to_dict())).items():
        section, _, name = key.partition(".")
        changes.setdefault(section, {})[name] = place
    data = config.to_dict()["data"] | changes["data"]
    if data["name"] is not None and data["path"] is None:
        catalog_settings = _catalog_settings(data)
        if len({*peers.exchange("data.name", json.dumps(catalog_settings))}) == 1:
            changes["data"] |= catalog_settings
    path = (data | changes["data"])["path"]
    # With data of its own, each process finds its own manifest when it opens the data.
    is_shared = data["placement"] == "shared"
    if is_shared and data["verify"] == "manifest" and data["manifest"] is None and path is not None:
        changes["data"]["manifest"] = str(find_manifest(path, None))
    return config.replace(**changes)


def absolute_settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a config.json, given by dotted keys, with absolute paths, as `with_absolute_paths` does.

    Older releases wrote relative paths, which are resolved in the current directory.
    """
    flat = {**saved, **_absolute_paths(saved)}
    data = {key.removeprefix("data."): value for key, value in flat.items() if key.startswith("data.")}
    if data.get("name") is None or data.get("path") is not None:
        return flat
    try:
        return flat | {f"data.{key}": value for key, value in _catalog_settings(data).items()}
    except InputError:
        return flat  # The name was known on the machine where the run began.


def _absolute_paths(flat: Mapping[str, Any]) -> dict[str, str]:
    """Return, by dotted key, the absolute path for each setting that holds a path."""
    paths = {key: place for key in _PATH_KEYS if isinstance(place := flat.get(key), str)}
    if paths.get("data.unlabelled") == TRAIN:
        del paths["data.unlabelled"]
    if "model.weights" in paths and not is_local(paths["model.weights"]):
        del paths["model.weights"]
    return {key: absolute(place) for key, place in paths.items()}


def _catalog_settings(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of datasets.toml for a name, as keys of `data`. Values in `data` take precedence."""
    entry = dataclasses.asdict(root.resolve(data["name"]))
    settings = {key: data.get(key) or entry[key] for key in ("train", "val", "classes")}
    return {**settings, "path": entry["path"], "name": None}
