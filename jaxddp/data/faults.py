"""Faults of single rows, files and names of a data set: the first one is raised, or all are collected."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.wording import appearance, code_points, show

Refuse = Callable[[str], None]
"""Is called with a message for each row or file that cannot be used. It raises an error, or returns to skip it."""


def at_once(fault: str) -> None:
    """Raise the first fault as an `InputError`."""
    raise InputError(fault)


@contextmanager
def told_to(refuse: Refuse) -> Iterator[None]:
    """If the block raises an `InputError`, passes its message to `refuse`, and continues after the block."""
    try:
        yield
    except InputError as error:
        refuse(str(error))


def check_apart(names: Iterable[str], where: Callable[[str], str], refuse: Refuse = at_once) -> None:
    """Reject names without visible characters, and names that look like an earlier one but differ from it.

    Args:
        where: returns the file of a name, and its line if there is one, for messages.
    """
    first: dict[str, str] = {}
    for name in names:
        before = first.setdefault(visible := appearance(name), name)
        if not visible:
            refuse(f"{where(name)}: the name {show(name)} has no visible character; write one that can be read")
        elif before != name:
            refuse(f"{where(name)}: {look_alike(name, before)}; spell both the same, or rename one")


def repeats(values: np.ndarray) -> list[tuple[int, int]]:
    """Return (row, first row of the same value) for each row that repeats an earlier one, in the order of the rows."""
    # For a million names, sorting takes half the time of looking up each name among the earlier ones.
    order = np.argsort(values, kind="stable")
    new = np.ones(len(values), bool)
    new[1:] = values[order[1:]] != values[order[:-1]]
    first = order[np.maximum.accumulate(np.where(new, np.arange(len(values)), 0))]
    return sorted(zip(order[~new].tolist(), first[~new].tolist(), strict=True))


def index_of_column(names: Sequence[str], wanted: str, where: str) -> int | None:
    """Return the index of a column; None if there is none.

    Raises:
        InputError: another column has the same name, ignoring case and invisible characters.
    """
    if wanted not in names:
        return None
    index = names.index(wanted)
    for place, name in enumerate(names):
        if place != index and _folded(name) == _folded(wanted):
            one, other = code_points(wanted, name)
            both = show(name) if name == wanted else f"{show(wanted)} ({one}) and {show(name)} ({other})"
            raise InputError(
                f"{where}: columns {index + 1} and {place + 1} have the same name, {both}; remove one, or rename it"
            )
    return index


def _folded(name: str) -> str:
    return appearance(name).replace(" ", "").casefold()


def look_alike(name: str, other: str) -> str:
    """Return the clause that two names look alike, with the code points in which they differ."""
    one, another = code_points(name, other)
    return f"{show(name)} ({one}) looks like {show(other)} ({another})"
