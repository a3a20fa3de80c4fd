"""The goal of a run: the metric, the direction and the smoothing by which its validations are compared."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from jaxddp.config.values import checked
from jaxddp.core.errors import InputError, Key, choices
from jaxddp.core.ranges import Decay

T = TypeVar("T")

VAL, VAL_EMA = "val", "val_ema"
"""The splits of a validation's metrics: of the trained and of the averaged parameters."""


class Mean(NamedTuple):
    """An exponential moving average with the bias correction of Adam (Kingma & Ba 2015, arXiv:1412.6980)."""

    total: float = 0.0
    weight: float = 0.0

    def with_value(self, value: float, smoothing: float) -> "Mean":
        """Return the average with a further value."""
        return Mean(*(smoothing * old + (1 - smoothing) * new for old, new in zip(self, (value, 1.0), strict=True)))

    @property
    def value(self) -> float:
        return self.total / self.weight


@dataclass(frozen=True)
class Goal:
    """The criterion by which one validation of a run is better than another.

    Attributes:
        metric: a metric as `flat` names it, such as "top1", or "val_ema loss" for the averaged parameters.
        lowest: whether lower is better.
        smoothing: 0 <= smoothing < 1, the decay of the exponential moving average that is compared.
    """

    metric: str = "top1"
    lowest: bool = False
    smoothing: float = 0.0

    @classmethod
    def parse(cls, name: str, best_is: str | None, smoothing: float) -> "Goal":
        """Parse the values of `checkpoint.best`, `checkpoint.best_is` and `checkpoint.best_smoothing`.

        Raises: InputError if `name` is not a split and a metric, such as "val top1".
        """
        split, _, metric = name.partition(" ")
        if split not in (VAL, VAL_EMA) or not metric or " " in metric:
            raise InputError(Key("checkpoint.best", name), ': give a split and a metric, "val top1" or "val_ema loss"')
        lowest = metric in ("loss", "ece", "mae") if best_is is None else {"min": True, "max": False}[best_is]
        return cls(metric if split == VAL else name, lowest, smoothing)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Goal":
        """Make a goal from the result of `plain`. Raises: ValueError, KeyError, TypeError or AttributeError."""
        return cls.parse(plain["best"], plain["is"], checked(plain["smoothing"], Decay, "smoothing"))

    def plain(self) -> dict[str, Any]:
        """Return the goal as a dict of JSON types."""
        return {"best": self.name, "is": "min" if self.lowest else "max", "smoothing": self.smoothing}

    @property
    def name(self) -> str:
        """The metric with its split: "val top1"."""
        return name_with_split(self.metric)

    def is_better(self, value: float, other: float, by: float = 0.0) -> bool:
        """Return whether `value` is better than `other` by more than `by`."""
        return value < other - by if self.lowest else value > other + by

    def values(self, measured: Iterable[float]) -> list[float]:
        """Return the compared values of a series of measurements: the moving average after each."""
        means = itertools.accumulate(measured, lambda mean, new: mean.with_value(new, self.smoothing), initial=Mean())
        return [mean.value for mean in itertools.islice(means, 1, None)]

    def best(self, values: Sequence[float]) -> int:
        """Return the index of the best value, the last of equal ones."""
        return max(range(len(values)), key=lambda index: (-values[index] if self.lowest else values[index], index))

    def check(self, known: Iterable[str]) -> None:
        """Raise `InputError` if the metric is not in `known`, whose names are in the format of `flat`."""
        names = [name_with_split(metric) for metric in known if metric != "count"]
        if self.name not in names:
            raise InputError(Key("checkpoint.best", self.name), " is not measured", advice=choices(self.name, names))


def flat(measured: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of all splits of a validation in one dict: "top1" and "val_ema top1"."""
    metrics_by_name = dict(measured[VAL])
    for split, metrics in measured.items():
        if split != VAL:
            metrics_by_name |= {f"{split} {name}": value for name, value in metrics.items() if name != "count"}
    return metrics_by_name


def of_exported(metrics: Mapping[str, T]) -> dict[str, T]:
    """Return the metrics of the parameters that predict and export use, averaged or not, from the result of `flat`."""
    averaged = {name.removeprefix(f"{VAL_EMA} "): value for name, value in metrics.items() if is_averaged(name)}
    return averaged | {name: value for name, value in metrics.items() if name == "count" or not averaged}


def is_averaged(name: str) -> bool:
    """Return whether a metric, with the name of `flat`, is that of averaged parameters."""
    return name.startswith(f"{VAL_EMA} ")


def name_with_split(metric: str) -> str:
    """Return the name of a `flat` metric with its split: "val top1" or "val_ema top1"."""
    return metric if " " in metric else f"{VAL} {metric}"
