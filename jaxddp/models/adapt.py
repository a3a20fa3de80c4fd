"""One protocol for every kind of network: Linen modules, NNX modules and pairs of functions become a `Model`.

The engine differentiates, averages and saves plain trees of arrays. So an adapted model is two pure functions, and what
a library keeps inside its objects (mode switches, random streams, running statistics) becomes an argument or a result.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax

from jaxddp.errors import InputError

Tree = Any  # a pytree of arrays

# The words by which modules ask for their mode, and what they want to hear in training.
MODE_ARGUMENTS = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

ACCEPTED = "a Linen module, an NNX module, a pair of functions (init, apply), or an object with a Model's two methods"


@runtime_checkable
class Model(Protocol):
    """All that the engine knows of a network: two pure functions, good under jit, grad, eval_shape and shard_map."""

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        """Makes (params, model_state) for images like `example`, float [1, H, W, C]; model_state is not trained."""
        ...

    def apply(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: jax.Array | None
    ) -> tuple[jax.Array, Tree]:
        """Maps float images [B, H, W, C] to (logits [B, K], model_state).

        `train` is static. In evaluation model_state comes back as it went in. All randomness follows from `key`, which
        may be None where nothing random happens.
        """
        ...


def adapt(model: Any) -> Model:
    """Makes a `Model` of what a user has; a `Model` passes through. Nothing that is given is ever changed.

    Accepted are:

    - a Linen module whose `__call__(images)` may also take its mode, by any name in `MODE_ARGUMENTS`: see `LinenModel`;
    - an NNX module, likewise: see `jaxddp.models.nnx_modules.NNXModel`;
    - a pair `(init, apply)`: see `FunctionModel` for the signatures.

    Raises:
        InputError: it is none of these, or a function has another signature.
    """
    if isinstance(model, nn.Module):
        return LinenModel(model)
    # Importing NNX takes as long as all the rest of Flax; who has a module of its kind has imported it.
    if (nnx := sys.modules.get("flax.nnx")) and isinstance(model, nnx.Module):
        from jaxddp.models.nnx_modules import NNXModel

        return NNXModel.of(model)
    if isinstance(model, tuple | list) and len(model) == 2 and all(map(callable, model)):
        return FunctionModel.of(*model)
    if isinstance(model, Model) and not isinstance(model, type):
        _require(model.init, 2, (), "init(key, example)")
        _require(model.apply, 3, ("train", "key"), "apply(params, model_state, images, *, train, key)")
        return model
    what = f"the class {_name(model)}" if isinstance(model, type) else f"of type {_name(type(model))}"
    raise InputError(f"model is {what}; give {ACCEPTED}")


@dataclass(frozen=True, eq=False)
class LinenModel:
    """A Linen module: `params` are its collection of that name, `model_state` every other collection that `init` makes.

    Random streams: "dropout" gets `key`; "params", and with it a stream of any other name, a key folded from it.
    """

    module: nn.Module

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        variables = dict(self.module.init(_linen_streams(key), example, **call_mode(self.module.__call__, False)))
        return variables.pop("params", {}), variables

    def apply(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: jax.Array | None
    ) -> tuple[jax.Array, Tree]:
        logits, updated = self.module.apply(
            {"params": params, **model_state},
            images,
            **call_mode(self.module.__call__, train),
            rngs=_linen_streams(key),
            mutable=list(model_state),
        )
        return logits, {**model_state, **updated} if train else model_state


@dataclass(frozen=True, eq=False)
class FunctionModel:
    """A pair of functions, in one of two shapes, told apart by how many arguments `apply` wants by position:

    - without state: `init(key, example) -> params`, `apply(params, images) -> logits`;
    - with state: `init(key, example) -> (params, state)`, `apply(params, state, images) -> (logits, state)`.

    `apply` may also take `key`, and its mode by any name in `MODE_ARGUMENTS`; whatever else it takes needs a default.
    """

    init_function: Callable[..., Any]
    apply_function: Callable[..., Any]
    has_state: bool
    takes_key: bool

    @classmethod
    def of(cls, init: Callable[..., Any], apply: Callable[..., Any]) -> "FunctionModel":
        _require(init, 2, (), "init(key, example)")
        parameters = _signature(apply).parameters.values()
        by_keyword = {p.name for p in parameters} & {"key", *MODE_ARGUMENTS}
        wanted = [p for p in parameters if p.kind in BY_POSITION and p.default is p.empty and p.name not in by_keyword]
        has_state = len(wanted) >= 3
        shapes = "apply(params, images) or apply(params, state, images), either with train and key by keyword"
        _require(apply, 3 if has_state else 2, by_keyword, shapes)
        return cls(init, apply, has_state, "key" in by_keyword)

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        made = self.init_function(key, example)
        return made if self.has_state else (made, {})

    def apply(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: jax.Array | None
    ) -> tuple[jax.Array, Tree]:
        keywords = call_mode(self.apply_function, train) | ({"key": key} if self.takes_key else {})
        if not self.has_state:
            return self.apply_function(params, images, **keywords), model_state
        logits, updated = self.apply_function(params, model_state, images, **keywords)
        return logits, updated if train else model_state


def call_mode(call: Callable[..., Any], train: bool) -> dict[str, Any]:
    """The mode in the words of `call`'s own arguments."""
    asked = inspect.signature(call).parameters
    return {name: in_training == train for name, in_training in MODE_ARGUMENTS.items() if name in asked}


def _linen_streams(key: jax.Array | None) -> dict[str, jax.Array]:
    # Linen draws a stream that it was not given from "params", with a count of its own for each draw.
    return {} if key is None else {"params": jax.random.fold_in(key, 0), "dropout": key}


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise InputError(f"model: {_name(function)} shows no signature; wrap it in a Python function") from error


def _require(function: Callable[..., Any], positional: int, keywords: Iterable[str], expected: str) -> None:
    """Raises an InputError unless `function` can be called so."""
    signature = _signature(function)
    complaint = f"model: {_name(function)}{signature} does not fit {expected}"
    if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
        raise InputError(f"{complaint}: *args hides what it takes; name its arguments")
    try:
        signature.bind(*range(positional), **dict.fromkeys(keywords))
    except TypeError as error:
        raise InputError(f"{complaint}: {error}") from error


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", type(value).__qualname__)
