"""Whether a step fits into the memory of each device, and the line that says what would.

What a program needs is known once it is compiled. What another division of the batch would need is estimated: of the
arrays that live only while a step is computed, gradients stay as they are, microbatches add sums of them, and the rest
shrinks with the examples that are computed at once.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax

from jaxddp.data.division import Division
from jaxddp.errors import InputError
from jaxddp.job.membership import exchange
from jaxddp.measure.cost import Cost
from jaxddp.measure.host_memory import HostMemory, host_memory
from jaxddp.mesh import Topology
from jaxddp.wording import size

_SCRATCH = {"cpu": 0.1}
"""The share of activations that stays however few images are computed, from programs that XLA compiled; GPUs: none."""
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
        scratch: another part of it, whose size is not that of the batch.
        images: those that are still to be placed, by their use.
    """

    arguments: int
    output: int
    temporary: int
    gradients: int
    scratch: int = 0
    images: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, cost: Cost, params: Any, topology: Topology, images: Mapping[str, int] | None = None) -> "Needs | None":
        """Of a compiled step; None where the backend does not say."""
        if (found := cost.memory) is None:
            return None
        output = max(found.output_size_in_bytes - found.alias_size_in_bytes, 0)
        temporary = found.temp_size_in_bytes
        gradients = min(bytes_on_a_device(params), temporary)
        scratch = int(_SCRATCH.get(topology.platform, 0) * (temporary - gradients))
        return cls(found.argument_size_in_bytes, output, temporary, gradients, scratch, images or {})

    @property
    def lasting(self) -> int:
        """What is there whatever is computed."""
        return self.arguments + self.output + sum(self.images.values())

    @property
    def total(self) -> int:
        return self.lasting + self.temporary

    def at(self, now: Division, then: Division) -> int:
        """About how many bytes the step needs where its batch is divided in another way."""
        gradients = self.gradients
        if now.accumulate == 1 < then.accumulate:
            gradients += 2 * self.gradients  # a loop's sum of them, before and after a microbatch
        activations = (self.temporary - self.gradients - self.scratch) * then.microbatch / now.microbatch
        return self.lasting + gradients + self.scratch + math.ceil(activations)

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

    def check(self) -> None:
        """Raises `InputError` where the step cannot fit."""
        if self.is_short:
            raise InputError(f"{self}; {self.advice()}")

    def __str__(self) -> str:
        if self.needs is None:
            return "what memory the step needs is not known"
        return f"the step needs {self.needs}" + (f", and {self.there}" if self.there else "")

    def advice(self) -> str:
        """Which `accumulate` or batch would do: on paper, and where memory ran out although it would, a smaller one."""
        needs, now = self.needs, self.division
        if needs is None:
            return "raise --train.accumulate, or lower --train.batch-size"
        spared, of = (MARGIN, self.room) if self.is_short and self.room is not None else (SPARED, needs.total)
        limit = (1 - spared) * of
        finer = next((then for then in now.finer() if needs.at(now, then) <= limit), None)
        smaller = now.largest(lambda then: needs.at(now, then) <= limit)

        def need(then: Division) -> str:
            return f"would need about {size(needs.at(now, then))}"

        choices = []
        if finer is not None:
            choices.append(f"--train.accumulate {finer.accumulate} {need(finer)}")
        if smaller is not None:
            choices.append(f"--train.batch-size {smaller.batch_size} {need(smaller)}")
        if not choices:
            least = Division(now.shares * now.together, now.shares, 1, now.together)
            alone = f"even images {now.together} at a time {need(least)}"
            choices.append(f"no accumulate and no batch would help, since {alone}; choose a smaller network")
        return ", or ".join([*choices, *(["set data.cache to none"] if needs.images else [])])


def agreed_fit(division: Division, own: Report) -> Fit:
    """How a step fits the devices of all processes, which all call this alike. Raises: InputError; one is silent."""
    return Fit.of(division, list(map(Report.from_json, exchange("memory of the step", own.to_json()))))


def told(sizes: Mapping[str, int]) -> str:
    """Bytes of images by their use, in words: "197 kB of training and 98 kB of validation images"."""
    return " and ".join(f"{size(count)} of {use}" for use, count in sizes.items()) + " images"


def ran_out(error: BaseException) -> bool:
    """Whether an allocation of JAX's failed: by the type of the exception, and by its status, which it begins with."""
    return isinstance(error, jax.errors.JaxRuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED")


@contextmanager
def named(when: Callable[[], str], advice: Callable[[], str]) -> Iterator[None]:
    """An allocation that fails in the block becomes an `InputError`: when it was, XLA's own words, and what to do."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        # On a GPU many lines follow the first.
        reason = str(error).splitlines()[0].partition(": ")[2][:_LONGEST_REASON].rstrip(".")
        raise InputError(f"memory ran out {when()} ({reason}): {advice()}") from error


def bytes_on_a_device(tree: Any) -> int:
    """What the arrays of a tree take on each device that holds them; a shape alone takes nothing."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)
