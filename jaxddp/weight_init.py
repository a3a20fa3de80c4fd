"""Parse `model.weight_init`, the initial distribution of a network's kernels."""

import math
import re
from dataclasses import dataclass

from jaxddp.core.errors import InputError, Key
from jaxddp.core.ranges import Range, real_number
from jaxddp.core.wording import choices, show

_FAMILIES = ("he", "xavier", "glorot", "lecun")
_NAMES = (*(f"{family}_{kind}" for family in _FAMILIES for kind in ("normal", "uniform")), "orthogonal", "zeros")
_NAMES_WITH_DEVIATION = ("normal", "truncated_normal")
_DEFAULT_DEVIATION = 0.01
_PATTERN = re.compile(rf"({'|'.join(_NAMES_WITH_DEVIATION)})\(([^()]*)\)")
_DEVIATIONS = Range(0, 100, above=True)


@dataclass(frozen=True)
class WeightInit:
    """The name of a distribution, and for "normal" and "truncated_normal" its standard deviation."""

    name: str = "he_normal"
    deviation: float | None = None

    @classmethod
    def parse(cls, text: str) -> "WeightInit":
        """Parse a name such as "he_normal", "normal" (deviation 0.01) or "normal(0.02)".

        Raises:
            InputError: the name is unknown (the message names the nearest), or the deviation is invalid.
        """
        if text in _NAMES:
            return cls(text)
        if text in _NAMES_WITH_DEVIATION:
            return cls(text, _DEFAULT_DEVIATION)
        if (match := _PATTERN.fullmatch(text)) is None:
            names = (*_NAMES, *(f"{name}(0.02)" for name in _NAMES_WITH_DEVIATION))
            raise InputError(
                Key("model.weight_init"), f": unknown weight_init {show(text)}", advice=choices(text, names)
            )
        try:
            deviation = real_number(match[2])
        except ValueError:
            deviation = math.nan
        if deviation not in _DEVIATIONS:
            advice = f"expected a standard deviation, {_DEVIATIONS}, as in {match[1]}(0.02)"
            raise InputError(Key("model.weight_init", text), ": ", advice)
        return cls(match[1], deviation)
