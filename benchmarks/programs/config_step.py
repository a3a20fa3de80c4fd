"""Compiles the training step of a config for devices, which need not be present."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config
from jaxddp.data.batch import Batch
from jaxddp.data.source import LabelKind
from jaxddp.engine.compilation import step_options
from jaxddp.engine.initial_state import make_init
from jaxddp.engine.objective import Objective
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.groups import Groups
from jaxddp.mesh import Topology
from jaxddp.models.adapt import for_platform
from jaxddp.recipe.file import RecipeFile
from jaxddp.setup.feed import LONGEST_CHUNK
from jaxddp.setup.initial_weights import as_trained
from jaxddp.setup.recipe import Recipe, make_objects
from jaxddp.setup.resources import Layout, TrainingData
from jaxddp.setup.run_setup import complete_recipe
from jaxddp.setup.user_objects import objects_of_hooks


@dataclass(frozen=True)
class Data:
    """The properties of a data set on which the compiled step depends."""

    examples: int
    classes: int
    channels: int = 3


def compile_step(
    file: RecipeFile,
    config: Config,
    topology: Topology,
    data: Data,
    *,
    platform: str,
    compiler_options: Mapping[str, str],
) -> tuple[Any, int]:
    """Compile the training step of a config.

    Args:
        topology: The devices, which need not be present.
        platform: The JAX platform of these devices.
        compiler_options: Options that these devices need, in addition to those of the config.

    Returns:
        The compiled program, and the number of steps that one call takes.
    """
    shape = (config.data.image_size, config.data.image_size, data.channels)
    counts = np.full(data.classes, data.examples // data.classes)
    images = lambda count: np.zeros((count, *shape), np.uint8)  # noqa: E731
    known = TrainingData(data.examples, LabelKind(data.classes), counts, images, shape, shape, np.dtype(np.uint8))
    layout = Layout.of(config, topology, known)
    objects = make_objects(config, layout, objects_of_hooks(file.hooks))
    preprocess = Preprocess.of(config, config.data.augment, objects["augmentation"])
    known = {"config": config, "topology": topology, "layout": layout, "preprocess": preprocess}
    # The data are only described, so nothing can be fed.
    none: Any = None
    recipe = complete_recipe(Recipe(**known, resources=none, feed=none, **objects))
    model = as_trained(for_platform(recipe.model, platform), recipe)
    init = make_init(model, recipe.optimizer, shape, topology, parts=recipe.parts, transform=recipe.initialize)
    way = layout.way
    objective = Objective(model, recipe.loss, preprocess, recipe.metrics, remat=config.train.remat)
    phases = Phases(recipe.objective(objective), recipe.optimizer, recipe.schedule, recipe.parts)
    rows, length = config.train.batch_size, 1
    if config.data.cache == "none":
        feed: tuple[Any, ...] = (abstract_batch((rows,), shape, topology),)
    else:
        length = LONGEST_CHUNK
        images = jax.ShapeDtypeStruct((data.examples, *shape), np.uint8, sharding=topology.replicated)
        feed = (images, abstract_batch((rows, length), None, topology))
    key = jax.eval_shape(jax.random.key, 0)
    state, key = jax.eval_shape(init, key), shapes(key, topology.replicated)
    if isinstance(way, Groups):
        state = jax.eval_shape(way.stack, state)
    state = jax.tree.map(lambda place, part: shapes(part, place), way.shardings(state), state)
    step: Any = way.step(phases, resident=length > 1)
    options = {**compiler_options, **step_options(config, topology)}
    compiled = step.trace(state, *feed, key).lower().compile(compiler_options=options)
    return compiled, length


def abstract_batch(rows: tuple[int, ...], shape: tuple[int, ...] | None, topology: Topology) -> Batch:
    """Return the shapes of a placed batch, without images if these are resident on the devices."""
    types = {"label": np.int32, "mask": np.float32, "row": np.int32, "epoch": np.int32}
    columns = {name: jax.ShapeDtypeStruct(rows, dtype) for name, dtype in types.items()}
    image = None if shape is None else jax.ShapeDtypeStruct((*rows, *shape), np.uint8)
    return shapes(Batch(image=image, **columns), topology.sharded)


def shapes(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
