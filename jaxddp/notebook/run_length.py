"""A setup whose run gets another length than it was prepared for."""

from jaxddp.config import Config
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key, Words


def check_length(before: Config, after: Config) -> None:
    """Raises `InputError` where something happens at the end or after a share of a run whose length was changed."""
    if before.train.duration == after.train.duration:
        return
    if before.train.lookahead is not None:
        raise InputError(
            Key("train.lookahead"),
            f": a run of {before.train.duration} ends on the slow weights, and this one is of {after.train.duration}",
            advice="give prepare_training its length",
        )
    thawed = before.model.thawed.items()
    shares: list[tuple[Words, Duration]] = [((Key("model.unfreeze"), f": {layer}="), each) for layer, each in thawed]
    if before.data.grow_from is not None:
        shares += [((Key(f"data.{key}"), "="), getattr(before.data, key)) for key in ("grow_start", "grow_end")]
    for key, duration in shares:
        if duration.unit == "%":
            raise InputError(
                key,
                f"{duration} is of a run of {before.train.duration}, and this one is of {after.train.duration}",
                advice="give prepare_training its length, or say epochs or steps",
            )
