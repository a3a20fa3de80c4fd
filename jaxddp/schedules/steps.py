"""How long a run is."""

from typing import NamedTuple


class Steps(NamedTuple):
    """Of a run, in steps."""

    total: int
    warmup: int
