"""What tells one training from another where its pieces are objects: names, and digests of what they compute."""

import functools
import hashlib
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.data.source import Source
from jaxddp.engine.extra_arguments import updated
from jaxddp.engine.parts.part import Part
from jaxddp.engine.set_metrics import is_set_metric
from jaxddp.engine.state import TrainState, array_types
from jaxddp.measure.flops import jaxprs_in
from jaxddp.mesh import AXIS
from jaxddp.models.interface import takes_example_keys
from jaxddp.overrides import flatten, plain
from jaxddp.recipe.recipe import Recipe

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def identity(recipe: Recipe, state: TrainState, num_classes: int, image_shape: tuple[int, ...]) -> dict[str, str]:
    """Each piece of a recipe by its name and by a digest of the program that JAX traces of it.

    A digest differs where any constant does: a learning rate, a class weight, a layer's width. It belongs to one
    release of JAX, and does not depend on the number of devices.
    """
    logits = jax.ShapeDtypeStruct((2, num_classes), jnp.float32)
    labels = logits if recipe.loss.labels.several else jax.ShapeDtypeStruct((2,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    image = jax.ShapeDtypeStruct(image_shape, jnp.float32)
    found = {"loss": described(recipe.loss.function, logits, labels)}
    found |= {f"metric {name}": _metric(each, logits, labels) for name, each in recipe.metrics.items()}

    def following(grads: Any, opt_state: Any, params: Any) -> Any:
        return updated(recipe.optimizer, grads, opt_state, params, value=lambda: jnp.zeros(()), grad=grads)

    update = _digest(following, state.params, state.opt_state, state.params)
    numbers = _initial_numbers(recipe.optimizer.init, state.params)
    found["optimizer"] = " ".join([update, *(str(np.asarray(number)) for number in numbers)])

    def network(params: Any, model_state: Any, images: jax.Array, key: jax.Array) -> Any:
        own = {"example_keys": jax.random.split(key, len(images))} if takes_example_keys(recipe.model) else {}
        return recipe.model.apply(params, model_state, images, train=True, key=key, **own)

    def network_of(batch: int) -> str:
        images = jax.ShapeDtypeStruct((batch, *image_shape), jnp.float32)
        return _digest(network, state.params, state.model_state, images, key)

    model = type(getattr(recipe.model, "module", recipe.model)).__name__
    try:
        found["model"] = f"{model} {network_of(1)}"
    except InputError:
        # Ghost batch norm takes nothing less than a group.
        found["model"] = f"{model} {network_of(recipe.config.train.batch_size)}"
    if recipe.schedule is not None:
        found["schedule"] = described(recipe.schedule, jax.ShapeDtypeStruct((), jnp.int32))
    if recipe.augmentation is not None:
        found["augmentation"] = described(recipe.augmentation, key, image)
    # What has no place in the state may change on resume.
    if parts := [part for part in recipe.parts if part.name in state.parts]:
        found["parts"] = ", ".join(_part(part, state) for part in parts)
    return found


def told(recipe: Recipe, val: Source | None) -> dict[str, Any]:
    """What decides the numbers of a run, and when processes meet: told differently, one would wait for another."""
    config = recipe.config
    found = flatten({"data": plain(config.data), "train": plain(config.train)})
    found |= {"log_every": config.log.every, "eval_every": config.eval.every, "save_every": config.checkpoint.every}
    found |= flatten({"checkpoint": config.checkpoint.goal.plain()})
    found |= {"check_every": config.parallel.check_replicas, "self_test": config.parallel.self_test}
    return found | {"val": None if val is None else val.fingerprint, "metrics": list(recipe.metrics)}


def checksums(state: TrainState) -> dict[str, str]:
    """Of the state that this process holds, by the name of what it holds: structure, dtypes, shapes and values."""
    held = {
        "the initial parameters": (state.params, state.model_state),
        "the optimizer's initial state": state.opt_state,
        "the initial state of the step's parts": state.parts,
        "the step that training begins with": state.step,
    }
    return {name: checksum(tree) for name, tree in held.items()}


def checksum(tree: Any) -> str:
    """Of a tree of arrays as this process holds it."""
    crc = zlib.crc32(repr(sorted(array_types(tree).items())).encode())
    for leaf in jax.tree.leaves(tree):
        plain = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        crc = zlib.crc32(np.asarray(plain.addressable_data(0)).tobytes(), crc)
    return f"{crc:08x}"


@functools.partial(jax.jit, static_argnums=0)
def _initial_numbers(init: Callable[[Any], Any], params: Any) -> list[jax.Array]:
    """The numbers that an optimizer keeps in its state and not in its program, as `optax.inject_hyperparams` does."""
    leaves = jax.tree.leaves(init(params))
    return [leaf for leaf in leaves if leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.floating)]


def _metric(metric: Any, logits: Any, labels: Any) -> str:
    if not is_set_metric(metric):
        return described(metric, logits, labels)
    if hasattr(metric, "examples"):
        return described(metric.examples, logits, labels)
    return described(metric.sums, logits, labels, jax.ShapeDtypeStruct((2,), jnp.float32))


def _part(part: Part, state: TrainState) -> str:
    def all_of_it(own: Any, state: TrainState) -> Any:
        grads = part.gradients(own, state.params)
        following, after = part.update(own, state, state, grads)
        judged = part.judge(following, state, after, jnp.array(True)) if part.judges else ()
        # Of a part that has none of these the digest is that of older releases.
        validated = part.validated(own, {"val loss": jnp.float32(0)}) if part.follows else ()
        told = part.report(own, grads)
        return part.loss_scale(own), grads, following, after, judged, told, part.rate_factor(own), validated

    return f"{part.name} {_digest(all_of_it, state.parts[part.name], state)}"


def described(function: Callable[..., Any], *arguments: Any, name: str | None = None) -> str:
    """A function by its name and by a digest of what it computes of such arguments, arrays or their shapes."""
    return f"{name or getattr(function, '__qualname__', type(function).__name__)} {_digest(function, *arguments)}"


def _digest(function: Callable[..., Any], *arguments: Any) -> str:
    """Of the jaxpr and all its constants, 12 hex digits."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    traced = jax.make_jaxpr(function, axis_env=[(AXIS, 1)])(*abstract)
    digest = hashlib.sha256(_ADDRESS.sub("", str(traced)).encode())
    # A jaxpr prints none of its constants, and no more than the ends of a large literal.
    for constant in _constants(traced):
        digest.update(np.ascontiguousarray(constant).tobytes())
    return digest.hexdigest()[:12]


def _constants(closed: Any) -> Iterator[Any]:
    """The arrays in a jaxpr, and in those of its operations."""
    yield from (constant for constant in getattr(closed, "consts", ()) if hasattr(constant, "dtype"))
    jaxpr = getattr(closed, "jaxpr", closed)
    for equation in jaxpr.eqns:
        yield from (operand.val for operand in equation.invars if hasattr(operand, "val"))
        for inner in jaxprs_in(equation.params.values()):
            yield from _constants(inner)
