"""A setup whose run gets another length than it was prepared for."""

from jaxddp.config import Config
from jaxddp.errors import InputError


def check_length(before: Config, after: Config) -> None:
    """Raises `InputError` where something happens at the end or after a share of a run whose length was changed."""
    if before.train.duration == after.train.duration:
        return
    if before.train.lookahead is not None:
        raise InputError(
            f"train.lookahead: a run of {before.train.duration} ends on the slow weights, and this one is of "
            f"{after.train.duration}; give prepare_training its length"
        )
    shares = {f"model.unfreeze: {layer}": duration for layer, duration in before.model.thawed.items()}
    if before.data.grow_from is not None:
        shares |= {"data.grow_start": before.data.grow_start, "data.grow_end": before.data.grow_end}
    for key, duration in shares.items():
        if duration.unit == "%":
            raise InputError(
                f"{key}={duration} is of a run of {before.train.duration}, and this one is of "
                f"{after.train.duration}; give prepare_training its length, or say epochs or steps"
            )
