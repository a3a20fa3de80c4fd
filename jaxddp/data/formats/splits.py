"""Finds the splits of a data set by their names: named splits such as `test`, or the shards of each split.

ROOT/train/*.tar and ROOT/val/*.tar             or valid/, validation/, test/: the first of these that exists
ROOT/train-000.tar and ROOT/val-000.tar         or any name with these words, such as imagenet1k-validation-07.tar
ROOT/*.tar                                      one split, which `data.val_share` divides
ROOT/shards-{000000..000146}.tar                a pattern with ranges, lists `{a,b}` or `*`; also one split
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key, counted, nearest, show
from jaxddp.data.format import Match, Place
from jaxddp.data.source import Split
from jaxddp.data.storage.root import Folder, is_address, is_url, with_cache
from jaxddp.data.storage.tables import REFUSED
from jaxddp.data.table import ExampleTable

SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "eval", "test", "testing"),
}
"""The names of the splits, in any case. The first of them that a data set has is used."""
_TEST = SPLITS["val"].index("test")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)")
_MOST = 100_000
"""The largest number of names of a pattern. A mistyped range could otherwise fill the memory."""


@dataclass(frozen=True)
class ShardFormat:
    """A format of large files that hold many images, on this machine or below a URL."""

    description: str
    suffix: str
    read: Callable[[Place, Folder, Split, dict[Split, list[str]]], ExampleTable]
    """Reads a split. The arguments are the place, its folder, the split, and the paths of the shards of each split."""
    keys: tuple[str, ...] = ()
    """The keys of tables that the format reads; see `TABLE_KEYS`."""
    by_column: Callable[[Place, Folder, dict[Split, list[str]]], bool] = lambda *_: False
    """Returns whether a column divides the rows of the shards into both splits."""

    def match(self, place: Place) -> Match:
        if is_address(place.address) and not is_url(place.address):
            return Match.NONE
        folder, pattern = place.shards
        if any((name or "").endswith(self.suffix) for name in (pattern, place.data.train, place.data.val)):
            return Match.NAMED
        # Permission to read an object does not include permission to list.
        with suppress(*[InputError] if folder.root is None else []):
            # A name in the config may be that of a split of another format.
            shards = {} if pattern or not folder.can_list else _find(place, self.suffix)
            if any(_with_suffix(paths, self.suffix) for paths in shards.values()):
                return Match.NAMED if folder.root is None else Match.WHOLE
        return Match.NONE

    def divided(self, place: Place) -> bool:
        shards = find_shards(place, self.suffix)
        return self.by_column(place, place.shards[0], shards) or "val" in shards

    def open(self, place: Place, split: Split) -> ExampleTable:
        folder, shards = place.shards[0], find_shards(place, self.suffix)
        if split not in shards and not self.by_column(place, folder, shards):
            advice = f"call them {split}-*{self.suffix}" if folder.can_list else ("name them by ", Key(f"data.{split}"))
            raise InputError(f"{folder.name()}: no shards of its {split} split", advice=advice)
        table = self.read(place, folder, split, shards)
        table = replace(table, store=with_cache(table.store, folder, place.data.local_cache))
        return table.without(np.flatnonzero(table.labels == REFUSED)).select(place.data.classes)


def find_shards(place: Place, suffix: str) -> dict[Split, list[str]]:
    """Return the shards of each split that a place has, as sorted paths in its folder. One split alone is "train".

    If only `data.val` names shards, the training split has the other ones.

    Raises: InputError if a pattern is wrong or matches no file, or a shard is in both splits.
    """
    shards = _find(place, suffix)
    if both := sorted({*shards.get("train", ())} & {*shards.get("val", ())}):
        name = place.shards[0].name(both[0])
        raise InputError(Key("data.val", *filter(None, [place.data.val])), f": {name} is also in the training split")
    return shards


def _find(place: Place, suffix: str) -> dict[Split, list[str]]:
    folder, pattern = place.shards
    shards: dict[Split, list[str]] = {}
    if name := place.data.train or pattern:
        shards["train"] = _matching(folder, name, Key("data.train" if place.data.train else "data.path"))
    if place.data.val:
        shards["val"] = _matching(folder, place.data.val, Key("data.val"))
    if not pattern and "train" not in shards:
        by_name = _by_name(folder, suffix)
        if "val" in shards:
            by_name["train"] = _others(folder, suffix, shards["val"])
        shards = {**by_name, **shards}
    return {split: paths for split, paths in shards.items() if paths}


def _others(folder: Folder, suffix: str, val: list[str]) -> list[str]:
    """Return the training shards beside those of the validation: shards with the word train, else all others."""
    beside = val[0].rpartition("/")[0]
    named = (_by_name(folder, suffix, within).get("train", []) for within in dict.fromkeys(("", beside)))
    found = next(filter(None, named), None) or (_with_suffix(folder.files(beside), suffix) if folder.can_list else [])
    return [path for path in found if path not in val]


def expand(pattern: str) -> list[str]:
    """Return the names of a pattern with numbers `{000..146}` and lists `{a,b}`, in the order of the numbers.

    Raises: InputError if braces are empty or not closed, a range descends, or there are too many names.
    """
    parts = _BRACES.split(pattern)
    # Every second part was in braces.
    choices = [_choices(part) if place % 2 else [part] for place, part in enumerate(parts)]
    wrong = [part for part, names in zip(parts, choices, strict=True) if not names or "{" in part]
    if wrong:
        fault = f"{show(wrong[0])} is neither list nor ascending range"
        raise InputError(f"{pattern}: {fault}; write {{000..146}} or {{a,b}}")
    if math.prod(map(len, choices)) > _MOST:
        raise InputError(f"{pattern}: has more than {counted(_MOST, 'name')}; correct its ranges")
    return [*map("".join, itertools.product(*choices))]


def _choices(braces: str) -> list[str]:
    if numbers := _RANGE.fullmatch(braces):
        first, last = int(numbers[1]), int(numbers[2])
        return [f"{number:0{len(numbers[1])}d}" for number in range(first, min(last, first + _MOST) + 1)]
    return braces.split(",") if "," in braces else []


def _matching(folder: Folder, pattern: str, key: Key) -> list[str]:
    found: list[str] = []
    for name in expand(pattern):
        has_wildcard = not {*"*?["}.isdisjoint(name)
        if has_wildcard and not folder.can_list:
            raise InputError(key, f": {folder.name()} cannot list its files", advice="write a range, as {000..146}")
        beside = folder.files(name.rpartition("/")[0]) if has_wildcard else [name]
        found += [path for path in beside if path == name or fnmatchcase(path, name)]
    if not found:
        raise InputError(key, f": no file of {folder.name()} matches {pattern}", advice="check the pattern")
    return found


def _by_name(folder: Folder, suffix: str, within: str = "") -> dict[Split, list[str]]:
    """Return the shards of each split, by the names of shards or of their folders; without such names, all "train"."""
    if not folder.can_list:
        return {}
    shards: dict[Split, list[str]] = {}
    # `datasets` writes its files to the folder data/.
    beside = _with_suffix(folder.files(within), suffix) or _with_suffix(folder.files(within or "data"), suffix)
    for split, names in SPLITS.items():
        for name in names:
            word = re.compile(rf"(?:^|[^a-z0-9]){name}(?:[^a-z]|$)")
            in_folder = _with_suffix(folder.files(f"{within}/{name}" if within else name), suffix)
            if found := in_folder or [path for path in beside if word.search(path.rpartition("/")[2].lower())]:
                shards[split] = found
                break
    # A Parquet file without the name of a split may be the predictions or the labels of another format's images.
    return shards or ({"train": beside} if beside and suffix == ".tar" else {})


def _with_suffix(paths: list[str], suffix: str) -> list[str]:
    # ImageNet's original archives are no shards; torchvision leaves them beside the folders that it unpacks.
    return [path for path in paths if path.endswith(suffix) and "ILSVRC2012_img_" not in path]


def rank(name: str, split: Split) -> tuple[bool, int] | None:
    """Return how well a name stands for a split, less for a better name; None if it does not.

    A name is a word of `SPLITS`, or begins or ends with one: `Val`, `seg_val`, `validation_set`, `val2017`. Names of
    other validation sets are better than those of test sets. A name with words of both splits stands for none.
    """
    parts = re.split("[^a-z]+", name.lower())
    places = {one: [SPLITS[one].index(part) for part in (parts[0], parts[-1]) if part in SPLITS[one]] for one in SPLITS}
    if not all(places.values()) and places[split]:
        place = min(places[split])
        return split == "val" and place >= _TEST, place if is_word(name, split) else len(SPLITS[split])
    return None


def is_word(name: str, split: Split) -> bool:
    """Return whether a name is a word of `SPLITS`, in any case."""
    return name.lower() in SPLITS[split]


def find_split(split: Split, names: Iterable[str], where: object) -> str | None:
    """Return the name that stands best for a split, or None. Raises: InputError if several are equally good."""
    ranks = {name: rank(name, split) for name in sorted(names, reverse=True)}
    known = {name: found for name, found in ranks.items() if found is not None}
    best = [name for name in known if known[name] == min(known.values())]
    if len(best) > 1 and not is_word(best[0], split):
        fault = f"{best[1]} and {best[0]} may both be the {split} split"
        raise InputError(f"{where}: {fault}", advice=("name one by ", Key(f"data.{split}")))
    return best[0] if best else None


def split_name(where: object, splits: Iterable[str], split: Split, data: DataConfig) -> str | None:
    """Return the name of a split in a data set; None if it has none.

    Args:
        where: the data set, for messages.
        splits: the names of the splits that the data set has.
        data: the config; `data.train` and `data.val` name splits. Without these, the first of `SPLITS` is used.

    Raises: InputError if the config's name is unknown, or is that of both splits.
    """
    names = [*splits]
    named, other = getattr(data, split), data.train if split == "val" else data.val
    if named is None:
        words = (name for word in SPLITS[split] for name in names if name.lower() == word)
        return next((name for name in words if name != other), None)
    if named in names and named != other:
        return named
    problem = "is also the training split" if named in names else f"{where} has no such split{nearest(named, names)}"
    key = Key("data.val" if named in names else f"data.{split}", named)
    raise InputError(key, f": {problem}", advice=f"the splits are {', '.join(names)}")


def required_split(where: object, splits: Iterable[str], split: Split, data: DataConfig) -> str:
    """Return the name of a split in a data set; see `split_name`. Raises: InputError if it has none."""
    if name := split_name(where, splits, split, data):
        return name
    fault = f"no split {split}; its splits are {', '.join(splits) or 'none'}"
    raise InputError(f"{where}: {fault}", advice=("name one by ", Key(f"data.{split}")))
