"""Peers of a process without a job."""

from jaxddp.core.peers import Peers


class Second(Peers):
    """The peers of process 1 of two, without messages from process 0."""

    @property
    def process_index(self) -> int:
        return 1

    @property
    def process_count(self) -> int:
        return 2
