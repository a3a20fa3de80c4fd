"""A run whose images have several sizes, those that training grows through and evaluation's: a network takes all."""

import logging
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.peers import Peers
from jaxddp.core.wording import first_line
from jaxddp.models.interface import Model
from jaxddp.models.variables import trees_of
from jaxddp.recipe.layout import ImageShape, Layout, TrainingData

_log = logging.getLogger("jaxddp.experiment")


def check_sizes(data: DataConfig, model: Model, layout: Layout, peers: Peers) -> None:
    """See that a network takes images of all sizes of a run; nothing is computed.

    Where a run ends before its images have grown, a line says so. Raises: InputError; names the first size that the
    network does not take.
    """
    whole, largest = layout.data.image_shape, layout.shapes[-1]
    if largest != whole and peers.is_first:
        _log.warning(f'data.grow_end="{data.grow_end}": the run ends before, at {largest[0]} pixels of {whole[0]}')
    for shape in layout.shapes:
        _check_takes(model, whole, shape, "grow_from", data)
    check_eval_size(data, model, layout.data)


def check_eval_size(data: DataConfig, model: Model, known: TrainingData) -> None:
    """The same of evaluation's images alone."""
    _check_takes(model, known.image_shape, known.eval_shape, "eval_size", data)


def _check_takes(model: Model, made_for: ImageShape, shape: ImageShape, key: str, data: DataConfig) -> None:
    if shape == made_for:
        return
    if why := refusal_of(model, trees_of(model, made_for), made_for, shape):
        raise InputError(
            Key(f"data.{key}", getattr(data, key)),
            f": the network that is made for {made_for[0]}x{made_for[1]} pixels does "
            f"not take {shape[0]}x{shape[1]} ({why})",
            advice=("leave ", Key(f"data.{key}"), " out, or choose another network"),
        )


def refusal_of(model: Model, trees: Any, made_for: ImageShape, shape: ImageShape) -> str:
    """Why a network with these (params, model_state) does not take images of a shape [H, W, C]; empty where it does."""
    expected = _logits(model, trees, made_for)
    try:
        return "" if _logits(model, trees, shape) == expected else "its output has another shape"
    except Exception as error:
        return first_line(error)


def _logits(model: Model, trees: Any, shape: ImageShape) -> Any:
    """The shape and dtype of a network's logits for an image [H, W, C]."""
    image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    return jax.eval_shape(lambda *given: model.apply(*given, train=False, key=None)[0], *trees, image)
