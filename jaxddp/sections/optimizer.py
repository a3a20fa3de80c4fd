"""The part of a config that says how parameters follow from gradients: the optimizer and its schedule."""

from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Literal

from jaxddp.duration import Duration
from jaxddp.layers import Groups, assignments, factor
from jaxddp.overrides import names_of
from jaxddp.ranges import Range, Share
from jaxddp.sections.training import BatchSize

Decay = Annotated[float, Range(0, 1, below=True)]


@dataclass(frozen=True)
class Numbers:
    """The keys that a config may leave to its optimizer, and what most optimizers have there."""

    momentum: float = 0.9
    nesterov: bool = True
    beta2: float = 0.999
    epsilon: float = 1e-8


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule; batch norm and biases are never decayed.

    Which of these keys an optimizer or a schedule reads is said beside it, in jaxddp/optimizers and jaxddp/schedules.
    """

    name: str = "momentum"
    """Of an optimizer of jaxddp/optimizers/; another name is answered by the list of them."""
    learning_rate: Annotated[float, Range(0, 1_000_000)] = 0.1
    """The peak, for the global batch size of this config, or for `reference_batch`."""
    schedule: str = "cosine"
    """How the rate falls from the peak: by name, of jaxddp/schedules/."""
    warmup: Duration = field(default_factory=lambda: Duration.parse("5%"))
    """How long the rate rises to the peak, along a straight line."""
    momentum: Decay | None = None
    """Momentum of SGD and its kin, beta 1 of Adam and its kin. The optimizer's own where absent: 0 of "sgd" and
    "rmsprop", 0.9 of all others."""
    nesterov: bool | None = None
    """Whether momentum is Nesterov's. The optimizer's own where absent: not of "sgd" and "rmsprop"."""
    beta2: Decay | None = None
    """The decay of the mean of squared gradients. The optimizer's own where absent: 0.99 of "rmsprop", 0.999 of
    others."""
    weight_decay: Annotated[float, Range(0, 100)] = 1e-4
    """Of kernels; batch norms and biases have none."""
    step_at: tuple[Share, ...] = (1 / 3, 2 / 3, 8 / 9)
    """Schedule "step": the shares of the run at which the rate is multiplied by step_factor."""
    step_factor: Share = 0.1
    """Schedule "step": what the rate is multiplied by at each of them."""
    end_factor: Share = 0.0
    """Schedules "linear", "polynomial" and "wsd": the share of the peak at which the run ends; "plateau": the least."""
    plateau_factor: Annotated[float, Range(0, 1, above=True, below=True)] = 0.1
    """Schedule "plateau": what the rate is multiplied by where the validation loss has stopped falling."""
    plateau_patience: Annotated[int, Range(1, 1_000_000)] = 10
    """Schedule "plateau": after so many validations without gain in the validation loss."""
    rate_factors: tuple[str, ...] = ()
    """What multiplies the learning rate of layers: "conv1=0.1,fc=10". Of several that begin a name, the longest."""
    layer_decay: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Each layer's rate is this multiple of the next one's, the head's being the learning rate."""
    epsilon: Share | None = None
    """What keeps a division from one by zero; the optimizer's own where absent."""
    trust_coefficient: Annotated[float, Range(0, 1, above=True)] = 0.001
    """Optimizer "lars": the share of its norm by which a layer changes at a learning rate of 1."""
    groups: tuple[str, ...] = ()
    """What layers have of their own: "fc:rate=10,fc:decay=0,conv1:frozen=true", a multiple of the learning rate, a
    weight decay in place of `weight_decay`, no training. Of several that begin a name, the longest."""
    clip_norm: Annotated[float, Range(0, 1_000_000, above=True)] | None = None
    """Scale the averaged gradient down to this norm, over all of its arrays, where it is longer."""
    power: Annotated[float, Range(0, 100, above=True)] = 2.0
    """Schedule "polynomial": 1 is a straight line."""
    decay_share: Share = 0.2
    """Schedule "wsd": the share of the run, at its end, over which the rate falls."""
    reference_batch: BatchSize | None = None
    """The global batch size for which `learning_rate` is given; this config's where absent."""
    scaling: Literal["linear", "sqrt", "none"] = "linear"
    """How the rate follows the batch size from `reference_batch`: by their quotient, its square root, or not at all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate_factors", names_of(self.rate_factors))
        object.__setattr__(self, "groups", names_of(self.groups))

    def numbers(self, own: Numbers = Numbers()) -> Numbers:
        """What the config says, and an optimizer's own numbers where it says nothing."""
        given = {key: getattr(self, key) for key in asdict(own)}
        return replace(own, **{key: value for key, value in given.items() if value is not None})

    @property
    def factors(self) -> dict[str, float]:
        """What `rate_factors` says. Raises: InputError; it says nothing."""
        found = assignments(self.rate_factors, "optimizer.rate_factors")
        return {layer: factor(value, f"optimizer.rate_factors: {layer}") for layer, value in found.items()}

    @property
    def own(self) -> Groups:
        """What `groups` says. Raises: InputError; it says nothing, or a rate that `rate_factors` says too."""
        found = Groups.parse(self.groups, "optimizer.groups")
        found.check_apart(self.factors, "optimizer.rate_factors", "optimizer.groups")
        return found

    @property
    def rates(self) -> dict[str, float]:
        """What multiplies the learning rate of layers, by either key. Raises: InputError; as `own`."""
        return self.factors | self.own.rates
