"""Finds the splits of a data set by their names: named splits such as `test`, or the shards of each split.

ROOT/train/*.tar and ROOT/val/*.tar             or valid/, validation/, test/: the first of these that exists
ROOT/train-000.tar and ROOT/val-000.tar         or any name with these words, such as imagenet1k-validation-07.tar
ROOT/*.tar                                      one split, which `data.val_share` divides
ROOT/shards-{000000..000146}.tar                a pattern with ranges, lists `{a,b}` or `*`; also one split
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import counted, nearest
from jaxddp.data.format import Place
from jaxddp.data.source import Split
from jaxddp.data.storage.shards import ShardFolder

SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "valid", "validation", "test")}
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"([0-9]+)\.\.([0-9]+)")
_MOST = 100_000
"""The largest number of names of a pattern. A mistyped range could otherwise fill the memory."""


def find_shards(place: Place, suffix: str) -> dict[Split, list[str]]:
    """Return the shards of each split that a place has, as sorted paths in its folder. One split alone is "train".

    If only `data.val` names shards, the training split has the other ones.

    Raises:
        InputError: a pattern is wrong or matches no file, or a shard is in both splits.
    """
    assert place.shards is not None
    shards = _find(place, suffix)
    if both := sorted({*shards.get("train", ())} & {*shards.get("val", ())}):
        name = place.shards[0].name(both[0])
        raise InputError(Key("data.val", place.data.val), f": {name} is also in the training split")
    return shards


def has_shards(place: Place, suffix: str) -> bool:
    """Return whether a place has a file with a suffix. A name in the config may be that of a split of another format.

    Raises: InputError if a pattern is wrong or matches no file.
    """
    return any(_with_suffix(paths, suffix) for paths in _find(place, suffix).values())


def _find(place: Place, suffix: str) -> dict[Split, list[str]]:
    assert place.shards is not None
    folder, pattern = place.shards
    patterns = {"train": place.data.train or pattern, "val": place.data.val}
    shards: dict[Split, list[str]] = {}
    for split in SPLITS:
        if name := patterns[split]:
            shards[split] = _matching(folder, name, Key("data.path") if name == pattern else Key(f"data.{split}"))
    if not pattern and "train" not in shards:
        by_name = _by_name(folder, suffix)
        if "val" in shards:
            by_name["train"] = _others(folder, suffix, shards["val"])
        shards = {**by_name, **shards}
    return {split: paths for split, paths in shards.items() if paths}


def _others(folder: ShardFolder, suffix: str, val: list[str]) -> list[str]:
    """Return the training shards beside those of the validation: shards with the word train, else all others."""
    beside = val[0].rpartition("/")[0]
    named = (_by_name(folder, suffix, within).get("train", []) for within in dict.fromkeys(("", beside)))
    found = next(filter(None, named), None) or (_with_suffix(folder.files(beside), suffix) if folder.can_list else [])
    return [path for path in found if path not in val]


def expand(pattern: str) -> list[str]:
    """Return the names of a pattern with numbers `{000..146}` and lists `{a,b}`, in the order of the numbers.

    Raises:
        InputError: braces are empty or not closed, a range descends, or there are too many names.
    """
    names = [pattern]
    while any("{" in name for name in names):
        longer = (one for name in names for one in _expand_first(name))
        names = [*islice(longer, _MOST + 1)]
        if len(names) > _MOST:
            raise InputError(f"{pattern}: has more than {counted(_MOST, 'name')}; correct its ranges")
    return names


def _expand_first(name: str) -> Iterator[str]:
    braces = _BRACES.search(name)
    if braces is None:
        if "{" in name:
            raise InputError(f"{name}: a brace is not closed; write a range such as {{000..146}}")
        yield name
        return
    if numbers := _RANGE.fullmatch(braces[1]):
        first, last = int(numbers[1]), int(numbers[2])
        if first > last or last - first >= _MOST:
            raise InputError(f"{name}: {{{braces[1]}}} is no range of at most {_MOST:,} numbers; write {{000..146}}")
        parts = [f"{number:0{len(numbers[1])}d}" for number in range(first, last + 1)]
    else:
        parts = braces[1].split(",")
        if len(parts) < 2:
            raise InputError(f"{name}: {{{braces[1]}}} is neither a range nor a list; write {{000..146}} or {{a,b}}")
    yield from (name[: braces.start()] + part + name[braces.end() :] for part in parts)


def _matching(folder: ShardFolder, pattern: str, key: Key) -> list[str]:
    found: list[str] = []
    for name in expand(pattern):
        if not {*"*?["} & {*name}:
            found.append(name)
            continue
        if not folder.can_list:
            raise InputError(key, f": {folder.name()} cannot list its files", advice="write a range, as {000..146}")
        beside = folder.files(name.rpartition("/")[0])
        found += [path for path in beside if fnmatchcase(path, name)]
    if not found:
        raise InputError(key, f": no file of {folder.name()} matches {pattern}", advice="check the pattern")
    return found


def _by_name(folder: ShardFolder, suffix: str, within: str = "") -> dict[Split, list[str]]:
    if not folder.can_list:
        return {}
    shards: dict[Split, list[str]] = {}
    beside = _with_suffix(folder.files(within), suffix)
    for split, names in SPLITS.items():
        for name in names:
            word = re.compile(rf"(?:^|[^a-z0-9]){name}(?:[^a-z]|$)")
            in_folder = _with_suffix(folder.files(f"{within}/{name}" if within else name), suffix)
            found = in_folder or [path for path in beside if word.search(path.rpartition("/")[2])]
            if found:
                shards[split] = found
                break
    return shards or ({"train": beside} if beside else {})


def _with_suffix(paths: list[str], suffix: str) -> list[str]:
    return [path for path in paths if path.endswith(suffix)]


def split_name(
    where: object, splits: Iterable[str], split: Split, data: DataConfig, usual: Mapping[Split, Sequence[str]]
) -> str | None:
    """Return the name of a split in a data set; None if it has none.

    Args:
        where: the data set, for messages.
        splits: the names of the splits that the data set has.
        data: the config; `data.train` and `data.val` name splits.
        usual: the names of each split if the config names none; the first that exists is used.

    Raises: InputError if the config's name is unknown, or is that of both splits.
    """
    names = [*splits]
    named, other = getattr(data, split), data.train if split == "val" else data.val
    if named is None:
        return next((name for name in usual[split] if name in names and name != other), None)
    if named not in names:
        raise InputError(
            Key(f"data.{split}", named),
            f": {where} has no such split{nearest(named, names)}",
            advice=f"its splits are {', '.join(names)}",
        )
    if named == other:
        raise InputError(
            Key("data.val", named), ": is also the training split", advice=f"the splits are {', '.join(names)}"
        )
    return named
