"""What training carries from step to step: arrays only, the same on every device."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted, show
from jaxddp.models.variables import path_of

EVAL_PARAMS = "eval_params"
"""The key under which a part's own arrays hold parameters that predict, export and serve in place of the trained ones,
and that evaluation measures: in place of them, or beside them. One part of a run may have them."""
SMALL_LEAF = 1 << 20
"""Arrays of fewer elements are copied together before they are reduced: each reduction is a kernel, and takes 20 ms to
compile."""


class TrainState(flax.struct.PyTreeNode):
    """The whole of a run between two steps: with the order, a function of `step`, it decides all that follows."""

    step: jax.Array
    """int32[], how many steps were taken."""
    params: Any
    model_state: Any
    """What the model updates itself: batch statistics, for one."""
    opt_state: Any
    parts: dict[str, Any] = flax.struct.field(default_factory=dict)
    """The arrays of the step's optional parts, by name; see `jaxddp.engine.parts.part.Part`."""

    def __repr__(self) -> str:
        """Also of shapes and of what JAX traces, where the step is not known."""
        try:
            step = f"step {int(self.step):,}, "
        except (TypeError, RuntimeError):
            step = ""
        leaves = [leaf for leaf in jax.tree.leaves(self.params) if hasattr(leaf, "size")]
        count = counted(sum(leaf.size for leaf in leaves), "parameter")
        return f"TrainState({step}{count} in {counted(len(leaves), 'array')})"

    @property
    def eval_params(self) -> Any:
        """The parameters that predict, export and serve: those that a part keeps for it, else `params`."""
        return next((own[EVAL_PARAMS] for own in self.parts.values() if EVAL_PARAMS in own), self.params)

    def measuring(self, params: Any) -> "TrainState":
        """The same state with these parameters, and with them as those that evaluation measures.

        Its tree is that of this state, so that what is compiled for the one serves the other.
        """
        parts = {name: {**own, EVAL_PARAMS: params} if EVAL_PARAMS in own else own for name, own in self.parts.items()}
        return self.replace(params=params, parts=parts)


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """bool[]: no floating-point leaf holds a NaN or an infinity."""
    leaves = [leaf.ravel() for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    small = [leaf for leaf in leaves if leaf.size < SMALL_LEAF]
    large = [leaf for leaf in leaves if leaf.size >= SMALL_LEAF]
    together = [jnp.concatenate(small)] if small else []
    return jnp.stack([jnp.isfinite(each).all() for each in [*together, *large]] or [jnp.array(True)]).all()


def is_sound(state: TrainState) -> jax.Array:
    """bool[]: the state holds no NaN and no infinity, but that single numbers of the optimizer's may be infinite.

    `optax.contrib.reduce_on_plateau`, for one, begins with infinity as the least loss so far.
    """

    def known(leaf: jax.Array) -> jax.Array:
        if leaf.ndim or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.where(jnp.isinf(leaf), 0, leaf)

    return all_finite((state.params, state.model_state, jax.tree.map(known, state.opt_state), state.parts))


def array_types(tree: Any) -> dict[str, str]:
    """Each array's path and type, {"params/fc/kernel": "float32[512, 10]"}: alike for a saved tree and a live one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {path_of(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves if hasattr(leaf, "shape")}


def in_dtypes_of(before: Any, after: Any) -> Any:
    """`after` with the floats' dtypes of `before`, where their structure is the same.

    Flax's `BatchNorm` begins its statistics in float32 and makes float64 of them under x64; a run could not be resumed.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        return after

    def kept(was: Any, now: Any) -> Any:
        are_floats = all(jnp.issubdtype(each.dtype, jnp.floating) for each in (was, now))
        return now.astype(was.dtype) if are_floats else now

    return jax.tree.map(kept, before, after)


def kept_types(before: TrainState, after: TrainState, by: str | None = None) -> TrainState:
    """`after`, which takes the place of `before` in a run: their arrays are of the same names, shapes and dtypes.

    Args:
        by: what made it of a state that was alike; the optimizer and the model where absent.

    Raises: InputError; they are not, so that no checkpoint could be resumed. Names the first array that differs.
    """
    for name in ("model_state", "opt_state", "params", "parts"):
        was, now = getattr(before, name), getattr(after, name)
        differs = first_difference(was, now)
        if differs is None and (structure := jax.tree.structure(was)) != (other := jax.tree.structure(now)):
            differs = "", show(structure), show(other)
        if differs is not None:
            path, there, here = differs
            owner = by or ("model" if name == "model_state" else "optimizer")
            raise InputError(
                f"{owner}: {f'{name}/{path}'.rstrip('/')} is {there} before a step and {here} after it; keep names, "
                "shapes and dtypes, or the run cannot be resumed"
            )
    return after


def first_difference(one: Any, other: Any) -> tuple[str, str, str] | None:
    """The first array that differs between two trees: its path, and what it is in each; None where none does."""
    ours, theirs = array_types(one), array_types(other)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return name, ours.get(name, "absent"), theirs.get(name, "absent")
    return None
