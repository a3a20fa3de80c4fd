"""Functions that find faulty rows, files and names of a data set, and pass each fault to a callback."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxddp.core.errors import InputError, appearance, code_points, show

Refuse = Callable[[str], None]
"""A callback that takes the message about an unusable row or file. It raises an error, or returns to skip the row."""


def raise_fault(fault: str) -> None:
    """Raise a fault as an `InputError`; a callback that stops at the first fault."""
    raise InputError(fault)


@contextmanager
def pass_faults_to(refuse: Refuse) -> Iterator[None]:
    """Catch an `InputError` of the block, and pass its message to `refuse`."""
    try:
        yield
    except InputError as error:
        refuse(str(error))


def check_distinct(
    names: Iterable[str], where: Callable[[str], str], refuse: Refuse = raise_fault, look: Any = appearance
) -> None:
    """Pass to `refuse` each name without visible characters, and each name that looks like a different earlier name.

    Args:
        where: returns the file, and the line if there is one, of a name, for messages.
        look: returns the same text for names that look alike.
    """
    first: dict[str, str] = {}
    for name in names:
        before = first.setdefault(visible := look(name), name)
        if not visible:
            refuse(f"{where(name)}: the name {show(name)} has no visible character; write one that can be read")
        elif before != name:
            one, other = code_points(name, before)
            both = f"{show(name)} ({one}) looks like {show(before)} ({other})"
            refuse(f"{where(name)}: {both}; spell both the same, or rename one")


def find_repeats(values: np.ndarray) -> list[tuple[int, int]]:
    """Return (row, first row of the same value) for each row that repeats an earlier value, in ascending order."""
    # For a million names, sorting takes half the time of a dict of the earlier names.
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    repeats = np.flatnonzero(first[inverse] != np.arange(len(values)))
    return [(row, int(first[inverse[row]])) for row in repeats.tolist()]


def check_columns(names: Sequence[str], wanted: Collection[str], where: str) -> None:
    """Check that no other column has the name of one of `wanted`, apart from case, spaces and invisible characters.

    Raises: InputError, with the place of the header `where`.
    """
    first: dict[str, int] = {}
    for place, name in enumerate(names):
        before = first.setdefault(appearance(name).replace(" ", "").casefold(), place)
        if before != place and not {name, names[before]}.isdisjoint(wanted):
            pair = (before, place) if names[before] in wanted else (place, before)
            one, other = (names[each] for each in pair)
            points = code_points(one, other)
            both = show(one) if one == other else f"{show(one)} ({points[0]}) and {show(other)} ({points[1]})"
            columns = f"columns {pair[0] + 1} and {pair[1] + 1} have the same name, {both}"
            raise InputError(f"{where}: {columns}; remove one, or rename it")
