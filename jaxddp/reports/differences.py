"""The settings in which runs differ, and the groups of runs that differ in their seed alone."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxddp.config import Config
from jaxddp.overrides import flatten
from jaxddp.recipe_file import RUN_ID
from jaxddp.reports.run_files import RunFiles

UNKNOWN = "unknown"
_FREE = (
    *("seed", "data.path", "data.name", "data.data_dir", "data.local_cache", "parallel.", "log.", "checkpoint."),
    *("data.verify", "data.manifest", "eval.batch_size", "recipe.file", "objects.jax", RUN_ID),
)
"""Prefixes of the keys in which runs of one recipe may differ: devices, location of the data, logging."""
_RECIPE = (
    *("parallel.reproducible", "parallel.groups"),
    *("checkpoint.best", "checkpoint.best_is", "checkpoint.best_smoothing"),
)
"""The keys with one of these prefixes that change a result, or the validation that counts as the best."""
_NO_SETTINGS = ("fingerprint.", "objects.", "recipe.", RUN_ID)
"""Prefixes of the keys in config.json that are not settings."""
_HOOKS = "recipe.hooks"
"""The names of the recipe's hooks, which replace settings: with `get_model`, no setting names the network."""
_LONGEST_NAME = 3


class Difference(NamedTuple):
    """The key of a setting, and the text of its value in each run."""

    key: str
    values: tuple[str, ...]


def differences(runs: Sequence[RunFiles]) -> list[Difference]:
    """Return the settings that differ between runs, in the order of a config."""
    configs, defaults = [flatten(dict(run.config)) for run in runs], flatten(Config().to_dict())
    keys = dict.fromkeys([*defaults, *(key for config in configs for key in config if key != RUN_ID)])
    rows = [Difference(key, tuple(_text(key, config, defaults) for config in configs)) for key in keys]
    return [row for row in rows if len({*row.values} - {UNKNOWN}) > 1]


def changes(run: RunFiles) -> list[Difference]:
    """Return the settings of a run that differ from the default, each with the default value and the run's value."""
    config, defaults = flatten(dict(run.config)), flatten(Config().to_dict())
    settings = {key: value for key, value in config.items() if key == _HOOKS or not key.startswith(_NO_SETTINGS)}
    rows = [Difference(key, (_text(key, defaults, {}), _text(key, settings, defaults))) for key in settings]
    return [row for row in rows if len(set(row.values)) > 1]


def seed_groups(runs: Sequence[RunFiles]) -> list[tuple[int, ...]]:
    """Return groups of the numbers of runs, in the order of the runs. The runs of a group differ in their seed alone.

    A run whose config cannot be read is a group of its own. A second run with the same seed is in another group.
    """
    defaults, groups, seeds = flatten(Config().to_dict()), dict[Any, list[int]](), Counter[Any]()
    for number, run in enumerate(runs):
        flat = flatten(dict(run.config))
        keys = [key for key in sorted({*defaults, *flat}) if key in _RECIPE or not key.startswith(_FREE)]
        recipe: Any = tuple((key, _text(key, flat, defaults)) for key in keys) if flat else number
        if flat.get("train.sync_every") is not None and flat.get("parallel.groups") is None:
            # Each process is a group of devices.
            recipe = recipe, run.result.get("processes")
        seed = recipe, flat.get("seed")
        groups.setdefault((recipe, seeds[seed]), []).append(number)
        seeds[seed] += 1
    return [tuple(members) for members in groups.values()]


def group_names(runs: Sequence[RunFiles], groups: Sequence[tuple[int, ...]]) -> list[str]:
    """Return a name for each group: the settings in which it differs from the other groups."""
    if len(groups) == 1:
        return ["all runs"]
    between_groups = differences([runs[members[0]] for members in groups])
    naming = [row for row in between_groups if row.key in _RECIPE or not row.key.startswith((*_FREE, *_NO_SETTINGS))]
    more = ", …" if len(naming) > _LONGEST_NAME else ""
    names = [
        ", ".join(f"{row.key.rpartition('.')[2]} {row.values[number]}" for row in naming[:_LONGEST_NAME]) + more
        for number in range(len(groups))
    ]
    return [name or runs[members[0]].name for name, members in zip(names, groups, strict=True)]


def _text(key: str, flat: dict[str, Any], defaults: dict[str, Any]) -> str:
    if key in flat:
        value = flat[key]
    elif key == _HOOKS:
        value = None
    else:
        # A key that is newer than the run has its default. The config of a run from Python lacks
        # whole sections, whose values are unknown.
        section = key.partition(".")[0] + "."
        if not any(other.startswith(section) for other in flat) and key != "seed":
            return UNKNOWN
        value = defaults.get(key)
    if key.startswith(_NO_SETTINGS) and isinstance(value, str):
        return value[:12]
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
