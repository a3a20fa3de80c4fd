"""The `Peers` of a job: `JobPeers` if jaxddp joined it, `DevicePeers` if the program initialized `jax.distributed`."""

import contextlib
import json
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxddp.core.errors import InputError, Unreachable, error_from
from jaxddp.core.peers import Peers, Spent
from jaxddp.core.phases import phase
from jaxddp.job.control_plane import ControlPlane


class JobPeers(Peers):
    """The processes of a job that watch each other, and exchange values over the control plane."""

    def __init__(self, plane: ControlPlane):
        self._plane = plane

    @property
    def process_index(self) -> int:
        return self._plane.job.process_id

    @property
    def process_count(self) -> int:
        return self._plane.job.num_processes

    @property
    def longest_wait(self) -> float:
        return self._plane.timeouts.longest

    def from_first(self, name: str, make: Callable[[], str]) -> str:
        with contextlib.nullcontext() if self.is_first else phase("agreement"):
            return self._plane.broadcast(name, make, self.longest_wait)

    def decide(self, name: str, text: str, decide: Callable[[list[str]], str]) -> str:
        with phase("agreement"):
            return self._plane.decide(name, text, decide, self.longest_wait)

    def spent(self) -> Mapping[int, Spent]:
        return {process: (alive.step, alive.spent) for process, alive in self._plane.heartbeats().items()}


class DevicePeers(Peers):
    """The processes of a program that called `jax.distributed.initialize` itself.

    The processes exchange values through their devices. Each process watches only itself.
    """

    @property
    def process_index(self) -> int:
        return jax.process_index()

    @property
    def process_count(self) -> int:
        return jax.process_count()

    def decide(self, name: str, text: str, decide: Callable[[list[str]], str]) -> str:
        texts, answer, error, code = _gather(text), "", None, 0
        if self.is_first:
            try:
                answer = decide(texts)
            except (InputError, Unreachable) as caught:
                error, code = caught.to_json(), caught.exit_code
        answer, error, code = json.loads(_gather(json.dumps([answer, error, code]))[0])
        if error is not None:
            raise error_from(code, error)
        return answer


def _gather(text: str) -> list[str]:
    """Return the texts of all processes, in the order of their ids."""
    encoded = np.frombuffer(text.encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.array([len(encoded)])))[:, 0]
    padded = np.zeros(max(int(lengths.max()), 1), np.uint8)
    padded[: len(encoded)] = encoded
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]
