"""Projects the time of a data-parallel step to many GPUs, by a model with few parameters. Nothing here is measured.

The time of an all-reduce is that of `benchmarks.programs.communication`: rings within a node, and rings or trees
between nodes, whichever take less time.

    step       = compute + (1 - overlap) * communication
    efficiency = compute / step

`overlap` is the fraction of the communication that computing hides: 0 for one collective after the last gradient. In a
schedule of several collectives (`project_schedule`), the computing between the start of a collective and the wait for
it hides that much of its time. The projection excludes all other waits of a GPU: input, stragglers, links shared with
other jobs, kernels slowed down by a collective.

The parameters of `DGX_A100` are NVIDIA's:
- NVLink 3: 600 GB/s a GPU, both directions together ("NVIDIA A100 Tensor Core GPU" data sheet): 300 GB/s each way.
- 8 HDR InfiniBand adapters of 200 Gb/s in a DGX A100 ("NVIDIA DGX A100" data sheet): 25 GB/s each way for each GPU.
- The share of either bandwidth that is reached, and the latencies, are those of `benchmarks.programs.communication`.
- 2470 images/s: ResNet-50 v1.5 in mixed precision on one A100 80GB (NVIDIA/DeepLearningExamples,
  PyTorch/Classification/ConvNets/resnet50v1.5, "Training performance"). There 8 GPUs reach 16621 images/s, 84% of 8
  times one: communication explains hardly any of the loss within a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.programs.communication import SHARE_OF_BANDWIDTH, Interconnect, Link


@dataclass(frozen=True)
class Message:
    """One all-reduce of a schedule.

    Attributes:
        beside: The fraction of a step's computing between the start of the all-reduce and the wait for it.
    """

    num_bytes: float
    beside: float


@dataclass(frozen=True)
class Projection:
    """A step on many GPUs: its seconds, overlap and efficiency."""

    gpus: int
    compute: float
    communication: float
    exposed: float
    images_per_second: float

    @property
    def step(self) -> float:
        return self.compute + self.exposed

    @property
    def overlap(self) -> float:
        """The fraction of the communication that computing hides, 0 to 1; 0 without communication."""
        return 1 - self.exposed / self.communication if self.communication else 0.0

    @property
    def efficiency(self) -> float:
        """The speed relative to as many GPUs without communication, 0 to 1."""
        return self.compute / self.step


DGX_A100 = Interconnect(
    devices=8,
    inside=Link(SHARE_OF_BANDWIDTH * 300e9, 3.4e-6),
    outside=Link(SHARE_OF_BANDWIDTH * 25e9, 14e-6),
)
A100_IMAGES_PER_SECOND = 2470


def fit_link(small: tuple[float, float], large: tuple[float, float]) -> Link:
    """Fit a link to two measured all-reduces between two peers, each (bytes, seconds).

    Raises:
        ValueError: The larger all-reduce took no longer than the smaller.
    """
    (few, short), (many, long) = small, large
    if not (many > few and long > short):
        raise ValueError(f"all-reduces of {few:g} and {many:g} bytes took {short:g} and {long:g} s: measure again")
    # For two peers, ring() is bytes / bandwidth + 2 latency.
    bandwidth = (many - few) / (long - short)
    return Link(bandwidth, max(0.0, (short - few / bandwidth) / 2))


def project(
    links: Interconnect, num_gpus: int, *, num_bytes: float, compute: float, batch_per_gpu: int, overlap: float = 0
) -> Projection:
    """Project a step of `num_gpus`, each with its own batch.

    Args:
        num_bytes: Bytes averaged over the GPUs in a step.
        compute: Seconds of a step without communication.
        overlap: The fraction of the communication that computing hides, 0 to 1.

    Raises:
        ValueError: A number is out of range.
    """
    if not (num_bytes >= 0 and compute > 0 and batch_per_gpu > 0 and 0 <= overlap <= 1):
        raise ValueError(f"{num_bytes=}, {compute=}, {batch_per_gpu=}, {overlap=}: out of range")
    communication = links.all_reduce(num_bytes, num_gpus)
    exposed = (1 - overlap) * communication
    return Projection(num_gpus, compute, communication, exposed, num_gpus * batch_per_gpu / (compute + exposed))


def project_schedule(
    links: Interconnect, num_gpus: int, *, messages: Sequence[Message], compute: float, batch_per_gpu: int
) -> Projection:
    """Project a step whose all-reduces run beside its computing; see `project`."""
    needed = [links.all_reduce(message.num_bytes, num_gpus) for message in messages]
    hidden = [message.beside * compute for message in messages]
    exposed = sum(max(0.0, need - beside) for need, beside in zip(needed, hidden, strict=True))
    return Projection(num_gpus, compute, sum(needed), exposed, num_gpus * batch_per_gpu / (compute + exposed))
