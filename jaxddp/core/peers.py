"""The processes that train together. They compare values, and process 0 computes values for all of them."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxddp.core.errors import InputError, Key, Unreachable, error_from, show

T = TypeVar("T")
Spent = tuple[int, Mapping[str, float]]
"""The number of steps of a process, and its seconds in each phase; see `jaxddp.core.phases`."""


class Peers:
    """This process and the other processes of its job. A direct instance of this class is a process without a job.

    `jaxddp.job.membership.join` returns the peers of a job, an instance of a subclass. All processes must call `agree`,
    `exchange`, `from_first` and `decide` equally often, in the same order.
    """

    process_index = 0
    """The number of this process, from 0."""
    process_count = 1
    """The number of processes."""
    longest_wait = 3600.0
    """The longest wait for a process in seconds. If the process is stuck, the watchdog ends the job earlier."""

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which writes and prints for all."""
        return self.process_index == 0

    @property
    def is_alone(self) -> bool:
        """Whether this is a single process."""
        return self.process_count == 1

    def agree(self, values: Mapping[str, str]) -> None:
        """Check that all processes have the same values.

        Each process sends a digest. If a digest differs from the digest of process 0, these two processes also send
        their values.

        Raises:
            InputError: a value differs. The message contains the name of the first value that differs, and both values.
        """
        text = json.dumps(dict(values))
        if other := self.decide("digests", hashlib.sha256(text.encode()).hexdigest(), _first_that_differs):
            shown = text if self.process_index in (0, other) else ""
            name, problem = self.decide("values", shown, lambda texts: _difference(texts, other))
            local = ", or set data.placement=local for data of each process" if name == "training data" else ""
            raise InputError(Key(name), problem, advice=f"start every process with the same value{local}")

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Return the JSON values of all processes, in their order. If jaxddp has joined the job, this uses no device.

        Raises: Unreachable if a process sends no value in time.
        """
        return self.decide(name, json.dumps(value), lambda texts: [*map(json.loads, texts)])

    def from_first(self, name: str, make: Callable[[], T]) -> T:
        """Call `make` on process 0, in its current phase, and return the result, a JSON value, on every process.

        Raises:
            InputError, Unreachable: `make` raised the error on process 0. Every process raises it.
        """
        return self.decide(name, "", lambda _: make())

    def decide(self, name: str, text: str, decide: Callable[[list[str]], T]) -> T:
        """Call `decide` on process 0, and return the result on every process. Raises: see `from_first`.

        The argument of `decide` is a list with the `text` of each process, in their order.
        """
        return decide([text])

    def abandon(self, reason: str, code: int) -> None:
        """In a job, send the others the reason, and end this process at once. Otherwise return.

        If another process was lost first, this process ends with the reason and exit code of that loss. If both reasons
        are equal, all processes have the same fault, and each process reports its own.
        """

    def spent(self) -> Mapping[int, Spent]:
        """Return the steps and seconds of each process; complete on process 0 only, and empty without a job."""
        return {}


ALONE = Peers()
"""The peers of a process without a job."""
_joined = ALONE


def joined() -> Peers:
    """Return the peers of this process; `ALONE` before it joins a job. Prefer to pass the peers as an argument."""
    return _joined


def record_joined(peers: Peers) -> None:
    """Set the result of `joined`, because this process has joined a job."""
    global _joined
    _joined = peers


def answer_of(make: Callable[[], Any]) -> str:
    """Call a function in process 0, and return its result or its error as text for all processes; see `result_of`."""
    try:
        return json.dumps([make(), "", 0])
    except (InputError, Unreachable) as error:
        return json.dumps(["", error.to_json(), error.exit_code])


def result_of(answer: str) -> Any:
    """Return the result in the text of `answer_of`, or raise the error in it."""
    result, error, code = json.loads(answer)
    if error:
        raise error_from(code, error)
    return result


def _first_that_differs(digests: list[str]) -> int:
    """Return the first process whose digest differs from the digest of process 0; 0 if all are equal."""
    return next((p for p, d in enumerate(digests) if d != digests[0]), 0)


def _difference(texts: list[str], process: int) -> tuple[str, str]:
    """Return the name of the first value in which a process differs from process 0, and both values."""
    first, other = (json.loads(texts[index]) for index in (0, process))
    name = next(name for name in first | other if first.get(name) != other.get(name))
    values = f"process 0 has {show(first.get(name))}, process {process} has {show(other.get(name))}"
    return name, f" differs: {values}"
