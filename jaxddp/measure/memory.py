"""Check whether a step fits into the memory of each device, and suggest a division of the batch that fits.

A compiled program reports the memory that it needs. For another division of the batch, the memory is estimated as
follows. The size of gradients is constant, and a step with several microbatches also keeps sums of gradients. The size
of other temporary arrays is proportional to the size of a microbatch. On a CPU, some of these arrays have a constant
size that is unknown, so nothing is estimated there. The memory of CPU devices is that of their process, so it also
holds the libraries, the compiled programs and the data.
"""

import math
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxddp.core.cores import cgroup_limits
from jaxddp.core.errors import InputError, Key, Option, Words, joined, size
from jaxddp.data.batch import Division
from jaxddp.measure.cost import Cost
from jaxddp.mesh import Topology

MARGIN = 0.03
"""The assumed error of an estimate, relative to the available memory; see docs/design.md."""
SPARED = 0.1
"""If memory runs out although the step was expected to fit, a suggested division must need this share less memory."""
CPU_TEMPORARY = 1.1
"""The factor of XLA's temporary memory on a CPU. XLA does not count the memory in which kernels rearrange operands; see
docs/design.md."""
_LONGEST_REASON = 200


class HostMemory(NamedTuple):
    """The memory of a machine in bytes, including swap."""

    machine: str
    """An ID of the machine, which Linux creates at boot."""
    installed: int
    """The memory of the machine."""
    allowed: int
    """The memory limit of this process by its cgroup and the ones above; at most `installed`."""
    used: int = 0
    """The memory that this process holds: Python, its libraries, compiled programs and data."""


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """Return the memory of this machine; None if the system does not report it.

    Args:
        root: the folder that contains /proc and /sys.
    """
    try:
        entries = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        installed, swap = (1024 * int(entries[key].split()[0]) for key in ("MemTotal", "SwapTotal"))
        machine = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        limits = cgroup_limits("memory", ("memory.limit_in_bytes",), ("memory.max",), root)
        allowed = min([installed, *(int(limit) for (limit,) in limits if limit.isdecimal())])
        used = int((root / "proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return HostMemory(machine, installed + swap, allowed + swap, used)


@dataclass(frozen=True)
class Needs:
    """The memory that a step needs on each device, in bytes.

    Attributes:
        arguments: the arguments of the step: the state, the batch and images that are cached on the device.
        output: the outputs that do not reuse the memory of an argument.
        temporary: arrays that exist only during the step.
        gradients: the part of `temporary` for the gradients of all parameters.
        is_linear: whether the rest of `temporary` is proportional to the size of a microbatch, as on devices but CPUs.
        images: images that will be cached on the device but are not there yet, by their use.
        process: on a CPU, this device's share of the other memory of the process: libraries, programs and data.
    """

    arguments: int
    output: int
    temporary: int
    gradients: int
    is_linear: bool = True
    images: Mapping[str, int] = field(default_factory=dict)
    process: int = 0

    @classmethod
    def of(cls, cost: Cost, params: Any, topology: Topology, images: Mapping[str, int] | None = None) -> "Needs | None":
        """Return the needs of a compiled step; None if the backend does not report memory."""
        if (stats := cost.memory) is None:
            return None
        output = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
        is_cpu = topology.platform == "cpu"
        temporary = round(CPU_TEMPORARY * stats.temp_size_in_bytes) if is_cpu else stats.temp_size_in_bytes
        gradients = min(bytes_on_a_device(params), temporary)
        return cls(stats.argument_size_in_bytes, output, temporary, gradients, not is_cpu, images or {})

    @property
    def persistent(self) -> int:
        """Return the bytes that exist before or after the step: arguments, outputs, images and the process itself."""
        return self.arguments + self.output + sum(self.images.values()) + self.process

    @property
    def total(self) -> int:
        return self.persistent + self.temporary

    def estimate_bytes(self, now: Division, then: Division) -> int:
        """Estimate the bytes of the step with the division `then` instead of `now`. `is_linear` must be true."""
        gradients = self.gradients
        if now.accumulate == 1 < then.accumulate:
            gradients += 2 * self.gradients  # the sums before and after a microbatch
        activations = (self.temporary - self.gradients) * then.microbatch / now.microbatch
        return self.persistent + gradients + math.ceil(activations)

    def __str__(self) -> str:
        parts = {"arguments": self.arguments, "output": self.output}
        parts |= {"the process itself": self.process} if self.process else {}
        texts = [f"{name} {size(count)}" for name, count in (parts | {"temporary": self.temporary}).items()]
        texts += [images_text(self.images)] if self.images else []
        return f"{size(self.total)} on each device ({', '.join(texts)})"


@dataclass(frozen=True)
class MemoryReport:
    """The memory that the step needs on the devices of one process, and the memory of these devices.

    Attributes:
        needs: the needs of the step; None if unknown.
        kind: the kind of the devices.
        devices: the number of devices of this process.
        room: the bytes available to the step on the device with the least free memory; None if the backend does not
            report memory, as on a CPU.
        host: the memory of the machine, which CPU devices share; None for other devices.
    """

    needs: Needs | None
    kind: str
    devices: int
    room: int | None
    host: HostMemory | None

    @classmethod
    def of(cls, needs: Needs | None, topology: Topology, arguments: Any) -> "MemoryReport":
        """Create the report of this process. Memory of `arguments` that are on a device counts as available."""
        free = topology.free_memory()
        room = None if free is None else free + bytes_on_a_device(arguments)
        host = host_memory() if free is None and topology.platform == "cpu" else None
        devices = len(topology.mesh.local_devices)
        if needs is not None and host is not None:
            needs = replace(needs, process=max(host.used // devices - bytes_on_a_device(arguments), 0))
        return cls(needs, topology.device_kind, devices, room, host)

    @classmethod
    def from_plain(cls, fields: Mapping[str, Any]) -> "MemoryReport":
        """Return the report of `asdict(report)`, as JSON holds it."""
        needs, host = fields["needs"] and Needs(**fields["needs"]), fields["host"] and HostMemory(*fields["host"])
        return cls(**{**fields, "needs": needs, "host": host})


@dataclass(frozen=True)
class Fit:
    """The memory that a step needs, and the memory that is available to it.

    Both are values of the device with the smallest difference of the two, among the devices of all processes.

    Attributes:
        division: the division of the batch.
        needs: the needs of the step; None if unknown.
        room: the bytes available to the step on that device; None if unknown.
        available: a phrase about `room` for messages.
        section: the section of the keys that change the division: "train" for a step, "eval" for a validation.
    """

    division: Division
    needs: Needs | None = None
    room: int | None = None
    available: str = ""
    section: str = "train"

    @classmethod
    def of(cls, division: Division, reports: Sequence[MemoryReport]) -> "Fit":
        """Create the fit from the reports of all processes, in their order. It is the same on all processes."""
        fits = [cls._of_one(division, reports, process) for process in range(len(reports))]
        complete = [fit for fit in fits if fit.needs is not None and fit.room is not None]
        return min(complete, key=lambda fit: fit.room - fit.needs.total, default=fits[0])  # pyright: ignore

    @classmethod
    def _of_one(cls, division: Division, reports: Sequence[MemoryReport], process: int) -> "Fit":
        report, host = reports[process], reports[process].host
        owner = f" of process {process}" if len(reports) > 1 else ""
        if host is None:
            available = "" if report.room is None else f"{report.kind}{owner} has {size(report.room)}"
            return cls(division, report.needs, report.room, available)
        # A process is limited by its cgroups, and all processes of a machine share its memory.
        count = sum(other.devices for other in reports if other.host and other.host.machine == host.machine)
        room = min(host.allowed // report.devices, host.installed // count)
        devices = f"each of its {count} devices" if count > 1 else "its device"
        return cls(division, report.needs, room, f"the machine{owner} has {size(room)} for {devices}")

    @property
    def is_short(self) -> bool:
        """Return whether the step needs more memory than is available."""
        return self.needs is not None and self.room is not None and self.needs.total > self.room

    def check(self) -> None:
        """Raise `InputError` if the step needs more memory than is available."""
        if self.is_short:
            raise InputError(f"{self}", advice=self.advice())

    def __str__(self) -> str:
        user = "step" if self.section == "train" else "validation"
        if self.needs is None:
            return f"the memory that the {user} needs is unknown"
        return ", and ".join(filter(None, (f"the {user} needs {self.needs}", self.available)))

    def advice(self) -> Words:
        """Return advice: a batch size that fits or, for a step, a value of `accumulate`, or `remat`.

        If memory ran out although the step was expected to fit, the suggested value needs less memory than the step.
        """
        needs, now, trains = self.needs, self.division, self.section == "train"
        batch_size = f"{self.section}.batch_size"
        remat = Option("train.remat", "blocks"), " keeps fewer activations"
        keeps = [remat] if trains and now.remat == "none" else []
        if needs is None or not needs.is_linear:
            raised = [("raise ", Option("train.accumulate"))] if trains else []
            return joined(", or ", [*raised, ("lower ", Option(batch_size)), *keeps])

        limit = (1 - MARGIN) * self.room if self.room is not None and self.is_short else (1 - SPARED) * needs.total

        def fits(then: Division) -> bool:
            return needs.estimate_bytes(now, then) <= limit

        def need(then: Division) -> str:
            return f"would need about {size(needs.estimate_bytes(now, then))}"

        choices: list[Words] = []
        if trains and (finer := next(filter(fits, now.finer_divisions()), None)):
            choices.append((Option("train.accumulate", finer.accumulate), f" {need(finer)}"))
        if smaller := now.largest_that_fits(fits):
            choices.append((Option(batch_size, smaller.batch_size), f" {need(smaller)}"))
        if not choices:
            alone = f"even {now.group_size} at a time {need(replace(now, accumulate=1).smallest)}"
            keys = "no accumulate and no batch size" if trains else "no batch size"
            choices.append(f"{keys} would help ({alone}); choose a smaller network")
        if needs.images:
            choices.append(("set ", Key("data.cache"), " to none"))
        return joined(", or ", [*choices, *keeps])


def agreed_fit(division: Division, needs: Needs | None, topology: Topology, arguments: Any) -> Fit:
    """Return the fit of a step on the devices of all processes. All processes must call this function.

    Args:
        arguments: see `MemoryReport.of`.

    Raises: InputError if a process does not answer.
    """
    report = asdict(MemoryReport.of(needs, topology, arguments))
    return Fit.of(division, [*map(MemoryReport.from_plain, topology.peers.exchange("memory of the step", report))])


def images_text(images: Mapping[str, int]) -> str:
    """Return the bytes of images, by their use, as text: "197 kB of training and 98 kB of validation images"."""
    return " and ".join(f"{size(count)} of {use}" for use, count in images.items()) + " images"


@contextmanager
def memory_errors(when: Callable[[], str], advice: Callable[[], Words]) -> Iterator[None]:
    """Convert a failed memory allocation in the block to an `InputError` with XLA's reason and advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        # On a GPU, the message has many lines; the first line has the reason.
        reason = str(error).splitlines()[0].partition(": ")[2][:_LONGEST_REASON].rstrip(".")
        raise InputError(f"memory ran out {when()} ({reason}): ", advice()) from error


def bytes_on_a_device(tree: Any) -> int:
    """Return the bytes of the arrays of a tree on each device. Shapes without data count as 0."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)
