"""Where the files of a run lie: it writes absolute places down, so that it can be asked from any directory."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.peers import ALONE, Peers
from jaxddp.data.soundness.image_manifest import find_manifest
from jaxddp.data.storage import catalog
from jaxddp.data.storage.home import is_address
from jaxddp.data.unlabelled import TRAIN
from jaxddp.overrides import flatten

_PLACES = (
    *("data.path", "data.unlabelled", "data.data_dir", "data.local_cache", "data.manifest", "model.weights"),
    "objective.teacher",
)


def absolute(place: str) -> str:
    """A path of this machine from the current directory on, links kept; a URL, or tfds:NAME, as it is."""
    if is_address(place):
        return place
    path = str(Path(os.path.expanduser(place)).absolute())
    # Behind a link, ".." leads elsewhere than it reads.
    plain = os.path.normpath(path)
    return plain if os.path.realpath(plain) == os.path.realpath(path) else path


def with_places(config: Config, peers: Peers = ALONE) -> Config:
    """The config with absolute paths, and with the places of `data.name`, unless machines know it by several, and of
    the manifest that `data.verify` asks for.

    All processes of a job must ask. Raises: InputError; no data set has this name, or there is no manifest.
    """
    changes: dict[str, dict[str, Any]] = {"data": {}}
    for key, place in _absolute(flatten(config.to_dict())).items():
        section, _, name = key.partition(".")
        changes.setdefault(section, {})[name] = place
    data = config.to_dict()["data"] | changes["data"]
    if data["name"] is not None and data["path"] is None:
        told = _named(data)
        if len({*peers.exchange("data.name", json.dumps(told))}) == 1:
            changes["data"] |= told
    path = (data | changes["data"])["path"]
    if data["verify"] == "manifest" and data["manifest"] is None and path is not None:
        changes["data"]["manifest"] = str(find_manifest(path, None))
    return config.replace(**changes)


def saved_places(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The same of what an older release wrote down, by dotted keys: relative ones begin at the current directory."""
    flat = {**saved, **_absolute(saved)}
    data = {key.removeprefix("data."): value for key, value in flat.items() if key.startswith("data.")}
    if data.get("name") is None or data.get("path") is not None:
        return flat
    try:
        return flat | {f"data.{key}": value for key, value in _named(data).items()}
    except InputError:
        return flat  # It was known where the run began.


def _absolute(flat: Mapping[str, Any]) -> dict[str, str]:
    """Those of the settings that are places, by dotted keys, as `absolute` ones."""
    known = {key: place for key in _PLACES if isinstance(place := flat.get(key), str)}
    if known.get("data.unlabelled") == TRAIN:
        del known["data.unlabelled"]
    return {key: absolute(place) for key, place in known.items()}


def _named(data: Mapping[str, Any]) -> dict[str, Any]:
    """What datasets.toml says of a name, as keys of `data`; what stands there already wins."""
    entry = dataclasses.asdict(catalog.resolve(data["name"]))
    told = {key: data.get(key) or entry[key] for key in ("train", "val", "classes")}
    return {**told, "path": entry["path"], "name": None}
