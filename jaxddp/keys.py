"""Short forms of keys for the command line, and suggestions for mistyped keys."""

from collections.abc import Iterable
from difflib import get_close_matches

HELP = ("-h", "--help")
SHORT = {
    "lr": "optimizer.learning_rate",
    "epochs": "train.duration",
    "batch_size": "train.batch_size",
    "model": "model.name",
    "data": "data.path",
}
"""Short forms that the command line accepts; `--seed` is a key already."""
_ELSEWHERE = {
    **{"num_epochs": "train.duration", "max_epochs": "train.duration", "bs": "train.batch_size"},
    **{"wd": "optimizer.weight_decay", "arch": "model.name", "output_dir": "workdir"},
}
"""Keys by the names that other trainers use for them."""
_MOST, _LONGEST, _LIKENESS = 3, 80, 0.78
_SHORTEST = 2
"""Last parts of this length or shorter are not compared, because every word of three letters is similar to them."""


def near(name: str, known: Iterable[str]) -> list[str]:
    """Return the known keys that a mistyped name may mean.

    Several keys are returned only if their last part is the last part of the name. A key is found
    by its short form ("train.lr"), by its last part ("weight_decay"), or despite a typo ("train.duratoin").
    """
    keys, name = list(known), name.replace("-", "_")
    last = name.rpartition(".")[2]
    if (short := (SHORT | _ELSEWHERE).get(last)) in keys:
        return [short]
    if f"{name}.name" in keys:
        return [f"{name}.name"]
    if alike := [key for key in keys if f".{key}".endswith(f".{name}")] or [key for key in keys if _last(key) == last]:
        return alike[:_MOST]
    # Matching takes quadratic time, and no key is this long.
    if len(name) > _LONGEST:
        return []
    if close := get_close_matches(name, keys, n=1, cutoff=_LIKENESS):
        return close
    ends = [*SHORT, *(end for end in map(_last, keys) if len(end) > _SHORTEST)]
    for end in get_close_matches(last, ends, n=1, cutoff=_LIKENESS):
        return near(end, keys)
    return []


def _last(key: str) -> str:
    return key.rpartition(".")[2]
