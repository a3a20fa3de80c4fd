"""The places that `model.weights` names: a file, the work directory of a run, published weights, or the Hub."""

import os
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.recipe_files.find_recipe import CONFIG_FILE, TEXT_FILES
from jaxddp.weights.download import download
from jaxddp.weights.hub_files import SCHEME, HubFile, fetch
from jaxddp.weights.published_list import find_published, has_library
from jaxddp.weights.state_dict import PICKLED

WEIGHTS_FILE = "model.safetensors"
"""The file of weights in a repository of the Hub."""
SIGNATURE_FILE = "signature.json"
"""The classes in a repository that `jaxddp push` wrote."""
_CHECKPOINTS = "checkpoints"
OFFLINE_VARIABLE = "HF_HUB_OFFLINE"


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
    path = _fetch(HubFile(place.repo, place.file or WEIGHTS_FILE, place.revision), offline=offline)
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


def _fetch(place: HubFile, *, offline: bool) -> Path:
    try:
        return fetch(place, offline=offline)
    except FileNotFoundError:
        advice = f"name a file of it: {SCHEME}{place.repo}/FILE"
        raise InputError(f"{place}: the repository has no such file; {advice}") from None
