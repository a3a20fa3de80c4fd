"""What a network makes of images, held against the classes of the data before anything is compiled."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError
from jaxddp.core.wording import kind_of
from jaxddp.engine.step_objective import wide_logits
from jaxddp.mesh import AXIS
from jaxddp.models.interface import Model, takes_example_keys
from jaxddp.models.variables import trees_of

_IMAGES = 2


def check_outputs(model: Model, image_shape: tuple[int, int, int], num_classes: int) -> None:
    """See that a network gives each image a logit for each class, in evaluation and in training; nothing is computed.

    Args:
        image_shape: [H, W, C].

    Raises:
        InputError: it gives something else.
    """
    images = jax.ShapeDtypeStruct((_IMAGES, *image_shape), jnp.float32)
    given = *trees_of(model, image_shape), images, jax.eval_shape(lambda: jax.random.key(0))
    for train in (False, True):
        when = "the data in training" if train else "the data"
        # A batch norm may average over the devices.
        traced = jax.make_jaxpr(functools.partial(_checked, model, (num_classes, when), train), axis_env=[(AXIS, 1)])
        traced(*given)


def _checked(
    model: Model, classes: tuple[int, str], train: bool, params: Any, state: Any, images: jax.Array, key: jax.Array
) -> jax.Array:
    """The logits, where they are one for each of so many classes of something."""
    own = {"example_keys": jax.random.split(key, _IMAGES)} if train and takes_example_keys(model) else {}
    try:
        made = model.apply(params, state, images, train=train, key=key if train else None, **own)
    except InputError:
        if train:
            # Ghost batch norm takes nothing less than a group.
            return images
        raise
    if not isinstance(made, tuple) or len(made) != 2:
        raise InputError(f"the model's apply returned {kind_of(made)}; return a pair (logits, model_state)")
    (logits, _), (wanted, data) = made, classes
    try:
        return wide_logits(logits, (_IMAGES, wanted))
    except InputError as error:
        shape, advice = getattr(logits, "shape", ()), f"one for each of the {wanted} classes of {data}"
        if len(shape) == 2 and shape[-1] != wanted:
            advice += f": its last layer has {shape[-1]} outputs, make it one of {wanted}"
        raise InputError(f"{error}, {advice}") from None
