"""The metrics of a recipe, which the config names or the user provides."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxddp.config import Config
from jaxddp.config.registry import METRICS
from jaxddp.core.errors import InputError, Key, Words
from jaxddp.core.wording import kind_of
from jaxddp.data.labels import LabelKind
from jaxddp.engine.example_loss import check_metric
from jaxddp.engine.objective import Metric, SetMetric, check_set_metric, is_set_metric
from jaxddp.engine.parts.guard import GRADIENT_NORM, LOSS_SCALE, SKIPPED
from jaxddp.training.listeners.notifier import OptionalLogger

_RESERVED = (
    *("loss", "step", "epoch", "split", "count", "seconds", "learning_rate", "images_per_second", "substituted"),
    *("data_wait_fraction", "flops_utilization", "peak_memory", "image_size", GRADIENT_NORM, LOSS_SCALE, SKIPPED),
)
"""Names that metrics.jsonl uses for other values. Names that begin with `epoch_` are reserved, too."""
_NAME = re.compile(r"(?!epoch_)[\w.-]+")


def configured_metrics(config: Config, labels: LabelKind) -> dict[str, Metric | SetMetric]:
    """Return the metrics that a config names, except metrics that need more classes than the data have.

    Raises: InputError if a metric takes one label per example and the data have several, or the reverse.
    """
    named = {name: METRICS.get(name) for name in config.eval.metrics}
    for name in named:
        others = ", ".join(other for other in METRICS.names() if _supports(METRICS.get(other), labels))
        _check_supported(name, Key("eval.metrics"), f"name some of {others}", labels)
    return {name: metric for name, metric in named.items() if labels.num_classes >= getattr(metric, "min_classes", 1)}


def with_user_metrics(
    configured: Mapping[str, Metric | SetMetric],
    user_metrics: Any,
    where: str,
    labels: LabelKind,
) -> dict[str, Metric | SetMetric]:
    """Return the config's and the user's metrics. A metric of the user replaces the config's metric of the same name.

    Args:
        user_metrics: a dict of names to functions like the entries of `METRICS`.
        where: names the hook or the argument in messages.

    Raises: InputError if `user_metrics` is no such dict, or two metrics return a value of the same name.
    """
    if not isinstance(user_metrics, Mapping):
        raise InputError(f"{where}: {kind_of(user_metrics)} was given; give a dict of name to function")
    metrics = {**configured, **user_metrics} if user_metrics else {}
    metric_of_value: dict[str, str] = {}
    for name, metric in metrics.items():
        check_name(name, where)
        if is_set_metric(metric):
            value_names = check_set_metric(metric, f"{where}: {name}", labels)
        else:
            check_metric(metric, f"{where}: {name}", labels)
            value_names = (name,)
        for value_name in value_names:
            check_name(value_name, f"{where}: {name}")
            if value_name in metric_of_value:
                raise InputError(
                    f"{where}: {metric_of_value[value_name]} and {name} both measure {value_name!r}; rename one of them"
                )
            metric_of_value[value_name] = name
    return {**configured, **user_metrics}


def check_requested_metrics(listeners: Iterable[Any], labels: LabelKind) -> None:
    """Raise `InputError` if a listener requests a metric that does not fit the labels of the data."""
    for listener in listeners:
        is_logger = isinstance(listener, OptionalLogger)
        where = (Key("log.to"), f": {listener.name}") if is_logger else type(listener).__name__
        for name in getattr(listener, "wants_metrics", ()):
            _check_supported(name, (where, ": its metric"), "leave it out", labels)


def _check_supported(name: str, where: Words, advice: str, labels: LabelKind) -> None:
    if not _supports(METRICS.get(name), labels):
        in_data, supported = ("several", "one label") if labels.several else ("one", "several labels")
        raise InputError(where, f": {name} takes {supported} per image, but the data have {in_data}", advice=advice)


def _supports(metric: Any, labels: LabelKind) -> bool:
    """Return whether a built-in metric supports these labels.

    A metric declares its support by the attributes `takes_several` (default False) and `takes_one` (default True).
    """
    return getattr(metric, "takes_several", False) if labels.several else getattr(metric, "takes_one", True)


def check_name(name: Any, where: str) -> None:
    """Raise `InputError` if a name is not allowed for a metric. `where` names the hook or the argument."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
        raise InputError(f"{where}: {name!r} cannot be the name of a metric; give another")
