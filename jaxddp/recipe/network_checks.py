"""Check a network against the classes and the image sizes of a run by abstract evaluation (`jax.eval_shape`)."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.peers import Peers
from jaxddp.core.wording import first_line, kind_of
from jaxddp.engine.step_objective import wide_logits
from jaxddp.mesh import AXIS
from jaxddp.models.adapt import LinenModel
from jaxddp.models.interface import Model, takes_example_keys
from jaxddp.models.nnx_modules import NNXModel
from jaxddp.models.variables import path_of, trees_of
from jaxddp.recipe.layout import ImageShape, Layout, TrainingData
from jaxddp.sections.layers import Layers

_log = logging.getLogger("jaxddp.experiment")
_NUM_IMAGES = 2


def check_sizes(data: DataConfig, model: Model, layout: Layout, peers: Peers) -> None:
    """Check that a network accepts images of all sizes of a run.

    A warning is logged if the run ends before the images have their full size. Raises: InputError if the
    network does not accept a size. The message names the first such size.
    """
    full_shape, largest = layout.training_data.image_shape, layout.shapes[-1]
    if largest != full_shape and peers.is_first:
        sides = f"{largest[0]} of {full_shape[0]} pixels"
        _log.warning(f'data.grow_end="{data.grow_end}": the run ends earlier, at {sides}')
    for shape in layout.shapes:
        _check_accepted(model, full_shape, shape, "grow_from", data)
    check_eval_size(data, model, layout.training_data)


def check_eval_size(data: DataConfig, model: Model, training_data: TrainingData) -> None:
    """Check that a network accepts the images of evaluation. Raises: InputError."""
    _check_accepted(model, training_data.image_shape, training_data.eval_shape, "eval_size", data)


def _check_accepted(model: Model, made_for: ImageShape, shape: ImageShape, key: str, data: DataConfig) -> None:
    if shape == made_for:
        return
    if reason := reason_of_rejection(model, trees_of(model, made_for), made_for, shape):
        raise InputError(
            Key(f"data.{key}", getattr(data, key)),
            f": the network that is made for {made_for[0]}x{made_for[1]} pixels does "
            f"not take {shape[0]}x{shape[1]} ({reason})",
            advice=("leave ", Key(f"data.{key}"), " out, or choose another network"),
        )


def reason_of_rejection(model: Model, trees: Any, made_for: ImageShape, shape: ImageShape) -> str:
    """Return the reason why a network rejects images [H, W, C]; empty if it accepts them.

    Args:
        trees: the network's (params, model_state).
        made_for: the shape of the images that the network is made for.
    """
    expected = _logits(model, trees, made_for)
    try:
        return "" if _logits(model, trees, shape) == expected else "its output has another shape"
    except Exception as error:
        return first_line(error)


def _logits(model: Model, trees: Any, shape: ImageShape) -> Any:
    """Return the shape and dtype of a network's logits for an image [H, W, C]."""
    image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    return jax.eval_shape(lambda *arguments: model.apply(*arguments, train=False, key=None)[0], *trees, image)


def check_frozen_state(model: Model, frozen: Layers, trees: Any, image_shape: ImageShape) -> None:
    """Check that a network without a module keeps the state of frozen layers in training.

    The batch norms of frozen layers in Linen and NNX modules use their running statistics. Functions get no such
    switch: statistics that they change are those of a batch norm that normalizes by the batch.

    Raises: InputError if the network changes the state of a frozen layer.
    """
    if not frozen or isinstance(model, LinenModel | NNXModel):
        return
    key = jax.eval_shape(lambda: jax.random.key(0))
    keys = {"example_keys": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), _NUM_IMAGES))}
    keywords = {"key": key} | (keys if takes_example_keys(model) else {})
    images = jax.ShapeDtypeStruct((_NUM_IMAGES, *image_shape), jnp.float32)

    def next_state(state: Any, params: Any, images: jax.Array, keywords: Any) -> Any:
        return model.apply(params, state, images, train=True, **keywords)[1]

    params, state = trees
    jaxpr = jax.make_jaxpr(next_state, axis_env=[(AXIS, 1)])(state, params, images, keywords).jaxpr
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, _), before, after in zip(leaves, jaxpr.invars, jaxpr.outvars, strict=False):
        name = path_of(path)
        if frozen.selects(name, name.partition("/")[2]) and before is not after:
            raise InputError(
                f"model: the network changes the state {name} of a layer that is frozen or unfrozen later, so its norm "
                "uses the batch's statistics",
                advice="normalize by the state and return it unchanged, or give a Linen or NNX module",
            )


def check_outputs(model: Model, image_shape: tuple[int, int, int], num_classes: int) -> None:
    """Check that a network returns one logit per class for each image, in evaluation and in training.

    Args:
        image_shape: [H, W, C].

    Raises:
        InputError: the network returns something else.
    """
    images = jax.ShapeDtypeStruct((_NUM_IMAGES, *image_shape), jnp.float32)
    arguments = *trees_of(model, image_shape), images, jax.eval_shape(lambda: jax.random.key(0))
    for train in (False, True):
        data_name = "the data in training" if train else "the data"
        # The trace needs the axis of the devices, because a batch norm may average over it.
        traced = jax.make_jaxpr(
            functools.partial(_checked, model, (num_classes, data_name), train), axis_env=[(AXIS, 1)]
        )
        traced(*arguments)


def _checked(
    model: Model, classes: tuple[int, str], train: bool, params: Any, state: Any, images: jax.Array, key: jax.Array
) -> jax.Array:
    """Return the logits, and check their shape.

    Args:
        classes: the number of classes, and a name of the data for messages.
    """
    key_arguments = {"example_keys": jax.random.split(key, _NUM_IMAGES)} if train and takes_example_keys(model) else {}
    try:
        result = model.apply(params, state, images, train=train, key=key if train else None, **key_arguments)
    except InputError:
        if train:
            # Ghost batch norm does not accept so few images. Skip the check of the network's output in training.
            return images
        raise
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(f"the model's apply returned {kind_of(result)}; return a pair (logits, model_state)")
    (logits, _), (num_classes, data) = result, classes
    try:
        return wide_logits(logits, (_NUM_IMAGES, num_classes))
    except InputError as error:
        shape, advice = getattr(logits, "shape", ()), f"one for each of the {num_classes} classes of {data}"
        if len(shape) == 2 and shape[-1] != num_classes:
            advice += f": the network's last layer has {shape[-1]} outputs; give it {num_classes}"
        raise InputError(f"{error}, {advice}") from None
