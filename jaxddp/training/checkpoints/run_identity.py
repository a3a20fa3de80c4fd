"""Which run a checkpoint is of: config.json and the manifest of each checkpoint say it, and both are compared."""

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
from jaxddp.recipe_file import CONFIG_FILE, RUN_ID

MOVED = ("data.path", "data.name", "data.train", "data.val", "data.unlabelled")
"""Where the data lie, which a fingerprint knows again."""
FREE = frozenset(
    (
        *("train.duration", "train.accumulate", "train.max_bad_steps", "eval.every", "checkpoint.every", "log.every"),
        *("log.profile", "log.to", "log.images", "log.guard_formulas", "eval.batch_size", "eval.views"),
        *("log.project", "log.name", "log.config", "train.stop_after", "train.stop_min_gain", "checkpoint.keep"),
        *("checkpoint.best", "checkpoint.best_is", "checkpoint.best_smoothing"),
        *("recipe.file", "objects.jax", "objective.teacher", RUN_ID),
        *(f"parallel.{field.name}" for field in fields(ParallelConfig) if field.name != "reproducible"),
        *("data.max_bad_images", "data.verify", "data.manifest", "data.local_cache", "data.data_dir", *MOVED),
    )
)
"""What a resumed run may change: how long, how often, on what, what is kept, and how it is measured. All else is the
recipe. A teacher may have been moved, by its fingerprint."""


@dataclass(frozen=True)
class RunIdentity:
    """What tells one run from all others.

    Attributes:
        id: random, given to the run at its start.
        keys: a digest of which settings are compared on resume, and of the release of JAX that tells objects apart.
        values: a digest of their values. Two that are of other keys say nothing: another release may compare more.
    """

    id: str
    keys: str
    values: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "RunIdentity | None":
        """That of the content of a config.json; None where it names no run, as those of older releases."""
        flat = flatten(dict(config))
        if not isinstance(own := flat.get(RUN_ID), str) or not own:
            return None
        compared = {key: value for key, value in sorted(flat.items()) if key not in FREE}
        values = [_plain(value) for value in compared.values()]
        return cls(own, _digest([*compared, flat.get("objects.jax")]), _digest(values))

    @classmethod
    def in_workdir(cls, directory: Path) -> "RunIdentity | None":
        """That of a work directory; None also where it has no config.json that can be read, which others say."""
        with suppress(OSError, ValueError, RecursionError):
            content = json.loads(files.read(directory / CONFIG_FILE))
            return cls.of(content) if isinstance(content, dict) else None
        return None

    @classmethod
    def parse(cls, told: Any) -> "RunIdentity":
        """The inverse of `plain`. Raises: ValueError; it is something else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(told, dict) or told.keys() != names or not all(isinstance(it, str) for it in told.values()):
            raise ValueError(f"its run is {show(told)}")
        return cls(**told)

    def plain(self) -> dict[str, str]:
        """As JSON holds it."""
        return asdict(self)

    def differs(self, config: "RunIdentity") -> str | None:
        """What is wrong with a checkpoint that says this where config.json says `config`; None where nothing is."""
        if self.id != config.id:
            return f"it is of run {self.id}, and {CONFIG_FILE} names run {config.id}; put the right one of them back"
        if self.keys == config.keys and self.values != config.values:
            return f"it is of other settings than {CONFIG_FILE} says, which was changed since; put them back"
        return None


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Equal numbers as one: a config may say 1 where it said 1.0."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
