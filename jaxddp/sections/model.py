"""The part of a config that says which network is trained, and which weights it starts from."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxddp.batch_statistics import BatchStatistics
from jaxddp.duration import Duration
from jaxddp.errors import about
from jaxddp.layers import Layers, assignments
from jaxddp.overrides import names_of
from jaxddp.ranges import Range
from jaxddp.weight_init import WeightInit

NETWORK_KEYS = ("name", "width", "stem", "shortcut_norm", "blur_pool")
"""The keys of `model` that decide which arrays a network has, and what it computes of them."""


@dataclass(frozen=True)
class ModelConfig:
    """Which network, and how it is made."""

    name: str = "resnet50"
    """Of a network of jaxddp/models/; another name is answered by the list of them."""
    width: Annotated[int, Range(1, 4096)] = 64
    """Of a ResNet and of airbench: features of the first stage, of which all others are multiples."""
    stem: Literal["imagenet", "small"] = "imagenet"
    """7x7 stride 2 and max-pool, or one 3x3 for images of about 32 pixels."""
    batch_norm: str = "local"
    """Over which images batch norm takes its statistics: "local", each device's slice of the batch; "sync", the global
    batch; "ghost:K", every K consecutive images of it, so that they are the same on any number of devices."""
    zero_init_last_scale: bool = True
    """Of a ResNet: whether each block begins as the identity, by a last batch norm whose scale is zero."""
    shortcut_norm: bool = True
    """Of a ResNet: whether the 1x1 convolutions of its shortcuts have a batch norm behind them, or a bias."""
    weight_init: str = "he_normal"
    """Of the kernels of a ResNet's convolutions: he_, xavier_ (or glorot_) and lecun_ with normal or uniform,
    "orthogonal", "zeros", or with a standard deviation "normal(0.02)" and, cut off at two of them,
    "truncated_normal(0.02)"; 0.01 where none is given. The head is always normal(0.01)."""
    blur_pool: bool = False
    """Of ResNets: blur what a convolution strides over, of 16 channels or more, so that a shifted image gives more
    nearly the same."""
    drop_path: Annotated[float, Range(0, 1, below=True)] = 0.0
    """Stochastic depth of the networks that have it: the probability that an example leaves out the last block, which
    grows linearly from the first block's 0."""
    weights: str | None = None
    """Start from these: a .safetensors or a .pth file with the names of torchvision or timm, or a run's work directory,
    of which the best checkpoint is taken. A head for another number of classes is left out."""
    new_layers: str | None = None
    """Layers that take nothing from the weights, by how their names begin: "fc", a head for other classes."""
    freeze: str | None = None
    """Layers that are not trained, by how their names begin: "conv1,layer1", or "all but fc", a linear probe. Their
    batch norms keep and use the running statistics."""
    unfreeze: tuple[str, ...] = ()
    """Layers that are trained only after so much of the run: "layer4=1 epoch,layer3=20%". Their batch norms keep and
    use the running statistics throughout."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "unfreeze", names_of(self.unfreeze))

    @property
    def batch_statistics(self) -> BatchStatistics:
        """What `batch_norm` says. Raises: InputError; it says nothing."""
        return BatchStatistics.parse(self.batch_norm)

    @property
    def initialization(self) -> WeightInit:
        """What `weight_init` says. Raises: InputError; it says nothing."""
        return WeightInit.parse(self.weight_init)

    @property
    def new(self) -> Layers:
        """What `new_layers` says. Raises: InputError; it says nothing."""
        return Layers.parse(self.new_layers or "", "model.new_layers")

    @property
    def frozen(self) -> Layers:
        """What `freeze` says. Raises: InputError; it says nothing."""
        return Layers.parse(self.freeze or "", "model.freeze")

    @property
    def thawed(self) -> dict[str, Duration]:
        """When each layer of `unfreeze` is trained from. Raises: InputError; it says nothing."""
        found = assignments(self.unfreeze, "model.unfreeze")
        with about("model.unfreeze"):
            return {layer: Duration.parse(value) for layer, value in found.items()}
