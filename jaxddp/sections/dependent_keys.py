"""Keys of a config that have an effect only if another key has a certain value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxddp.core.errors import Key, Words


@dataclass(frozen=True)
class Requirement:
    """The key that a dependent key needs, and the values that the needed key must have.

    Attributes:
        key: the needed key.
        values: the values that meet the requirement; a list meets it by containing one of these values. If empty, any
            value except None, 0 and False meets the requirement.
    """

    key: str
    values: tuple[str, ...] = ()

    def is_met(self, value: Any) -> bool:
        """Return whether a value of the needed key meets the requirement."""
        if isinstance(value, list | tuple):
            return bool({*self.values} & {*value})
        return value in self.values if self.values else bool(value)

    def reason_unmet(self, value: Any) -> Words:
        """Return the text that follows the dependent key in a message, for this value of the needed key."""
        if isinstance(value, list | tuple):
            return " has no effect without ", " or ".join(self.values), " in ", Key(self.key)
        if self.values:
            return " has no effect with ", Key.plain(self.key, value)
        return " has no effect without ", Key(self.key)


NEEDS: Mapping[str, Requirement] = {
    "data.augment.border": Requirement("data.augment.pad"),
    "data.augment.erase_area": Requirement("data.augment.erase"),
    "data.augment.erase_fill": Requirement("data.augment.erase"),
    "data.augment.rand_deviation": Requirement("data.augment.rand_augment"),
    "data.augment.rand_magnitude": Requirement("data.augment.rand_augment"),
    "data.augment.rand_operations": Requirement("data.augment.rand_augment"),
    "data.augment.rand_probability": Requirement("data.augment.rand_augment"),
    "data.crop_area": Requirement("data.crop", ("random_area",)),
    "data.grow_by": Requirement("data.grow_from"),
    "data.grow_end": Requirement("data.grow_from"),
    "data.grow_start": Requirement("data.grow_from"),
    "data.labels_seed": Requirement("data.labels_per_class"),
    "data.manifest": Requirement("data.verify", ("manifest",)),
    "data.max_bad_images": Requirement("data.bad_images", ("substitute",)),
    "log.guard_formulas": Requirement("log.to", ("confusion",)),
    "log.images": Requirement("log.to", ("tensorboard", "wandb", "mlflow")),
    "objective.strong_rand_magnitude": Requirement("objective.strong_rand_augment"),
    "optimizer.nesterov": Requirement("optimizer.momentum"),
    "optimizer.scaling": Requirement("optimizer.reference_batch"),
    "parallel.groups": Requirement("train.sync_every"),
    "train.ema_every": Requirement("train.ema"),
    "train.ema_warmup": Requirement("train.ema"),
    "train.lookahead_decay": Requirement("train.lookahead"),
    "train.outer_rate": Requirement("train.outer_optimizer", ("nesterov",)),
    "train.outer_momentum": Requirement("train.outer_optimizer", ("nesterov",)),
    "train.outer_optimizer": Requirement("train.sync_every"),
    "train.stop_min_gain": Requirement("train.stop_after"),
}
"""The requirement of each key that needs another key. `LogConfig.check` checks the loggers' keys, such as
`log.project`."""
