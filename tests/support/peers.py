"""Peers of a process that meets nobody."""

from jaxddp.core.peers import Peers


class Second(Peers):
    """Those of process 1 of two, which hears nothing of the other."""

    @property
    def process_index(self) -> int:
        return 1

    @property
    def process_count(self) -> int:
        return 2
