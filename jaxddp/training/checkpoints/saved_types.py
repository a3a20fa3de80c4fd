"""Compares the arrays of a saved state with those of the run that restores it."""

from collections.abc import Mapping
from typing import Any

from jaxddp.core.errors import InputError, Key, Option, Words
from jaxddp.core.wording import counted
from jaxddp.engine.state import TrainState, first_difference, groups_in


def check_saved(saved: Mapping[str, Any], like: TrainState, place: Words) -> None:
    """Check that a saved state has the names, shapes and dtypes of the arrays of a run.

    Args:
        saved: the types of the saved state, by field.
        like: the state of the run.
        place: the directory of the checkpoint, for the message.

    Raises:
        InputError: the state is of another architecture or optimizer, or of another number of groups of devices.
    """
    other = ("use ", Key("the config"), " that wrote it")
    before, now = groups_in(saved["parts"]), like.groups
    if before != now:
        of_saved, of_run = (counted(count or 1, "group") for count in (before, now))
        raise InputError(
            *(place, f": the checkpoint has the states of {of_saved} of devices, and this run has {of_run}"),
            advice=other if None in (before, now) else ("give ", Key("parallel.groups", before)),
        )
    if difference := first_difference(saved, like):
        name, saved_as, needed = difference
        raise InputError(
            *(place, f": the checkpoint is of another architecture or optimizer: {name} is "),
            f"{saved_as} in the checkpoint and {needed} in this run",
            advice=(*other, ", or another ", Option("workdir")),
        )
