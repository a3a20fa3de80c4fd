"""What a run trains: the objects that decide its numbers, but for its data and its devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import optax

from jaxddp.augment.preprocess import Augmentation
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.wording import kind_of
from jaxddp.engine.example_loss import ExampleLoss
from jaxddp.engine.initial_state import Transform
from jaxddp.engine.parts.part import Part
from jaxddp.engine.set_metrics import SetMetric
from jaxddp.engine.step_objective import Metric, Objective, TrainObjective, supervised
from jaxddp.models.interface import Model


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training's numbers, but for data and devices.

    Attributes:
        objective: makes what a step minimizes of the supervised objective, which has the loss.
        eval_loss: what evaluation calls the loss: without label smoothing, which is a device of training, and with
            the weights of classes.
        metrics: measured beside the loss, by name.
        augmentation: of one image, after the config's.
        initialize: a transform of the fresh parameters.
        learning_rate: what the optimizer follows, to be shown; None where that is unknown.
        schedule: multiplies the optimizer's updates, as a function of the step (0 first).
    """

    config: Config = field(repr=False)
    model: Model
    optimizer: optax.GradientTransformation = field(repr=False)
    loss: ExampleLoss
    eval_loss: ExampleLoss
    objective: Callable[[Objective], TrainObjective] = supervised
    metrics: Mapping[str, Metric | SetMetric] = field(default_factory=dict)
    augmentation: Augmentation | None = None
    parts: tuple[Part, ...] = ()
    initialize: Transform | None = None
    learning_rate: optax.Schedule | None = None
    schedule: optax.Schedule | None = None

    def minimized(self, supervised: Objective) -> TrainObjective:
        """What a step minimizes. Raises: InputError; the recipe's objective made no function."""
        made = self.objective(supervised)
        if not callable(made):
            raise InputError(
                f"objective: it returned {kind_of(made)}; return a function (params, model_state, batch, …)"
            )
        return made
