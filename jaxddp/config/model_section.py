"""The `model`, `loss` and `objective` sections of a config: what is trained."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from jaxddp.config.layers import Layers, assignments
from jaxddp.config.registry import LOSSES, MODELS, OBJECTIVES, SectionOfChoices
from jaxddp.config.values import Names, read
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, Key, about, choices, counted, nearest, show
from jaxddp.core.ranges import Positive, Range

_GHOST = re.compile("ghost:([1-9][0-9]{0,7})")


@dataclass(frozen=True)
class BatchStatistics:
    """The images over which batch norm computes its statistics: by default all images of a device.

    Attributes:
        axis_name: the mesh axis over which statistics are averaged, for the statistics of the global batch.
        group: the number of consecutive images that are normalized together, the ghost batch of Hoffer et al. 2017
            (arXiv:1705.08741). Such statistics are the same on any number of devices.
    """

    axis_name: str | None = None
    group: int | None = None

    @classmethod
    def parse(cls, text: str) -> "BatchStatistics":
        """Parse "local", "sync" or "ghost:K".

        Raises:
            InputError: the text is none of these forms. The message suggests the nearest one.
        """
        named = {"local": cls(), "sync": cls(axis_name="data")}
        if text in named:
            return named[text]
        if ghost := _GHOST.fullmatch(text):
            return cls(group=int(ghost[1]))
        expected = "'local', 'sync' or 'ghost:K' (K images are normalized together, 1 to 99,999,999)"
        raise InputError(Key("model.batch_norm", text), f": expected {expected}{nearest(text, named)}")

    def check(self, batch_size: int, shares: int) -> None:
        """Check that each part of the global batch consists of complete ghost batches.

        Args:
            batch_size: a multiple of `shares`.
            shares: the number of equal parts into which devices, shards and microbatches divide the batch.

        Raises:
            InputError: a part is not a multiple of the group. The message names batch and group sizes that fit.
        """
        share = batch_size // shares
        if self.group is None or share % self.group == 0:
            return
        whole = self.group * shares
        below, above = batch_size // whole * whole, -(-batch_size // whole) * whole
        fitting = f"{below}, {above}" if below else f"{above}"
        group = max(size for size in range(1, min(self.group, share) + 1) if share % size == 0)
        key = Key.plain("model.batch_norm", f"ghost:{self.group}")
        problem = key, f" normalizes {counted(self.group, 'image')} together, but ", Key("train.batch_size", batch_size)
        parts = f" is computed in {counted(shares, 'part')} of {share}"
        raise InputError(*problem, parts, advice=f"a batch of {fitting}, or ghost:{group}, would do")


_FAMILIES = ("he", "xavier", "glorot", "lecun")
_NAMES = (*(f"{family}_{kind}" for family in _FAMILIES for kind in ("normal", "uniform")), "orthogonal", "zeros")
_PATTERN = re.compile(r"(normal|truncated_normal)(?:\(([^()]*)\))?")
_Deviation = Annotated[float, Range(0, 100, above=True)]


@dataclass(frozen=True)
class WeightInit:
    """The name of a distribution, and for "normal" and "truncated_normal" its standard deviation."""

    name: str = "he_normal"
    deviation: float | None = None

    @classmethod
    def parse(cls, text: str) -> "WeightInit":
        """Parse a name such as "he_normal", "normal" (deviation 0.01) or "normal(0.02)".

        Raises:
            InputError: the name is unknown (the message names the nearest), or the deviation is invalid.
        """
        if text in _NAMES:
            return cls(text)
        if (match := _PATTERN.fullmatch(text)) is None:
            names = (*_NAMES, "normal(0.02)", "truncated_normal(0.02)")
            raise InputError(Key("model.weight_init"), f": unknown weight_init {show(text)}; {choices(text, names)}")
        with about(Key("model.weight_init", text)):
            return cls(match[1], read("0.01" if match[2] is None else match[2], _Deviation, "standard deviation"))


NETWORK_KEYS = ("name", "width", "stem", "shortcut_norm", "blur_pool")
"""The keys of `model` that determine a network's arrays and its output."""


@dataclass(frozen=True)
@MODELS.complete
class ModelConfig(SectionOfChoices):
    """The network, and the weights that it starts from."""

    name: str = "resnet50"
    """Name of a network in jaxddp/models/. An unknown name is an error that lists all names."""
    weights: str | None = None
    """Initial weights: a name of published weights, such as timm/resnet50.a1_in1k or
    torchvision/ResNet50_Weights.IMAGENET1K_V2 (`jaxddp weights` lists them); hf://owner/name, a repository of the
    Hugging Face Hub, or hf://owner/name/file; a .safetensors or .pth file with parameter names of torchvision or timm;
    a folder that `jaxddp export --format hub` wrote; or the work directory of a run, whose best checkpoint is used. A
    head for another number of classes is not loaded."""
    offline: bool = False
    """Do not fetch `weights`. They must be on this machine, because an earlier run fetched them."""
    freeze: str | None = None
    """Layers that are not trained, by the beginning of their names: "conv1,layer1", or "all but fc" for a linear probe.
    Their batch norms use the running statistics and do not change them."""
    new_layers: str | None = None
    """Layers that are initialized even if `weights` has them, by the beginning of their names: "fc" for a head with
    other classes."""
    unfreeze: Names = ()
    """Layers that are trained only after a part of the run: "layer4=1 epoch,layer3=20%". Their batch norms use the
    running statistics throughout and do not change them."""
    cpu_convolutions: bool = True
    """On CPUs, compute the depthwise and grouped convolutions (`nn.Conv` with `feature_group_count`) of a recipe's own
    network as sums and products of matrices, which is many times faster. The results are equal to rounding."""

    @cached_property
    def batch_statistics(self) -> BatchStatistics:
        """The parsed `batch_norm`; local for None. Raises: InputError if the text is invalid."""
        return BatchStatistics() if self.batch_norm is None else BatchStatistics.parse(self.batch_norm)

    @cached_property
    def initialization(self) -> WeightInit:
        """The parsed `weight_init`; he_normal for None. Raises: InputError if the text is invalid."""
        return WeightInit() if self.weight_init is None else WeightInit.parse(self.weight_init)

    @cached_property
    def fresh_layers(self) -> Layers:
        """The parsed `new_layers`. Raises: InputError if the text is invalid."""
        return Layers.parse(self.new_layers or "", "model.new_layers")

    @cached_property
    def frozen(self) -> Layers:
        """The parsed `freeze`. Raises: InputError if the text is invalid."""
        return Layers.parse(self.freeze or "", "model.freeze")

    @cached_property
    def unfreeze_times(self) -> dict[str, Duration]:
        """When the training of each layer of `unfreeze` begins. Raises: InputError if the text is invalid."""
        durations = assignments(self.unfreeze, "model.unfreeze")
        with about(Key("model.unfreeze")):
            return {layer: Duration.parse(value) for layer, value in durations.items()}


BALANCED: Literal["balanced"] = "balanced"


@dataclass(frozen=True)
@LOSSES.complete
class LossConfig:
    """The loss function and the weights of classes."""

    name: str = "cross_entropy"
    """Name of a loss in jaxddp/losses.py: "cross_entropy", "nll" (for log-probabilities) or "bce" (one binary decision
    per class)."""
    class_weights: str | None = None
    """Weight of each class in the loss, in training and evaluation: "1,4,0.5" lists one positive number per class;
    "balanced" is N / (K n_k) for a class with n_k of the N training images and K classes."""

    @cached_property
    def weights(self) -> Literal["balanced"] | tuple[float, ...] | None:
        """The parsed `class_weights`. Raises: InputError if the text is invalid."""
        if self.class_weights is None or self.class_weights == BALANCED:
            return self.class_weights
        return tuple(read(word, Positive, "loss.class_weights") for word in self.class_weights.split(","))


@dataclass(frozen=True)
@OBJECTIVES.complete
class ObjectiveConfig(SectionOfChoices):
    """The function that a training step minimizes. It includes the loss."""

    name: str = "supervised"
    """Name of an objective in jaxddp/objectives/: "supervised" (the loss on the labels), "distillation",
    "fixmatch" or "jensen_shannon"."""
