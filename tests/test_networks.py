"""Networks with published weights: the depth of their layers, and their error messages.

`conformance/test_networks.py` tests the names and shapes of their arrays, and their logits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from support.cases import essential_and_rare
from support.published import CLASSES

from jaxddp.config import Config
from jaxddp.config.registry import MODELS
from jaxddp.core.errors import InputError
from jaxddp.models.convnext import ResponseNorm
from jaxddp.models.ops.layers import gelu


def network(name):
    return MODELS.get(name)(Config(), CLASSES)


def shapes_of(model, size=224):
    """Return the shapes of the arrays by path, such as "params/fc/kernel"."""
    variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32))
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(dict(variables), sep="/").items()}


@pytest.mark.parametrize(
    "name",
    essential_and_rare(
        ("vit_ti16", "convnext_tiny", "swin_t"),
        *("vit_s16", "vit_b16", "convnext_small", "swin_s"),
        *("regnet_y_400mf", "efficientnet_v2_s", "mobilenet_v3_large"),
    ),
)
def test_depths_grow_from_the_stem_to_the_head(name):
    model = network(name)
    depths = [model.depth_of(path) for path in shapes_of(model) if path.startswith("params/")]
    assert sorted(set(depths)) == list(range(model.depth))
    # The first layer and the last layer have at least two arrays each.
    assert depths.count(0) >= 2
    assert depths.count(model.depth - 1) >= 2


def test_the_depths_of_a_resnet_count_its_blocks():
    model = network("resnet50")
    depths = {
        "params/conv1/kernel": 0,
        "batch_stats/bn1/mean": 0,
        "params/layer1_0/downsample_conv/kernel": 1,
        "params/layer1_2/conv3/kernel": 3,
        "params/layer2_0/bn1/scale": 4,
        "params/layer4_2/conv1/kernel": 16,
        "params/fc/bias": 17,
    }
    assert {path: model.depth_of(path) for path in depths} == depths


@pytest.mark.parametrize(
    ("name", "depths"),
    [
        (
            "regnet_y_400mf",
            {"stem/conv/kernel": 0, "stage1_0/se/fc1/bias": 1, "stage2_2/conv3/norm/scale": 4, "fc/kernel": 17},
        ),
        (
            "efficientnet_b0",
            {"stem/norm/scale": 0, "stage1_0/depthwise/conv/kernel": 1, "stage7_0/se/fc2/bias": 16}
            | {"last_conv/conv/kernel": 17, "head/kernel": 17},
        ),
        ("mobilenet_v3_large", {"block1/project/conv/kernel": 1, "block15/expand/norm/bias": 15, "hidden/bias": 16}),
        ("resnet50d", {"stem_conv2/kernel": 0, "layer1_0/downsample_conv/kernel": 1, "fc/bias": 17}),
    ],
)
def test_the_depths_of_other_networks_count_their_blocks(name, depths):
    model = network(name)
    assert {path: model.depth_of(f"params/{path}") for path in depths} == depths
    assert model.depth == 1 + max(model.depth_of(f"params/{head}/kernel") for head in ("fc", "head"))


@pytest.mark.parametrize("dtype", essential_and_rare((jnp.float32, jnp.bfloat16), jnp.float16))
@pytest.mark.parametrize(
    "name",
    essential_and_rare(
        ("vit_ti16", "convnext_tiny", "mobilenet_v3_large"), "swin_t", "regnet_y_400mf", "efficientnet_b0"
    ),
)
def test_logits_have_at_least_float32_and_parameters_keep_their_dtype(name, dtype):
    model, images = network(name).clone(dtype=dtype), jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    logits = jax.eval_shape(model.apply, variables, images)
    assert (logits.shape, logits.dtype) == ((2, CLASSES), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("is_float64", [False, True])
def test_gelu_and_its_derivative_are_exact(is_float64):
    with jax.enable_x64(is_float64):
        x = np.linspace(-7, 7, 57).astype(np.float64 if is_float64 else np.float32)
        tolerance = 1e-14 if is_float64 else 2e-6
        cdf = np.array([(1 + math.erf(value * math.sqrt(0.5))) / 2 for value in x.tolist()])
        pdf = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
        value, gradient = gelu(x), jax.vmap(jax.grad(gelu))(x)
        assert value.dtype == gradient.dtype == x.dtype
        np.testing.assert_allclose(value, x * cdf, rtol=0, atol=tolerance)
        np.testing.assert_allclose(gradient, cdf + x * pdf, rtol=0, atol=tolerance)


def test_the_gradient_of_a_response_norm_is_finite_for_a_channel_of_zeros():
    norm, images = ResponseNorm(), jnp.ones((1, 2, 2, 3)).at[..., 1].set(0)
    params = {"params": {"scale": jnp.ones(3), "bias": jnp.zeros(3)}}
    gradient = jax.jit(jax.grad(lambda images: norm.apply(params, images).sum()))(images)
    assert np.isfinite(gradient).all() and np.abs(gradient).min() > 0


def test_images_that_do_not_fit_the_position_embeddings_raise_a_one_line_error():
    model = network("vit_ti16")
    variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32))
    with pytest.raises(InputError) as raised:
        jax.eval_shape(model.apply, variables, jax.ShapeDtypeStruct((1, 96, 80, 3), jnp.float32))
    expected = (
        "vit: images of 96x80 pixels have 30 patches, but the position embeddings are for 16; give data.image_size=64"
    )
    assert first_line(raised) == expected


def first_line(raised):
    """Return the first line of a message, without the note that JAX adds to the exception."""
    return str(raised.value).splitlines()[0]


@pytest.mark.parametrize(
    ("name", "side", "expected"),
    [
        ("vit_ti16", 100, "vit: images of 100x100 pixels are not whole patches of 16; give data.image_size=96 or 112"),
        ("vit_ti16", 8, "vit: images of 8x8 pixels are not whole patches of 16; give data.image_size=16"),
        ("convnext_tiny", 28, "convnext: images of 28x28 pixels are too small; give data.image_size=32 or more"),
        ("swin_t", 3, "swin: images of 3x3 pixels are too small; give data.image_size=4 or more"),
    ],
)
def test_images_that_a_network_cannot_take_raise_a_one_line_error(name, side, expected):
    with pytest.raises(InputError) as raised:
        shapes_of(network(name), side)
    assert first_line(raised) == expected
