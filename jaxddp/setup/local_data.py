"""Checks of a config whose processes have data of their own (`data.placement=local`)."""

from typing import Any

from jaxddp.config import Config
from jaxddp.core.errors import InputError, Key
from jaxddp.overrides import flatten

_REASONS: dict[str, tuple[Any, str]] = {
    "data.cache": ("none", "each device would hold the images of all processes"),
    "data.sampling": (
        "shuffled",
        "the classes are balanced over all examples, and a process knows only its own labels",
    ),
    "data.repeats": (1, "the copies of an example would be on one process"),
    "data.limit": (None, "the examples are chosen among those of all processes"),
    "data.labels_per_class": (None, "the examples are chosen among those of all processes"),
    "data.unlabelled": (None, "a second source is not divided among the processes"),
    "eval.limit": (None, "the examples are chosen among those of all processes"),
}
"""The keys that `data.placement=local` does not support: the value that it supports, and the reason."""


def check_placement(config: Config, *, unlabelled: bool = False) -> None:
    """Check that a config with `data.placement=local` has no key that needs the data of all processes.

    Args:
        unlabelled: whether a source of unlabelled images was passed to the Python API.

    Raises:
        InputError: a key has an unsupported value.
    """
    if config.data.placement == "shared":
        return
    values = flatten(config.to_dict())
    if unlabelled:
        values["data.unlabelled"] = "a table"
    for key, (supported, reason) in _REASONS.items():
        if values[key] != supported:
            advice = ("leave ", Key(key), " out") if supported is None else ("set ", Key(key), f" to {supported}")
            shown = Key.plain(key, values[key])
            raise InputError(shown, " with ", Key.plain("data.placement", "local"), f": {reason}", advice=advice)
