"""A run whose images have several sizes, those that training grows through and evaluation's: a network takes all."""

import logging
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.config import Config
from jaxddp.data.growth import Growth
from jaxddp.data.source import Source
from jaxddp.errors import InputError
from jaxddp.experiment.initial_weights import trees_of
from jaxddp.job.membership import is_first
from jaxddp.models.protocol import Model
from jaxddp.training.plan import Plan
from jaxddp.wording import first_line

_log = logging.getLogger("jaxddp.experiment")


def growth_of(config: Config, source: Source) -> Growth | None:
    """How a config has the images of a source grow, up to the size that they have else. Raises: InputError."""
    if config.data.grow_from is None:
        return None
    height, width, _ = source.image_shape(config.data)
    if height != width:
        raise InputError(
            f"data.grow_from={config.data.grow_from}: these images are {height}x{width}, and square ones grow; leave "
            "data.grow_from out"
        )
    return Growth.of(config.data, width, **Plan.of(config, len(source)).sizes)


def shapes_in_training(config: Config, source: Source) -> list[tuple[int, int, int]]:
    """(H, W, C) of the images that the run is trained on: one, or where they grow each, from the smallest on."""
    whole = source.image_shape(config.data)
    if (growth := growth_of(config, source)) is None:
        return [whole]
    sides = [side for _, side in growth.segments(range(Plan.of(config, len(source)).total_steps))]
    return [(side, side, whole[-1]) for side in sides]


def check_sizes(config: Config, source: Source, model: Model) -> None:
    """See that a network takes images of all sizes of a run; nothing is computed.

    Where a run ends before its images have grown, a line says so. Raises: InputError; names the first size that the
    network does not take.
    """
    whole, grown = source.image_shape(config.data), shapes_in_training(config, source)
    if config.data.grow_from is not None and grown[-1] != whole and is_first():
        _log.warning(
            f'data.grow_end="{config.data.grow_end}": the run ends before, at {grown[-1][0]} pixels of {whole[0]}'
        )
    wanted = {"grow_from": grown, "eval_size": [source.image_shape(config.data.of_evaluation)]}
    others = [(key, shape) for key, shapes in wanted.items() for shape in shapes if shape != whole]
    if not others:
        return
    trees = trees_of(model, whole)
    for key, shape in others:
        if why := refusal_of(model, trees, whole, shape):
            raise InputError(
                f"data.{key}={getattr(config.data, key)}: the network that is made for {whole[0]}x{whole[1]} pixels "
                f"does not take {shape[0]}x{shape[1]} ({why}); leave data.{key} out, or choose another network"
            )


def refusal_of(model: Model, trees: Any, made_for: tuple[int, int, int], shape: tuple[int, int, int]) -> str:
    """Why a network with these (params, model_state) does not take images of a shape [H, W, C]; empty where it does."""
    expected = _logits(model, trees, made_for)
    try:
        return "" if _logits(model, trees, shape) == expected else "its output has another shape"
    except Exception as error:
        return first_line(error)


def _logits(model: Model, trees: Any, shape: tuple[int, int, int]) -> Any:
    """The shape and dtype of a network's logits for an image [H, W, C]."""
    image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    return jax.eval_shape(lambda *given: model.apply(*given, train=False, key=None)[0], *trees, image)
