"""What numbers an augmentation takes."""

import math

from jaxddp.errors import InputError


def check_bound(key: str, value: float, most: float, meaning: str) -> None:
    """Raises `InputError` where `data.augment.KEY` is not a finite number in 0..most; `meaning` says what it is."""
    if not 0 <= value <= most or value == math.inf:
        numbers = "0 (none) or a positive number" if most == math.inf else f"0 to {most}"
        raise InputError(f"data.augment.{key}={value!r}: expected {numbers}, {meaning}")
