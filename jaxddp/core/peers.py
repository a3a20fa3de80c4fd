"""The processes that train together: what they compare, and what the first of them tells the others."""

import hashlib
import json
from collections.abc import Callable, Mapping

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.wording import show

Spent = tuple[int, Mapping[str, float]]
"""The steps that a process has done, and its seconds in each phase so far; see `jaxddp.core.phases`."""
_AN_HOUR = 3600.0


class Peers:
    """This process and those that it trains with. Of this class itself a process is alone.

    Those of a job are what `jaxddp.job.membership.join` returns. What compares or tells, `agree`, `exchange`,
    `from_first` and `decide`, all of them must call alike, in the same order.
    """

    @property
    def process_index(self) -> int:
        """From 0."""
        return 0

    @property
    def process_count(self) -> int:
        return 1

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which writes and prints for all."""
        return self.process_index == 0

    @property
    def is_alone(self) -> bool:
        return self.process_count == 1

    @property
    def longest_wait(self) -> float:
        """How many seconds a process waits for another one, which was named by then if it is stuck."""
        return _AN_HOUR

    def agree(self, values: Mapping[str, str]) -> None:
        """See that all have the same values; an `InputError` names the first that differs, and who has what.

        Each gives a digest; only where one differs from that of process 0, its values follow.
        """
        told = json.dumps(dict(values))
        digest = hashlib.sha256(told.encode()).hexdigest()
        if other := int(self.decide("digests", digest, _first_that_differs)):
            own = told if self.process_index in (0, other) else ""
            name, told = json.loads(self.decide("values", own, lambda all_of: _difference(all_of, other)))
            raise InputError(Key(name), told, advice="start every process with the same")

    def exchange(self, name: str, value: str) -> list[str]:
        """The values of all, in order of their processes. In a job of ours it needs no device.

        Raises:
            Unreachable: a process gives none in time.
        """
        return json.loads(self.decide(name, value, json.dumps))

    def from_first(self, name: str, make: Callable[[], str]) -> str:
        """What process 0 makes, in the phase in which it is; it alone calls the function.

        Raises:
            InputError, Unreachable: that of process 0, on every process.
        """
        return self.decide(name, "", lambda _: make())

    def decide(self, name: str, text: str, decide: Callable[[list[str]], str]) -> str:
        """What process 0 makes of the texts of all, in order of their processes. Raises: as `from_first`."""
        return decide([text])

    def spent(self) -> Mapping[int, Spent]:
        """Of each process, where its seconds went; only process 0 hears of all. Empty where nobody is heard of."""
        return {}


ALONE = Peers()
"""Of a process that is in no job."""


def _first_that_differs(digests: list[str]) -> str:
    """The process whose digest is not that of process 0; "0" where there is none."""
    return str(next((p for p, d in enumerate(digests) if d != digests[0]), 0))


def _difference(told: list[str], process: int) -> str:
    """What tells the values of a process from those of process 0: the name of one, and who has what."""
    own, theirs = (json.loads(told[each]) for each in (0, process))
    name = next(name for name in own | theirs if own.get(name) != theirs.get(name))
    has = f"process 0 has {show(own.get(name))}, process {process} has {show(theirs.get(name))}"
    return json.dumps([name, f" differs: {has}"])
