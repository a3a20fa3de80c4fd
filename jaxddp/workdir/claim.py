"""A work directory belongs to one recipe: it is claimed by writing config.json, and a resumed run must match it."""

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
from jaxddp.choices import DECIDING, NAMES, compared, keys_of_choices
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key, Option
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.wording import show
from jaxddp.overrides import flatten
from jaxddp.recipe_file import CONFIG_FILE, COPY_FOLDER, RUN_ID, RecipeFile
from jaxddp.sections.data_section import IMAGE_KEYS
from jaxddp.sections.dependent_keys import NEEDS
from jaxddp.sections.loss_section import LossConfig
from jaxddp.sections.model_section import NETWORK_KEYS
from jaxddp.training.checkpoints.run_identity import FREE, MOVED, RunIdentity
from jaxddp.workdir.paths import saved_places

_MEND = ("restore it, or start in another ", Option("workdir"))
_KEEPS = ("a resumed run keeps its recipe: set it back, or start in another ", Option("workdir"))
MEASURED = (
    *(*(f"model.{key}" for key in NETWORK_KEYS), *(f"data.{key}" for key in IMAGE_KEYS)),
    *("data.classes", "data.val_share", *(f"loss.{field.name}" for field in fields(LossConfig)), "train.ema"),
)
"""What an evaluation has to share with its run: the network, what it was taught to see, and what its figures are of.
Nothing but these is compared, for it makes no optimizer and no training batch."""
_log = logging.getLogger("jaxddp.experiment")


@dataclass(frozen=True)
class Claim:
    """What a run writes into config.json.

    Attributes:
        settings: the keys of its config and their values, by section.
        fingerprints: those of its data.
        recipe: the recipe file that brought its objects, if one did.
        objects: what tells its objects from others, where they came from Python; see `RunSetup.identity`.
    """

    settings: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    recipe: RecipeFile | None = None
    objects: Mapping[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The content of config.json as it will be read again: NumPy's numbers become Python's."""
        record: dict[str, Any] = {**self.settings, "fingerprint": dict(self.fingerprints)}
        if self.recipe is not None and (digest := self.recipe.digest()):
            record["recipe"] = {"file": self.recipe.sources.main, "digest": digest}
        if self.objects:
            record["objects"] = {**self.objects, "jax": version("jax")}
        return json.loads(json.dumps(record, default=lambda value: value.tolist()))


def claim(
    directory: Path, claimed: Claim, peers: Peers = ALONE, *, resuming: bool, run_id: str | None = None
) -> tuple[dict[str, Any], bool]:
    """Write config.json, and a copy of the recipe's files. On resume, compare with what stands there.

    A run that begins is given an id, and keeps it. One of an older release, which has none, is given that of its
    checkpoint, `run_id`, or one from here on. Data may have been moved. Of files, a fingerprint knows names and labels,
    and no image: a line says so.

    Returns:
        The content of config.json, and whether nothing at all of it is new.

    Raises:
        InputError: a key of the recipe differs, or a file cannot be read or written.
    """
    path, record, saved = directory / CONFIG_FILE, claimed.record(), None
    if resuming:
        saved = _read(path)
        kept = saved.get("recipe")
        if claimed.recipe is not None and isinstance(kept, dict) and kept.get("digest") and record.get("recipe"):
            for name, file in claimed.recipe.files().items():
                copy = directory / COPY_FOLDER / name
                if copy.is_file() and files.read(copy) != file:
                    raise InputError(f"{copy}: the recipe file {name} is another now", advice=_KEEPS)
        hooks = () if claimed.recipe is None else claimed.recipe.hooks
        _compare(path, saved, record, hooks, peers)
        record = _as_saved(saved, record)
        known = RunIdentity.of(saved)
        run_id = run_id if known is None else known.id
    record = {RUN_ID: peers.from_first("run id", lambda: run_id or secrets.token_hex(8)), **record}
    if peers.is_first:
        if claimed.recipe is not None:
            _keep(directory / COPY_FOLDER, claimed.recipe.files())
        files.replace(path, (json.dumps(record, indent=2) + "\n").encode())
    return record, saved == record


def check_measured(directory: Path, config: Config) -> None:
    """See that an evaluation under a config is of the network of a run, and of such images and classes as it learnt.

    Nothing is compared where the work directory does not say them. Raises: InputError; names a key and both values.
    """
    path = directory / CONFIG_FILE
    saved = _read(path) if path.exists() else {}
    if "model" not in saved:
        return
    there, here = _settings(flatten(saved)), compared(flatten(config.to_dict()))
    for key in MEASURED:
        if there[key] != here[key]:
            raise InputError(
                *(f"{path}: ", Key(key), f" was {there[key]!r} and is now {here[key]!r}"),
                advice="a checkpoint is measured as it was trained: leave it out",
            )


def _settings(saved: dict[str, Any], hooks: Collection[str] = ()) -> dict[str, Any]:
    """What a run wrote down, by dotted keys, or left to its choices. What is newer than the file had its default."""
    return saved_places(compared(flatten(Config().to_dict()) | saved, hooks))


def _as_saved(saved: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json, where what choices read is written as before: a checkpoint knows its run by that.

    A release may have written values that a config leaves to its choices.
    """
    flat, keys = flatten(saved), (keys_of_choices() | NEEDS.keys()) - FREE

    def as_saved(section: str, name: str, value: Any) -> Any:
        key = f"{section}.{name}"
        return flat.get(key, value) if key in keys else value

    sections = {section for section, values in record.items() if isinstance(values, dict)}
    return record | {
        section: {name: as_saved(section, name, value) for name, value in record[section].items()}
        for section in sections
    }


def _keep(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Make a folder hold these files, and no file of an earlier recipe."""
    with files.readable_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        for name, content in contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            files.replace(folder / name, content)


def _compare(path: Path, saved: dict[str, Any], record: dict[str, Any], hooks: Collection[str], peers: Peers) -> None:
    known, here = flatten(saved), compared(flatten(record), hooks)
    there = _settings(known, hooks)
    written, release = there.get("objects.jax"), here.get("objects.jax")
    if release is not None and written != release:
        # Digests are those of one release of JAX; that there is a schedule, say, is the same in all.
        if peers.is_first:
            by = "before they were noted down" if written is None else f"with jax {written}"
            _log.warning(f"{path}: written {by}; its model, loss and optimizer cannot be compared")
        objects = {key for key in here if key.startswith("objects.") and (written is None or key in there)}
        there = {key: value for key, value in there.items() if key not in objects}
        here = {key: value for key, value in here.items() if key not in objects}
    changed = {
        key: f"was {there.get(key)!r} and is now {here.get(key)!r}"
        for key in sorted(known.keys() | here.keys())
        if there.get(key) != here.get(key)
    }
    # With a key that decides what others mean, these change, too.
    for key in sorted(changed, key=lambda key: (key not in NAMES, key not in DECIDING)):
        if key not in FREE:
            own = f"; jaxddp train {path.parent} goes on with its own settings" if "model" in saved else ""
            raise InputError(f"{path}: ", Key(key), f" {changed[key]}", advice=(_KEEPS, own))
    for key in MOVED:
        if key in changed and peers.is_first:
            _log.info(f"{key} {changed[key]}: the same data by their fingerprints, for which no image file is opened")


def _read(path: Path) -> dict[str, Any]:
    with files.reading(path, _MEND, missing=("is missing beside the checkpoints; ", _MEND)):
        content = files.read(path)
    try:
        saved = json.loads(content)
        if not isinstance(saved, dict):
            raise ValueError(f"it holds {show(saved)}")
        return saved
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error})", advice=_MEND) from None
