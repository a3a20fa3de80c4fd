"""Adapt networks to the `Model` interface: Linen modules, NNX modules and pairs of functions.

The import of NNX doubles the time of importing Flax, so NNX is imported on first use.
"""

import contextlib
import functools
import inspect
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.typing import DTypeLike

from jaxddp.config.layers import ADAPTERS, NO_LAYERS, Layers
from jaxddp.core.errors import InputError, Key, kind_of
from jaxddp.kernels import path_of
from jaxddp.models import interface
from jaxddp.models.interface import MODE_ARGUMENTS, Call, Keys, Model, Outputs, Tree, cast, cast_like, name_of
from jaxddp.models.ops.layers import Convolution, Operations
from jaxddp.platforms import platform_named

if TYPE_CHECKING:
    import flax.nnx


Path = tuple[Any, ...]
"""The path of a variable in an NNX module, which consists of attribute names and list indices."""
Shape = tuple[int, ...]
KEPT = "jaxddp_kept"
"""The collection of Linen variables that a `Call` may make, besides those of the state."""


@dataclass(frozen=True, eq=False)
class NNXModel:
    """An NNX module as a `Model`.

    The module is split once. `params` are its `nnx.Param`s, and `model_state` is all other state except random
    streams. Both are nested dicts by attribute name. A list index becomes a string, because checkpoints need string
    keys.

    `init` makes a new module with its key if there is a function that makes it. Otherwise it ignores the key and
    returns copies of the module's values. `apply` builds a module, sets its mode, and seeds every random stream from
    `key`, so random streams are not part of the state.
    """

    function: Callable[..., Any]
    """The function whose arguments set the mode."""
    graph: Any
    params: dict[Path, Any]
    state: dict[Path, Any]
    streams: dict[Path, tuple[bool, tuple[int, ...]]]
    """For each array of a random stream: whether the array holds keys (otherwise counts), and its shape."""
    statistics: frozenset[str]
    """The names of the arrays of `state` that are `nnx.BatchStat`s."""
    settled: Layers = NO_LAYERS
    """Layers whose batch norms also use their running statistics in training, without updating them."""
    make: Callable[..., Any] | None = None
    """The function of `rngs` that makes the module; None for a module with its own initial values."""
    dtype: DTypeLike | None = None
    """The dtype to which `apply` casts the parameters and the images; None for no cast."""
    convolution: Convolution | None = None
    """The implementation of grouped convolutions; None for that of `for_platform`."""

    @classmethod
    def of(cls, module: "flax.nnx.Module") -> "NNXModel":
        graph, params, streams, state = _split(module)
        kinds = {path: (_holds_keys(leaf), leaf.shape) for path, leaf in streams.items()}
        names = ("/".join(map(str, path)) for path in _arrays(flax.nnx.state(module, flax.nnx.BatchStat)))
        return cls(type(module).__call__, graph, params, state, kinds, frozenset(names))

    @classmethod
    def made_by(cls, make: Callable[..., Any]) -> "NNXModel":
        """Adapt a function of `rngs` that returns a module. Raises: InputError if it returns something else."""
        module = flax.nnx.eval_shape(lambda: _made(make, jax.random.key(0)))
        interface.check_call(type(module))
        return replace(cls.of(module), make=make)

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        if self.make is not None:
            _, params, _, state = _split(_made(self.make, _typed(key)))
            return _nested(params), _nested(state)
        # Copy, because the training step donates its arguments, and the arrays may be on other devices.
        params, state = jax.tree.map(jnp.array, jax.device_get((self.params, self.state)))
        return _nested(params), _nested(state)

    def apply(self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: Keys) -> Outputs:
        logits, updated = self.run(params, model_state, images, train=train, key=key)
        new_state = _nested({path: updated[path] for path in self.state})
        return logits, cast_like(model_state, new_state) if train else model_state

    def run(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: Keys = None, call: Any = None
    ) -> tuple[jax.Array, dict[Path, Any]]:
        """Call the module in a mode, and its layers by a `Call` if given. Return the logits and the new state."""
        params, images = cast((params, images), self.dtype)
        leaves = _pick(params, self.params) | _pick(model_state, self.state) | self._seed_streams(key)
        module = flax.nnx.merge(self.graph, traverse_util.unflatten_dict(leaves))
        (module.train if train else module.eval)()
        for path, layer in [*flax.nnx.iter_modules(module)]:
            if call is not None:
                layer.__class__ = _intercepted(type(layer), "/".join(map(str, path)), call)
            for name, in_training in MODE_ARGUMENTS.items():
                if isinstance(vars(layer).get(name), bool):
                    setattr(layer, name, in_training == train)
            if self.dtype is not None and vars(layer).get("dtype", self.dtype) is None:
                # A norm without a dtype would return float32, the dtype of its running statistics.
                setattr(layer, "dtype", self.dtype)  # noqa: B010
            if train and hasattr(layer, "use_running_average") and "/".join(map(str, path)) in self.settled:
                layer.set_attributes(use_running_average=True)
            if self.convolution and isinstance(layer, flax.nnx.Conv) and layer.feature_group_count > 1:
                is_default = layer.conv_general_dilated is jax.lax.conv_general_dilated
                layer.conv_general_dilated = self.convolution if is_default else layer.conv_general_dilated
        keywords: dict[str, Any] = interface.call_mode(module.__call__, train)
        if "rngs" in interface.signature(module.__call__).parameters:
            keywords["rngs"] = flax.nnx.Rngs(_typed(key))
        return module(images, **keywords), _arrays(flax.nnx.state(module))

    def layer_arrays(self, image_shape: tuple[int, int, int]) -> dict[str, tuple[Shape, Shape, Any]]:
        """Return, for each parameter by name, its shape, its shape in a single layer, and the module that owns it.

        The attributes of NNX's layers give the shape in a single layer, without the axes that `nnx.vmap` adds. Any
        other array has the additional axes of the layers in the same module.
        """
        leaves = self.params | self.state | self._seed_streams(None)
        modules = dict(flax.nnx.iter_modules(flax.nnx.merge(self.graph, traverse_util.unflatten_dict(leaves))))
        shapes: dict[Path, Shape] = {path: leaf.shape for path, leaf in self.params.items()}
        inner = {path: _single_shape(modules.get(path[:-1]), path[-1]) for path in shapes}
        single = {path: shape for path, shape in inner.items() if shape is not None}

        def added(owner: Path) -> int:
            extra = [len(shapes[path]) - len(single[path]) for path in single if path[: len(owner)] == owner]
            return min(extra, default=0) if extra or not owner else added(owner[:-1])

        return {
            "/".join(map(str, path)): (shape, single.get(path, shape[added(path[:-1]) :]), modules.get(path[:-1]))
            for path, shape in shapes.items()
        }

    def _seed_streams(self, key: jax.Array | None) -> dict[Path, jax.Array]:
        """Return every random stream in its initial state, each with its own key folded from `key`."""
        key, seeded = _typed(key), {}
        for i, (path, (holds_keys, shape)) in enumerate(self.streams.items()):
            stream = jax.random.fold_in(key, i)
            keys = jax.random.split(stream, shape) if shape else stream
            seeded[path] = keys if holds_keys else jnp.zeros(shape, jnp.uint32)
        return seeded


def _intercepted(kind: Any, path: str, call: Call) -> Any:
    """Return a class of layers that `call` calls. Python looks `__call__` up in the class, as `nnx.remat` does."""

    def call_layer(layer: Any, *args: Any, **kwargs: Any) -> Any:
        return call(path, layer, functools.partial(kind.__call__, layer), args, kwargs)

    return type(kind)(kind.__name__, (kind,), {"__call__": call_layer})


def takes_rngs(function: Any) -> bool:
    """Return whether a class or function can be called as `function(rngs=...)`, and has this argument."""
    if isinstance(function, type):
        function = functools.partial(function)
    if isinstance(function, functools.partial) and isinstance(function.func, type):
        # The signature of an NNX class is that of its metaclass.
        function = functools.partial(function.func.__init__, None, *function.args, **function.keywords)
    with contextlib.suppress(TypeError, ValueError):
        signature = inspect.signature(function)
        signature.bind(rngs=None)
        return "rngs" in signature.parameters
    return False


def _typed(key: jax.Array | None) -> jax.Array:
    """Return a key of type `key<...>`; that of seed 0 for None."""
    key = jax.random.key(0) if key is None else key
    return key if _holds_keys(key) else jax.random.wrap_key_data(key)


def _made(make: Callable[..., Any], key: jax.Array) -> "flax.nnx.Module":
    module = make(rngs=flax.nnx.Rngs(key))
    if not isinstance(module, flax.nnx.Module):
        raise InputError(f"model: {name_of(make)}(rngs) returned {kind_of(module)}; return an NNX module")
    for _, part in flax.nnx.iter_modules(module):
        for name, value in [*vars(part).items()]:
            # While JAX traces, NNX takes a bare array for a constant of the graph, which the trace does not outlive.
            if isinstance(value, jax.Array) and not flax.nnx.is_data(value):
                setattr(part, name, flax.nnx.data(value))
    return module


def _split(module: "flax.nnx.Module") -> tuple[Any, dict[Path, Any], dict[Path, Any], dict[Path, Any]]:
    """Return the graph of a module, its parameters, the arrays of its random streams, and all other arrays."""
    graph, *parts = flax.nnx.split(module, flax.nnx.Param, flax.nnx.RngState, ...)
    params, streams, state = map(_arrays, parts)
    return graph, params, streams, state


def _holds_keys(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _arrays(state: "flax.nnx.State") -> dict[Path, Any]:
    return traverse_util.flatten_dict(flax.nnx.to_pure_dict(state))


def _nested(leaves: Mapping[Path, jax.Array]) -> Tree:
    return traverse_util.unflatten_dict({tuple(map(str, path)): leaf for path, leaf in leaves.items()})


def _pick(tree: Tree, paths: Iterable[Path]) -> dict[Path, jax.Array]:
    """Return the leaves of a nested dict by NNX's paths, in which list indices are integers."""
    leaves = traverse_util.flatten_dict(tree)
    # Convert to immutable JAX arrays, because NNX writes in place to a variable that holds a NumPy array.
    return {path: jnp.asarray(leaves[tuple(map(str, path))]) for path in paths}


def _single_shape(layer: Any, name: str) -> Shape | None:
    """Return the shape of a parameter of one of NNX's layers from the attributes of the layer; None if unknown."""
    match layer, name:
        case flax.nnx.LinearGeneral(), "kernel":
            return (*layer.batch_axis.values(), *layer.in_features, *layer.out_features)
        case flax.nnx.Linear(), "kernel":
            return (layer.in_features, layer.out_features)
        case flax.nnx.Conv() | flax.nnx.ConvTranspose() | flax.nnx.Einsum(), "kernel":
            return tuple(layer.kernel_shape)
        case flax.nnx.Embed(), "embedding":
            return (layer.num_embeddings, layer.features)
        case ((flax.nnx.BatchNorm() | flax.nnx.LayerNorm()), "scale" | "bias"):
            return (layer.num_features,)
    return None


ACCEPTED = (
    "a Linen module, an NNX module or a function (rngs) that returns one, a pair of functions (init, apply), or an "
    "object with a Model's two methods"
)


def adapt(model: Any) -> Model:
    """Adapt a network to `Model`. The network itself is not changed, and a `Model` is returned unchanged.

    A module's `__call__(images)` may also have an argument that sets the mode, with a name in `MODE_ARGUMENTS`. A
    boolean field of a Linen module or attribute of an NNX module with such a name sets the mode too. The `__call__` of
    a Linen module may also have the argument `example_keys`, see `Model.apply`; that of an NNX module, `rngs`.

    Raises:
        InputError: the type of the object is not in `ACCEPTED`, or a function has a wrong signature.
    """
    if isinstance(model, nn.Module):
        interface.check_call(type(model))
        return LinenModel(model)
    # Importing NNX takes as long as importing all other modules of Flax. A user with an NNX module has imported NNX.
    has_nnx = "flax.nnx" in sys.modules
    if has_nnx and isinstance(model, flax.nnx.Module):
        interface.check_call(type(model))
        return NNXModel.of(model)
    if has_nnx and takes_rngs(model):
        return NNXModel.made_by(model)
    if isinstance(model, tuple | list) and len(model) == 2 and all(map(callable, model)):
        return FunctionModel.of(*model)
    if isinstance(model, Model) and not isinstance(model, type):
        interface.check_signature(model.init, 2, (), "init(key, example)")
        interface.check_signature(model.apply, 3, ("train", "key"), "apply(params, model_state, images, *, train, key)")
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
    dtype: DTypeLike | None = None
    """The dtype to which `apply` casts the parameters and the images; None for no cast. Flax computes means and
    variances in float32, and the running statistics keep their dtype."""
    convolution: Convolution | None = None
    """The implementation of grouped convolutions; None for that of `for_platform`."""

    @property
    def function(self) -> Callable[..., Any]:
        """The function whose arguments set the mode."""
        return self.module.__call__

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        arguments = interface.call_mode(self.module.__call__, False, example_keys=None)
        with _own_ranks(self.module):
            variables = dict(_in_mode(self.module, False, arguments).init(_linen_streams(key), example, **arguments))
        return variables.pop("params", {}), variables

    def apply(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: Keys, example_keys: Keys = None
    ) -> Outputs:
        keys: dict[str, Any] = {"example_keys": example_keys, "rngs": _linen_streams(key)}
        logits, updated = self.run(params, _without_sown(model_state), images, train=train, **keys)
        return logits, {**model_state, **cast_like(model_state, updated)} if train else model_state

    def run(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, call: Call | None = None, **words: Any
    ) -> Outputs:
        """Call the module in a mode, and its layers by a `Call` if given. Return the logits and the new state."""
        keys, mutable = words.pop("example_keys", None), [*model_state, KEPT]
        call_arguments = interface.call_mode(self.module.__call__, train, example_keys=keys)
        # A box of `nn.with_partitioning` may name axes that the mesh of a run does not have.
        is_box = lambda leaf: isinstance(leaf, nn.Partitioned)  # noqa: E731
        params = jax.tree.map(lambda leaf: leaf.value if is_box(leaf) else leaf, params, is_leaf=is_box)
        variables, images = {"params": cast(params, self.dtype), **model_state}, cast(images, self.dtype)
        frozen = interface.freeze_norms(self.settled) if self.settled else contextlib.nullcontext()
        grouped = with_grouped_convolution(self.convolution) if self.convolution else contextlib.nullcontext()
        intercepted = interface.intercepting(call) if call else contextlib.nullcontext()
        with frozen, grouped, intercepted, _own_ranks(self.module):
            module = _in_mode(self.module, train, call_arguments)
            return module.apply(variables, images, mutable=mutable, **call_arguments, **words)

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


def _in_mode(module: nn.Module, train: bool, call_arguments: Mapping[str, Any]) -> nn.Module:
    """Return a module whose boolean fields that set the mode, but are no arguments of its call, have this mode."""
    names = [name for name in MODE_ARGUMENTS if isinstance(vars(module).get(name), bool) and name not in call_arguments]
    fields: dict[str, Any] = {name: MODE_ARGUMENTS[name] == train for name in names}
    return module.clone(**fields) if names else module


def _own_ranks(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Let jaxddp's networks broadcast arrays of lower ranks, which `jax_numpy_rank_promotion` may forbid."""
    return jax.numpy_rank_promotion("allow") if hasattr(module, "with_operations") else contextlib.nullcontext()


def _without_sown(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of Linen without the tuples of `Module.sow`, which would append to them."""
    kept = {name: value for name, value in state.items() if not isinstance(value, tuple)}
    return {name: _without_sown(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


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
    function: Callable[..., Any]
    """`apply`, whose arguments set the mode."""
    has_state: bool
    dtype: DTypeLike | None = None
    """The dtype to which `apply` casts the parameters and the images; None for no cast."""

    @classmethod
    def of(cls, init: Callable[..., Any], apply: Callable[..., Any]) -> "FunctionModel":
        interface.check_signature(init, 2, (), "init(key, example)")
        interface.check_mode(apply)
        parameters = interface.signature(apply).parameters.values()
        by_keyword = {p.name for p in parameters} & {"key", "example_keys", *MODE_ARGUMENTS}
        by_position = [p for p in parameters if p.kind in interface.BY_POSITION and p.default is p.empty]
        required = [p for p in by_position if p.name not in by_keyword]
        has_state = len(required) >= 3
        shapes = "apply(params, images) or apply(params, state, images), either with train and key by keyword"
        interface.check_signature(apply, 3 if has_state else 2, by_keyword, shapes)
        return cls(init, apply, has_state)

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        variables = self.init_function(key, example)
        return variables if self.has_state else (variables, {})

    def apply(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: Keys, example_keys: Keys = None
    ) -> Outputs:
        keywords = interface.call_mode(self.function, train, key=key, example_keys=example_keys)
        params, images = cast((params, images), self.dtype)
        if not self.has_state:
            return self.function(params, images, **keywords), model_state
        result = self.function(params, model_state, images, **keywords)
        logits, updated = interface.pair(result, "apply", "(logits, state)")
        return logits, cast_like(model_state, updated) if train else model_state


@dataclass(frozen=True, eq=False)
class Adapted:
    """A network that is called with W + scale * A B in place of some of its kernels W.

    These are the low-rank adapters of LoRA (Hu et al. 2021, arXiv:2106.09685). The network itself is not changed.

    Its `params` are those of the network and, in the dict `ADAPTERS`, A and B for each such kernel, by the kernel's
    path, as in "lora/blocks_0/attn/qkv/kernel/a". B is zero at the start. As in peft, A is uniform in ±1/sqrt(inputs).

    Attributes:
        base: the network.
        shapes: the shape [..., inputs, outputs] of each of these kernels as one or more matrices, by the kernel's name.
        rank: the number of columns of A, [..., inputs, rank], and of rows of B, [..., rank, outputs].
    """

    base: Model
    shapes: Mapping[str, tuple[int, ...]]
    rank: int
    scale: float

    @property
    def function(self) -> Callable[..., Any]:
        """The function whose arguments set the mode."""
        return getattr(self.base, "function", self.base.apply)

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        params, model_state = self.base.init(key, example)
        return self.with_adapters(params, key), model_state

    def with_adapters(self, params: Tree, key: jax.Array) -> Tree:
        """Add fresh adapters to the network's parameters. An adapter does not depend on the choice of the others."""
        leaves, adapters = interface.by_path(params, ()), dict[str, jax.Array]()
        for name, (*stack, inputs, outputs) in self.shapes.items():
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            dtype, bound = leaves[interface.PARAMS + name].dtype, inputs**-0.5
            adapters[f"{name}/a"] = jax.random.uniform(own, (*stack, inputs, self.rank), dtype, -bound, bound)
            adapters[f"{name}/b"] = jnp.zeros((*stack, self.rank, outputs), dtype)
        return {**params, ADAPTERS: traverse_util.unflatten_dict(adapters, sep="/")}

    def apply(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: Keys, example_keys: Keys = None
    ) -> Outputs:
        keywords: dict[str, Any] = {"example_keys": example_keys} if interface.takes_example_keys(self.base) else {}
        return self.base.apply(merged(params, self.scale), model_state, images, train=train, key=key, **keywords)


def merged(params: Tree, scale: float) -> Tree:
    """Return the parameters of a network alone, with W + scale * A B for each kernel W that has an adapter."""
    adapters: Any = traverse_util.flatten_dict(params[ADAPTERS], sep="/")

    def add(path: Any, leaf: jax.Array) -> jax.Array:
        if (name := path_of(path)) + "/a" not in adapters:
            return leaf
        product = jnp.matmul(adapters[f"{name}/a"], adapters[f"{name}/b"], precision="highest")
        return leaf + scale * product.reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(add, {name: tree for name, tree in params.items() if name != ADAPTERS})


def without_adapters(model: Model, params: Tree) -> Tree:
    """Return the parameters of a network alone; those of a network that is not `Adapted` are returned unchanged."""
    return merged(params, model.scale) if isinstance(model, Adapted) else params


def has_dropout(model: Model, params: Tree, model_state: Tree, image_shape: tuple[int, int, int]) -> bool:
    """Return whether a Linen module calls `nn.Dropout` with a rate above 0 for images [H, W, C]."""
    if not isinstance(model, LinenModel):
        return False
    rates, images = [0.0], jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)

    def record(function: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        rates.append(context.module.rate if isinstance(context.module, nn.Dropout) else 0.0)
        return function(*args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(lambda *trees: model.apply(*trees, train=False, key=None)[0], params, model_state, images)
    return max(rates) > 0


def with_frozen_norms(model: Model, layers: Layers) -> Model:
    """Make the batch norms of these layers also use their running statistics in training, without updating them.

    This applies to Linen and NNX modules. Any other model is returned unchanged.
    """
    return replace(model, settled=layers) if layers and isinstance(model, LinenModel | NNXModel) else model


def takes_cpu_convolutions(model: Model) -> TypeGuard[LinenModel | NNXModel]:
    """Return whether `for_platform` may replace grouped convolutions: in users' Linen and NNX modules."""
    return isinstance(model, LinenModel | NNXModel) and not hasattr(getattr(model, "module", None), "with_operations")


def with_cpu_convolutions(model: Model, *, allowed: bool) -> Model:
    """Return a model for which `for_platform` may or may not replace grouped convolutions.

    Raises: InputError if they are not allowed, and the model has none that it replaces.
    """
    if allowed:
        return model
    if not takes_cpu_convolutions(model):
        reason = " has no effect: it applies to Linen and NNX modules of your own"
        raise InputError(Key("model.cpu_convolutions", allowed), reason, advice="leave it out")
    return replace(model, convolution=jax.lax.conv_general_dilated)


def for_platform(model: Any, platform: str) -> Any:
    """Return the fastest version of a model or a module for a platform ("cpu", "gpu", "tpu").

    A network with a method `with_operations(operations)`, such as `jaxddp.models.resnet.ResNet`, gets the operations of
    `jaxddp.platforms`. Of any other Linen or NNX module, only grouped convolutions are replaced. Other
    models are returned unchanged.
    """
    operations = platform_named(platform).operations
    if operations == Operations():
        return model
    if isinstance(model, LinenModel) and (module := for_platform(model.module, platform)) is not model.module:
        return replace(model, module=module)
    if isinstance(model, LinenModel | NNXModel):
        grouped = model.convolution or operations.grouped_convolution
        return model if grouped is model.convolution else replace(model, convolution=grouped)
    with_operations = getattr(model, "with_operations", None)
    return model if with_operations is None else with_operations(operations)


def with_grouped_convolution(convolution: Convolution) -> Any:
    """Return a context in which the grouped `nn.Conv` use `convolution`, if they name no function."""

    def call(path: str, layer: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        is_grouped = isinstance(layer, nn.Conv) and layer.feature_group_count > 1
        if is_grouped and not (layer.conv_general_dilated or layer.conv_general_dilated_cls):
            # Linen copied this instance for this call; see `freeze_norms`.
            object.__setattr__(layer, "conv_general_dilated", convolution)
        return function(*args, **kwargs)

    return interface.intercepting(call)
