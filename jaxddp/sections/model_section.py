"""The `model` section of a config: the network, and the weights that it starts from."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxddp.batch_statistics import BatchStatistics
from jaxddp.core.duration import Duration
from jaxddp.core.errors import Key, about
from jaxddp.overrides import names_of
from jaxddp.registry import MODELS
from jaxddp.sections.layers import Layers, assignments
from jaxddp.weight_init import WeightInit

NETWORK_KEYS = ("name", "width", "stem", "shortcut_norm", "blur_pool")
"""The keys of `model` that determine a network's arrays and its output."""


@dataclass(frozen=True)
@MODELS.complete
class ModelConfig:
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
    unfreeze: tuple[str, ...] = ()
    """Layers that are trained only after a part of the run: "layer4=1 epoch,layer3=20%". Their batch norms use the
    running statistics throughout and do not change them."""
    cpu_convolutions: bool = True
    """On CPUs, compute the depthwise and grouped convolutions (`nn.Conv` with `feature_group_count`) of a recipe's own
    network as sums and products of matrices, which is many times faster. The results are equal to rounding."""

    if TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any:
            """Return the value of a setting of a choice; see `Registry.complete`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "unfreeze", names_of(self.unfreeze))

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
