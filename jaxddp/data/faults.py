"""What is wrong with single rows, files and names of a data set: the first ends its opening, or all are noted."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.wording import appearance, code_points, show

Refuse = Callable[[str], None]
"""What is told of a row or a file that cannot be used. Where it returns, the others are read without that one."""


def at_once(fault: str) -> None:
    """The first fault is the last. Raises: InputError."""
    raise InputError(fault)


@contextmanager
def told_to(refuse: Refuse) -> Iterator[None]:
    """An InputError of the block is told, and what the block would have read is left out."""
    try:
        yield
    except InputError as error:
        refuse(str(error))


def check_apart(names: Iterable[str], where: Callable[[str], str], refuse: Refuse = at_once) -> None:
    """Refuses each of some names that shows nothing, or looks like an earlier one and is not equal to it.

    Args:
        where: the file, and if it has one the line, of a name.
    """
    first: dict[str, str] = {}
    for name in names:
        before = first.setdefault(seen := appearance(name), name)
        if not seen:
            refuse(f"{where(name)}: the name {show(name)} shows nothing; write one that can be read")
        elif before != name:
            refuse(f"{where(name)}: {look_alike(name, before)}; write both in one way, or give one another name")


def repeats(values: np.ndarray) -> list[tuple[int, int]]:
    """(row, the first row of the same value) for each row that repeats an earlier one, in the order of the rows."""
    # Sorting a column of a million names takes half the time of looking each one up among those before it.
    order = np.argsort(values, kind="stable")
    new = np.ones(len(values), bool)
    new[1:] = values[order[1:]] != values[order[:-1]]
    first = order[np.maximum.accumulate(np.where(new, np.arange(len(values)), 0))]
    return sorted(zip(order[~new].tolist(), first[~new].tolist(), strict=True))


def index_of_column(names: Sequence[str], wanted: str, where: str) -> int | None:
    """The index of a column; None where there is none.

    Raises: InputError; there is another one of that name, but for upper and lower case and what cannot be seen.
    """
    if wanted not in names:
        return None
    index = names.index(wanted)
    for place, name in enumerate(names):
        if place != index and _folded(name) == _folded(wanted):
            there, here = code_points(wanted, name)
            both = show(name) if name == wanted else f"{show(wanted)} ({there}) and {show(name)} ({here})"
            raise InputError(
                f"{where}: columns {index + 1} and {place + 1} have one name, {both}; leave one, or give the other "
                "another name"
            )
    return index


def _folded(name: str) -> str:
    return appearance(name).replace(" ", "").casefold()


def look_alike(name: str, other: str) -> str:
    """That two names cannot be told apart, and how they are written."""
    here, there = code_points(name, other)
    return f"{show(name)} ({here}) looks like {show(other)} ({there})"
