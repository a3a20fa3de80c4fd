"""The training state: arrays only, replicated on every device."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted, show
from jaxddp.models.variables import path_of

EVAL_PARAMS = "eval_params"
"""The key of evaluation parameters among a part's arrays. They replace the trained parameters in prediction, export and
serving, and are evaluated in place of them or beside them. At most one part of a run has them."""
SMALL_LEAF = 1 << 20
"""Arrays with fewer elements are concatenated before they are reduced. Each reduction is a separate kernel, and a
kernel takes 20 ms to compile."""


class TrainState(flax.struct.PyTreeNode):
    """The state of a run between two steps.

    Together with the sample order, which is a function of `step`, it determines the rest of the run.
    """

    step: jax.Array
    """int32[], the number of steps taken."""
    params: Any
    model_state: Any
    """Variables that the model updates itself, such as batch statistics."""
    opt_state: Any
    parts: dict[str, Any] = flax.struct.field(default_factory=dict)
    """The arrays of the step's optional parts, by name; see `jaxddp.engine.parts.part.Part`."""

    def __repr__(self) -> str:
        """Describe the state. The step is omitted if the state consists of shapes or traced values."""
        try:
            step = f"step {int(self.step):,}, "
        except (TypeError, RuntimeError):
            step = ""
        leaves = [leaf for leaf in jax.tree.leaves(self.params) if hasattr(leaf, "size")]
        count = counted(sum(leaf.size for leaf in leaves), "parameter")
        return f"TrainState({step}{count} in {counted(len(leaves), 'array')})"

    @property
    def eval_params(self) -> Any:
        """Return the parameters for prediction, export and serving: those of a part that keeps them, else `params`."""
        return next((arrays[EVAL_PARAMS] for arrays in self.parts.values() if EVAL_PARAMS in arrays), self.params)

    def measuring(self, params: Any) -> "TrainState":
        """Return this state with `params` as its parameters and as its evaluation parameters, if it has any.

        The tree structure stays the same, so no program is compiled again.
        """
        parts = {
            name: {**arrays, EVAL_PARAMS: params} if EVAL_PARAMS in arrays else arrays
            for name, arrays in self.parts.items()
        }
        return self.replace(params=params, parts=parts)


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Return bool[]: whether no floating-point leaf holds a NaN or an infinity."""
    leaves = [leaf.ravel() for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    small = [leaf for leaf in leaves if leaf.size < SMALL_LEAF]
    large = [leaf for leaf in leaves if leaf.size >= SMALL_LEAF]
    together = [jnp.concatenate(small)] if small else []
    return jnp.stack([jnp.isfinite(array).all() for array in [*together, *large]] or [jnp.array(True)]).all()


def is_sound(state: TrainState) -> jax.Array:
    """Return bool[]: whether the state holds no NaN and no infinity, except infinite scalars of the optimizer.

    `optax.contrib.reduce_on_plateau`, for example, starts with infinity as the best loss.
    """

    def known(leaf: jax.Array) -> jax.Array:
        if leaf.ndim or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.where(jnp.isinf(leaf), 0, leaf)

    return all_finite((state.params, state.model_state, jax.tree.map(known, state.opt_state), state.parts))


def array_types(tree: Any) -> dict[str, str]:
    """Return each array's type by path, such as {"params/fc/kernel": "float32[512, 10]"}.

    The result is the same for a tree in memory and for a saved one.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {path_of(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves if hasattr(leaf, "shape")}


def in_dtypes_of(before: Any, after: Any) -> Any:
    """Cast the floats of `after` to the dtypes of `before`, if both have the same structure.

    Flax's `BatchNorm` creates its statistics in float32 and updates them to float64 under x64. Without the cast such a
    run could not be resumed.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        return after

    def kept(old: Any, new: Any) -> Any:
        are_floats = all(jnp.issubdtype(array.dtype, jnp.floating) for array in (old, new))
        return new.astype(old.dtype) if are_floats else new

    return jax.tree.map(kept, before, after)


def kept_types(before: TrainState, after: TrainState, by: str | None = None) -> TrainState:
    """Return `after` if its arrays have the same names, shapes and dtypes as those of `before`.

    Args:
        by: what changed the state, for the message; by default the optimizer or the model.

    Raises:
        InputError: an array differs, so that no checkpoint could be resumed. The message names the first one.
    """
    for name in ("model_state", "opt_state", "params", "parts"):
        old, new = getattr(before, name), getattr(after, name)
        difference = first_difference(old, new)
        if difference is None and (structure := jax.tree.structure(old)) != (other := jax.tree.structure(new)):
            difference = "", show(structure), show(other)
        if difference is not None:
            path, type_before, type_after = difference
            owner = by or ("model" if name == "model_state" else "optimizer")
            raise InputError(
                f"{owner}: {f'{name}/{path}'.rstrip('/')} is {type_before} before a step and {type_after} after it; "
                "keep names, shapes and dtypes, or the run cannot be resumed"
            )
    return after


def first_difference(one: Any, other: Any) -> tuple[str, str, str] | None:
    """Return the path of the first array that differs between two trees, and its type in each; None if none does."""
    ours, theirs = array_types(one), array_types(other)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return name, ours.get(name, "absent"), theirs.get(name, "absent")
    return None
