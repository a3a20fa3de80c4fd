"""Adapt networks to the `Model` interface: Linen modules, NNX modules and pairs of functions."""

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError
from jaxddp.models.frozen import freeze_norms
from jaxddp.models.interface import (
    BY_POSITION,
    MODE_ARGUMENTS,
    Model,
    Tree,
    call_mode,
    check_signature,
    name_of,
    signature,
)
from jaxddp.models.nnx_modules import NNXModel
from jaxddp.models.ops.operations import Operations
from jaxddp.models.variables import path_of
from jaxddp.platforms import platform_named
from jaxddp.sections.layers import NO_LAYERS, Layers

Shape = tuple[int, ...]
ACCEPTED = "a Linen module, an NNX module, a pair of functions (init, apply), or an object with a Model's two methods"


def adapt(model: Any) -> Model:
    """Adapt a network to `Model`. The network itself is not changed, and a `Model` is returned unchanged.

    A module's `__call__(images)` may also have an argument that sets the mode, with a name in `MODE_ARGUMENTS`. The
    `__call__` of a Linen module may also have the argument `example_keys`; see `Model.apply`.

    Raises:
        InputError: the type of the object is not in `ACCEPTED`, or a function has a wrong signature.
    """
    if isinstance(model, nn.Module):
        return LinenModel(model)
    # Importing NNX takes as long as importing all other modules of Flax. A user with an NNX module has imported NNX.
    if (nnx := sys.modules.get("flax.nnx")) and isinstance(model, nnx.Module):
        return NNXModel.of(model)
    if isinstance(model, tuple | list) and len(model) == 2 and all(map(callable, model)):
        return FunctionModel.of(*model)
    if isinstance(model, Model) and not isinstance(model, type):
        check_signature(model.init, 2, (), "init(key, example)")
        check_signature(model.apply, 3, ("train", "key"), "apply(params, model_state, images, *, train, key)")
        return model
    kind = f"the class {name_of(model)}" if isinstance(model, type) else f"of type {name_of(type(model))}"
    raise InputError(f"model is {kind}; give {ACCEPTED}")


@dataclass(frozen=True, eq=False)
class LinenModel:
    """A Linen module as a `Model`.

    `params` is the module's collection "params", and `model_state` holds all other collections that `init` creates. The
    random stream "dropout" gets `key`. The stream "params" gets a key folded from `key`, and Linen uses the stream
    "params" in place of streams of other names.
    """

    module: nn.Module
    settled: Layers = NO_LAYERS
    """Layers whose batch norms also use their running statistics in training, without updating them."""

    @property
    def takes_example_keys(self) -> bool:
        return "example_keys" in signature(self.module.__call__).parameters

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        variables = dict(self.module.init(_linen_streams(key), example, **call_mode(self.module.__call__, False)))
        return variables.pop("params", {}), variables

    def apply(
        self,
        params: Tree,
        model_state: Tree,
        images: jax.Array,
        *,
        train: bool,
        key: jax.Array | None,
        example_keys: jax.Array | None = None,
    ) -> tuple[jax.Array, Tree]:
        keywords: dict[str, Any] = call_mode(self.module.__call__, train)
        if self.takes_example_keys:
            keywords["example_keys"] = example_keys
        with freeze_norms(self.settled) if self.settled else contextlib.nullcontext():
            logits, updated = self.module.apply(
                {"params": params, **model_state},
                images,
                **keywords,
                rngs=_linen_streams(key),
                mutable=list(model_state),
            )
        return logits, {**model_state, **updated} if train else model_state

    def layer_arrays(self, image_shape: tuple[int, int, int]) -> dict[str, tuple[Shape, Shape, Any]]:
        """Return, for each parameter by name, its shape, its shape in a single layer, and the module that owns it.

        The two shapes differ by the axes that `nn.scan` and `nn.vmap` add. The module is None if no call shows it.
        """
        found: dict[str, tuple[Shape, Any]] = {}

        def record(function: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            result, module = function(*args, **kwargs), context.module
            params = module.variables.get("params", {}) if module.scope else {}
            own = {name: leaf for name, leaf in params.items() if not isinstance(leaf, Mapping)}
            # A leaf may be a box of `nn.with_partitioning`, which has its array as "value".
            for path, leaf in jax.tree_util.tree_leaves_with_path(own):
                # The module within a transformation returns before the transformed one.
                found.setdefault("/".join((*module.path, path_of(path))), (leaf.shape, module))
            return result

        example = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
        with nn.intercept_methods(record):
            # A new function: JAX would reuse an earlier trace of `self.init`, which calls no module.
            params, _ = jax.eval_shape(lambda image: self.init(jax.random.key(0), image), example)
        shapes = {path_of(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
        return {name: (shape, *found.get(name, (shape, None))) for name, shape in shapes.items()}


def _linen_streams(key: jax.Array | None) -> dict[str, jax.Array]:
    # For a stream without a key Linen draws from "params". Linen counts the draws of each stream.
    return {} if key is None else {"params": jax.random.fold_in(key, 0), "dropout": key}


@dataclass(frozen=True, eq=False)
class FunctionModel:
    """A pair of functions as a `Model`.

    There are two forms, which differ in the number of positional arguments of `apply`:

    - without state: `init(key, example) -> params`, `apply(params, images) -> logits`;
    - with state: `init(key, example) -> (params, state)`, `apply(params, state, images) -> (logits, state)`.

    `apply` may also take `key`, `example_keys`, and an argument that sets the mode, with a name in `MODE_ARGUMENTS`.
    Any other argument needs a default.
    """

    init_function: Callable[..., Any]
    apply_function: Callable[..., Any]
    has_state: bool
    takes_key: bool
    takes_example_keys: bool = False

    @classmethod
    def of(cls, init: Callable[..., Any], apply: Callable[..., Any]) -> "FunctionModel":
        check_signature(init, 2, (), "init(key, example)")
        parameters = signature(apply).parameters.values()
        by_keyword = {p.name for p in parameters} & {"key", "example_keys", *MODE_ARGUMENTS}
        required = [
            p for p in parameters if p.kind in BY_POSITION and p.default is p.empty and p.name not in by_keyword
        ]
        has_state = len(required) >= 3
        shapes = "apply(params, images) or apply(params, state, images), either with train and key by keyword"
        check_signature(apply, 3 if has_state else 2, by_keyword, shapes)
        return cls(init, apply, has_state, "key" in by_keyword, "example_keys" in by_keyword)

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        variables = self.init_function(key, example)
        return variables if self.has_state else (variables, {})

    def apply(
        self,
        params: Tree,
        model_state: Tree,
        images: jax.Array,
        *,
        train: bool,
        key: jax.Array | None,
        example_keys: jax.Array | None = None,
    ) -> tuple[jax.Array, Tree]:
        keywords = call_mode(self.apply_function, train) | ({"key": key} if self.takes_key else {})
        keywords |= {"example_keys": example_keys} if self.takes_example_keys else {}
        if not self.has_state:
            return self.apply_function(params, images, **keywords), model_state
        logits, updated = self.apply_function(params, model_state, images, **keywords)
        return logits, updated if train else model_state


def with_frozen_norms(model: Model, layers: Layers) -> Model:
    """Make the batch norms of these layers also use their running statistics in training, without updating them.

    This applies to Linen and NNX modules. Any other model is returned unchanged.
    """
    return replace(model, settled=layers) if layers and isinstance(model, LinenModel | NNXModel) else model


def for_platform(model: Any, platform: str) -> Any:
    """Return the fastest version of a model or a module for a platform ("cpu", "gpu", "tpu").

    A network with a method `with_operations(operations)`, such as `jaxddp.models.resnet.ResNet`, gets the operations of
    `jaxddp.platforms`. Any other model is returned unchanged.
    """
    operations = platform_named(platform).operations
    if operations == Operations():
        return model
    if isinstance(model, LinenModel):
        module = for_platform(model.module, platform)
        return model if module is model.module else replace(model, module=module)
    with_operations = getattr(model, "with_operations", None)
    return model if with_operations is None else with_operations(operations)
