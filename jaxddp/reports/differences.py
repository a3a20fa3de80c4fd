"""In which settings runs differ, and which of them differ in their seed alone."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxddp.config import Config
from jaxddp.overrides import flatten
from jaxddp.recipe_file import RUN_ID
from jaxddp.reports.run_files import RunFiles
from jaxddp.sections.fallback_values import USUAL

UNKNOWN = "unknown"
_FREE = (
    *("seed", "data.path", "data.name", "data.data_dir", "data.local_cache", "parallel.", "log.", "checkpoint."),
    *("data.verify", "data.manifest", "eval.batch_size", "recipe.file", "objects.jax", RUN_ID),
)
"""How the keys begin in which runs of one recipe may differ: on what it runs, where its data lie, what is watched."""
_RECIPE = "parallel.reproducible"
_BESIDE = ("fingerprint.", "objects.", "recipe.", RUN_ID)
_LONGEST_NAME = 3


class Difference(NamedTuple):
    """A setting, and its value in each run, as text."""

    key: str
    values: tuple[str, ...]


def differences(runs: Sequence[RunFiles]) -> list[Difference]:
    """The settings that are not the same in all runs, in the order of a config."""
    flat, defaults = [flatten(dict(run.config)) for run in runs], flatten(Config().to_dict())
    keys = dict.fromkeys([*defaults, *(key for each in flat for key in each if key != RUN_ID)])
    rows = [Difference(key, tuple(_text(key, each, defaults) for each in flat)) for key in keys]
    return [row for row in rows if len({*row.values} - {UNKNOWN}) > 1]


def changes(run: RunFiles) -> list[Difference]:
    """The settings of a run that are not those of a config that says nothing: the default, and the run's."""
    flat, defaults = flatten(dict(run.config)), flatten(Config().to_dict())
    known = {key: value for key, value in flat.items() if not key.startswith(_BESIDE)}
    rows = [Difference(key, (_text(key, defaults, {}), _text(key, known, defaults))) for key in known]
    return [row for row in rows if len(set(row.values)) > 1]


def seed_groups(runs: Sequence[RunFiles]) -> list[tuple[int, ...]]:
    """The runs by number, those together that differ in their seed alone; in the order of the runs.

    A run whose config cannot be read is alone.
    """
    defaults, groups = flatten(Config().to_dict()), dict[Any, list[int]]()
    for number, run in enumerate(runs):
        flat = flatten(dict(run.config))
        keys = [key for key in sorted({*defaults, *flat}) if key == _RECIPE or not key.startswith(_FREE)]
        recipe = tuple((key, _text(key, flat, defaults)) for key in keys) if flat else number
        groups.setdefault(recipe, []).append(number)
    return [tuple(members) for members in groups.values()]


def group_names(runs: Sequence[RunFiles], groups: Sequence[tuple[int, ...]]) -> list[str]:
    """What tells each group from the others: the settings in which they differ."""
    if len(groups) == 1:
        return ["all runs"]
    firsts = differences([runs[members[0]] for members in groups])
    apart = [row for row in firsts if row.key == _RECIPE or not row.key.startswith((*_FREE, *_BESIDE))]
    more = ", …" if len(apart) > _LONGEST_NAME else ""
    names = [
        ", ".join(f"{row.key.rpartition('.')[2]} {row.values[number]}" for row in apart[:_LONGEST_NAME]) + more
        for number in range(len(groups))
    ]
    return [name or runs[members[0]].name for name, members in zip(names, groups, strict=True)]


def _text(key: str, flat: dict[str, Any], defaults: dict[str, Any]) -> str:
    if key in flat:
        value = flat[key]
    else:
        # A key that is newer than the run had its default; a run from Python says nothing of whole sections.
        section = key.partition(".")[0] + "."
        if not any(other.startswith(section) for other in flat) and key != "seed":
            return UNKNOWN
        value = defaults.get(key)
    value = USUAL.get(key) if value is None else value
    if key.startswith(_BESIDE) and isinstance(value, str):
        return value[:12]
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
