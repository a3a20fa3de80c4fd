"""Convolutions: every platform's version equals XLA's, and no network of configs/ has a slow operation."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from support.cases import ci_case, costly, essential_and_ci, rare_case
from support.networks import largest_difference

from jaxddp.api import resnet
from jaxddp.config import Config, load
from jaxddp.config.registry import MODELS
from jaxddp.core.errors import InputError
from jaxddp.models.adapt import adapt, for_platform, with_cpu_convolutions
from jaxddp.models.interface import takes_example_keys
from jaxddp.models.ops.convolution import convolve_on_cpu, convolve_on_gpu
from jaxddp.models.ops.layers import Operations
from jaxddp.models.resnet import BASIC, Architecture, ResNet
from jaxddp.recipe.sources import config_names

KERNELS = st.sampled_from([(1, 0), (3, 1), (3, 0), (7, 3), (5, 2)])

pytestmark = pytest.mark.usefixtures("float64")


def xla_convolution(images: jax.Array, kernel: jax.Array, stride: int, padding: int) -> jax.Array:
    groups = images.shape[-1] // kernel.shape[2]
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
    return lax.conv_general_dilated(images, kernel, (stride,) * 2, [(padding, padding)] * 2, **layout)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def value_and_gradients(convolution, images, kernel, stride, padding):
    value, gradient = jax.vjp(lambda x, k: convolution(x, k, stride, padding), images, kernel)
    return value, *gradient(jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape))


def assert_equal_to_xla(images, kernel, stride, padding, ours=convolve_on_cpu):
    """Assert that the outputs and both gradients of a convolution equal those of XLA's."""
    results = [value_and_gradients(each, images, kernel, stride, padding) for each in (ours, xla_convolution)]
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def random_arguments(batch: int, height: int, width: int, channels: int, features: int, size: int) -> tuple:
    rng = np.random.default_rng(0)
    return rng.normal(size=(batch, height, width, channels)), rng.normal(size=(size, size, channels, features))


@pytest.mark.slow
@costly
@given(
    batch=st.integers(1, 5),
    height=st.integers(2, 33),
    width=st.integers(2, 9),
    channels=st.integers(1, 4),
    features=st.integers(1, 4),
    kernel=KERNELS,
    stride=st.integers(1, 3),
    ours=st.sampled_from([convolve_on_cpu, convolve_on_gpu]),
)
def test_values_and_gradients_equal_xlas(batch, height, width, channels, features, kernel, stride, ours):
    size, padding = kernel
    if min(height, width) + 2 * padding >= size:
        assert_equal_to_xla(*random_arguments(batch, height, width, channels, features, size), stride, padding, ours)


@pytest.mark.parametrize(
    ("batch", "side", "channels", "features", "stride"),
    [
        pytest.param(2, 4, 256, 256, 1, id="many features on both sides"),
        pytest.param(2, 4, 4, 256, 2, id="many features of the output"),
        pytest.param(2, 5, 256, 4, 1, id="many features of the input"),
        pytest.param(3, 16, 128, 512, 1, id="several blocks, a large kernel"),
        pytest.param(6, 8, 3, 5, 1, id="several images a block"),
        pytest.param(7, 8, 3, 5, 2, id="a batch that blocks cannot divide"),
    ],
)
def test_each_way_to_compute_a_convolution_gives_the_same_result(batch, side, channels, features, stride):
    assert_equal_to_xla(*random_arguments(batch, side, side, channels, features, 3), stride, 1)


DEPTHWISE = (9, 7, 1, 3), (4, 7, 1, 3), (5, 3, 1, 0), (8, 3, 2, 1), (9, 5, 2, 2), (4, 5, 2, 2), (9, 3, 3, 1)


@pytest.mark.parametrize(
    ("channels", "features", "groups", "side", "size", "stride", "padding"),
    [
        *(pytest.param(6, 6, 6, *case, id=f"depthwise {case}") for case in DEPTHWISE),
        pytest.param(4, 4, 4, 8, 3, 2, 1, id="few channels, a stride"),
        pytest.param(12, 24, 3, 5, 3, 1, 1, id="all groups merged, more features than channels"),
        pytest.param(96, 96, 24, 5, 3, 2, 1, id="four groups merged, a stride"),
        pytest.param(40, 20, 2, 5, 3, 1, 1, id="no groups merged"),
    ],
)
def test_grouped_convolutions_equal_xlas(channels, features, groups, side, size, stride, padding):
    images, kernel = random_arguments(2, side, side + 1, channels, features, size)
    for ours in (convolve_on_cpu, convolve_on_gpu):
        assert_equal_to_xla(images, kernel[:, :, : channels // groups], stride, padding, ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"strides": 2},
        {"padding": "CIRCULAR"},
        {"padding": ((2, 1), (-1, 3)), "strides": (2, 1)},
        {"kernel_size": (4, 2), "kernel_dilation": (1, 2), "mask": 1},
        rare_case({"kernel_dilation": 2, "strides": 2}),
        rare_case({"input_dilation": 2, "padding": 1}),
        rare_case({"kernel_size": (3,), "padding": "CAUSAL"}),
    ],
)
@pytest.mark.parametrize(("features", "groups"), [(6, 6), (12, 3)])
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_users_convolutions_in_groups_equal_xlas_on_cpus(library, features, groups, settings):
    settings = {"kernel_size": (3, 3), "feature_group_count": groups, **settings}
    if settings.pop("mask", None):
        shape = (*settings["kernel_size"], 6 // groups, features)
        settings["mask"] = jnp.asarray(np.random.default_rng(1).integers(0, 2, shape))
    images = np.random.default_rng(0).normal(size=(2, *(9, 8)[: len(settings["kernel_size"])], 6))
    if library == "linen":
        model = adapt(nn.Conv(features, param_dtype=jnp.float64, bias_init=nn.initializers.normal(1.0), **settings))
    else:
        model = adapt(lambda rngs: nnx.Conv(6, features, param_dtype=jnp.float64, rngs=rngs, **settings))
    params, state = model.init(jax.random.key(0), images)

    @functools.partial(jax.jit, static_argnums=0)
    def results(model, *arguments):
        value, gradient = jax.vjp(lambda p, x: model.apply(p, state, x, train=True, key=None)[0], *arguments)
        return value, gradient(jnp.cos(jnp.arange(value.size, dtype=value.dtype)).reshape(value.shape))

    on_cpu = for_platform(model, "cpu")
    expected = results(model, params, images)
    of_each = jax.vmap(lambda image: on_cpu.apply(params, state, image, train=True, key=None)[0])(images[:, None])
    assert largest_difference((*results(on_cpu, params, images), of_each[:, 0]), (*expected, expected[0])) < 1e-9
    program = str(jax.make_jaxpr(lambda *a: on_cpu.apply(*a, train=False, key=None)[0])(params, state, images))
    is_replaced = len(settings["kernel_size"]) == 2 and "input_dilation" not in settings
    assert ("conv_general_dilated" not in program) == is_replaced


def test_only_convolutions_in_groups_without_a_function_of_their_own_are_replaced():
    own = lambda *arguments, **options: lax.conv_general_dilated(*arguments, **options)  # noqa: E731
    layers = [nn.Conv(4, (3, 3)), nn.Conv(4, (3, 3), feature_group_count=4, conv_general_dilated=own)]
    model, images = adapt(nn.Sequential(layers)), jnp.zeros((1, 8, 8, 3))
    params, state = model.init(jax.random.key(0), images)
    programs = [
        str(jax.make_jaxpr(lambda p, model=model: model.apply(p, state, images, train=False, key=None)[0])(params))
        for model in (model, for_platform(model, "cpu"))
    ]
    assert programs[0] == programs[1] and programs[0].count("conv_general_dilated[") == 2
    assert for_platform(model, "cpu").convolution and for_platform(model, "gpu") is model
    assert for_platform(with_cpu_convolutions(model, allowed=False), "cpu").convolution is lax.conv_general_dilated


@pytest.mark.parametrize("network", [resnet("resnet18", 5), (lambda key, example: {}, lambda params, images: images)])
def test_cpu_convolutions_are_refused_where_they_have_no_effect(network):
    message = r"^model.cpu_convolutions=False has no effect: it applies to Linen and NNX modules of your own; leave"
    with pytest.raises(InputError, match=message):
        with_cpu_convolutions(adapt(network), allowed=False)


def test_a_policy_of_checkpoints_sees_convolutions():
    seen, (images, kernel) = [], random_arguments(1, 8, 8, 3, 256, 3)
    note = lambda operation, *_, **__: seen.append(operation.name) is not None  # noqa: E731
    for ours in (convolve_on_cpu, convolve_on_gpu):
        loss = jax.checkpoint(lambda k, f=ours: jnp.sin(f(images, k, 2, 1)).sum(), policy=note)
        jax.make_jaxpr(jax.grad(loss))(kernel)
    assert seen.count("custom_vmap_call") == 2 and "custom_vjp_call" not in seen


@pytest.mark.slow
def test_bfloat16_gradients_are_summed_in_float32():
    # 4096 ones summed in bfloat16 stop at 256.
    for channels in (1, 2):
        images, kernel = (jnp.ones((1, side, side, channels), jnp.bfloat16) for side in (64, 1))
        loss = lambda k, x: convolve_on_cpu(x, k, 1, 0).astype(jnp.float32).sum()  # noqa: E731
        with jax.checking_leaks():
            gradient = jax.jit(jax.grad(loss))(kernel, images)
        assert gradient.dtype == jnp.bfloat16 and gradient.ravel().tolist() == channels * [4096]


def slow_operations(program: str) -> list[str]:
    """Return the slow operations of a lowered CPU program: the gradient of max pooling, and the convolutions that
    `jaxddp.models.ops.convolution` replaces."""
    slow = ["select_and_scatter"] * program.count("stablehlo.select_and_scatter")
    pattern = r"stablehlo\.convolution.*: \(tensor<(\d+)x(\d+)x(\d+)x\d+xf\d+>, tensor<(\d+)x(\d+)x"
    shapes = [tuple(map(int, match)) for match in re.findall(pattern, program)]
    assert len(shapes) == program.count("stablehlo.convolution(")
    return slow + [str(s) for s in shapes if s[3] > s[1] or s[4] > s[2] or s[3] > 7]


@functools.cache
def trace_gradient(network, size: int, count: int):
    """Trace the gradient of a network's loss. Equal networks are traced once."""
    model = adapt(network)
    images = jax.ShapeDtypeStruct((count, size, size, 3), jnp.float32)
    params, state = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss(params, state, images):
        keys = {"example_keys": jax.random.split(jax.random.key(0), len(images))} if takes_example_keys(model) else {}
        return model.apply(params, state, images, train=True, key=None, **keys)[0].sum()

    traced = jax.jit(jax.grad(loss)).trace(params, state, images)
    assert "cond[" not in str(traced.jaxpr)
    return traced


def lower_gradient_of_config(config: Config, platform: str = "cpu") -> str:
    network = for_platform(MODELS.get(config.model.name)(config, 10), platform)
    # In configs with ghost batch norm, the batch is one whole group.
    count = config.model.batch_statistics.group or 8
    traced = trace_gradient(network, config.data.image_size, count)
    return traced.lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),)).as_text()


# At least one config for each kind of network and each kind of images.
REPRESENTATIVE = {"cifar10_fast", "digits", "imagenet_resnet50", "imagenet_vit_s16"}


@pytest.mark.slow
@pytest.mark.parametrize("name", essential_and_ci(sorted(REPRESENTATIVE), config_names()))
def test_no_network_of_configs_has_a_slow_operation(name):
    with jax.enable_x64(False):
        assert slow_operations(lower_gradient_of_config(load(name))) == []


def test_slow_operations_are_detected():
    def program(size: int) -> str:
        images, kernel = jnp.zeros((8, size, size, 4)), jnp.zeros((3, 3, 4, 4))
        return jax.jit(jax.grad(lambda k: xla_convolution(images, k, 1, 1).sum())).lower(kernel).as_text()

    assert slow_operations(program(2)) and slow_operations(program(8))


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["gpu", ci_case("tpu")])
def test_programs_for_gpu_and_tpu_have_xlas_convolutions_and_no_branches(platform):
    """A ResNet-50 has 53 convolutions with two gradients each. The first, a composite on GPUs, lacks the images'."""
    with jax.enable_x64(False):
        program = lower_gradient_of_config(load("imagenet_resnet50"), platform)
    assert program.count("stablehlo.convolution(") == 3 * 53 - 1
    # The two gradients of the head. The loss is the sum of the logits, so the gradients do not need the logits.
    assert program.count("stablehlo.dot_general") == 2
    assert program.count("stablehlo.composite") == (2 if platform == "gpu" else 0)
    for operation in ("stablehlo.case", "stablehlo.if", "stablehlo.while", "platform_index"):
        assert operation not in program


@pytest.mark.ci
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_programs_for_gpu_and_tpu_have_xlas_depthwise_convolutions(platform):
    """An EfficientNet-B0 has 16 depthwise convolutions, each with two gradients, which XLA's operations express."""
    with jax.enable_x64(False):
        program = lower_gradient_of_config(load("imagenet_efficientnet_b0").replace(data={"image_size": 32}), platform)
    groups = re.findall(r"(?:feature|batch)_group_count = (\d+)", program)
    assert sum(int(count) > 1 for count in groups) == 3 * 16
    assert "stablehlo.while" not in program and program.count("stablehlo.composite") == (2 if platform == "gpu" else 0)


def test_for_platform_sets_the_convolution_once_and_keeps_the_results():
    network = ResNet(Architecture((1,), BASIC), 3, width=4, stem="small", dtype="float64", param_dtype="float64")
    for_gpu, for_cpu = (for_platform(network, platform) for platform in ("gpu", "cpu"))
    assert for_gpu.operations.convolution is convolve_on_gpu and for_cpu.operations.convolution is convolve_on_cpu
    assert for_platform(for_cpu, "gpu") is for_cpu and for_platform(for_cpu, "cpu") is for_cpu
    assert for_platform(custom := network.clone(operations=Operations(xla_convolution)), "cpu") is custom
    assert for_platform(adapt(network), "cpu").module == for_cpu
    assert for_platform(functions := (len, max), "cpu") is functions
    images = np.random.default_rng(0).normal(size=(2, 8, 8, 3))
    variables = jax.jit(for_gpu.init)(jax.random.key(0), images)
    results = [jax.jit(network.apply)(variables, images) for network in (for_gpu, for_cpu)]
    np.testing.assert_allclose(*results, rtol=1e-12)


@pytest.mark.slow
def test_the_operations_of_every_platform_give_the_same_gradients():
    dtypes = {"dtype": "float64", "param_dtype": "float64"}
    network = ResNet(Architecture((1, 1), BASIC), 3, width=4, stem="imagenet", zero_init_last_scale=False, **dtypes)
    images = np.random.default_rng(0).normal(size=(4, 33, 33, 3))
    variables = jax.jit(network.init)(jax.random.key(0), images)

    def gradients(platform):
        def loss(params):
            module = for_platform(network, platform)
            logits, _ = module.apply({**variables, "params": params}, images, train=True, mutable=["batch_stats"])
            return jnp.square(logits - 1).sum()

        return jax.jit(jax.grad(loss))(variables["params"])

    expected = gradients("gpu")
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(expected))
    assert largest_difference([gradients("cpu"), gradients("tpu")], [expected, expected]) < 1e-9
