"""Peers of processes without a job."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxddp.core.errors import InputError
from jaxddp.core.peers import Peers


class Second(Peers):
    """The peers of process 1 of two, without messages from process 0."""

    process_index, process_count = 1, 2


class Simulated(Peers):
    """The peers of one of several processes, which are threads of this process; see `as_processes`."""

    def __init__(self, index: int, texts: list[str], barrier: threading.Barrier):
        self.process_index, self.process_count = index, len(texts)
        self._texts, self._barrier = texts, barrier
        self.names: list[str] = []

    def decide(self, name: str, text: str, decide: Callable[[list[str]], str]) -> str:
        self.names.append(name)
        self._texts[self.process_index] = text
        self._barrier.wait()
        try:
            return decide(list(self._texts))
        finally:
            self._barrier.wait()


def as_processes(count: int, call: Callable[[Peers], Any]) -> list[Any]:
    """Call a function for each of several processes at the same time. Return their results, or the errors of input."""
    texts, barrier = [""] * count, threading.Barrier(count, timeout=30)

    def result(index: int) -> Any:
        try:
            return call(Simulated(index, texts, barrier))
        except InputError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(result, range(count)))
