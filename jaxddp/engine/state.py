"""The training state, a tree of arrays that is replicated on every device."""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxddp.core.errors import InputError, counted, show
from jaxddp.kernels import path_of

EVAL_PARAMS = "eval_params"
"""The key of evaluation parameters among a part's arrays. Prediction, export and serving use evaluation parameters
instead of the trained parameters. Validation measures either the evaluation parameters or both. At most one part of a
run has evaluation parameters."""
EVAL_MODEL_STATE, MEASURED_AT = "eval_model_state", "measured_at"
"""The keys of the model state for these parameters, and of the step for which it was computed, int32[]; -1 for none.
See `jaxddp.engine.statistics`."""
DEVICE_GROUPS, NUMBERS = "device_groups", "numbers"
"""The keys of int32[N] in the `parts` of a state that stacks N states; see `TrainState.stacked`."""
SMALL_LEAF = 1 << 20
"""Arrays with fewer elements are concatenated before a reduction, because each reduction is a separate kernel, which
takes 20 ms to compile."""


class TrainState(flax.struct.PyTreeNode):
    """The state of a run between two steps.

    The state and the order of examples, which is a function of `step`, determine all later steps.
    """

    step: jax.Array
    """int32[], the number of completed steps."""
    params: Any
    model_state: Any
    """Variables that the model updates, such as batch statistics."""
    opt_state: Any
    parts: dict[str, Any] = flax.struct.field(default_factory=dict)
    """The arrays of the step's optional parts, by name; see `jaxddp.engine.parts.part.Part`."""

    def __repr__(self) -> str:
        """Describe the parameters by their number, without arrays."""
        leaves = [leaf for leaf in jax.tree.leaves(self.params) if hasattr(leaf, "size")]
        count = counted(sum(leaf.size for leaf in leaves), "parameter")
        return f"TrainState({count} in {counted(len(leaves), 'array')})"

    @property
    def eval_params(self) -> Any:
        """Return the parameters for prediction, export and serving: the `EVAL_PARAMS` of a part, or else `params`."""
        return next((arrays[EVAL_PARAMS] for arrays in self.parts.values() if EVAL_PARAMS in arrays), self.params)

    @property
    def eval_model_state(self) -> Any:
        """Return the model state for `eval_params`: that of a part if it was computed at this step, or else
        `model_state`."""
        arrays = next((arrays for arrays in self.parts.values() if EVAL_MODEL_STATE in arrays), None)
        if arrays is None:
            return self.model_state
        return _selected(arrays[MEASURED_AT] == self.step, arrays[EVAL_MODEL_STATE], self.model_state)

    @property
    def stacked(self) -> int | None:
        """Return the number of states that are stacked in this state, along the first axis of every array.

        None for a single state. Only the step's number and the arrays with the key `DEVICE_GROUPS` are not stacked,
        because all of these states share them; see `Groups.stack`.
        """
        return stacked_in(self.parts)

    def with_variables(self, params: Any, model_state: Any) -> "TrainState":
        """Return this state with other parameters and another model state, also for evaluation, if a part has them.

        The tree structure stays the same, so no program is compiled again.
        """
        values = {EVAL_PARAMS: params, EVAL_MODEL_STATE: model_state}
        parts = {
            name: {key: values.get(key, own) for key, own in arrays.items()} if EVAL_PARAMS in arrays else arrays
            for name, arrays in self.parts.items()
        }
        return self.replace(params=params, model_state=model_state, parts=parts)

    def map_params(self, function: Callable[[Any], Any]) -> "TrainState":
        """Return this state with a function of its parameters, and of its evaluation parameters, if any."""
        parts = {
            name: {**arrays, EVAL_PARAMS: function(arrays[EVAL_PARAMS])} if EVAL_PARAMS in arrays else arrays
            for name, arrays in self.parts.items()
        }
        return self.replace(params=function(self.params), parts=parts)


@jax.jit
def _selected(is_first: jax.Array, first: Any, second: Any) -> Any:
    """Return one of two trees. As one program: each selection of an array would be compiled and run alone."""
    return jax.tree.map(functools.partial(jnp.where, is_first), first, second)


def stacked_in(parts: Any) -> int | None:
    """Return `TrainState.stacked` of the parts of a state, or of their shapes."""
    return parts[DEVICE_GROUPS][NUMBERS].shape[0] if DEVICE_GROUPS in parts else None


def without_shared(state: TrainState) -> TrainState:
    """Return a state without the arrays that stacked states share."""
    return state.replace(parts={name: arrays for name, arrays in state.parts.items() if name != DEVICE_GROUPS})


def shapes_of_one(state: TrainState) -> TrainState:
    """Return the shapes of one of the stacked states. A single state is returned as it is."""
    if state.stacked is None:
        return state
    own = without_shared(state).replace(step=())
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), own)
    return shapes.replace(step=jax.ShapeDtypeStruct((), jnp.int32))


def merged_state(state: TrainState, sharding: jax.sharding.Sharding) -> TrainState:
    """Return one state for the stacked states of a checkpoint. A single state is returned as it is.

    Every device holds the whole arrays, before and after.
    """
    if state.stacked is None:
        return state
    arrays = without_shared(state).replace(step=())
    return jax.jit(lambda arrays: jax.tree.map(merged, arrays), out_shardings=sharding)(arrays).replace(step=state.step)


def merged(leaf: jax.Array) -> jax.Array:
    """Merge an array of several states, [states, …]: the mean of floats, the first random key, or else the maximum."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf[0]
    return leaf.mean(0) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf.max(0)


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Return bool[]: whether all floating-point leaves are finite."""
    leaves = [leaf.ravel() for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(array).all() for array in few_arrays(leaves)] or [jnp.array(True)]).all()


def few_arrays(arrays: list[jax.Array]) -> list[jax.Array]:
    """Return vectors with the same elements. Small vectors are concatenated to one."""
    small = [array for array in arrays if array.size < SMALL_LEAF]
    large = [array for array in arrays if array.size >= SMALL_LEAF]
    return [*([jnp.concatenate(small)] if small else []), *large]


@jax.jit
def is_sound(state: TrainState) -> jax.Array:
    """Return bool[]: whether the state is finite. Scalars of the optimizer may be infinite.

    For example, `optax.contrib.reduce_on_plateau` starts with infinity as the best loss.
    """

    def without_infinity(leaf: jax.Array) -> jax.Array:
        if leaf.ndim or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.where(jnp.isinf(leaf), 0, leaf)

    def is_finite(params: Any, model_state: Any, opt_state: Any, parts: Any) -> jax.Array:
        return all_finite((params, model_state, jax.tree.map(without_infinity, opt_state), parts))

    arrays = state.params, state.model_state, state.opt_state, without_shared(state).parts
    if state.stacked is None:
        return is_finite(*arrays)
    return jax.vmap(is_finite)(*arrays).all() & all_finite(state.parts[DEVICE_GROUPS])


def array_types(tree: Any) -> dict[str, str]:
    """Return each array's type by path, such as {"params/fc/kernel": "float32[512, 10]"}.

    The result is the same for a tree in memory and for its saved copy.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))
    return {path_of(path): _type_of(leaf) for path, leaf in leaves if hasattr(leaf, "shape")}


def _type_of(leaf: Any) -> str:
    # A checkpoint holds the words of a random key.
    saved = jax.eval_shape(jax.random.key_data, leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    return f"{saved.dtype}{list(saved.shape)}"


def check_types(before: TrainState, after: TrainState, owner_name: str | None = None) -> TrainState:
    """Return `after` if its arrays have the same names, shapes and dtypes as those of `before`.

    Args:
        owner_name: the name in the message of the object that changed the state; by default the optimizer or the model.

    Raises:
        InputError: the type of an array differs, so no checkpoint could be resumed. The message names the first such
            array.
    """
    for name in ("model_state", "opt_state", "params", "parts"):
        owner = owner_name or ("model" if name == "model_state" else "optimizer")
        check_same(name, getattr(before, name), getattr(after, name), owner)
    return after


def check_same(name: str, old: Any, new: Any, owner: str) -> Any:
    """Return `new` if its arrays have the same names, shapes and dtypes as those of `old`. Raises: InputError."""
    difference = first_difference(old, new)
    if difference is None and (structure := jax.tree.structure(old)) != (other := jax.tree.structure(new)):
        difference = "", show(structure), show(other)
    if difference is not None:
        path, type_before, type_after = difference
        full_path = f"{name}/{path}".rstrip("/")
        problem = f"{owner}: {full_path} is {type_before} before a step and {type_after} after it"
        raise InputError(problem, advice="keep names, shapes and dtypes, or the run cannot be resumed")
    return new


def first_difference(one: Any, other: Any) -> tuple[str, str, str] | None:
    """Return the path and both types of the first array whose type differs between two trees; None for equal types."""
    types, other_types = array_types(one), array_types(other)
    for name in sorted(types.keys() | other_types.keys()):
        if types.get(name) != other_types.get(name):
            return name, types.get(name, "absent"), other_types.get(name, "absent")
    return None
