"""Whether a step fits into the memory of each device, and the line that says what would.

What a program needs is known once it is compiled. What another division of the batch would need is estimated: of the
arrays that live only while a step is computed, gradients stay as they are, microbatches add sums of them, and the rest
shrinks with the examples that are computed at once: on GPUs all of it; on a CPU something stays, however few these are,
and a second program tells how much.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key, Option, Words, joined
from jaxddp.core.peers import Peers
from jaxddp.core.wording import size
from jaxddp.data.batch_plan.division import Division
from jaxddp.measure.cost import Cost
from jaxddp.measure.host_memory import HostMemory, host_memory
from jaxddp.mesh import Topology

MARGIN = 0.03
"""What is estimated may be off by this share of what is there; see BUILD_NOTES.md."""
SPARED = 0.1
"""The share of what ran out that another division must need less, to be worth a try."""
_LONGEST_REASON = 200


@dataclass(frozen=True)
class Needs:
    """Bytes that a step needs on each device.

    Attributes:
        arguments: the state, the batch, images that lie there.
        output: what does not take the place of an argument.
        temporary: what lives only while the step is computed.
        gradients: of all parameters, a part of what is temporary.
        scratch: another part of it, whose size is not that of the batch; None where that is not known.
        images: those that are still to be placed, by their use.
        batch: a part of the arguments whose size is that of the batch, so far as it is known.
    """

    arguments: int
    output: int
    temporary: int
    gradients: int
    scratch: int | None = 0
    images: Mapping[str, int] = field(default_factory=dict)
    batch: int = 0

    @classmethod
    def of(cls, cost: Cost, params: Any, topology: Topology, images: Mapping[str, int] | None = None) -> "Needs | None":
        """Of a compiled step; None where the backend does not say."""
        if (found := cost.memory) is None:
            return None
        output = max(found.output_size_in_bytes - found.alias_size_in_bytes, 0)
        temporary = found.temp_size_in_bytes
        gradients = min(bytes_on_a_device(params), temporary)
        scratch = None if topology.platform == "cpu" else 0
        return cls(found.argument_size_in_bytes, output, temporary, gradients, scratch, images or {})

    @property
    def lasting(self) -> int:
        """What is there whatever is computed."""
        return self.arguments + self.output + sum(self.images.values())

    @property
    def total(self) -> int:
        return self.lasting + self.temporary

    def beside(self, now: Division, other: "Needs", then: Division) -> "Needs":
        """The same with its scratch and its batch, as two programs tell them whose batches are of other sizes."""
        examples, activations = now.microbatch - then.microbatch, self.temporary - self.gradients
        scratch = activations - (self.temporary - other.temporary) / examples * now.microbatch
        batch = (self.arguments - other.arguments) / examples * now.microbatch
        return replace(self, scratch=min(max(round(scratch), 0), activations), batch=max(round(batch), 0))

    def at(self, now: Division, then: Division) -> int:
        """About how many bytes the step needs where its batch is divided in another way; scratch has to be known."""
        assert self.scratch is not None
        gradients = self.gradients
        if now.accumulate == 1 < then.accumulate:
            gradients += 2 * self.gradients  # a loop's sum of them, before and after a microbatch
        activations = (self.temporary - self.gradients - self.scratch) * then.microbatch / now.microbatch
        batch = self.batch * (then.batch_size / now.batch_size - 1)
        return self.lasting + gradients + self.scratch + math.ceil(activations + batch)

    def __str__(self) -> str:
        images = f", {told(self.images)}" if self.images else ""
        lasting = f"arguments {size(self.arguments)}, output {size(self.output)}"
        return f"{size(self.total)} on each device ({lasting}, temporary {size(self.temporary)}{images})"


@dataclass(frozen=True)
class Report:
    """What one process knows: what the step needs on each of its devices, and what there is.

    Attributes:
        kind: of its devices.
        devices: of this process.
        room: bytes of the fullest of them that the step may have; None where the backend does not say, as on a CPU.
        host: the memory that CPU devices share with everything else; None on others.
    """

    needs: Needs | None
    kind: str
    devices: int
    room: int | None
    host: HostMemory | None

    @classmethod
    def of(cls, needs: Needs | None, topology: Topology, arguments: Any) -> "Report":
        """Of this process. Those of the arguments that lie on its devices already are not in the way of the step."""
        free = topology.free_memory()
        room = None if free is None else free + bytes_on_a_device(arguments)
        host = host_memory() if free is None and topology.platform == "cpu" else None
        return cls(needs, topology.device_kind, len(topology.mesh.local_devices), room, host)

    def to_json(self) -> str:
        return json.dumps(asdict(replace(self, host=None)) | {"host": self.host})

    @classmethod
    def from_json(cls, text: str) -> "Report":
        told = json.loads(text)
        needs, host = told["needs"] and Needs(**told["needs"]), told["host"] and HostMemory(*told["host"])
        return cls(**told | {"needs": needs, "host": host})


@dataclass(frozen=True)
class Fit:
    """What a step needs and what there is, on the device of all processes that has the least left.

    Attributes:
        room: bytes of that device that the step may have; None where that is not known.
        there: the same in words.
    """

    division: Division
    needs: Needs | None = None
    room: int | None = None
    there: str = ""

    @classmethod
    def of(cls, division: Division, reports: Sequence[Report]) -> "Fit":
        """The same on all processes, whose reports these are, in order."""
        fits = [cls._of_one(division, reports, process) for process in range(len(reports))]
        known = [fit for fit in fits if fit.needs is not None and fit.room is not None]
        return min(known, key=lambda fit: fit.room - fit.needs.total, default=fits[0])  # pyright: ignore

    @classmethod
    def _of_one(cls, division: Division, reports: Sequence[Report], process: int) -> "Fit":
        own, host = reports[process], reports[process].host
        whose = f" of process {process}" if len(reports) > 1 else ""
        if host is None:
            there = "" if own.room is None else f"{own.kind}{whose} has {size(own.room)}"
            return cls(division, own.needs, own.room, there)
        # Control groups may bound each process by itself, and the machine bounds all of them together.
        beside = sum(other.devices for other in reports if other.host and other.host.machine == host.machine)
        room = min(host.allowed // own.devices, host.installed // beside)
        each = f"each of its {beside} devices" if beside > 1 else "its device"
        return cls(division, own.needs, room, f"the machine{whose} has {size(room)} for {each}")

    @property
    def is_short(self) -> bool:
        """Whether the step cannot fit."""
        return self.needs is not None and self.room is not None and self.needs.total > self.room

    def check(self, compiled: Callable[[Division], Needs | None]) -> None:
        """Raises `InputError` where the step cannot fit.

        Args:
            compiled: what a smaller batch needs, in as many microbatches; None where that cannot be told.
        """
        if self.is_short:
            raise InputError(f"{self}", advice=self.compared(compiled).advice())

    def compared(self, compiled: Callable[[Division], Needs | None]) -> "Fit":
        """With the scratch of the step, which the batch tells that would do if there were none."""
        needs, now = self.needs, self.division
        if needs is None or needs.scratch is not None:
            return self
        without = replace(needs, scratch=0)
        then = now.largest(lambda then: without.at(now, then) <= self._limit) or now.least
        if then.microbatch == now.microbatch:
            return replace(self, needs=without)
        other = compiled(then)
        return self if other is None else replace(self, needs=needs.beside(now, other, then))

    def __str__(self) -> str:
        if self.needs is None:
            return "what memory the step needs is not known"
        return f"the step needs {self.needs}" + (f", and {self.there}" if self.there else "")

    def advice(self) -> Words:
        """Which `accumulate` or batch would do: on paper, and where memory ran out although it would, a smaller one."""
        needs, now = self.needs, self.division
        if needs is None or needs.scratch is None:
            return ("raise ", Option("train.accumulate"), ", or lower ", Option("train.batch_size"))
        finer = next((then for then in now.finer() if needs.at(now, then) <= self._limit), None)
        smaller = now.largest(lambda then: needs.at(now, then) <= self._limit)

        def need(then: Division) -> str:
            return f"would need about {size(needs.at(now, then))}"

        choices: list[Words] = []
        if finer is not None:
            choices.append((Option("train.accumulate", finer.accumulate), f" {need(finer)}"))
        if smaller is not None:
            choices.append((Option("train.batch_size", smaller.batch_size), f" {need(smaller)}"))
        if not choices:
            least = replace(now, accumulate=1).least
            alone = f"even images {now.together} at a time {need(least)}"
            choices.append(f"no accumulate and no batch would help, since {alone}; choose a smaller network")
        if needs.images:
            choices.append(("set ", Key("data.cache"), " to none"))
        return joined(", or ", choices)

    @property
    def _limit(self) -> float:
        """What another division may need."""
        if self.is_short and self.room is not None:
            return (1 - MARGIN) * self.room
        return (1 - SPARED) * (self.needs.total if self.needs else 0)


def agreed_fit(division: Division, own: Report, peers: Peers) -> Fit:
    """How a step fits the devices of all processes, which all call this alike. Raises: InputError; one is silent."""
    return Fit.of(division, list(map(Report.from_json, peers.exchange("memory of the step", own.to_json()))))


def told(sizes: Mapping[str, int]) -> str:
    """Bytes of images by their use, in words: "197 kB of training and 98 kB of validation images"."""
    return " and ".join(f"{size(count)} of {use}" for use, count in sizes.items()) + " images"


def ran_out(error: BaseException) -> bool:
    """Whether an allocation of JAX's failed: by the type of the exception, and by its status, which it begins with."""
    return isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED")


@contextmanager
def named(when: Callable[[], str], advice: Callable[[], Words]) -> Iterator[None]:
    """An allocation that fails in the block becomes an `InputError`: when it was, XLA's own words, and what to do."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        # On a GPU many lines follow the first.
        reason = str(error).splitlines()[0].partition(": ")[2][:_LONGEST_REASON].rstrip(".")
        raise InputError(f"memory ran out {when()} ({reason}): ", advice()) from error


def bytes_on_a_device(tree: Any) -> int:
    """What the arrays of a tree take on each device that holds them; a shape alone takes nothing."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)
