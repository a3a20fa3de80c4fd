"""The config: one tree of frozen dataclasses, a section each, says what a run is."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jaxddp.choices import given_way
from jaxddp.core.ranges import Seed
from jaxddp.overrides import check_values, flatten, plain, replaced
from jaxddp.sections.data_section import DataConfig
from jaxddp.sections.eval_section import CheckpointConfig, EvalConfig
from jaxddp.sections.layers import Layers
from jaxddp.sections.log_section import LogConfig
from jaxddp.sections.loss_section import LossConfig
from jaxddp.sections.model_section import ModelConfig
from jaxddp.sections.objective_section import ObjectiveConfig
from jaxddp.sections.optimizer_section import OptimizerConfig
from jaxddp.sections.parallel_section import ParallelConfig
from jaxddp.sections.train_section import TrainConfig


@dataclass(frozen=True)
class Config:
    """Everything that decides a run.

    Raises:
        InputError: a value of another type than its field's, or out of its range.
    """

    # Whether a resumed run may change a key, `FREE` of jaxddp/training/checkpoints/run_identity.py says.

    seed: Seed = 0
    """Of all that is random: the initial parameters, the order of examples, augmentation, dropout."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        check_values(self)
        # What is written in a form of its own is read here, once, so that a mistake is said before anything starts.
        _ = self.model.batch_statistics, self.model.new, self.model.frozen, self.model.thawed, self.optimizer.rates
        _ = self.loss.weights, self.checkpoint.goal, self.data.area

    @cached_property
    def frozen(self) -> Layers:
        """The layers that are not trained, by `model.freeze` or by `optimizer.groups`."""
        return replace(self.model.frozen, also=self.optimizer.own.frozen)

    @cached_property
    def settled(self) -> Layers:
        """The layers whose batch norms keep their running statistics."""
        return replace(self.frozen, also=(*self.frozen.also, *self.model.thawed))

    def replace(self, **changes: Any) -> "Config":
        """A copy with the given keys changed: `config.replace(seed=1, train={"duration": "10 epochs"})`.

        Where a choice is named, such as an optimizer, the keys that it does not read are left to it, unless they are
        given here, too: `config.replace(optimizer={"name": "adamw"})` has nothing of another one's `trust_coefficient`.

        Raises:
            InputError: an unknown key (the nearest right one is named), or a value of another type or out of range.
        """
        return given_way(replaced(self, changes), flatten(changes))

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as config.json holds them; `Config().replace(**d)` is its inverse."""
        return plain(self)
