"""The part of a config that says how parameters follow from gradients: the optimizer and its schedule."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from jaxddp.core.duration import Duration
from jaxddp.core.errors import about
from jaxddp.core.message import Key
from jaxddp.core.ranges import Decay, Factor, HeldOut, Period, Positive, Range, Share, SomeShare, WeightDecay
from jaxddp.overrides import names_of, read_number
from jaxddp.sections.layers import Groups, assignments
from jaxddp.sections.train_section import BatchSize

Power = Annotated[float, Range(0, 100, above=True)]


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule; batch norm and biases are never decayed."""

    # A key that only some optimizers or schedules read is None until it is said: they have their own value for it.

    name: str = "momentum"
    """Of an optimizer of jaxddp/optimizers/; another name is answered by the list of them."""
    learning_rate: Factor = 0.1
    """The peak, for the global batch size of this config, or for `reference_batch`."""
    schedule: str = "cosine"
    """How the rate falls from the peak: by name, of jaxddp/schedules/."""
    warmup: Duration = field(default_factory=lambda: Duration.parse("5%"))
    """How long the rate rises to the peak, along a straight line."""
    weight_decay: WeightDecay = 1e-4
    """Of kernels; batch norms and biases have none."""
    momentum: Decay | None = None
    """Momentum of SGD and its kin, beta 1 of Adam and its kin."""
    nesterov: bool | None = None
    """Whether momentum is Nesterov's."""
    beta2: Decay | None = None
    """The decay of the mean of squared gradients."""
    epsilon: Share | None = None
    """What keeps a division from one by zero."""
    trust_coefficient: SomeShare | None = None
    """Optimizer "lars": the share of its norm by which a layer changes at a learning rate of 1."""
    step_at: tuple[Share, ...] | None = None
    """Schedule "step": the shares of the run at which the rate is multiplied by step_factor."""
    step_factor: Share | None = None
    """Schedule "step": what the rate is multiplied by at each of them."""
    end_factor: Share | None = None
    """Schedules "linear", "polynomial" and "wsd": the share of the peak at which the run ends; "plateau": the least."""
    power: Power | None = None
    """Schedule "polynomial": 1 is a straight line."""
    decay_share: Share | None = None
    """Schedule "wsd": the share of the run, at its end, over which the rate falls."""
    plateau_factor: HeldOut | None = None
    """Schedule "plateau": what the rate is multiplied by where the validation loss has stopped falling."""
    plateau_patience: Period | None = None
    """Schedule "plateau": after so many validations without gain in the validation loss."""
    clip_norm: Positive | None = None
    """Scale the averaged gradient down to this norm, over all of its arrays, where it is longer."""
    reference_batch: BatchSize | None = None
    """The global batch size for which `learning_rate` is given; this config's where absent."""
    scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the rate follows the batch size from `reference_batch`: by their quotient, its square root, or not at all."""
    groups: tuple[str, ...] = ()
    """What layers have of their own: "fc:rate=10,fc:decay=0,conv1:frozen=true", a multiple of the learning rate, a
    weight decay in place of `weight_decay`, no training. Of several that begin a name, the longest."""
    rate_factors: tuple[str, ...] = ()
    """What multiplies the learning rate of layers: "conv1=0.1,fc=10". Of several that begin a name, the longest."""
    layer_decay: SomeShare = 1.0
    """Each layer's rate is this multiple of the next one's, the head's being the learning rate."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate_factors", names_of(self.rate_factors))
        object.__setattr__(self, "groups", names_of(self.groups))

    @cached_property
    def factors(self) -> dict[str, float]:
        """What `rate_factors` says. Raises: InputError; it says nothing."""
        found = assignments(self.rate_factors, "optimizer.rate_factors")
        with about(Key("optimizer.rate_factors")):
            return {layer: read_number(value, Factor, layer) for layer, value in found.items()}

    @cached_property
    def own(self) -> Groups:
        """What `groups` says. Raises: InputError; it says nothing, or a rate that `rate_factors` says too."""
        found = Groups.parse(self.groups, "optimizer.groups")
        found.check_apart(self.factors, "optimizer.rate_factors", "optimizer.groups")
        return found

    @cached_property
    def rates(self) -> dict[str, float]:
        """What multiplies the learning rate of layers, by either key. Raises: InputError; as `own`."""
        return self.factors | self.own.rates
