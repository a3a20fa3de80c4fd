"""The whole config of a run: a frozen dataclass with one field for each section."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jaxddp.config.training_section as training
from jaxddp.config.data_section import DataConfig
from jaxddp.config.layers import Layers
from jaxddp.config.model_section import LossConfig, ModelConfig, ObjectiveConfig
from jaxddp.config.registry import reset_unread
from jaxddp.config.values import check_values, flatten, plain, replaced
from jaxddp.core.ranges import Seed


@dataclass(frozen=True)
class Config:
    """All settings of a run.

    Raises:
        InputError: a value has the wrong type or is out of range.
    """

    # `MAY_CHANGE` in jaxddp/training/checkpoints/integrity.py lists the keys that a resumed run may change.

    seed: Seed = 0
    """Seed of all random values: the initial parameters, the order of examples, augmentation and dropout."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: training.TrainConfig = field(default_factory=training.TrainConfig)
    optimizer: training.OptimizerConfig = field(default_factory=training.OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    eval: training.EvalConfig = field(default_factory=training.EvalConfig)
    checkpoint: training.CheckpointConfig = field(default_factory=training.CheckpointConfig)
    log: training.LogConfig = field(default_factory=training.LogConfig)
    parallel: training.ParallelConfig = field(default_factory=training.ParallelConfig)

    def __post_init__(self) -> None:
        check_values(self)
        # Parse the values that have a special syntax, to report invalid values before the run starts.
        _ = self.model.batch_statistics, self.model.fresh_layers, self.model.frozen, self.model.unfreeze_times
        _ = self.optimizer.layer_rate_factors
        _ = self.loss.weights, self.checkpoint.goal(averages=False), self.parallel.division

    @cached_property
    def frozen(self) -> Layers:
        """The layers that are not trained, because of `model.freeze` or their own settings."""
        return replace(self.model.frozen, additional=self.optimizer.layer_settings.frozen)

    @cached_property
    def frozen_norms(self) -> Layers:
        """The layers whose batch norms keep their running statistics: the layers of `frozen` and `model.unfreeze`."""
        return replace(self.frozen, additional=(*self.frozen.additional, *self.model.unfreeze_times))

    def replace(self, **changes: Any) -> "Config":
        """Return a copy with some keys changed: `config.replace(seed=1, train={"duration": "10 epochs"})`.

        Keys that have no effect with the new values get their defaults back, unless they are changed, too:
        `config.replace(optimizer={"name": "adamw"})` drops LARS's `trust_coefficient`.

        Raises:
            InputError: a key is unknown (the message suggests the nearest one), or a value has the wrong type or is out
                of range.
        """
        keys = flatten(changes).keys()
        config = reset_unread(replaced(self, changes), keys)
        vars(config)["replaced_keys"] = self.replaced_keys | keys
        return config

    @cached_property
    def replaced_keys(self) -> frozenset[str]:
        """The keys that calls of `replace` have set since the config was created or loaded, also to the same value."""
        return frozenset()

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts of JSON types, as in config.json. `Config().replace(**d)` is the inverse."""
        return plain(self)
