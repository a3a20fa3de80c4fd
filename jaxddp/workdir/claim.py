"""config.json: a new run claims its work directory by writing this file, and a resumed run is compared with it.

A run that has ended, and has nothing left to train, is found by the same comparison. The module reads only files of the
work directory, and imports neither JAX nor TensorFlow.
"""

import dataclasses
import json
import logging
import os
import secrets
import shlex
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
import jaxddp.training.checkpoints.integrity as integrity
from jaxddp.config import Config
from jaxddp.config.data_section import IMAGE_KEYS
from jaxddp.config.goal import VAL
from jaxddp.config.registry import NAMES, effective_settings, needs
from jaxddp.config.tree import BALANCED, NETWORK_KEYS, LossConfig
from jaxddp.config.values import flatten, plain
from jaxddp.core.errors import InputError, Key, Option, measure
from jaxddp.core.peers import ALONE, Peers
from jaxddp.data.manifest import find_manifest
from jaxddp.data.opening import TRAIN, RunData
from jaxddp.data.storage import root
from jaxddp.recipe.file import COPY_FOLDER, REFERENCE_FILE, RUN_ID, RecipeFile
from jaxddp.recipe.sources import CONFIG_FILE
from jaxddp.training.listeners.jsonl import ENDED, RESULT
from jaxddp.training.progress import format_metrics
from jaxddp.weights.places import is_local
from jaxddp.workdir.lock import is_locked

_RESTORE_ADVICE = ("restore it, or start in another ", Option("workdir"))
_RECIPE_ADVICE = ("a resumed run keeps its recipe: set it back, or start in another ", Option("workdir"))
EVALUATION_KEYS = [*(f"model.{key}" for key in NETWORK_KEYS), *(f"data.{key}" for key in (*IMAGE_KEYS, "classes"))]
EVALUATION_KEYS += ["data.val_share", "data.fold", "train.ema", "train.swa"]
EVALUATION_KEYS += [f"loss.{field.name}" for field in dataclasses.fields(LossConfig)]
"""The keys that must be equal in an evaluation and its run: those of the network, the images, the classes and the loss.
Other keys are not compared, because an evaluation makes no optimizer and no training batch."""
_log = logging.getLogger("jaxddp.experiment")


@dataclasses.dataclass(frozen=True)
class Claim:
    """The content that a run writes into config.json.

    Attributes:
        settings: the keys of its config and their values, by section.
        fingerprints: the fingerprints of the data and of the objective, by name.
        recipe: the recipe file; None for a run from Python.
        objects: digests of the objects of a run from Python; see `jaxddp.setup.identity`.
    """

    settings: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    recipe: RecipeFile | None = None
    objects: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the content of config.json as it is read again, with plain numbers in place of NumPy's."""
        record: dict[str, Any] = {**self.settings, "fingerprint": dict(self.fingerprints)}
        if self.recipe is not None and (entry := self.recipe.entry()):
            record["recipe"] = entry
        if self.objects:
            record["objects"] = {**self.objects, "jax": version("jax")}
        return json.loads(json.dumps(record, default=lambda value: value.tolist()))


def claim(
    directory: Path, claimed: Claim, peers: Peers = ALONE, *, resuming: bool, ended: bool = False
) -> tuple[dict[str, Any], bool]:
    """Write config.json, a copy of the recipe's files, and its reference. On resume, first compare the first two.

    A new run gets an id, which it keeps. The paths of the data may change. A change is logged, because the fingerprints
    of the data cover the names and labels of image files but not the images. `ended` is whether no step is left. Return
    the content of config.json, and whether the run is resumed with the same length.

    Raises: InputError if a key of the recipe differs, or a file cannot be read or written.
    """
    record, run_id, same = claimed.record(), "", False
    if resuming:
        saved, record = compare(directory, claimed, peers)
        run_id, changes = str(saved.get(RUN_ID) or ""), changed_keys(saved, record)
        same = changes.keys().isdisjoint(integrity.LENGTH_KEYS)
        for key in sorted(changes.keys() & integrity.LOCATION_KEYS) if peers.is_first else []:
            _log.info(f"{key}{changes[key]}: the fingerprints are equal; they do not cover the image files")
    record = {RUN_ID: peers.from_first("run id", lambda: run_id or secrets.token_hex(8)), **record}
    if peers.is_first:
        if claimed.recipe is not None:
            # The files of a resumed run are read from this folder.
            is_run = resuming or integrity.RunIdentity.in_workdir(directory) is not None
            files.replace_folder(directory / COPY_FOLDER, claimed.recipe.files(), replaces_others=is_run)
            if (reference := claimed.recipe.reference) is not None:
                files.replace_json(directory / REFERENCE_FILE, plain(reference))
            elif not claimed.recipe.is_run:
                (directory / REFERENCE_FILE).unlink(missing_ok=True)
        if resuming and not same and not ended:
            # If this start is killed, the next one must not take the run for ended.
            files.remove(directory / RESULT)
        files.replace_json(directory / CONFIG_FILE, record)
    return record, same


def changed_keys(saved: dict[str, Any], record: dict[str, Any]) -> dict[str, str]:
    """Return the keys, with dots, whose values differ in two contents of config.json, and both values as text.

    The run's id is not compared.
    """
    before, now = flatten(saved), flatten(record)
    values = {key: (before.get(key), now.get(key)) for key in sorted((before.keys() | now.keys()) - {RUN_ID})}
    return {key: f" was {was!r} and is now {new!r}" for key, (was, new) in values.items() if was != new}


def compare(directory: Path, claimed: Claim, peers: Peers = ALONE) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare the claim of a resumed run with its config.json and its copy of the recipe.

    Return the saved config.json, and the content with which the run is resumed. Raises: InputError if a key of the
    recipe differs, or a file cannot be read.
    """
    path, record, recipe = directory / CONFIG_FILE, claimed.record(), claimed.recipe
    saved, hooks = _read(path), () if recipe is None else recipe.hooks
    if recipe is not None and isinstance(saved.get("recipe"), dict) and "recipe" in record:
        for name, file in recipe.files().items():
            copy = directory / COPY_FOLDER / name
            if copy.is_file() and files.read(copy) != file:
                raise InputError(f"{copy}: the recipe file {name} has changed", advice=_RECIPE_ADVICE)
    saved_keys, now = flatten(saved), effective_settings(Config, flatten(record), hooks)
    # The config.json of a published run leaves private keys out.
    before = effective_settings(Config, Config().flat() | saved_keys, hooks)
    release = now.get("objects.jax")
    if None not in (before.get("objects.jax"), release) and before["objects.jax"] != release:
        # The digests depend on the release of JAX, so they are not compared. The names of the objects are compared:
        # an object, such as a schedule, exists with any release of JAX.
        if peers.is_first:
            written = before["objects.jax"]
            _log.warning(f"{path}: written with jax {written}; its model, loss and optimizer cannot be compared")
        before |= {key: value for key, value in now.items() if key.startswith("objects.") and key in before}
    changes = changed_keys(before, now)
    changed = changes.keys() & (saved_keys.keys() | now.keys()) - integrity.MAY_CHANGE
    if changed:
        # Some keys determine the values of other keys, and the precision is a part of a model. The error names such a
        # key rather than one that changes with it.
        first, needed = (*NAMES, "recipe.hooks"), {need.key for need in needs(Config).values()}
        key = min(changed, key=lambda key: (key not in first, key not in needed, key.startswith("objects."), key))
        continuation = f"; jaxddp train {path.parent} continues with its own settings" if "model" in saved else ""
        if key.startswith("fingerprint."):  # With its own settings the run does not continue either.
            continuation = "" if "teacher" in key else "; the images, labels or classes of the data have changed"
        raise InputError(f"{path}: ", Key(key), changes[key], advice=(_RECIPE_ADVICE, continuation))
    # Checkpoints hold a digest of the settings, so a key that is now written in another way keeps its saved value.
    for section in [name for name, values in claimed.settings.items() if isinstance(values, Mapping)]:
        kept = saved.get(section, {}).items()
        record[section] |= {name: value for name, value in kept if f"{section}.{name}" not in integrity.MAY_CHANGE}
    return saved, record


def check_evaluation(directory: Path, config: Config) -> RunData:
    """Check that a config has the network, the images and the classes of a run that is to be evaluated.

    Return the run's data. A run from Python is not checked: its config.json does not hold these settings. Raises:
    InputError, with the first key that differs, and both values.
    """
    path = directory / CONFIG_FILE
    saved = _read(path) if path.exists() else {}
    if "model" not in saved:
        return RunData()
    of_run, of_config = (effective_settings(Config, each) for each in (flatten(saved), config.flat()))
    changes = changed_keys(of_run, of_config)
    of_balanced = ("data.limit", "data.labels_per_class") if of_run.get("loss.class_weights") == BALANCED else ()
    if different := [key for key in (*EVALUATION_KEYS, *of_balanced) if key in changes]:
        advice = "a checkpoint is evaluated as it was trained: leave the option out"
        raise InputError(f"{path}: ", Key(different[0]), changes[different[0]], advice=advice)
    if config.data.placement == "local":
        return RunData()  # A process cannot know the fingerprint of the data of all.
    fingerprints = [text for key, text in flatten(saved).items() if key.startswith("fingerprint.")]
    return RunData(fingerprints, not changes.keys().isdisjoint(integrity.LOCATION_KEYS))


def _read(path: Path) -> dict[str, Any]:
    missing = ("is missing beside the checkpoints; ", _RESTORE_ADVICE)
    content = files.content_of(path, _RESTORE_ADVICE, missing=missing)
    with files.parsing(path, _RESTORE_ADVICE, "cannot be read"):
        return files.parse_json(content, dict)


_ALWAYS_PATHS = ("data.path", "data.data_dir", "data.local_cache", "data.manifest", "objective.teacher")
_IS_PATH: dict[str, Callable[[str], bool]] = dict.fromkeys(_ALWAYS_PATHS, lambda place: True)
# Other folders of images are relative to their table.
_IS_PATH |= {"data.images": os.path.isdir, "model.weights": is_local, "data.unlabelled": lambda place: place != TRAIN}
"""The keys whose values are paths, and whether a value is one."""


def with_absolute_paths(config: Config, peers: Peers = ALONE) -> Config:
    """Return a config with absolute paths. `data.name` becomes a path, and the manifest for `data.verify` is added.

    `data.name` stays if the hosts of a job have different paths for it. All processes of a job must call this function
    together. Raises: InputError if no data set has this name, or there is no manifest.
    """
    data, changes = config.flat(), dict[str, Any]()
    for key, is_path in _IS_PATH.items():
        if data[key] is not None and is_path(data[key]):
            changes[key] = root.absolute(data[key])
    if data["data.name"] is not None and data["data.path"] is None:
        entry = root.resolve(data["data.name"])
        of_name = {f"data.{key}": getattr(entry.completed(config.data), key) for key in ("train", "val", "classes")}
        of_name |= {"data.path": entry.path, "data.name": None}
        if len({*peers.exchange("data.name", json.dumps(of_name))}) == 1:
            changes |= of_name
    data |= changes
    # With data of its own, each process finds its own manifest when it opens the data.
    is_needed = data["data.placement"] == "shared" and data["data.verify"] == "manifest"
    if is_needed and data["data.manifest"] is None and data["data.path"] is not None:
        changes["data.manifest"] = str(find_manifest(data["data.path"], None))
    return config.replace(**changes)


_OPENING_KEYS = {*integrity.LENGTH_KEYS, *integrity.LOCATION_KEYS, "objective.teacher"}
_OPENING_KEYS |= {"data.verify", "data.manifest", "data.data_dir"}
"""The keys that a resumed run may change, and after whose change it opens its data: to train longer, or to compare."""


def _end(directory: Path, step: int) -> str:
    """Return lines on what a run reached and how to go on; "" if it did not end at `step`, its latest checkpoint."""
    path = directory / RESULT
    try:
        result: dict[str, Any] = files.parse_json(files.read(path), dict)
        status, last = result["status"], result["step"]
        metrics = {name: value for name, value in (result[VAL] or {}).items() if isinstance(value, float)}
        when = f"{datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M}"
    # Another program may have written the file. A new run replaces it.
    except (OSError, ValueError, KeyError, AttributeError, OverflowError):
        return ""
    if status not in ENDED or last != step:
        return ""
    reason = f" ({result.get('reason') or ''})" if status == "stopped" else ""
    measured = f"; result: {VAL} {format_metrics(metrics)}" if metrics else ""
    reached = f"{status} at step {step:,}{reason} on {when}: nothing to train{measured}{_best(directory)}"
    advice = "to train longer, give more --epochs; to start anew, another --workdir; to measure the run again:"
    return f"{directory}: {reached}\n{advice} jaxddp eval {shlex.quote(str(directory))}"


def _best(directory: Path) -> str:
    """Return the best validation of the checkpoints as text; "" if it is unknown."""
    try:
        validations = integrity.ValidationFile(directory / integrity.CHECKPOINTS, None)
    except InputError:
        return ""
    step, metric = validations.best(integrity.steps_in(directory / integrity.CHECKPOINTS)), validations.goal.metric
    value = None if step is None else validations.by_step[step].get(metric)
    return "" if value is None else f"; best: {measure(metric, value)} at step {step:,}"


def describe_end(directory: Path, step: int | None, peers: Peers, *, is_same: bool) -> str:
    """Return lines about the end of a run, or "" if it did not end at `step`, that of its latest checkpoint.

    A run with another length (not `is_same`) continues. All processes must call it together; process 0 decides.
    """
    # All processes have the same step, and most starts have none: they need no exchange.
    if step is None:
        return ""
    return peers.from_first("whether the run has ended", lambda: _end(directory, step) if is_same else "")


def nothing_to_train(file: RecipeFile, directory: Path) -> str:
    """Return lines about the end of a run; "" if the run may continue, or if its data must be opened to decide that.

    The settings are compared as on a resume. No data are opened. Raises: InputError if a setting has changed.
    """
    directory = directory.absolute()
    place = directory / integrity.CHECKPOINTS
    step = max(integrity.steps_in(place), default=None)
    if step is None or not (lines := _end(directory, step)) or is_locked(directory):
        return ""
    try:
        saved = files.parse_json(files.read(directory / CONFIG_FILE), dict)
        config = with_absolute_paths(file.config)
        # The devices determine a precision that is not set, and they are not known without JAX.
        config = config.replace(train={"precision": config.train.precision or saved["train"]["precision"]})
        claimed = Claim(config.to_dict(), dict(saved["fingerprint"]), file)
    # A start raises the error.
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if "model" not in saved or integrity.Integrity(place).check(step) is not None:
        return ""
    if not changed_keys(saved, claimed.record()).keys().isdisjoint(_OPENING_KEYS):
        return ""
    compare(directory, claimed)
    return lines
