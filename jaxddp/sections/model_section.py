"""The part of a config that says which network is trained, and which weights it starts from."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from jaxddp.batch_statistics import BatchStatistics
from jaxddp.core.duration import Duration
from jaxddp.core.errors import about
from jaxddp.core.message import Key
from jaxddp.core.ranges import Decay, Range
from jaxddp.overrides import names_of
from jaxddp.sections.layers import Layers, assignments
from jaxddp.weight_init import WeightInit

NETWORK_KEYS = ("name", "width", "stem", "shortcut_norm", "blur_pool")
"""The keys of `model` that decide which arrays a network has, and what it computes of them."""


Width = Annotated[int, Range(1, 4096)]
Stem = Literal["imagenet", "small"]


@dataclass(frozen=True)
class ModelConfig:
    """Which network, and how it is made."""

    # A key that only some networks read is None until it is said: they have their own value for it.

    name: str = "resnet50"
    """Of a network of jaxddp/models/; another name is answered by the list of them."""
    weights: str | None = None
    """Start from these: a .safetensors or a .pth file with the names of torchvision or timm, or a run's work directory,
    of which the best checkpoint is taken. A head for another number of classes is left out."""
    width: Width | None = None
    """Of ResNets and of airbench: features of the first stage, of which all others are multiples."""
    stem: Stem | None = None
    """Of ResNets: 7x7 stride 2 and max-pool, or one 3x3 for images of about 32 pixels."""
    batch_norm: str | None = None
    """Over which images batch norm takes its statistics: "local", each device's slice of the batch; "sync", the global
    batch; "ghost:K", every K consecutive images of it, so that they are the same on any number of devices."""
    drop_path: Decay | None = None
    """Stochastic depth of ViTs and ConvNeXts: the probability that an example leaves out the last block, which grows
    linearly from the first block's 0."""
    freeze: str | None = None
    """Layers that are not trained, by how their names begin: "conv1,layer1", or "all but fc", a linear probe. Their
    batch norms keep and use the running statistics."""
    new_layers: str | None = None
    """Layers that take nothing from the weights, by how their names begin: "fc", a head for other classes."""
    unfreeze: tuple[str, ...] = ()
    """Layers that are trained only after so much of the run: "layer4=1 epoch,layer3=20%". Their batch norms keep and
    use the running statistics throughout."""
    weight_init: str | None = None
    """Of the kernels of a ResNet's convolutions: he_, xavier_ (or glorot_) and lecun_ with normal or uniform,
    "orthogonal", "zeros", or with a standard deviation "normal(0.02)" and, cut off at two of them,
    "truncated_normal(0.02)"; 0.01 where none is given. The head is always normal(0.01)."""
    zero_init_last_scale: bool | None = None
    """Of ResNets: whether each block begins as the identity, by a last batch norm whose scale is zero."""
    shortcut_norm: bool | None = None
    """Of ResNets: whether the 1x1 convolutions of shortcuts have a batch norm behind them, or a bias."""
    blur_pool: bool | None = None
    """Of ResNets: blur what a convolution strides over, of 16 channels or more, so that a shifted image gives more
    nearly the same."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "unfreeze", names_of(self.unfreeze))

    @cached_property
    def batch_statistics(self) -> BatchStatistics:
        """What `batch_norm` says; local ones where it is None. Raises: InputError; it says nothing."""
        return BatchStatistics() if self.batch_norm is None else BatchStatistics.parse(self.batch_norm)

    @cached_property
    def initialization(self) -> WeightInit:
        """What `weight_init` says; He's where it is None. Raises: InputError; it says nothing."""
        return WeightInit() if self.weight_init is None else WeightInit.parse(self.weight_init)

    @cached_property
    def new(self) -> Layers:
        """What `new_layers` says. Raises: InputError; it says nothing."""
        return Layers.parse(self.new_layers or "", "model.new_layers")

    @cached_property
    def frozen(self) -> Layers:
        """What `freeze` says. Raises: InputError; it says nothing."""
        return Layers.parse(self.freeze or "", "model.freeze")

    @cached_property
    def thawed(self) -> dict[str, Duration]:
        """When each layer of `unfreeze` is trained from. Raises: InputError; it says nothing."""
        found = assignments(self.unfreeze, "model.unfreeze")
        with about(Key("model.unfreeze")):
            return {layer: Duration.parse(value) for layer, value in found.items()}
