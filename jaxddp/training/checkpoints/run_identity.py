"""The identity of a run, in config.json and in the manifest of each of its checkpoints."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.config import ParallelConfig
from jaxddp.core.wording import show
from jaxddp.overrides import flatten
from jaxddp.recipe_file import RUN_ID
from jaxddp.recipe_files.find_recipe import CONFIG_FILE

LOCATION_KEYS = ("data.path", "data.name", "data.train", "data.val", "data.unlabelled")
"""The keys that name the data's location. They may change on resume, because moved data keep their fingerprint."""
MAY_CHANGE = frozenset(
    (
        *("train.duration", "train.accumulate", "train.max_bad_steps", "eval.every", "checkpoint.every", "log.every"),
        *("log.profile", "log.to", "log.images", "log.guard_formulas", "eval.batch_size", "eval.views"),
        *("log.project", "log.name", "log.config", "train.stop_after", "train.stop_min_gain", "checkpoint.keep"),
        *("checkpoint.best", "checkpoint.best_is", "checkpoint.best_smoothing", "model.offline"),
        *("recipe.file", "objects.jax", "objective.teacher", RUN_ID),
        *(f"parallel.{field.name}" for field in fields(ParallelConfig) if field.name != "reproducible"),
        *("data.max_bad_images", "data.verify", "data.manifest", "data.local_cache", "data.data_dir", *LOCATION_KEYS),
    )
)
"""The keys that a resumed run may change: its length, cadences, devices, outputs and evaluation. All others belong to
the recipe. A teacher, like the data, is compared by its fingerprint."""

LENGTH_KEYS = (
    *("train.duration", "train.stop_after", "train.stop_min_gain"),
    *("checkpoint.best", "checkpoint.best_is", "checkpoint.best_smoothing"),
)
"""The keys that determine when a run ends. A run that has ended continues if one of them changes."""


@dataclass(frozen=True)
class RunIdentity:
    """The id of a run, and digests of its settings.

    Attributes:
        id: a random id, drawn when the run starts.
        keys: a digest of the names of the keys that are compared on resume, and of the JAX release that made the
            digests of Python objects in the config.
        values: a digest of the values of these keys. It is compared only if `keys` is equal, because a new release may
            have other keys.
    """

    id: str
    keys: str
    values: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "RunIdentity | None":
        """Return the identity in the content of a config.json; None if it has no id, as in older releases."""
        flat = flatten(dict(config))
        if not isinstance(run_id := flat.get(RUN_ID), str) or not run_id:
            return None
        compared = {key: value for key, value in sorted(flat.items()) if key not in MAY_CHANGE}
        values = [_plain(value) for value in compared.values()]
        return cls(run_id, _digest([*compared, flat.get("objects.jax")]), _digest(values))

    @classmethod
    def in_workdir(cls, directory: Path) -> "RunIdentity | None":
        """Return the identity of a work directory's run; None if config.json names no run or is unreadable."""
        with suppress(OSError, ValueError):
            content = files.parse_json(files.read(directory / CONFIG_FILE))
            return cls.of(content) if isinstance(content, dict) else None
        return None

    @classmethod
    def parse(cls, entry: Any) -> "RunIdentity":
        """Return the identity that `plain` wrote. Raises: ValueError if the entry is not a run's identity."""
        names = {field.name for field in fields(cls)}
        if not isinstance(entry, dict) or entry.keys() != names or not all(isinstance(v, str) for v in entry.values()):
            raise ValueError(f"its run is {show(entry)}")
        return cls(**entry)

    def plain(self) -> dict[str, str]:
        """Return the identity as a dict, to be written as JSON."""
        return asdict(self)

    def differs(self, config: "RunIdentity") -> str | None:
        """Return why a checkpoint of this run does not belong to the run of config.json; None if it does."""
        if self.id != config.id:
            return f"it belongs to run {self.id}, and {CONFIG_FILE} names run {config.id}; restore the right one"
        if self.keys == config.keys and self.values != config.values:
            return f"its settings differ from {CONFIG_FILE}, which has changed; restore them"
        return None


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Return a value with whole floats replaced by integers, so that 1 and 1.0 have the same digest."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
