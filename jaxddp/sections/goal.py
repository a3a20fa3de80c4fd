"""By what the validations of a run are compared: which metric, whether less of it is better, and how it is smoothed."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.ranges import Decay
from jaxddp.core.wording import choices
from jaxddp.overrides import checked

T = TypeVar("T")

VAL, VAL_EMA = "val", "val_ema"
"""What a validation measures: the trained parameters, or what evaluation has in place of them; and beside them an
average."""
_SPLITS = (VAL, VAL_EMA)
_SIDES = {"min": True, "max": False}
_LESS_IS_BETTER = ("loss", "ece")


class Mean(NamedTuple):
    """An exponential mean of values, corrected for its begin as Adam's are (Kingma & Ba 2015, arXiv:1412.6980)."""

    total: float = 0.0
    weight: float = 0.0

    def and_then(self, value: float, smoothing: float) -> "Mean":
        """The mean that follows: the share `smoothing` of it is this one's."""
        return Mean(*(smoothing * old + (1 - smoothing) * new for old, new in zip(self, (value, 1.0), strict=True)))

    @property
    def value(self) -> float:
        return self.total / self.weight


@dataclass(frozen=True)
class Goal:
    """What makes one validation of a run better than another.

    Attributes:
        metric: among `flat` ones, such as "top1", or "val_ema loss" of the averaged parameters.
        lowest: whether less is better.
        smoothing: 0 <= smoothing < 1, of the exponential mean over the validations so far that stands for a value.
    """

    metric: str = "top1"
    lowest: bool = False
    smoothing: float = 0.0

    @classmethod
    def parse(cls, name: str, side: str | None, smoothing: float) -> "Goal":
        """Of what `checkpoint.best` and its like say: "val top1"; "min", "max" or None, which goes by the name.

        Raises: InputError; no split or no metric.
        """
        split, _, metric = name.partition(" ")
        if split not in _SPLITS or not metric or " " in metric:
            raise InputError(Key("checkpoint.best", name), ': give a split and a metric, "val top1" or "val_ema loss"')
        lowest = metric in _LESS_IS_BETTER if side is None else _SIDES[side]
        return cls(metric if split == VAL else name, lowest, smoothing)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Goal":
        """The inverse of `plain`. Raises: ValueError, KeyError, TypeError or AttributeError; it is something else."""
        return cls.parse(plain["best"], plain["is"], checked(plain["smoothing"], Decay, "smoothing"))

    def plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {"best": self.name, "is": "min" if self.lowest else "max", "smoothing": self.smoothing}

    @property
    def name(self) -> str:
        """The metric with its split, as people give it: "val top1"."""
        return named(self.metric)

    def better(self, value: float, other: float, by: float = 0.0) -> bool:
        """Whether a value is better than another, and by more than so much."""
        return value < other - by if self.lowest else value > other + by

    def values(self, measured: Iterable[float]) -> list[float]:
        """What is compared of these values of the metric, in their order: the mean that each is the last of."""
        means = itertools.accumulate(measured, lambda mean, value: mean.and_then(value, self.smoothing), initial=Mean())
        return [mean.value for mean in itertools.islice(means, 1, None)]

    def best(self, values: Sequence[float]) -> int:
        """The place of the best of some values, at least one; of equal ones the last."""
        sign = -1 if self.lowest else 1
        return max(range(len(values)), key=lambda place: (sign * values[place], place))

    def check(self, known: Iterable[str]) -> None:
        """Raises `InputError` where the metric is none of those known, `flat` ones; says which there are."""
        names = [named(metric) for metric in known if metric != "count"]
        if self.name not in names:
            raise InputError(Key("checkpoint.best", self.name), " is not measured", advice=choices(self.name, names))


def flat(measured: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The metrics of all splits of a validation by one name each: "top1" and "val_ema top1"."""
    found = dict(measured[VAL])
    for split, metrics in measured.items():
        if split != VAL:
            found |= {f"{split} {name}": value for name, value in metrics.items() if name != "count"}
    return found


def by_split(metrics: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """The inverse of `flat`."""
    found: dict[str, dict[str, T]] = {VAL: {}}
    for name, value in metrics.items():
        split, _, metric = named(name).partition(" ")
        found.setdefault(split, {})[metric] = value
    return found


def named(metric: str) -> str:
    """A `flat` metric with its split: "val top1", or "val_ema top1"."""
    return metric if " " in metric else f"{VAL} {metric}"
