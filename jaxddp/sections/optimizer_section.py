"""The `optimizer` section of a config: the optimizer, its learning rate and its schedule."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from jaxddp.core.duration import Duration
from jaxddp.core.errors import Key, about
from jaxddp.core.ranges import Factor, Positive, SomeShare, WeightDecay
from jaxddp.overrides import names_of, read_number
from jaxddp.registry import OPTIMIZERS, SCHEDULES, Requires
from jaxddp.sections.layers import Groups, assignments
from jaxddp.sections.train_section import BatchSize


@dataclass(frozen=True)
@SCHEDULES.complete
@OPTIMIZERS.complete
class OptimizerConfig:
    """The optimizer and its learning rate schedule."""

    name: str = "momentum"
    """Name of an optimizer in jaxddp/optimizers.py. An unknown name is an error that lists all names."""
    learning_rate: Factor = 0.1
    """Peak learning rate, for the batch size of this config, or for `reference_batch` if that is set."""
    schedule: str = "cosine"
    """Learning rate schedule after the warmup, by its name in jaxddp/schedules.py."""
    warmup: Duration = Duration.parse("5%")
    """Length of the linear warmup to the peak."""
    weight_decay: WeightDecay = 1e-4
    """Weight decay of kernels. Biases and the parameters of norms have none."""
    clip_norm: Positive | None = None
    """Clip the averaged gradient to this global norm."""
    reference_batch: BatchSize | None = None
    """Batch size for which `learning_rate` is given. If None, the batch size of this config."""
    scaling: Annotated[Literal["linear", "sqrt", "none"], Requires("optimizer.reference_batch")] = "linear"
    """How the learning rate scales with batch size / `reference_batch`: linearly, with its square root, or not at
    all."""
    groups: tuple[str, ...] = ()
    """Settings of single layers, such as "fc:rate=10,fc:decay=0,conv1:frozen=true": a factor of the learning rate, a
    weight decay, or no training. A layer is named by the beginning of its name; the longest match applies."""
    rate_factors: tuple[str, ...] = ()
    """Factors of the learning rate for single layers: "conv1=0.1,fc=10". A layer is named by the beginning of its name;
    the longest match applies."""
    layer_decay: SomeShare = 1.0
    """Layer-wise learning rate decay: the rate of each layer is this multiple of the rate of the next layer. The head
    has the full rate."""

    if TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any:
            """Return the value of a setting of a choice; see `Registry.complete`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate_factors", names_of(self.rate_factors))
        object.__setattr__(self, "groups", names_of(self.groups))

    @cached_property
    def factors(self) -> dict[str, float]:
        """The parsed `rate_factors`. Raises: InputError if the text is invalid."""
        factors = assignments(self.rate_factors, "optimizer.rate_factors")
        with about(Key("optimizer.rate_factors")):
            return {layer: read_number(value, Factor, layer) for layer, value in factors.items()}

    @cached_property
    def layer_settings(self) -> Groups:
        """The parsed `groups`. Raises: InputError if the text is invalid, or sets a rate that `rate_factors` sets."""
        groups = Groups.parse(self.groups, "optimizer.groups")
        groups.check_no_other_rates(self.factors, "optimizer.rate_factors", "optimizer.groups")
        return groups

    @cached_property
    def layer_rate_factors(self) -> dict[str, float]:
        """The learning rate factors of layers, from both keys. Raises: see `layer_settings`."""
        return self.factors | self.layer_settings.rates
