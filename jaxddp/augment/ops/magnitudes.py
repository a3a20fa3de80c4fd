"""Operations with a magnitude, as rows of a table of parameters from which a policy draws.

A row holds the integer parameters of one operation with one magnitude and one direction. NumPy computes the table when
the step is traced, so a draw on the device is a random index into a table, and is exact.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.augment.ops.apply import operate
from jaxddp.augment.ops.pixel_operation import ONE, PixelOperation, number_of

Size = tuple[int, int]
"""(height, width) of an image, in pixels."""


class Space(NamedTuple):
    """The magnitudes of one operation from which a policy draws.

    The units are: shear: pixels for each pixel; translate: pixels; rotate: degrees; posterize: the number of upper bits
    that are kept; solarize: the lowest value that is inverted; solarize_add: the added value; blends: the distance of
    the factor from 1.

    Attributes:
        magnitudes: float64[n].
        is_signed: whether the opposite of a magnitude is equally likely.
    """

    magnitudes: np.ndarray
    is_signed: bool


IDENTITY = (number_of("identity"), ONE, 0, 0, 0, 0, 0, 256, 0, ONE, 0)
"""The parameters that do not change an image."""


def row(name: str, magnitude: float) -> tuple[int, ...]:
    """Return the parameters of an operation, in the order of the fields of `PixelOperation`.

    Args:
        name: a name of `OPERATIONS`, "solarize_add" or "invert".
        magnitude: in the unit of `Space`; negative for the opposite direction. A positive translation moves the image
            to the right or down, as in torchvision.
    """
    if name == "invert":
        name, magnitude = "solarize", 0
    changed: dict[str, int] = {"operation": number_of(name)}
    if name == "rotate":
        angle = math.radians(magnitude)
        changed |= {"cos": round(ONE * math.cos(angle)), "sin": round(ONE * math.sin(angle))}
    elif name in ("shear_x", "shear_y"):
        changed[name] = round(ONE * magnitude)
    elif name in ("translate_x", "translate_y"):
        changed[name] = -int(magnitude)
    elif name == "solarize":
        changed["threshold"] = math.ceil(magnitude)
    elif name == "solarize_add":
        changed["added"] = round(magnitude)
    elif name == "posterize":
        changed["dropped"] = 8 - round(magnitude)
    elif name in ("color", "contrast", "brightness", "sharpness"):
        changed["factor"] = ONE + round(ONE * magnitude)
    values = dict(zip(PixelOperation._fields, IDENTITY, strict=True)) | changed
    return tuple(values[field] for field in PixelOperation._fields)


def rows(space: Mapping[str, Space], name: str) -> list[list[tuple[int, ...]]]:
    """Return the parameters of an operation for each magnitude of its space, in both directions.

    The two directions of an operation without a sign are equal. An operation that is not in the space has no magnitude.
    """
    if name not in space:
        return [2 * [row(name, 0)]]
    magnitudes, is_signed = space[name]
    return [[row(name, each), row(name, -each if is_signed else each)] for each in magnitudes]


def drawn(table: np.ndarray, index: jax.Array) -> PixelOperation:
    """Return the rows of a table, int[n, number of parameters], at indices int32[...]."""
    return PixelOperation(*jnp.unstack(jnp.array(table, jnp.int32)[index], axis=-1))


def operate_all(planes: jax.Array, parameters: PixelOperation) -> jax.Array:
    """Apply operations one after the other to uint8[C, H, W].

    Args:
        parameters: int32[n] each.
    """
    # The operations run in a loop, so the compile time does not grow with their number.
    return jax.lax.scan(lambda image, one: (operate(image, one), None), planes, parameters)[0]
