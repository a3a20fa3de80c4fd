"""Adapted models: the same network in three libraries gives equal results; modes, random streams and state work."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.errors import error_line

from jaxddp.config.layers import Layers
from jaxddp.models.adapt import adapt
from jaxddp.models.interface import MODE_ARGUMENTS, Model
from jaxddp.setup.network_checks import check_outputs, notices

EXAMPLE = jnp.zeros((1, 8, 8, 3))


class LinenCNN(nn.Module):
    """A Linen network: 3x3 convolution, batch norm, relu, dropout at `rate`, mean over pixels, dense."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, images, train=False):
        x = nn.Conv(4, (3, 3), name="conv")(images)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x)
        x = nn.Dropout(self.rate, deterministic=not train)(nn.relu(x))
        return nn.Dense(5, name="head")(x.mean((1, 2)))


class NNXCNN(nnx.Module):
    """The same network in NNX; train() and eval() set its mode."""

    def __init__(self, rate=0.0, *, rngs):
        self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.head = nnx.Linear(4, 5, rngs=rngs)

    def __call__(self, images):
        return self.head(self.dropout(nnx.relu(self.norm(self.conv(images)))).mean((1, 2)))


def function_init(key, example):
    variables = LinenCNN().init(key, example)
    return variables["params"], variables["batch_stats"]["norm"]


def function_apply(params, state, images, *, train):
    """The same network in jax.lax alone."""
    dimensions = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(images, params["conv"]["kernel"], (1, 1), "SAME", dimension_numbers=dimensions)
    x += params["conv"]["bias"]
    mean, var = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if train else (state["mean"], state["var"])
    updated = {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var}
    x = (x - mean) / jnp.sqrt(var + 1e-5) * params["norm"]["scale"] + params["norm"]["bias"]
    x = jnp.maximum(x, 0.0).mean((1, 2))
    return x @ params["head"]["kernel"] + params["head"]["bias"], updated


def networks_by_library():
    """Return, by library, the adapted network and a function that makes its state of running statistics."""
    return {
        "linen": (adapt(LinenCNN()), lambda statistics: {"batch_stats": {"norm": statistics}}),
        "nnx": (adapt(NNXCNN(rngs=nnx.Rngs(0))), lambda statistics: {"norm": statistics}),
        "function": (adapt((function_init, function_apply)), lambda statistics: statistics),
    }


def random_weights(seed=0):
    """Draw params, running statistics, images and labels, float64."""
    rng = np.random.default_rng(seed)
    params, _ = jax.eval_shape(lambda: function_init(jax.random.key(0), EXAMPLE))
    params = jax.tree.map(lambda leaf: rng.uniform(0.1, 1.0, leaf.shape) * rng.choice([-1, 1], leaf.shape), params)
    statistics = {"mean": rng.standard_normal(4), "var": rng.uniform(0.5, 1.5, 4)}
    return params, statistics, rng.standard_normal((8, 8, 8, 3)), rng.integers(0, 5, 8)


def loss_and_gradients(model, params, state, images, labels, train, key=None):
    def loss(params):
        logits, updated = model.apply(params, state, images, train=train, key=key)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)), (logits, updated)

    return jax.value_and_grad(loss, has_aux=True)(params)


def assert_close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), actual, expected)


@functools.cache
def results_by_library(train):
    """Return, by library, (loss, logits, gradients) and the new state."""
    params, statistics, images, labels = random_weights()
    results = {}
    with jax.enable_x64(True):
        for name, (model, wrap) in networks_by_library().items():
            step = jax.jit(
                lambda params, state, model=model: loss_and_gradients(model, params, state, images, labels, train)
            )
            (loss, (logits, updated)), gradients = step(params, wrap(statistics))
            results[name] = (loss, logits, gradients), updated
            assert logits.dtype == jnp.float64
    return results


@pytest.mark.slow
@pytest.mark.parametrize("library", ["linen", "nnx"])
@pytest.mark.parametrize("train", [True, False])
def test_one_network_in_three_libraries_computes_the_same_function(library, train):
    results, statistics = results_by_library(train), random_weights()[1]
    expected, expected_state = results["function"]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(expected[2]["head"]))
    assert_close(results[library][0], expected)
    assert_close(results[library][1], networks_by_library()[library][1](expected_state))
    assert np.allclose(expected_state["mean"], statistics["mean"]) != train


@pytest.mark.slow
@pytest.mark.parametrize("library", ["linen", "nnx", "function"])
def test_adapted_models_work_in_shard_map(library):
    params, statistics, images, labels = random_weights(2)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    with jax.enable_x64(True):
        model, wrap = networks_by_library()[library]
        state = wrap(statistics)

        def shard_step(params, state, images, labels, train):
            key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("data"))
            params = jax.lax.pcast(params, "data", to="varying")
            (loss, (_, updated)), gradients = loss_and_gradients(model, params, state, images, labels, train, key)
            return jax.lax.pmean((loss, gradients, updated), "data")

        def on_four_devices(train):
            specs = {"in_specs": (P(), P(), P("data"), P("data")), "out_specs": P()}
            step = jax.shard_map(lambda *arguments: shard_step(*arguments, train), mesh=mesh, **specs)
            return jax.jit(step)(params, state, images, labels)

        on_one_device = jax.jit(functools.partial(loss_and_gradients, model), static_argnums=4)
        (loss, (_, _)), gradients = on_one_device(params, state, images, labels, False)
        assert_close(on_four_devices(False), (loss, gradients, state))
        # In training each device computes the statistics of its shard. The averaged means equal the mean of the whole
        # batch; the averaged variances do not equal its variance.
        _, (_, updated) = on_one_device(params, state, images, labels, True)[0]
        for (path, sharded), whole in zip(
            jax.tree_util.tree_leaves_with_path(on_four_devices(True)[2]), jax.tree.leaves(updated), strict=True
        ):
            assert np.allclose(sharded, whole, rtol=1e-9) == (path[-1].key == "mean")


@pytest.mark.parametrize("model", [LinenCNN(rate=0.5), NNXCNN(rate=0.5, rngs=nnx.Rngs(0))], ids=["linen", "nnx"])
def test_dropout_depends_on_the_key_alone(model):
    model = adapt(model)
    params, state = model.init(jax.random.key(0), EXAMPLE)
    images = np.random.default_rng(1).standard_normal((4, 8, 8, 3), np.float32)

    def logits(seed, train=True):
        key = None if seed is None else jax.random.key(seed)
        return np.asarray(model.apply(params, state, images, train=train, key=key)[0])

    np.testing.assert_array_equal(logits(1), logits(1))
    assert not np.array_equal(logits(1), logits(2))
    np.testing.assert_array_equal(logits(1, train=False), logits(2, train=False))
    np.testing.assert_array_equal(logits(1, train=False), logits(None, train=False))
    raw_key = model.apply(params, state, images, train=True, key=jax.random.PRNGKey(1))[0]
    np.testing.assert_array_equal(raw_key, logits(1))


class LinenNoise(nn.Module):
    """A module that draws from two streams, one with an unusual name, and counts its calls in its own collection."""

    @nn.compact
    def __call__(self, images, example_keys):
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        calls.value += not self.is_initializing()
        return jnp.stack([jax.random.normal(self.make_rng(name), (3,)) for name in ("dropout", "noise")])


class NNXNoise(nnx.Module):
    """The same module in NNX, with streams inside a list."""

    def __init__(self, rngs):
        self.streams = nnx.List([rngs["dropout"].fork(), rngs["noise"].fork(), rngs["noise"].split((2,))])
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, images):
        self.calls[...] += 1
        return jnp.stack([stream.normal((3,)) for stream in self.streams[:2]])


@pytest.mark.parametrize(
    ("model", "state_path"),
    [(LinenNoise(), ("counters", "calls")), (NNXNoise(nnx.Rngs(0, dropout=0, noise=0)), ("calls",))],
    ids=["linen", "nnx"],
)
def test_adapted_models_handle_every_random_stream_and_every_state_collection(model, state_path):
    model = adapt(model)
    params, state = model.init(jax.random.key(0), EXAMPLE)
    assert params == {}
    (path,) = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    assert tuple(entry.key for entry in path) == state_path

    noise, updated = jax.jit(model.apply, static_argnames="train")(
        params, state, EXAMPLE, train=True, key=jax.random.key(1)
    )
    assert len(np.unique(noise)) == noise.size, "two random streams drew the same number"
    assert jax.tree.leaves(updated) == [1]
    noise_of_evaluation, state_of_evaluation = model.apply(params, updated, EXAMPLE, train=False, key=jax.random.key(2))
    assert not np.any(np.asarray(noise_of_evaluation) == np.asarray(noise))
    assert jax.tree.leaves(state_of_evaluation) == [1], "evaluation changed the state"


def call_with(name):
    """Return a function of images whose argument `name` sets the mode, and adds 1 in training."""
    default, adds = ("", name) if name == "train" else (f"={not MODE_ARGUMENTS[name]}", name)
    if not MODE_ARGUMENTS[name]:
        default, adds = "=None" if name == "use_running_average" else "=True", f"(not {name})"
    return eval(f"lambda _, x, {name}{default}: x + {adds}")


@pytest.mark.parametrize("name", MODE_ARGUMENTS)
@pytest.mark.parametrize("library", ["linen", "nnx", "function"])
def test_the_training_mode_is_passed_under_the_models_own_argument_name(name, library):
    call = call_with(name)
    if library == "function":
        model = adapt((lambda key, example: {}, call))
    else:
        module_class = nn.Module if library == "linen" else nnx.Module
        model = adapt(type("Net", (module_class,), {"__call__": call, "__module__": __name__})())
    params, state = model.init(jax.random.key(0), EXAMPLE)
    for train in (True, False):
        logits, _ = model.apply(params, state, EXAMPLE, train=train, key=None)
        np.testing.assert_array_equal(logits, EXAMPLE + train)


@pytest.mark.parametrize("name", ["train", pytest.param("inference", marks=pytest.mark.ci)])
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_a_boolean_field_or_attribute_sets_the_mode(name, library):
    module_class = nn.Module if library == "linen" else nnx.Module
    call, body = call_with(name), {"__annotations__": {name: bool}, name: True, "__module__": __name__}
    if library == "nnx":
        name, body = "inference", {"__init__": lambda self: setattr(self, "inference", True), "__module__": __name__}
        call = call_with(name)
    network = type("Net", (module_class,), {**body, "__call__": lambda self, x: call(self, x, getattr(self, name))})()
    model = adapt(network)
    for train in (True, False):
        logits, _ = model.apply({}, {}, EXAMPLE, train=train, key=None)
        np.testing.assert_array_equal(logits, EXAMPLE + train)
    assert getattr(network, name) is True


class NNXMeasured(NNXCNN):
    def __init__(self, rngs):
        super().__init__(rngs=rngs)
        self.accuracy, self.count, self.shift = nnx.metrics.Accuracy(), nnx.Variable(jnp.zeros(())), jnp.arange(5.0)

    def __call__(self, images):
        self.count[...] += 1
        return super().__call__(images) + self.shift


@pytest.mark.parametrize("make", [NNXCNN, functools.partial(NNXCNN, 0.5), NNXMeasured, lambda rngs: NNXCNN(rngs=rngs)])
def test_a_function_of_rngs_makes_the_nnx_module_from_the_key(make):
    model, expected = adapt(make), adapt(make(rngs=nnx.Rngs(jax.random.key(3))))
    images = np.random.default_rng(0).standard_normal((2, 8, 8, 3), np.float32)
    trees = model.init(jax.random.key(3), EXAMPLE)
    jax.tree.map(np.testing.assert_array_equal, trees, expected.init(None, EXAMPLE))
    assert not np.array_equal(trees[0]["head"]["kernel"], model.init(jax.random.key(4), EXAMPLE)[0]["head"]["kernel"])
    for train in (True, False):
        results = [each.apply(*trees, images, train=train, key=jax.random.key(1)) for each in (model, expected)]
        jax.tree.map(np.testing.assert_array_equal, *results)


class Switched(nn.Module):
    """A network with dropout and a batch norm, in the mode of `training` if it is given, else of `learning`."""

    training: bool | None = None

    @nn.compact
    def __call__(self, images, learning: bool = False):
        learning = learning if self.training is None else self.training
        x = nn.BatchNorm(use_running_average=not learning, name="norm")(images)
        return nn.Dense(5)(nn.Dropout(0.5, deterministic=not learning)(x).mean((1, 2)))


class Spectral(nn.Module):
    """A network with a spectral norm, whose evaluation reads `u` and not `sigma`, a batch norm and a sown loss."""

    always_training: bool = False

    @nn.compact
    def __call__(self, images, train: bool):
        x = nn.SpectralNorm(nn.Dense(5))(images.mean((1, 2)), update_stats=train)
        x += self.variable("constants", "shift", jnp.ones, 5).value
        self.sow("losses", "size", (x**2).mean())
        return nn.BatchNorm(use_running_average=not (train or self.always_training))(x)


def constant_apply(params, state, images):
    return function_apply(params, state, images, train=False)[0], state


@pytest.mark.parametrize(
    ("network", "beginnings"),
    [
        (Switched(), ["learning=False: Switched.__call__", "training does not change batch_stats", "the network has"]),
        (Switched(True), ["learning=False"]),
        (LinenCNN(0.5), []),
        (NNXCNN(0.5, rngs=nnx.Rngs(0)), []),
        (NNXMeasured(nnx.Rngs(0)), []),
        (Spectral(), []),
        (Spectral(True), ["evaluation does not read batch_stats/BatchNorm_0/mean, batch_stats/BatchNorm_0/var"]),
        ((function_init, constant_apply), ["training does not change mean, var"]),
        (
            (function_init, lambda params, state, images: function_apply(params, state, images, train=True)),
            ["evaluation does not read mean, var"],
        ),
    ],
)
def test_a_mode_that_has_no_effect_is_told(network, beginnings):
    model, shape = adapt(network), EXAMPLE.shape[1:]
    lines = [*notices(model, shape, *check_outputs(model, shape, 5))]
    assert len(lines) == len(beginnings)
    assert all(line.startswith(beginning) for line, beginning in zip(lines, beginnings, strict=True))


def test_state_of_frozen_layers_need_not_change():
    model, shape = adapt((function_init, constant_apply)), EXAMPLE.shape[1:]
    traces = check_outputs(model, shape, 5)
    (line,) = notices(model, shape, *traces, Layers(("mean",)))
    assert line.startswith("training does not change var,")
    assert not [*notices(model, shape, *traces, Layers(("mean", "var")))]


class NNXNested(nnx.Module):
    """A module with a list, a shared layer and a bare array."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)])
        self.repeated = self.layers[0]
        self.offset = jnp.arange(3.0)

    def __call__(self, images):
        x = images
        for layer in [*self.layers, self.repeated]:
            x = layer(x)
        return x + self.offset


def test_adapting_keeps_the_nnx_structure_and_the_users_module_unchanged():
    module = NNXNested(nnx.Rngs(0))
    images = np.random.default_rng(0).standard_normal((4, 3), np.float32)
    expected = np.asarray(module(images))
    model = adapt(module)
    params, state = model.init(jax.random.key(9), images)
    assert list(params) == ["layers"] and list(params["layers"]) == ["0", "1"]
    np.testing.assert_array_equal(state["offset"], jnp.arange(3.0))
    nnx.update(other := NNXNested(nnx.Rngs(1)), nnx.restore_int_paths(params))  # As docs/extending.md says.
    np.testing.assert_array_equal(other(images), expected)
    logits, _ = model.apply(params, state, images, train=True, key=None)
    np.testing.assert_allclose(logits, expected, rtol=1e-6)

    logits, _ = model.apply(jax.tree.map(jnp.zeros_like, params), state, images, train=True, key=None)
    np.testing.assert_allclose(logits, np.broadcast_to(jnp.arange(3.0), (4, 3)))
    jax.tree.map(lambda leaf: leaf.delete(), (params, state))  # Donation deletes the arrays in the same way.
    np.testing.assert_array_equal(module(images), expected)
    np.testing.assert_allclose(model.apply(*model.init(None, images), images, train=False, key=None)[0], expected)
    # Its mode does not change either.
    module = NNXCNN(0.5, rngs=nnx.Rngs(0))
    module.eval()
    model = adapt(module)
    model.apply(*model.init(jax.random.key(0), EXAMPLE), EXAMPLE, train=True, key=jax.random.key(1))
    assert module.norm.use_running_average and module.dropout.deterministic
    np.testing.assert_array_equal(module.norm.mean[...], np.zeros(4))


def test_functions_may_have_no_state_and_may_receive_a_key():
    def init(key, example):
        # These two arrays are the parameters, and not a pair (params, state).
        return (jnp.ones(3), jnp.zeros(3))

    def apply(params, images, key=None):
        return images * params[0] + params[1] + jax.random.uniform(key)

    model = adapt([init, apply])
    params, state = model.init(jax.random.key(0), EXAMPLE)
    assert len(params) == 2 and state == {}
    logits, state = model.apply(params, state, EXAMPLE, train=True, key=jax.random.key(1))
    np.testing.assert_allclose(logits, EXAMPLE + jax.random.uniform(jax.random.key(1)))
    assert state == {}


@pytest.mark.parametrize("library", ["linen", "nnx", "function"])
def test_an_adapted_model_is_a_frozen_hashable_model(library):
    model, _ = networks_by_library()[library]
    assert isinstance(model, Model)
    assert adapt(model) is model
    assert hash(model) == hash(model)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(model, dataclasses.fields(model)[0].name, None)
    params, state = jax.eval_shape(model.init, jax.random.key(0), EXAMPLE)
    apply = jax.jit(lambda model, *arguments: model.apply(*arguments, train=True, key=None), static_argnums=0)
    logits, updated = jax.eval_shape(lambda *arguments: apply(model, *arguments), params, state, EXAMPLE)
    assert (logits.shape, logits.dtype) == ((1, 5), jnp.float32)
    assert jax.tree.structure(updated) == jax.tree.structure(state)


class OtherApply:
    """An object with the methods of a Model, whose `apply` has other arguments."""

    def init(self, key, example):
        return {}, {}

    def apply(self, params, images):
        return images


def params_init(key, example):
    return {}


def apply_with_any_inputs(params, state, rng, *inputs):
    return inputs[0], state


@pytest.mark.parametrize(
    ("model", "phrases"),
    [
        (3, ["model is of type int;", "a Linen module, an NNX module or a function (rngs)"]),
        ("resnet50", ["model is of type str;"]),
        (LinenCNN, ["model is the class LinenCNN;"]),
        ((params_init,), ["model is of type tuple;"]),
        ((params_init, 3), ["model is of type tuple;"]),
        ((lambda key: {}, function_apply), ["does not fit init(key, example)"]),
        ((params_init, lambda params: params), ["does not fit apply(params, images) or apply(params, state, images)"]),
        ((params_init, lambda a, b, c, d: a), ["(a, b, c, d) does not fit apply", "'d'"]),
        ((params_init, lambda a, b, *, rate: a), ["does not fit apply", "'rate'"]),
        (
            (params_init, apply_with_any_inputs),
            ["apply_with_any_inputs(params, state, rng, *inputs) does not fit", "name its arguments"],
        ),
        ((params_init, lambda a, b, mode="train": a), ["mode='train' would have one value", "such as train=False"]),
        ((params_init, lambda a, b, mode=True: a), ["mode=True would have one value"]),
        ((lambda key, x: {"a": 1.0, "b": 2.0}, constant_apply), ["the model's init returned an object of type dict;"]),
        ((lambda key, x: ({}, {}), lambda a, b, x: x[:, 0, 0]), ["the model's apply returned float32[2, 3]; return a"]),
        ((LinenCNN().init, LinenCNN().apply), ["model: Module.init is a method of a Flax module; give the module"]),
        ((dict, function_apply), ["dict has no signature; wrap it in a Python function"]),
        (
            OtherApply(),
            ["OtherApply.apply(params, images) does not fit apply(params, model_state, images, *, train, key)"],
        ),
    ],
)
def test_adapt_rejects_any_other_object_by_its_type_name(model, phrases):
    line = error_line(lambda: check_outputs(adapt(model), (8, 8, 3), 5))
    for phrase in phrases:
        assert phrase in line
