"""The sizes of `benchmarks/gpu.py`: on a GPU, or for a rehearsal on a CPU."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.rivals.contenders.case import Case
from benchmarks.rivals.gpu_data import encode, join_files, save

EAGER = "eager"
MODES = (EAGER, "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune")


@dataclass(frozen=True)
class Scale:
    """The sizes of a run of this benchmark.

    Attributes:
        other: The second network whose step the part `variants` measures.
        gate: Images in the gate. They are few, because float32 without TF32 is slow.
        modes: Modes of torch.
        settings: Settings of the CIFAR-10 recipe, in addition to those of the command line.
        command: Length of the runs of the part `command`.
        networks: Networks of the part `networks`.
    """

    case: Case
    other: Case
    gate: int
    batches: tuple[int, ...]
    modes: tuple[str, ...]
    steps: int
    turns: int
    rounds: int
    warmup: int
    seeds: int
    settings: tuple[str, ...]
    command: str
    networks: tuple[Case, ...]


# At this rate five losses fall by a tenth; see `gpu_gate.py`.
GPU = Scale(
    case=Case("resnet50", "imagenet", 64, 224, 256, precision="bfloat16", learning_rate=1e-3),
    other=Case("resnet18", "small", 64, 32, 256, classes=10, precision="bfloat16"),
    gate=16,
    batches=(256, 400, 512),
    modes=MODES,
    steps=50,
    turns=3,
    rounds=5,
    warmup=10,
    seeds=10,
    settings=("data.cache=device",),
    command="6 epochs",
    networks=tuple(Case(name, "imagenet", 64, 224, 256, precision="bfloat16") for name in ("vit_s16", "convnext_tiny")),
)
SMALL = Scale(
    case=Case("resnet10", "small", 8, 32, 4, classes=10, precision="bfloat16", learning_rate=3e-2),
    other=Case("resnet18", "small", 4, 16, 4, classes=10, precision="bfloat16"),
    gate=16,
    batches=(2, 4),
    modes=MODES,
    steps=3,
    turns=2,
    rounds=2,
    warmup=2,
    seeds=3,
    settings=(
        *("data.cache=device", "model.width=4", "train.duration=2 epochs"),
        *("train.batch_size=16", "eval.batch_size=16", "train.precision=float32"),
    ),
    command="60 steps",
    networks=(Case("vit_s16", "imagenet", 64, 32, 4, classes=10, precision="bfloat16"),),
)


def write_small_cifar(path: Path) -> Path:
    """Write a packed file of a few images of CIFAR's size, whose color shows their class."""
    rng = np.random.default_rng(0)
    colors = rng.integers(0, 256, (10, 1, 1, 3))
    arrays = {"class_names": np.array(list("abcdefghij")), "part": np.array([0, 1])}
    for split, count in (("train", 64), ("val", 32)):
        labels = np.arange(count) % 10
        images = np.clip(colors[labels] + rng.integers(-20, 21, (count, 32, 32, 3)), 0, 255).astype(np.uint8)
        arrays |= join_files(split, [encode(image) for image in images], labels)
    save(path, arrays)
    return path
