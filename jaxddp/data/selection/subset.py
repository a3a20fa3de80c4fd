"""Selection of classes, and of a balanced subset of rows."""

import operator
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.wording import nearest, show

ClassSelection = str | Iterable[int | str] | None
"""`"0:200"` (start and stop, as in Python), `"n01440764,n01443537"`, a sequence of indices or ids, or None for all."""

_RANGE = re.compile(r"\s*(-?[0-9]{1,9})\s*:\s*(-?[0-9]{1,9})\s*")
_FORMS = "give a range such as '0:200', or class ids such as 'n01440764,n01443537'"
_TAKE_KEY = 0x7A6B65


def chosen_classes(classes: str | Iterable[int | str], class_ids: Sequence[str]) -> np.ndarray:
    """Return the indices of the chosen classes, int64[K], in ascending order.

    Raises:
        InputError: a class id is unknown, an index is out of bounds, a class is chosen twice, or no class is chosen.
    """
    where = f"classes {show(classes)}"
    items = _items(classes, where)
    if isinstance(items, range) and items:
        # The ends are checked first, so a range of a billion classes is rejected without a list of its items.
        _check_bounds((items[0], items[-1]), len(class_ids), where)
    position = {class_id: index for index, class_id in enumerate(class_ids)}
    indices = [_index(item, position, where) for item in items]
    if not indices:
        raise InputError(f"{where}: selects no class; {_FORMS}")
    chosen, counts = np.unique(np.array(indices, np.int64), return_counts=True)
    if counts.max() > 1:
        raise InputError(f"{where}: names {class_ids[chosen[counts.argmax()]]} twice; name each class once")
    return chosen


def balanced_rows(label: np.ndarray, limit: int) -> np.ndarray:
    """Return `limit` of N rows, int64, ascending, in proportion to the classes; all rows if N is at most `limit`.

    The choice depends only on the labels and the limit. The rows of a smaller limit are a subset of those of a larger
    limit. The m rows of a class, in a fixed pseudo-random order, get the ranks 1/2m, 3/2m, 5/2m, ...; the rows with the
    smallest ranks are chosen (Webster's method of apportionment).

    Raises: InputError if the limit is below 1.
    """
    if limit < 1:
        raise InputError(f"limit {limit}: selects no example; give a limit of 1 or more")
    if limit >= len(label):
        return np.arange(len(label))
    # The raw words of a counter-based generator are fixed; NumPy's permutations may change from release to release.
    word = np.random.Philox(key=_TAKE_KEY).random_raw(len(label))
    by_class = np.lexsort((word, label))
    _, start, count = np.unique(label[by_class], return_index=True, return_counts=True)
    rank = np.arange(len(label)) - np.repeat(start, count)
    place = (rank + 0.5) / np.repeat(count, count)
    return np.sort(by_class[np.lexsort((word[by_class], place))[:limit]])


def _items(classes: str | Iterable[int | str], where: str) -> Iterable[int | str]:
    if isinstance(classes, str):
        if span := _RANGE.fullmatch(classes):
            return range(int(span[1]), int(span[2]))
        return [part.strip() for part in classes.split(",") if part.strip()]
    if not isinstance(classes, Iterable):
        raise InputError(f"{where}: is of type {type(classes).__name__}; {_FORMS}")
    return classes


def _index(item: int | str, position: Mapping[str, int], where: str) -> int:
    if isinstance(item, str):
        if item not in position:
            hint = nearest(item, position)
            raise InputError(f"{where}: unknown class {show(item)} of {len(position)}{hint or f'; {_FORMS}'}")
        return position[item]
    try:
        index = operator.index(item)
    except TypeError:
        raise InputError(f"{where}: {show(item)} is neither an index nor a class id; {_FORMS}") from None
    _check_bounds((index,), len(position), where)
    return index


def _check_bounds(indices: Iterable[int], count: int, where: str) -> None:
    if any(not 0 <= index < count for index in indices):
        raise InputError(f"{where}: out of bounds, there are {count} classes; stay within 0:{count}")
