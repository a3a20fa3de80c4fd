"""Programs that predict: the logits and classes of images, features of a layer, and heat maps for predicted classes.

Heat maps are those of Grad-CAM (Selvaraju et al. 2017, arXiv:1610.02391).
"""

from collections.abc import Callable
from math import isqrt
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import P, lax

from jaxddp.augment.preprocess import Preprocess
from jaxddp.data.batch import Batch
from jaxddp.engine.objective import Objective
from jaxddp.engine.state import TrainState
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.activations import LayerCall, activation
from jaxddp.models.interface import Model, as_wide

Pool = Literal["mean", "none"]
"""What is done with the output of a layer [B, …, C]: "mean" averages it to [B, C], and "none" leaves it."""
LayerProgram = Callable[[TrainState, Batch], tuple[Any, Any]]
"""(state, batch) -> (values of the images, with B in front, and the batch's `substituted`), replicated."""
Outputs = Callable[[jax.Array], jax.Array]
"""A function of the logits float[B, K] of a batch."""


def make_predict(objective: Objective, topology: Topology) -> Callable[[TrainState, Batch], jax.Array]:
    """Compile (on first use) the computation of one batch's logits, float[B, K], sharded like the batch."""

    def local_predict(state: TrainState, batch: Batch) -> jax.Array:
        images = objective.preprocess(batch, train=False).images
        return objective.predict(state.eval_params, state.eval_model_state, images)

    return jax.jit(jax.shard_map(local_predict, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS)))


def make_classify(objective: Objective, topology: Topology, outputs: Outputs | None = None) -> LayerProgram:
    """Compile (on first use) the classification of one batch, replicated.

    The compiled function returns the `outputs` of the logits, by default the probabilities of `make_probabilities`, and
    the batch's `substituted`.
    """
    predict, outputs_of = make_predict(objective, topology), outputs or make_probabilities(objective)

    def classify(state: TrainState, batch: Batch) -> tuple[jax.Array, Any]:
        return outputs_of(predict(state, batch)), batch.substituted

    return jax.jit(classify, out_shardings=topology.replicated)


def make_probabilities(objective: Objective, temperature: float = 1.0) -> Outputs:
    """Return the function from logits to the probabilities of the classes, float32[B, K].

    The logits are divided by the temperature. If images may have several labels, the probabilities are their sigmoid,
    and otherwise their softmax. Numbers to predict are the logits. NaN is the result for an image with a logit that is
    not finite.
    """
    functions = {"several labels": jax.nn.sigmoid, "numbers": lambda numbers: numbers}
    function = functions.get(objective.loss.labels.form, jax.nn.softmax)

    def probabilities(logits: jax.Array) -> jax.Array:
        logits = logits.astype(jnp.float32)
        # XLA may compute any values from logits that are not finite.
        return jnp.where(jnp.isfinite(logits).all(-1, keepdims=True), function(logits / temperature), jnp.nan)

    return probabilities


def make_features(
    model: Model, preprocess: Preprocess, layer: LayerCall, pool: Pool, topology: Topology
) -> LayerProgram:
    """Compile (on first use) the activation of a layer for a batch, float[B, C] or [B, *layer.shape].

    The dtype is float32 or wider, and the mean is computed in it.
    """

    def local_features(state: TrainState, batch: Batch) -> jax.Array:
        images = preprocess(batch, train=False).images
        _, value = activation(model, layer, state.eval_params, state.eval_model_state, images)
        value = as_wide(value)
        return value.mean(range(1, value.ndim - 1)) if pool == "mean" else value

    return _on_devices(local_features, topology)


def make_explain(objective: Objective, layer: LayerCall, topology: Topology, probabilities_of: Outputs) -> LayerProgram:
    """Compile (on first use) the predictions of a batch with a heat map for the most probable class of each image.

    The values are the probabilities of the classes, float32[B, K], a map of `grad_cam` at the size of the images,
    float32[B, H, W], and the images of the batch.
    """

    def local_explain(state: TrainState, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        images = objective.preprocess(batch, train=False).images
        variables = state.eval_params, state.eval_model_state
        logits = objective.predict(*variables, images)
        maps = jax.nn.relu(grad_cam(objective.model, layer, *variables, images, logits.argmax(-1)))
        maps = jax.image.resize(maps.astype(jnp.float32), images.shape[:3], "linear")
        return probabilities_of(logits), maps, batch.image

    return _on_devices(local_explain, topology)


def grad_cam(
    model: Model, layer: LayerCall, params: Any, model_state: Any, images: jax.Array, classes: jax.Array
) -> jax.Array:
    """Return a map of each image for a class, before the ReLU of Grad-CAM: float[B, h, w]. Call it in `shard_map`.

    A map is the sum of the activation's channels, each times the mean over its pixels of the gradient of the logit.

    Args:
        layer: a layer with the output [B, h, w, C], or with [B, T, C] for tokens. The last h·w tokens are those of
            patches; h and w are the largest numbers for which h·w is at most T and h / w is the shape of the images.
        classes: int[B].
    """

    def logits_of_classes(change: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits, value = activation(model, layer, params, model_state, images, change)
        # The logits of an image do not depend on other images, so the gradient of the sum is that of each image.
        return jnp.take_along_axis(logits, classes[:, None], 1).sum(), value

    # Like the images, the change differs between the devices. Otherwise its gradient would be summed over them.
    change = lax.pcast(jnp.zeros((len(images), *layer.shape), images.dtype), AXIS, to="varying")
    gradients, values = jax.grad(logits_of_classes, has_aux=True)(change)
    gradients, values = (_maps(array, images.shape[1:3]) for array in (gradients, values))
    wide = jnp.promote_types(values.dtype, jnp.float32)
    weights = gradients.mean((1, 2), dtype=wide)
    return jnp.einsum("bhwc,bc->bhw", values.astype(wide), weights)


def _maps(array: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Return an activation as maps [B, h, w, C]."""
    if array.ndim == 4:
        return array
    (height, width), tokens = size, array.shape[1]
    columns = isqrt(tokens * width // height)
    rows = columns * height // width
    return array[:, tokens - rows * columns :].reshape(len(array), rows, columns, -1)


def _on_devices(local: Callable[[TrainState, Batch], Any], topology: Topology) -> LayerProgram:
    mapped = jax.shard_map(local, mesh=topology.mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS))

    def program(state: TrainState, batch: Batch) -> tuple[Any, Any]:
        return mapped(state, batch), batch.substituted

    return jax.jit(program, out_shardings=topology.replicated)
