"""The keys of a config that have no effect unless another key has a certain value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxddp.core.message import Key, Words


@dataclass(frozen=True)
class Need:
    """What a key needs of another key.

    Attributes:
        key: the other key.
        values: one of these, or one of these in a list; where empty, any value but None, 0 and false.
    """

    key: str
    values: tuple[str, ...] = ()

    def is_met(self, value: Any) -> bool:
        """Whether a value of the other key is such a value."""
        if isinstance(value, list | tuple):
            return bool({*self.values} & {*value})
        return value in self.values if self.values else bool(value)

    def unmet(self, value: Any) -> Words:
        """Why a key has no effect, where the other key has this value, as a message goes on behind the key."""
        if isinstance(value, list | tuple):
            return " has no effect without ", " or ".join(self.values), " in ", Key(self.key)
        if self.values:
            return " has no effect with ", Key.plain(self.key, value)
        return " has no effect without ", Key(self.key)


NEEDS: Mapping[str, Need] = {
    "data.augment.border": Need("data.augment.pad"),
    "data.augment.rand_magnitude": Need("data.augment.rand_augment"),
    "data.crop_area": Need("data.crop", ("random_area",)),
    "data.grow_by": Need("data.grow_from"),
    "data.grow_end": Need("data.grow_from"),
    "data.grow_start": Need("data.grow_from"),
    "data.labels_seed": Need("data.labels_per_class"),
    "data.manifest": Need("data.verify", ("manifest",)),
    "data.max_bad_images": Need("data.bad_images", ("substitute",)),
    "log.guard_formulas": Need("log.to", ("confusion",)),
    "log.images": Need("log.to", ("tensorboard", "wandb", "mlflow")),
    "objective.strong_rand_magnitude": Need("objective.strong_rand_augment"),
    "optimizer.nesterov": Need("optimizer.momentum"),
    "optimizer.scaling": Need("optimizer.reference_batch"),
    "train.ema_every": Need("train.ema"),
    "train.ema_warmup": Need("train.ema"),
    "train.lookahead_decay": Need("train.lookahead"),
    "train.stop_min_gain": Need("train.stop_after"),
}
"""By key. The loggers' own keys, such as `log.project`, are checked by `LogConfig.check`."""
