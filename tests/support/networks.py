"""Small networks, the objects that a step needs, and comparisons of their parameters."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_recipe import SmallNet as SmallNet

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import AugmentConfig
from jaxddp.data.source import LabelKind
from jaxddp.engine.objective import Objective, example_loss
from jaxddp.engine.state import TrainState
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Way
from jaxddp.losses import cross_entropy
from jaxddp.mesh import Topology
from jaxddp.metrics import TopK
from jaxddp.models import convnext, inverted_residual, regnet, resnet, swin, vit
from jaxddp.models.interface import shapes_of
from jaxddp.models.inverted_residual import InvertedResidualSizes
from jaxddp.weights.match import namings_of, published
from support.data import CLASSES
from support.published import weights
from support.shared import adapted, sgd


@functools.cache
def linear_model(classes: int = CLASSES):
    """Softmax regression as a pair of functions. Its gradient can be written in one line."""

    def init(key, example):
        return {"weight": 0.1 * jax.random.normal(key, (example[0].size, classes), example.dtype)}

    def apply(params, images):
        return images.reshape(len(images), -1) @ params["weight"]

    return init, apply


def drawing_model():
    """Return a linear model whose state has a random number of the last step, and its square."""

    def init(key, example):
        return {"weight": jnp.zeros((example[0].size, CLASSES))}, {"drawn": jnp.zeros(()), "squared": jnp.zeros(())}

    def apply(params, state, images, *, train, key):
        drawn = jax.random.normal(key, ()) if train else jnp.zeros(())
        logits = images.reshape(len(images), -1) @ params["weight"]
        return logits, {"drawn": drawn, "squared": jnp.square(drawn)}

    return init, apply


def make_shallow(monkeypatch: pytest.MonkeyPatch, stages: tuple[int, ...] = (1,)) -> None:
    """Make every network that a config can name shallow, so that it compiles fast. `stages` are a ResNet's blocks."""
    for name, architecture in resnet.ARCHITECTURES.items():
        monkeypatch.setitem(resnet.ARCHITECTURES, name, dataclasses.replace(architecture, stage_sizes=stages))
    for name, size in vit.SIZES.items():
        monkeypatch.setitem(
            vit.SIZES, name, dataclasses.replace(size, width=16, heads=2, blocks=2, patch=16, hidden=None)
        )
    for name in swin.STAGE_SIZES:
        monkeypatch.setitem(swin.STAGE_SIZES, name, (1, 0, 0, 0))
    for name, size in convnext.SIZES.items():
        monkeypatch.setitem(convnext.SIZES, name, dataclasses.replace(size, stages=(1, 0, 0, 0), width=96))
    for name, architecture in regnet.ARCHITECTURES.items():
        monkeypatch.setitem(regnet.ARCHITECTURES, name, dataclasses.replace(architecture, depth=1, initial_width=16))
    for name, architecture in inverted_residual.ARCHITECTURES.items():
        monkeypatch.setitem(inverted_residual.ARCHITECTURES, name, with_two_blocks(architecture))


def with_two_blocks(architecture: InvertedResidualSizes) -> InvertedResidualSizes:
    """Return an architecture of two small blocks: an expanded one, and one with an addition."""
    small = {"inputs": 8, "features": 8, "stride": 1, "squeeze": 4, "fused": False}
    (name, first), (other, second) = architecture.blocks[0], architecture.blocks[-1]
    blocks = (
        (name, dataclasses.replace(first, **small | {"stride": 2}, expanded=16)),
        (other, dataclasses.replace(second, **small, expanded=8)),
    )
    return dataclasses.replace(architecture, stem=8, blocks=blocks, last=16, hidden=min(architecture.hidden, 16))


def state_dict_of(model, image_shape, naming: int = 0) -> dict[str, np.ndarray]:
    """Return float64 weights by the formula of `support.published`, under one of the model's published namings."""
    zeros = {path: np.broadcast_to(0.0, shape) for path, shape in shapes_of(model, image_shape).items()}
    return weights({name: array.shape for name, array in published(zeros, namings_of(model)[naming]).items()})


def randomized(tree, seed: int = 7):
    """Redraw every scale and bias as random and positive, so that no gradient is zero because of them."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    random_leaves = [jnp.asarray(rng.uniform(0.5, 1.5, x.shape), x.dtype) for x in leaves]
    return jax.tree.unflatten(structure, [v if x.ndim == 1 else x for x, v in zip(leaves, random_leaves, strict=True)])


def largest_difference(a, b) -> float:
    """Return the largest difference over all leaves of two trees of one structure: absolute below 1, else relative."""

    def difference(x, y) -> float:
        x, y = np.asarray(x), np.asarray(y)
        return float((np.abs(x - y) / np.maximum(1, np.abs(y))).max(initial=0))

    return max(jax.tree.leaves(jax.tree.map(difference, a, b)), default=0.0)


def objective_of(model, loss=None, **preprocess) -> Objective:
    # A random crop or flip takes longer to compile than the other operations of a step, so it is off by default.
    settings = {"augment": AugmentConfig(flip=False), "dtype": jnp.float64, **preprocess}
    return Objective(
        adapted(model),
        example_loss(loss or cross_entropy(), LabelKind(CLASSES)),
        Preprocess(**settings),
        {"top1": TopK(1)},
    )


@functools.cache
def _initial(model, image: int, dtype, wide: bool):
    """Return a model's parameters, with `randomized` scales, and statistics, which `fresh_state` copies."""
    initial = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, image, image, 3), jnp.float64))
    # Convert statistics too: if their dtype changed after the first step, it would be compiled twice.
    return jax.tree.map(lambda x: np.asarray(x.astype(dtype)), (randomized(initial[0]), initial[1]))


def fresh_state(objective: Objective, optimizer, topology: Topology, image: int = 6, dtype=jnp.float64) -> TrainState:
    params, model_state = _initial(objective.model, image, dtype, jax.config.jax_enable_x64)
    return topology.replicate(TrainState(np.zeros((), np.int32), params, model_state, optimizer.init(params)))


def train_steps(objective: Objective, way: Way, batches, *key, minimized=None, rate=0.1, image=6, dtype=jnp.float64):
    """Take steps of plain SGD, a batch each, on `minimized`, by default the objective.

    Return the parameters before and after each step, the sums of each, and the last state, all on the host.
    """
    optimizer = sgd(rate)
    step: Any = way.step(Phases(minimized or objective, optimizer))
    state = fresh_state(objective, optimizer, way.topology, image, dtype)
    params, sums = [jax.device_get(state.params)], []
    for batch in batches:
        state, of_batch = step(state, way.topology.place(batch), *key)
        params.append(jax.device_get(state.params))
        sums.append(of_batch)
    return params, sums, jax.device_get(state)
