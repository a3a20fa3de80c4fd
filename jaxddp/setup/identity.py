"""Digests of the objects, settings and arrays of a run, by which runs and processes are compared."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.data.batch import Batch
from jaxddp.engine.initial_state import transform_of
from jaxddp.engine.objective import is_set_metric, supervised
from jaxddp.engine.optimizer import call_update
from jaxddp.engine.parts.part import Part
from jaxddp.engine.state import TrainState, array_types
from jaxddp.measure.cost import digest
from jaxddp.models.interface import name_of, takes_example_keys
from jaxddp.setup.recipe import Recipe
from jaxddp.setup.run_setup import RunSetup


def identity(setup: RunSetup) -> dict[str, str]:
    """Return, for each object of a setup, its name and a digest of its traced JAX program.

    A digest depends on every constant, such as a learning rate, a class weight, or the width of a layer, and on the
    release of JAX, but not on the number of devices.
    """
    model, state, image_shape = setup.config.model, setup.state, setup.layout.training_data.image_shape
    trees = state.params, state.model_state
    key = jax.eval_shape(lambda: jax.random.key(0))
    digests = _loss_and_metrics(setup) | {"optimizer": _optimizer(setup), "model": _network(setup, *trees, key)}
    if model.lora:
        digests |= {"lora": str(model.lora), "lora_alpha": str(model.lora_alpha)}
    digests |= {name: str(getattr(model, name)) for name in ("weights", "new_layers") if getattr(model, name)}
    if setup.schedule is not None:
        digests["schedule"] = name_and_digest(setup.schedule, jax.ShapeDtypeStruct((), jnp.int32))
    if setup.augmentation is not None:
        image = jax.ShapeDtypeStruct(image_shape, jnp.float32)
        digests["augmentation"] = name_and_digest(setup.augmentation, key, image)
    if setup.initialize is not None:
        transform = transform_of(setup.network, setup.initialize, setup.topology)
        digests["initialize"] = name_and_digest(transform, *trees, name=name_of(setup.initialize))
    # Parts without arrays in the state may change on resume.
    if parts := [part for part in setup.parts if part.name in state.parts]:
        digests["parts"] = ", ".join(_part(part, state) for part in parts)
    if setup.objective is not supervised:

        def gradient_of(params: Any, model_state: Any, batch: Batch, key: jax.Array) -> Any:
            return setup.unmeasured(params, model_state, batch, train=True, key=key, image_key=key)

        # The slots of a batch may depend on the devices.
        batch = setup.feed.divided(()).abstract_batch(setup.feed.order.batch_size)
        digests["objective"] = name_and_digest(gradient_of, *trees, batch, key, name=name_of(setup.objective))
    return digests


def _loss_and_metrics(setup: RunSetup) -> dict[str, str]:
    logits = jax.ShapeDtypeStruct((2, setup.layout.training_data.labels.num_classes), jnp.float32)
    labels = logits if setup.loss.labels.form != "one label" else jax.ShapeDtypeStruct((2,), jnp.int32)
    digests = {"loss": name_and_digest(setup.loss.function, logits, labels)}
    for name, metric in setup.metrics.items():
        if is_set_metric(metric) and not hasattr(metric, "examples"):
            mask = jax.ShapeDtypeStruct((2,), jnp.float32)
            digests[f"metric {name}"] = name_and_digest(metric.sums, logits, labels, mask)
        else:
            function = metric.examples if is_set_metric(metric) else metric
            digests[f"metric {name}"] = name_and_digest(function, logits, labels)
    return digests


def _optimizer(setup: RunSetup) -> str:
    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        return call_update(setup.optimizer, grads, opt_state, params, value=jnp.zeros(()), grad=grads)

    params = setup.state.params
    numbers = [str(np.asarray(number)) for number in _initial_numbers(setup.optimizer.init, params)]
    return " ".join([digest(update, params, setup.state.opt_state, params), *numbers])


def _network(setup: RunSetup, params: Any, model_state: Any, key: Any) -> str:
    def apply(params: Any, model_state: Any, images: jax.Array, key: jax.Array) -> Any:
        keys = {"example_keys": jax.random.split(key, len(images))} if takes_example_keys(setup.model) else {}
        return setup.model.apply(params, model_state, images, train=True, key=key, **keys)

    # Ghost batch norm needs at least one group of images.
    shape = setup.config.train.batch_size, *setup.layout.training_data.image_shape
    name = type(getattr(setup.model, "module", setup.model)).__name__
    return name_and_digest(apply, params, model_state, jax.ShapeDtypeStruct(shape, jnp.float32), key, name=name)


def shared_settings(recipe: Recipe, **others: Any) -> dict[str, str]:
    """Return the settings that all processes of a job must share, and other values, as text: all but the outputs."""
    flat, val = recipe.config.flat(), recipe.resources.val
    settings = {key: value for key, value in flat.items() if key == "log.every" or not key.startswith("log.")}
    settings |= {"val": None if val is None else val.fingerprint, "metrics": list(recipe.metrics)}
    return {name: str(value) for name, value in (settings | others).items()}


def checksums(state: TrainState) -> dict[str, str]:
    """Return checksums of this process's state by component; they cover structure, dtypes, shapes and values."""
    components = {"parameters": (state.params, state.model_state), "state of the optimizer": state.opt_state}
    components |= {"state of the step's parts": state.parts, "step": state.step}
    return {f"the initial {name}": checksum(tree) for name, tree in components.items()}


def checksum(tree: Any) -> str:
    """Return the CRC-32 of a tree of arrays: its structure, and the values on this process's first device.

    The values of an array that is divided among the devices are left out, because each process holds others.
    """
    crc = zlib.crc32(repr(sorted(array_types(tree).items())).encode())
    for leaf in jax.tree.leaves(tree):
        plain = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        if plain.sharding.is_fully_replicated:
            crc = zlib.crc32(np.asarray(plain.addressable_data(0)).tobytes(), crc)
    return f"{crc:08x}"


@functools.partial(jax.jit, static_argnums=0)
def _initial_numbers(init: Callable[[Any], Any], params: Any) -> list[jax.Array]:
    """Return the scalars that an optimizer keeps in its state, as `optax.inject_hyperparams` does."""
    return [x for x in jax.tree.leaves(init(params)) if x.ndim == 0 and jnp.issubdtype(x.dtype, jnp.floating)]


def _part(part: Part, state: TrainState) -> str:
    def methods(own: Any, state: TrainState) -> Any:
        grads = part.gradients(own, state.params)
        following, after = part.update(own, state, state, grads)
        judged = part.judge(following, state, after, jnp.array(True)) if part.judges else ()
        validated = part.validated(own, {"val loss": jnp.float32(0)}) if part.follows else ()
        report = part.report(own, grads)
        return part.loss_scale(own), grads, following, after, judged, report, part.rate_factor(own), validated

    return f"{part.name} {digest(methods, state.parts[part.name], state)}"


def name_and_digest(function: Callable[..., Any], *arguments: Any, name: str | None = None) -> str:
    """Return the name of a function and the digest of its program for these arguments: arrays or their shapes."""
    return f"{name or getattr(function, '__qualname__', type(function).__name__)} {digest(function, *arguments)}"
