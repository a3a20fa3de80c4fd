"""config.json: a new run claims its work directory by writing this file, and a resumed run is compared with it."""

import json
import logging
import secrets
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.choices import CHOICES, DECIDING_KEYS, NAMES, effective_settings, keys_of_choices
from jaxddp.config import Config
from jaxddp.core.errors import InputError, Key, Option
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.wording import show
from jaxddp.overrides import flatten
from jaxddp.recipe_file import COPY_FOLDER, RUN_ID, RecipeFile
from jaxddp.recipe_files.find_recipe import CONFIG_FILE
from jaxddp.sections.data_section import IMAGE_KEYS
from jaxddp.sections.dependent_keys import NEEDS
from jaxddp.sections.loss_section import LossConfig
from jaxddp.sections.model_section import NETWORK_KEYS
from jaxddp.training.checkpoints.integrity import LENGTH_KEYS, LOCATION_KEYS, MAY_CHANGE, RunIdentity
from jaxddp.workdir.paths import absolute_settings

_RESTORE_ADVICE = ("restore it, or start in another ", Option("workdir"))
_RECIPE_ADVICE = ("a resumed run keeps its recipe: set it back, or start in another ", Option("workdir"))
EVALUATION_KEYS = (
    *(*(f"model.{key}" for key in NETWORK_KEYS), *(f"data.{key}" for key in IMAGE_KEYS)),
    *("data.classes", "data.val_share", *(f"loss.{field.name}" for field in fields(LossConfig)), "train.ema"),
)
"""The keys that must be equal in an evaluation and its run: those of the network, the images, the classes and the loss.
Other keys are not compared, because an evaluation makes no optimizer and no training batch."""
_log = logging.getLogger("jaxddp.experiment")


@dataclass(frozen=True)
class Claim:
    """The content that a run writes into config.json.

    Attributes:
        settings: the keys of its config and their values, by section.
        fingerprints: the fingerprints of the data and of the objective, by name.
        recipe: the recipe file; None for a run from Python.
        objects: digests of the objects of a run from Python; see `RunSetup.identity`.
    """

    settings: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    recipe: RecipeFile | None = None
    objects: Mapping[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the content of config.json as it is read again, with plain numbers in place of NumPy's."""
        record: dict[str, Any] = {**self.settings, "fingerprint": dict(self.fingerprints)}
        if self.recipe is not None and (entry := self.recipe.entry()):
            record["recipe"] = entry
        if self.objects:
            record["objects"] = {**self.objects, "jax": version("jax")}
        return json.loads(json.dumps(record, default=lambda value: value.tolist()))


def claim(
    directory: Path, claimed: Claim, peers: Peers = ALONE, *, resuming: bool, run_id: str | None = None
) -> tuple[dict[str, Any], bool]:
    """Write config.json and a copy of the recipe's files. On resume, first compare both with the saved files.

    A new run gets an id, which it keeps. If a run of an older release has no id, it gets the id in its checkpoint,
    `run_id`, or a new one. The paths of the data may change. A change is logged, because the fingerprints of the data
    cover the names and labels of image files but not the images.

    Returns:
        The content of config.json, and whether the resumed run has the same length; see `Comparison.is_same_length`.

    Raises:
        InputError: a key of the recipe differs, or a file cannot be read or written.
    """
    path, record, same = directory / CONFIG_FILE, claimed.record(), False
    if resuming:
        compared = compare(directory, claimed, peers)
        record, same, identity = compared.record, compared.is_same_length, RunIdentity.of(compared.saved)
        run_id = run_id if identity is None else identity.id
        if peers.is_first:
            compared.log_locations()
    record = {RUN_ID: peers.from_first("run id", lambda: run_id or secrets.token_hex(8)), **record}
    if peers.is_first:
        if claimed.recipe is not None:
            _replace_files(directory / COPY_FOLDER, claimed.recipe.files())
        files.replace(path, (json.dumps(record, indent=2) + "\n").encode())
    return record, same


@dataclass(frozen=True)
class Comparison:
    """The saved config.json of a run, and the content with which the run is resumed."""

    saved: dict[str, Any]
    record: dict[str, Any]

    def changed_keys(self) -> set[str]:
        """Return the keys, with dots, whose values differ. The id of the run is not compared."""
        before, now = flatten(self.saved), flatten(self.record)
        return {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)} - {RUN_ID}

    def log_locations(self) -> None:
        """Log the locations of the data that differ."""
        before, now = (absolute_settings(flatten(content)) for content in (self.saved, self.record))
        for key in LOCATION_KEYS:
            if before.get(key) != now.get(key):
                change = f"was {before.get(key)!r} and is now {now.get(key)!r}"
                _log.info(f"{key} {change}: the fingerprints are equal; they do not cover the image files")

    @property
    def is_same_length(self) -> bool:
        """Whether no key has changed that determines when the run ends."""
        return self.changed_keys().isdisjoint(LENGTH_KEYS)


def compare(directory: Path, claimed: Claim, peers: Peers = ALONE) -> Comparison:
    """Compare the claim of a resumed run with its config.json and its copy of the recipe.

    Raises:
        InputError: a key of the recipe differs, or a file cannot be read.
    """
    path, record = directory / CONFIG_FILE, claimed.record()
    saved = _read(path)
    recipe = saved.get("recipe")
    if claimed.recipe is not None and isinstance(recipe, dict) and recipe.get("digest") and record.get("recipe"):
        for name, file in claimed.recipe.files().items():
            copy = directory / COPY_FOLDER / name
            if copy.is_file() and files.read(copy) != file:
                raise InputError(f"{copy}: the recipe file {name} has changed", advice=_RECIPE_ADVICE)
    hooks = () if claimed.recipe is None else claimed.recipe.hooks
    _compare(path, saved, record, hooks, peers)
    return Comparison(saved, _as_saved(saved, record))


def check_evaluation(directory: Path, config: Config) -> None:
    """Check that a config has the network, the images and the classes of a run that is to be evaluated.

    A run from Python is not checked: its config.json does not hold these settings. The error names the first key that
    differs, and both values.

    Raises:
        InputError: a key differs.
    """
    path = directory / CONFIG_FILE
    saved = _read(path) if path.exists() else {}
    if "model" not in saved:
        return
    of_run, of_config = _settings(flatten(saved)), effective_settings(flatten(config.to_dict()))
    for key in EVALUATION_KEYS:
        if of_run[key] != of_config[key]:
            raise InputError(
                *(f"{path}: ", Key(key), f" was {of_run[key]!r} and is now {of_config[key]!r}"),
                advice="a checkpoint is evaluated as it was trained: leave the option out",
            )


def _settings(saved: dict[str, Any], hooks: Collection[str] = ()) -> dict[str, Any]:
    """Returns the settings of a config.json by dotted keys. Keys that the file does not have get their defaults."""
    return absolute_settings(effective_settings(flatten(Config().to_dict()) | saved, hooks))


def _as_saved(saved: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Return the content for config.json, with the saved values of the keys that only some choices read.

    A choice is, for example, an optimizer, and only some optimizers read `optimizer.beta2`. For such a key, an older
    release may have written a value where a config now holds None, for the default of the choice. The saved values must
    not change, because checkpoints hold a digest of them.
    """
    flat, keys = flatten(saved), (keys_of_choices() | NEEDS.keys()) - MAY_CHANGE

    def as_saved(section: str, name: str, value: Any) -> Any:
        key = f"{section}.{name}"
        return flat.get(key, value) if key in keys else value

    sections = {section for section, values in record.items() if isinstance(values, dict)}
    return record | {
        section: {name: as_saved(section, name, value) for name, value in record[section].items()}
        for section in sections
    }


def _replace_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Replace the files of a folder."""
    with files.readable_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            files.replace(folder / name, content)


def _compare(path: Path, saved: dict[str, Any], record: dict[str, Any], hooks: Collection[str], peers: Peers) -> None:
    saved_keys, now = flatten(saved), effective_settings(flatten(record), hooks)
    before = _settings(saved_keys, hooks)
    written, release = before.get("objects.jax"), now.get("objects.jax")
    if release is not None and written != release:
        # The digests depend on the release of JAX, so they are not compared. The names of the objects are compared:
        # an object, such as a schedule, exists with any release of JAX.
        if peers.is_first:
            by = "without the release of jax" if written is None else f"with jax {written}"
            _log.warning(f"{path}: written {by}; its model, loss and optimizer cannot be compared")
        objects = {key for key in now if key.startswith("objects.") and (written is None or key in before)}
        before = {key: value for key, value in before.items() if key not in objects}
        now = {key: value for key, value in now.items() if key not in objects}
    changed = {
        key: f"was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted(saved_keys.keys() | now.keys())
        if before.get(key) != now.get(key)
    }
    had, has = (set(values.get("recipe.hooks") or ()) for values in (before, now))
    # A recipe without hooks has no entry; any other entry is a damaged one, which the keys below name.
    is_sound = isinstance(saved.get("recipe", {}), dict)
    for kind in (kind for kind in CHOICES if is_sound and kind.hook in had ^ has):
        verb, where = ("replaces", "") if kind.hook in had else ("replaced", " in the run")
        problem = f" {verb} {kind.hook} of the recipe{where}"
        raise InputError(f"{path}: ", Key(kind.key), problem, advice=_RECIPE_ADVICE)
    # Some keys determine the values of other keys, and the precision is a part of a model. The error names such a key
    # rather than one that changes with it.
    for key in sorted(
        changed, key=lambda key: (key not in NAMES, key not in DECIDING_KEYS, key.startswith("objects."))
    ):
        if key not in MAY_CHANGE:
            continuation = f"; jaxddp train {path.parent} continues with its own settings" if "model" in saved else ""
            raise InputError(f"{path}: ", Key(key), f" {changed[key]}", advice=(_RECIPE_ADVICE, continuation))


def _read(path: Path) -> dict[str, Any]:
    with files.reading(path, _RESTORE_ADVICE, missing=("is missing beside the checkpoints; ", _RESTORE_ADVICE)):
        content = files.read(path)
    try:
        saved = files.parse_json(content)
        if not isinstance(saved, dict):
            raise ValueError(f"it holds {show(saved)}")
        return saved
    except ValueError as error:
        raise InputError(f"{path}: cannot be read ({error})", advice=_RESTORE_ADVICE) from None
