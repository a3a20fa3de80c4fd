"""Divides examples by class and by group: into a training and a validation split, or into folds.

The division depends on the ids, the label and the group of each example, and not on the order of the rows. A group,
such as a patient, is on one side, since two images of one patient resemble each other.
"""

import hashlib
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jaxddp.core.files as files
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key, Option, counted, show, some
from jaxddp.core.user_code import describe_error
from jaxddp.data.source import Split, Table, check_labelled, labels_of
from jaxddp.data.table import ExampleTable

GROUPS: dict[str, Callable[[str], object]] = {}
"""Functions of an image's path in the data set, or its id in a shard, that return its group, by their names.

A recipe adds its own: `GROUPS["patient"] = lambda path: path.rpartition("/")[2].partition("_")[0]`.
"""
_log = logging.getLogger("jaxddp.data")


def held_out(table: ExampleTable, share: float, where: str) -> dict[Split, ExampleTable]:
    """Divide a table into "train" and "val", each in the order of the rows.

    An example with several classes counts as an example of its first class.

    Args:
        share: the share of each class for "val", above 0 and below 1; see `held_out_rows`.
        where: a readable name of the data set, for messages.

    Raises: InputError if a class has only one example, or there is only one group, and each split needs one.
    """
    labels = _strata(table)
    if table.group is not None:
        return _divided(table, _held_out_by_group(table, labels, share, where))
    counts = np.bincount(labels[labels >= 0], minlength=table.num_classes)[: table.num_classes]
    single_classes = np.flatnonzero((counts == 1) & (labels_of(table).counts == 1))
    if len(single_classes):
        example = table.name(int(np.flatnonzero(labels == single_classes[0])[0]))
        fault = f"{where}: class {show(table.class_ids[single_classes[0]])} has only one example, {example}, but "
        needs = Key("data.val_share", share, f"{share:g}"), " needs two of each class: one to hold out and one to train"
        raise InputError(fault, needs, advice="add examples, or leave the class out")
    # Examples without a label stay in the training split, where `check_labelled` raises an error about them.
    is_held_out = np.zeros(len(table), bool)
    is_held_out[labels >= 0] = held_out_rows(table.id[labels >= 0], labels[labels >= 0], share)
    return _divided(table, is_held_out)


def one_fold(table: ExampleTable, number: int, count: int) -> dict[Split, ExampleTable]:
    """Divide a table into "val", one of its folds, and "train", each in the order of the rows. Raises: see `folds`."""
    return _divided(table, folds(table, count) == number)


def _divided(table: ExampleTable, is_held_out: np.ndarray) -> dict[Split, ExampleTable]:
    return {"train": table.rows(np.flatnonzero(~is_held_out)), "val": table.rows(np.flatnonzero(is_held_out))}


def _strata(table: ExampleTable) -> np.ndarray:
    """Return the first class of each example, int[N]; -1 if it is unknown, and K if it has none of the K classes."""
    labels = labels_of(table)
    if not labels.has_rows:
        return labels.values
    if labels.form == "numbers":
        return np.zeros(len(table), np.int32)
    return np.where(table.labels.any(1), table.labels.argmax(1), table.num_classes)


def held_out_rows(ids: np.ndarray, labels: np.ndarray, share: float) -> np.ndarray:
    """Return a mask of the examples that are held out, bool[N].

    In a class of n examples, these are the k examples whose ids have the smallest hashes (the first 8 bytes of
    SHA-256). k is `share * n`, rounded to the nearest integer (halves up) and limited to 1..n-1. The order of the rows
    has no effect. Adding or removing an example moves at most one other example, of the same class, to the other split.

    Args:
        ids: bytes 'S'[N], unique.
        labels: int[N], class indices.
    """
    is_held_out = np.zeros(len(ids), bool)
    order = np.lexsort((ids, _digests(ids), labels))
    _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
    for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        wanted = max(1, min(math.floor(share * count + 0.5), count - 1))
        is_held_out[order[start : start + wanted]] = True
    return is_held_out


def digest64(name: bytes) -> int:
    """Return the first 8 bytes of the SHA-256 of a name as an integer."""
    return int.from_bytes(hashlib.sha256(name).digest()[:8])


def _digests(names: np.ndarray) -> np.ndarray:
    return np.array([*map(digest64, names.tolist())], np.uint64)


def _held_out_by_group(table: ExampleTable, labels: np.ndarray, share: float, where: str) -> np.ndarray:
    """Return a mask of the examples whose group is held out, bool[N].

    In the order of their hashes, each group is held out that brings the shares of its classes nearer to `share`. If
    there is none, the group that comes nearest is held out.
    """
    all_groups = _each_group(table, labels)
    if len(all_groups) == 1:
        fault = f"{where}: all images are of one group, {show(all_groups[0].name)}, and a group is in one split"
        raise InputError(fault, advice=("leave ", Key("data.group_column"), " out, or give images of another group"))
    total = np.bincount(labels[labels >= 0], minlength=1)
    is_held_out, left = np.zeros(len(table), bool), np.full(len(total), share)
    for group in all_groups:
        if _loss(left, group, total) < 0:
            is_held_out[group.rows] = True
            left[group.classes] -= group.counts / total[group.classes]
    if not is_held_out.any():
        is_held_out[min(all_groups, key=lambda group: _loss(left, group, total)).rows] = True
    if is_held_out.all():
        is_held_out[all_groups[-1].rows] = False
    of_val, of_all = (labels_of(each).counts for each in (table.rows(np.flatnonzero(is_held_out)), table))
    missing = [table.class_ids[label] for label in np.flatnonzero((of_val == 0) & (of_all > 0))]
    if missing:
        which = f"{counted(len(missing), 'class')} ({some(missing)})"
        _log.warning(f"{where}: no validation image of {which}, because of the group of each image")
    return is_held_out


def grouped(table: Table, name: str | None) -> Table:
    """Return a table with the group of each image, by a function of `GROUPS`; the table itself if there is none.

    Raises: InputError if the function fails, or the images are not in files.
    """
    if name not in GROUPS:
        return table
    where = f"GROUPS[{name!r}]"
    if not isinstance(table, ExampleTable):
        raise InputError(f"{where}: the images of {table!r} have no paths; leave ", Key("data.group_column"), " out")
    paths = table.path if table.offset is None else table.id  # The path of an image in a shard is that of the shard.
    try:
        group = [str(GROUPS[name](os.fsdecode(path))).encode() for path in paths.tolist()]
    except Exception as error:
        raise InputError(f"{where}: {describe_error(error)}") from error
    return replace(table, group=np.array(group, "S"))


class _Group(NamedTuple):
    name: str
    rows: np.ndarray
    classes: np.ndarray
    counts: np.ndarray
    """The number of examples of each of its `classes`."""


def _each_group(table: ExampleTable, labels: np.ndarray) -> list[_Group]:
    """Return each group of a table, in the order of the hashes of their names."""
    assert table.group is not None
    names, counts = np.unique(table.group, return_counts=True)
    rows = np.split(np.argsort(table.group, kind="stable"), np.cumsum(counts)[:-1])
    of_group = (np.unique(labels[each][labels[each] >= 0], return_counts=True) for each in rows)
    all_groups = [_Group(name.decode(), each, *of) for name, each, of in zip(names, rows, of_group, strict=True)]
    return [all_groups[place] for place in np.lexsort((names, _digests(names)))]


def _loss(left: np.ndarray, group: _Group, total: np.ndarray) -> float:
    """Return how much farther the shares of a group's classes are from what is left of them, with the group."""
    before = left[group.classes]
    return float(((before - group.counts / total[group.classes]) ** 2 - before**2).sum())


def check_disjoint(splits: Mapping[str, Table], where: str) -> None:
    """Check that no group is in both splits, and warn of images that are. Raises: InputError about such a group."""
    tables = [table for table in splits.values() if isinstance(table, ExampleTable)]
    roots = {table.store.root if table.offset is None else None for table in tables}
    if len(tables) == 2 and len(roots) == 1 and None not in roots:
        few, many = sorted((table.path.tolist() for table in tables), key=len)
        if both := sorted({*few}.intersection(many)):
            names = some([os.fsdecode(path) for path in both])
            _log.warning(f"{where}: {counted(len(both), 'image')} ({names}) in both splits; validations are too good")
    columns = [table.group for table in tables if table.group is not None]
    if len(columns) == 2 and len(both := np.intersect1d(columns[0], columns[1])):
        names = some([name.decode() for name in both])
        fault = f"{where}: {counted(len(both), 'group')} ({names}) with images in both splits"
        advice = ("divide the data by group, as `jaxddp data split` does, or leave ", Key("data.group_column"), " out")
        raise InputError(fault, advice=advice)


def folds(table: ExampleTable, number: int) -> np.ndarray:
    """Return the fold of each example, int[N], 0 to number - 1; each class is spread over the folds.

    The largest group is dealt first, each to the fold with the fewest examples of its classes.

    Raises: InputError if `number` is above the number of images, or of different values of `group`.
    """
    labels, fold = _strata(table), np.zeros(len(table), np.int64)
    all_groups = None if table.group is None else _each_group(table, labels)
    if len(all_groups or table) < number:
        parts = counted(len(all_groups or table), "image" if all_groups is None else "group")
        raise InputError(f"{number} folds of {parts}; give at most as many folds")
    if all_groups is None:
        fold[np.lexsort((table.id, _digests(table.id), labels))] = np.arange(len(table)) % number
        return fold
    loads, total = np.zeros((number, int(labels.max(initial=0)) + 1)), np.bincount(labels[labels >= 0], minlength=1)
    # Groups of equal length are in the order of their hashes.
    for group in sorted(all_groups, key=lambda group: -len(group.rows)):
        chosen = int(np.lexsort((loads.sum(1), loads[:, group.classes].sum(1)))[0])
        loads[chosen, group.classes] += group.counts / total[group.classes]
        fold[group.rows] = chosen
    return fold


def write_folds(table: Table, number: int, out: Path, data: DataConfig) -> list[int]:
    """Write a CSV file with the path, labels, group, weight and fold of each image; return the size of each fold.

    Paths are relative to the folder of the CSV file, or absolute if they are not below it; none has "..".

    Args:
        data: names the columns of the group and the weight.

    Raises: InputError if the images are not in files of their own, or one has no label; see also `folds`.
    """
    if not isinstance(table, ExampleTable) or table.offset is not None or table.store.root is None:
        fault = f"{table.name(0)}: is one of many images in a file, and a table of folds names files"
        raise InputError(fault, advice=("train on each fold with ", Option("data.fold", f"0/{number}")))
    check_labelled(table, "data split")
    fold, labels, beside = folds(table, number), labels_of(table), Path(os.path.abspath(out)).parent
    has_columns = labels.has_rows or any({*name} & {*";|"} for name in labels.ids)
    columns, more = table.with_several_labels().labels if has_columns else labels.values, dict[str, list[Any]]()
    if table.group is not None:
        more[data.group_column or "group"] = [name.decode() for name in table.group.tolist()]
    if table.weights is not None:
        more[data.weight_column or "weight"] = table.weights.tolist()
    rows: list[list[Any]] = [["path", *(labels.ids if has_columns else ["label"]), *more, "fold"]]
    root = table.store.root.resolve() if ".." in table.store.root.parts else table.store.root
    for row, name in enumerate(table.path.tolist()):
        path = root / os.fsdecode(name)
        place = path.relative_to(beside) if path.is_relative_to(beside) else path
        label = columns[row] if has_columns else [labels.ids[labels.values[row]]]
        rows.append([place, *label, *(column[row] for column in more.values()), fold[row]])
    files.replace_csv(out, rows)
    return np.bincount(fold, minlength=number).tolist()
