"""Networks with published weights: the depth of their layers, and their error messages.

`conformance/test_networks.py` tests the names and shapes of their arrays, and their logits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from jax.sharding import PartitionSpec as P
from support.cases import essential_and_rare
from support.published import CLASSES

from jaxddp.config import Config
from jaxddp.config.registry import MODELS
from jaxddp.core.errors import InputError
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.adapt import for_platform
from jaxddp.models.convnext import ConvNeXt
from jaxddp.models.ops.layers import gelu
from jaxddp.models.regnet import ARCHITECTURES
from jaxddp.models.swin import Swin
from jaxddp.models.vit import ViT, ViTSize

PARAMETER_COUNTS = {
    "vit_ti16": 5_717_416,
    "vit_s16": 22_050_664,
    "vit_b16": 86_567_656,
    "convnext_tiny": 28_589_128,
    "convnext_small": 50_223_688,
    "swin_t": 28_288_354,
    "swin_s": 49_606_258,
}
TRAINED_COUNTS = {
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x8d": 88_791_336,
    "wide_resnet50_2": 68_883_240,
    "wide_resnet101_2": 126_886_696,
    "resnet50d": 25_576_264,
    "seresnet50": 28_088_024,
    "regnet_y_400mf": 4_344_144,
    "regnet_y_800mf": 6_432_512,
    "regnet_y_1_6gf": 11_202_430,
    "regnet_y_3_2gf": 19_436_338,
    "regnet_y_8gf": 39_381_472,
    "regnet_y_16gf": 83_590_140,
    "regnet_y_32gf": 145_046_770,
    "efficientnet_b0": 5_288_548,
    "efficientnet_v2_s": 21_458_488,
    "mobilenet_v3_large": 5_483_032,
}
"""Parameters of networks that also have running statistics. torchvision and timm publish these numbers."""


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


@pytest.mark.parametrize("name", PARAMETER_COUNTS)
def test_parameter_counts_are_the_published_ones(name):
    variables = shapes_of(MODELS.get(name)(Config(), 1000))
    assert sum(map(math.prod, variables.values())) == PARAMETER_COUNTS[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    essential_and_rare(
        ("regnet_y_400mf", "efficientnet_b0"),
        *(name for name in TRAINED_COUNTS if name not in ("regnet_y_400mf", "efficientnet_b0")),
    ),
)
def test_numbers_of_trained_parameters_are_the_published_ones(name):
    shapes = shapes_of(MODELS.get(name)(Config(), 1000), 64)
    trained = [shape for path, shape in shapes.items() if path.startswith("params/")]
    assert sum(map(math.prod, trained)) == TRAINED_COUNTS[name]


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


def test_the_widths_of_a_regnet_become_multiples_of_the_group():
    """Table 1 of torchvision's RegNetY-1.6GF: the quantized widths are 48, 120, 336 and 888."""
    stages = ARCHITECTURES["regnet_y_1_6gf"].stages
    assert [(stage.blocks, stage.features, stage.group) for stage in stages] == [
        *((2, 48, 24), (6, 120, 24), (17, 336, 24), (2, 888, 24)),
    ]


def test_the_depths_of_a_vit_count_its_blocks():
    model = network("vit_ti16")
    depths = {
        "params/cls_token": 0,
        "params/pos_embed": 0,
        "params/patch_embed/kernel": 0,
        "params/blocks_0/attn/qkv/kernel": 1,
        "params/blocks_11/mlp/fc2/bias": 12,
        "params/norm/scale": 13,
        "params/head/kernel": 13,
    }
    assert {path: model.depth_of(path) for path in depths} == depths


def test_the_depths_of_a_convnext_count_its_blocks():
    model = network("convnext_small")
    depths = {
        "params/stem/norm/scale": 0,
        "params/stage0_0/conv/kernel": 1,
        "params/downsample1/norm/scale": 4,
        "params/stage1_0/layer_scale": 4,
        "params/stage2_26/fc1/kernel": 33,
        "params/downsample3/conv/kernel": 34,
        "params/stage3_2/fc2/kernel": 36,
        "params/head/kernel": 37,
        "params/norm/bias": 37,
    }
    assert {path: model.depth_of(path) for path in depths} == depths


def test_the_depths_of_a_swin_transformer_count_its_blocks():
    model = network("swin_s")
    depths = {
        "params/patch_norm/scale": 0,
        "params/stage0_1/attn/qkv/kernel": 2,
        "params/merge1/reduction/kernel": 3,
        "params/stage1_0/relative_position_bias_table": 3,
        "params/stage2_17/mlp/fc1/kernel": 22,
        "params/stage3_1/norm2/bias": 24,
        "params/norm/bias": 25,
        "params/head/kernel": 25,
    }
    assert {path: model.depth_of(path) for path in depths} == depths


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


def test_gelu_has_a_gradient_inside_shard_map():
    topology = Topology.create(2)

    def gradient(x):
        return jax.grad(lambda x: gelu(x).sum())(x)

    sharded = jax.shard_map(gradient, mesh=topology.mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    x = jnp.linspace(-2.0, 2.0, 8)
    np.testing.assert_allclose(jax.jit(sharded)(topology.place(x)), gradient(x), rtol=1e-6)


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


SMALL = {
    "vit": ViT(ViTSize(192, 3, blocks=2), CLASSES),
    "convnext": ConvNeXt((1, 0, 0, 0), CLASSES, width=32),
    "swin": Swin((1, 0, 0, 0), CLASSES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "convnext", pytest.param("swin", marks=pytest.mark.ci)])
def test_initial_logits_are_small_and_differ_between_images(name):
    """A network in which a layer starts with zeros or with very large numbers would not learn."""
    model = for_platform(SMALL[name], "cpu")
    images = np.random.default_rng(0).standard_normal((2, 32, 32, 3), np.float32)
    logits = jax.jit(lambda key, images: model.apply(model.init(key, images), images))(jax.random.key(0), images)
    assert 0.05 < np.std(logits) < 2
    assert np.abs(logits[0] - logits[1]).max() > 1e-3
