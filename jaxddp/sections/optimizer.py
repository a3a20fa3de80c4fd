"""The part of a config that says how parameters follow from gradients: the optimizer and its schedule."""

from dataclasses import dataclass, field
from typing import Annotated

from jaxddp.duration import Duration
from jaxddp.layers import assignments, factor
from jaxddp.overrides import names_of
from jaxddp.ranges import Range, Share

Decay = Annotated[float, Range(0, 1, below=True)]


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule; batch norm and biases are never decayed."""

    name: str = "momentum"
    learning_rate: Annotated[float, Range(0, 1_000_000)] = 0.1
    """The peak, for the global batch size of this config."""
    schedule: str = "cosine"
    warmup: Duration = field(default_factory=lambda: Duration.parse("5%"))
    momentum: Decay = 0.9
    nesterov: bool = True
    beta2: Decay = 0.999
    weight_decay: Annotated[float, Range(0, 100)] = 1e-4
    step_at: tuple[Share, ...] = (1 / 3, 2 / 3, 8 / 9)
    """Schedule "step": the shares of the run at which the rate is multiplied by step_factor."""
    step_factor: Share = 0.1
    end_factor: Share = 0.0
    """Schedule "linear": the share of the peak at which the run ends; "plateau": the least share."""
    plateau_factor: Annotated[float, Range(0, 1, above=True, below=True)] = 0.1
    plateau_patience: Annotated[int, Range(1, 1_000_000)] = 10
    """Schedule "plateau": after so many validations without gain in the validation loss the rate is multiplied by
    plateau_factor."""
    rate_factors: tuple[str, ...] = ()
    """What multiplies the learning rate of layers: "conv1=0.1,fc=10". Of several that begin a name, the longest."""
    layer_decay: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Each layer's rate is this multiple of the next one's, the head's being the learning rate."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate_factors", names_of(self.rate_factors))

    @property
    def factors(self) -> dict[str, float]:
        """What `rate_factors` says. Raises: InputError; it says nothing."""
        found = assignments(self.rate_factors, "optimizer.rate_factors")
        return {layer: factor(value, f"optimizer.rate_factors: {layer}") for layer, value in found.items()}
