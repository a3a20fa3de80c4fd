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
    "offline": "model.offline",
}
"""Short forms that the command line accepts; `--seed` is a key already."""
_FOREIGN_NAMES = {
    **{"num_epochs": "train.duration", "max_epochs": "train.duration", "bs": "train.batch_size"},
    **{"wd": "optimizer.weight_decay", "arch": "model.name", "output_dir": "workdir"},
}
"""The keys for names that other trainers use."""
_MAX_KEYS, _MAX_LENGTH, _MIN_SIMILARITY = 3, 80, 0.78
_MAX_IGNORED = 2
"""Last parts up to this length are not compared, because every word of three letters is similar to them."""


def similar_keys(name: str, known: Iterable[str]) -> list[str]:
    """Return the known keys that a mistyped name may mean.

    The result has several keys only if the last part of each is the last part of the name. A key is found by
    its short form ("train.lr"), by its last part ("weight_decay"), or despite a typo ("train.duratoin").
    """
    keys, name = list(known), name.replace("-", "_")
    last = name.rpartition(".")[2]
    if (short := (SHORT | _FOREIGN_NAMES).get(last)) in keys:
        return [short]
    if f"{name}.name" in keys:
        return [f"{name}.name"]
    if exact := [key for key in keys if f".{key}".endswith(f".{name}")] or [key for key in keys if _last(key) == last]:
        return exact[:_MAX_KEYS]
    # Matching takes quadratic time, and no key is this long.
    if len(name) > _MAX_LENGTH:
        return []
    if close := get_close_matches(name, keys, n=1, cutoff=_MIN_SIMILARITY):
        return close
    last_parts = [*SHORT, *(part for part in map(_last, keys) if len(part) > _MAX_IGNORED)]
    for part in get_close_matches(last, last_parts, n=1, cutoff=_MIN_SIMILARITY):
        return similar_keys(part, keys)
    return []


def _last(key: str) -> str:
    return key.rpartition(".")[2]
