"""The `optimizer` section of a config: the optimizer, its learning rate and its schedule."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from jaxddp.core.duration import Duration
from jaxddp.core.errors import Key, about
from jaxddp.core.ranges import Decay, Factor, HeldOut, Period, Positive, Range, Share, SomeShare, WeightDecay
from jaxddp.overrides import names_of, read_number
from jaxddp.sections.layers import Groups, assignments
from jaxddp.sections.train_section import BatchSize

Power = Annotated[float, Range(0, 100, above=True)]


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate schedule."""

    # A key that only some optimizers or schedules read is None by default; each of these has its own default.

    name: str = "momentum"
    """Name of an optimizer in jaxddp/optimizers/. An unknown name is an error that lists all names."""
    learning_rate: Factor = 0.1
    """Peak learning rate, for the batch size of this config, or for `reference_batch` if that is set."""
    schedule: str = "cosine"
    """Learning rate schedule after the warmup, by its name in jaxddp/schedules/."""
    warmup: Duration = field(default_factory=lambda: Duration.parse("5%"))
    """Length of the linear warmup to the peak."""
    weight_decay: WeightDecay = 1e-4
    """Weight decay of kernels. Biases and the parameters of norms have none."""
    momentum: Decay | None = None
    """Momentum of SGD and similar optimizers; beta 1 of Adam and similar optimizers."""
    nesterov: bool | None = None
    """Whether to use Nesterov momentum."""
    beta2: Decay | None = None
    """Decay of the mean of squared gradients."""
    epsilon: Share | None = None
    """Small constant that prevents division by zero."""
    trust_coefficient: SomeShare | None = None
    """LARS: at a learning rate of 1, each layer changes by this fraction of its norm."""
    step_at: tuple[Share, ...] | None = None
    """Schedule "step": the fractions of the run at which the rate is multiplied by `step_factor`."""
    step_factor: Share | None = None
    """Schedule "step": the factor applied at each step of the schedule."""
    end_factor: Share | None = None
    """Schedules "cosine", "linear", "polynomial" and "wsd": the last learning rate as a fraction of the peak. Schedule
    "plateau": the lowest rate as a fraction of the peak."""
    power: Power | None = None
    """Schedule "polynomial": the exponent; 1 is a straight line."""
    decay_share: Share | None = None
    """Schedule "wsd": the fraction of the run, at its end, over which the rate decays."""
    plateau_factor: HeldOut | None = None
    """Schedule "plateau": the factor applied when the validation loss stops improving."""
    plateau_patience: Period | None = None
    """Schedule "plateau": the number of validations without improvement before the rate is reduced."""
    clip_norm: Positive | None = None
    """Clip the averaged gradient to this global norm."""
    reference_batch: BatchSize | None = None
    """Batch size for which `learning_rate` is given. If None, the batch size of this config."""
    scaling: Literal["linear", "sqrt", "none"] = "linear"
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
