"""ResNets: published parameter counts, the same training on every platform, and each option's effect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.errors import error_line

from jaxddp.api import resnet
from jaxddp.models.adapt import for_platform
from jaxddp.models.resnet import BASIC, BOTTLENECK, WEIGHT_INITS, Architecture, ResidualBlock, ResNet


def randomized(tree, seed=0):
    """Redraw every leaf, with positive variances and scales away from zero, and kernels small enough to stay finite."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        if name in ("scale", "var"):
            return rng.uniform(0.5, 1.5, leaf.shape)
        fan_in = np.prod(leaf.shape[:-1]) if name == "kernel" else 100
        return rng.standard_normal(leaf.shape) / np.sqrt(fan_in)

    return jax.tree_util.tree_map_with_path(draw, tree)


def shallow(block=BASIC, **settings):
    """Build a ResNet of three blocks: at least one keeps its input's shape, and one has a stride."""
    return ResNet(Architecture((2, 1), block), num_classes=5, width=4, stem="small", **settings)


def assert_trees_close(actual, expected, tolerance):
    """Check that two trees have one structure, and leaves that are equal within `tolerance` of their largest value."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        error = np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b))
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: relative error {error:.1e}"


def value_and_gradients(module, variables, images, weights, **mode):
    """Return the output, new running statistics, and the gradients of sum(output * weights) by (params, images)."""

    def loss(params, images):
        output, updated = module.apply({**variables, "params": params}, images, **mode, mutable=["batch_stats"])
        return jnp.sum(output * weights), (output, updated["batch_stats"])

    by_both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (output, stats)), gradients = by_both(variables["params"], images)
    return output, stats, gradients


@pytest.mark.parametrize("shortcut_norm", [True, False])
@pytest.mark.parametrize(("in_features", "stride"), [(12, 1), (12, 2), (5, 1)], ids=["identity", "strided", "widened"])
def test_a_bottleneck_block_trains_alike_with_the_layers_of_each_platform(in_features, stride, shortcut_norm):
    """The layers for GPUs are Flax's. `conformance/test_networks.py` compares the logits with torchvision's."""
    rng, found = np.random.default_rng(2), []
    images, weights = (
        rng.standard_normal(shape) for shape in ((4, 7, 6, in_features), (4, -(-7 // stride), 6 // stride, 12))
    )
    with jax.enable_x64(True):
        model = resnet("resnet50", 5, dtype=jnp.float64, param_dtype=jnp.float64)
        for platform in ("cpu", "gpu"):
            conv, norm = for_platform(model, platform).layers(True)
            settings = {"zero_init_last_scale": True, "conv": conv, "norm": norm, "shortcut_norm": shortcut_norm}
            block = ResidualBlock(Architecture((), BOTTLENECK), features=3, stride=stride, **settings)
            variables = randomized(jax.eval_shape(block.init, jax.random.key(0), images))
            found.append(value_and_gradients(block, variables, images, weights))
    assert ("downsample_conv" in variables["params"]) == ((in_features, stride) != (12, 1))
    assert_trees_close(*found, 1e-10)
    gradients, _ = found[0][2]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients)), "a zero gradient proves nothing"


@pytest.mark.slow
def test_sync_batch_norm_on_four_devices_equals_one_device():
    rng = np.random.default_rng(3)
    images, weights = rng.standard_normal((8, 8, 8, 3)), rng.standard_normal((8, 5))
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def on_four_devices(model, variables):
        def step(variables, images, weights):
            varying = jax.lax.pcast(variables["params"], "data", to="varying")
            logits, stats, (gradients, _) = value_and_gradients(
                model, {**variables, "params": varying}, images, weights, train=True
            )
            return logits, jax.lax.pmean(stats, "data"), jax.lax.psum(gradients, "data")

        specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": (P("data"), P(), P())}
        return jax.jit(jax.shard_map(step, mesh=mesh, **specs))(variables, images, weights)

    with jax.enable_x64(True):
        axes = [resnet("resnet18", 5, batch_norm=kind).axis_name for kind in ("local", "sync")]
        local, sync = (shallow(axis_name=axis, dtype=jnp.float64, param_dtype=jnp.float64) for axis in axes)
        variables = randomized(jax.eval_shape(sync.init, jax.random.key(0), images))
        logits, stats, (gradients, _) = value_and_gradients(local, variables, images, weights, train=True)
        one_device = jax.tree.map(np.asarray, (logits, stats, gradients))
        assert_trees_close(on_four_devices(sync, variables), one_device, 1e-9)
        local_logits, *_ = on_four_devices(local, variables)
    assert not np.allclose(local_logits, one_device[0], rtol=1e-3), "local batch norm must differ"


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHT_INITS)
def test_an_initial_kernel_has_the_variance_of_its_initializer(name):
    stem_and_head = ResNet(Architecture((), BASIC), num_classes=1000, kernel_init=WEIGHT_INITS[name])
    params = stem_and_head.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"]
    assert float(params["fc"]["kernel"].std()) == pytest.approx(0.01, rel=0.03)
    kernel, fan_in, fan_out = params["conv1"]["kernel"], 7 * 7 * 3, 7 * 7 * 64
    if name == "orthogonal":
        columns = kernel.reshape(fan_in, 64)
        np.testing.assert_allclose(columns.T @ columns, 2 * np.eye(64), atol=1e-4)
        return
    variance = {"normal": 1e-4, "he": 2 / fan_out, "xavier": 2 / (fan_in + fan_out), "lecun": 1 / fan_in}[
        name.split("_")[0]
    ]
    assert float(kernel.std()) == pytest.approx(variance**0.5, rel=0.05)
    assert (float(jnp.abs(kernel).max()) <= (3 * variance) ** 0.5) == name.endswith("_uniform")


@pytest.mark.parametrize(
    ("text", "deviation"),
    [
        ("normal", 0.01),
        ("normal(0.02)", 0.02),
        ("truncated_normal(0.3)", 0.264),
        ("zeros", 0),
        ("glorot_uniform", 0.025),
    ],
)
def test_kernels_are_initialized_by_the_config_and_the_head_always_in_the_same_way(text, deviation):
    model = resnet("resnet18", 1000, weight_init=text)
    module = ResNet(Architecture((), BASIC), num_classes=1000, kernel_init=model.kernel_init)
    params = module.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))["params"]
    assert float(params["conv1"]["kernel"].std()) == pytest.approx(deviation, rel=0.05)
    assert float(params["fc"]["kernel"].std()) == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weight_init": "normal(-1)"},
            "weight_init='normal(-1)': standard deviation=-1.0: expected above 0, at most 100",
        ),
        ({"weight_init": "normal(x)"}, "weight_init='normal(x)': standard deviation='x': expected a number, above 0"),
        ({"weight_init": "uniform(0.1)"}, "unknown weight_init 'uniform(0.1)'; did you mean "),
        ({"name": "resnt50"}, "unknown model 'resnt50'; did you mean 'resnet50'?"),
        ({"stem": "smal"}, "stem='smal': expected 'imagenet' or 'small' or 'deep'"),
        ({"batch_norm": "synch"}, "batch_norm='synch': expected 'local', 'sync' or 'ghost:K' (K images"),
        ({"batch_norm": "synch"}, "normalized together, 1 to 99,999,999), did you mean 'sync'?"),
        ({"weight_init": "he_norml"}, "unknown weight_init 'he_norml'; did you mean 'he_normal'?"),
        ({"num_classes": 0}, "num_classes is 0; give a positive number"),
        ({"width": -8}, "width=-8: expected 1 to 4,096"),
        (
            {"name": "resnext50_32x4d", "width": 24},
            "width=24: 48 features cannot be divided into 32 groups; give a multiple of 16",
        ),
        ({"dtype": "flaot16"}, "resnet: dtype='flaot16'; give \"float32\", "),
        ({"param_dtype": "int8"}, "resnet: param_dtype='int8'; give \"float32\", "),
    ],
)
def test_an_error_names_bad_settings(changes, message):
    assert message in error_line(resnet, **{"name": "resnet50", "num_classes": 10, **changes})
