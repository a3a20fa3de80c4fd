"""What the engine knows of a network, and how a user's function is asked for it.

The engine differentiates, averages and saves plain trees of arrays. So a model is two pure functions, and the mode,
random streams and running statistics that a library keeps in its objects become arguments or results.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import jax

from jaxddp.core.errors import InputError

Tree = Any  # a pytree of arrays

# The arguments by which modules ask for their mode, and their values in training.
MODE_ARGUMENTS = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "use_running_average": False,
}

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


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

        A model may also take `example_keys`: in training, a random key [B] of each image, which follows from the seed,
        the epoch and the image's row alone, where `key` is that of a device's share of the batch.
        """
        ...


def takes_example_keys(model: Model) -> bool:
    """Whether `apply` is to be given `example_keys`: if it has this argument, and where the model says of itself by an
    attribute of this function's name, only then.
    """
    takes = "example_keys" in inspect.signature(model.apply).parameters
    return takes and getattr(model, "takes_example_keys", True)


def call_mode(call: Callable[..., Any], train: bool) -> dict[str, Any]:
    """The mode in the words of `call`'s own arguments."""
    asked = inspect.signature(call).parameters
    return {name: in_training == train for name, in_training in MODE_ARGUMENTS.items() if name in asked}


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """Raises `InputError` where the function has none, as some built-in ones."""
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise InputError(f"model: {name_of(function)} shows no signature; wrap it in a Python function") from error


def require(function: Callable[..., Any], positional: int, keywords: Iterable[str], expected: str) -> None:
    """Raises `InputError` where a function cannot be called with these arguments, by position and by keyword."""
    found = signature(function)
    complaint = f"model: {name_of(function)}{found} does not fit {expected}"
    if any(p.kind is p.VAR_POSITIONAL for p in found.parameters.values()):
        raise InputError(f"{complaint}: *args hides what it takes; name its arguments")
    try:
        found.bind(*range(positional), **dict.fromkeys(keywords))
    except TypeError as error:
        raise InputError(f"{complaint}: {error}") from error


def name_of(value: Any) -> str:
    """What a person calls a function, a class or an object, for messages."""
    return getattr(value, "__qualname__", type(value).__qualname__)
