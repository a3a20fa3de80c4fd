"""The recipe of a run: all objects that determine its result, except the data and the devices."""

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
from jaxddp.optimizers.kernels import BY_NAME, Kernels
from jaxddp.sections.goal import Goal


@dataclass(frozen=True)
class Recipe:
    """All objects that determine the result of a training, except the data and the devices.

    Attributes:
        loss: the loss of training.
        eval_loss: the loss of evaluation, with class weights and without label smoothing.
        objective: a function that takes the supervised objective, which includes the loss, and returns the function
            that a step minimizes.
        kernels: the kernels of the network.
        metrics: metrics in addition to the loss, by name.
        augmentation: a function that augments one image after the config's augmentation.
        parts: optional parts of the step.
        initialize: a function of the initial (params, model_state) that returns new ones.
        learning_rate: the schedule of the optimizer, for logs; None if it is unknown.
        schedule: a function of the step number, from 0. The optimizer's updates are multiplied by its result.
    """

    config: Config = field(repr=False)
    model: Model
    optimizer: optax.GradientTransformation = field(repr=False)
    loss: ExampleLoss
    eval_loss: ExampleLoss
    objective: Callable[[Objective], TrainObjective] = supervised
    kernels: Kernels = BY_NAME
    metrics: Mapping[str, Metric | SetMetric] = field(default_factory=dict)
    augmentation: Augmentation | None = None
    parts: tuple[Part, ...] = ()
    initialize: Transform | None = None
    learning_rate: optax.Schedule | None = None
    schedule: optax.Schedule | None = None

    @property
    def goal(self) -> Goal:
        """The metric, the direction and the smoothing by which validations are compared."""
        return self.config.checkpoint.goal(averages=any(part.beside for part in self.parts))

    def minimized(self, supervised: Objective) -> TrainObjective:
        """Return the function that a step minimizes. Raises: InputError if the objective returned no function."""
        train_objective = self.objective(supervised)
        if not callable(train_objective):
            raise InputError(
                f"objective: it returned {kind_of(train_objective)}; return a function (params, model_state, batch, …)"
            )
        return train_objective
