"""The network of the CIFAR-10 speedruns and the initialization of its first convolution, compared with NumPy."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from support.networks import largest_difference, randomized
from support.peers import Second

import jaxddp.models.airbench as airbench
from jaxddp.config import Config
from jaxddp.config.registry import MODELS
from jaxddp.core.errors import InputError
from jaxddp.engine.initial_state import make_init
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt, for_platform

WIDE = {"dtype": jnp.float64, "param_dtype": jnp.float64}
MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
NET = airbench.Airbench(3, width=4)


def random_images(count: int, size: int) -> np.ndarray:
    """Draw smooth uint8 images, whose neighbouring pixels are similar, as in photographs."""
    noise = np.random.default_rng(0).integers(0, 256, (count, size, size, 3))
    return ((noise + np.roll(noise, 1, 1) + np.roll(noise, 1, 2)) // 3).astype(np.uint8)


def normalized(images: np.ndarray) -> np.ndarray:
    return (images / 255 - np.array(MEAN)) / np.array(STD)


def patches_of(images: np.ndarray, size: int) -> np.ndarray:
    """Return patches, float[P, size * size * C], with the axes of a kernel in a row."""
    windows = np.lib.stride_tricks.sliding_window_view(images, (size, size), (1, 2))
    return windows.transpose(0, 1, 2, 4, 5, 3).reshape(-1, size * size * images.shape[-1])


def test_patch_moments_equal_those_of_all_patches():
    images = random_images(300, 7)
    patches = patches_of(normalized(images), 2)
    np.testing.assert_allclose(
        airbench.patch_moments(images, 2, MEAN, STD), patches.T @ patches / len(patches), rtol=1e-10
    )


def test_whitened_patches_have_uncorrelated_components_of_variance_one():
    images = random_images(50, 9)
    kernel = airbench.whitening_kernel(airbench.patch_moments(images, 2, MEAN, STD), 3)
    assert kernel.shape == (2, 2, 3, 24)
    np.testing.assert_array_equal(kernel[..., 12:], -kernel[..., :12])
    features = patches_of(normalized(images), 2) @ kernel[..., :12].reshape(12, 12)
    moments = features.T @ features / len(features)
    # Whitening turns a variance v into v / (v + epsilon).
    variances = np.linalg.eigvalsh(airbench.patch_moments(images, 2, MEAN, STD))
    np.testing.assert_allclose(moments, np.diag(variances / (variances + airbench.EPSILON)), atol=1e-9)


def test_the_whitening_transform_changes_only_the_kernel_and_keeps_its_dtype():
    images = random_images(50, 9)
    params, state = jax.jit(adapt(NET).init)(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    changed, same_state = airbench.initialize_whitening("whiten", lambda: images, MEAN, STD)(params, state)
    assert same_state is state and changed["whiten"]["kernel"].dtype == jnp.float32
    expected = airbench.whitening_kernel(airbench.patch_moments(images, 2, MEAN, STD), 3)
    np.testing.assert_allclose(changed["whiten"]["kernel"], expected, rtol=1e-6)
    restored = {**changed, "whiten": {**changed["whiten"], "kernel": params["whiten"]["kernel"]}}
    assert largest_difference(restored, params) == 0


def test_other_processes_take_the_kernel_from_the_first_and_read_no_image():
    names: list[str] = []

    class RecordingPeers(Second):
        def from_first(self, name, make):
            names.append(name)
            return json.dumps(np.zeros((2, 2, 3, 24)).tolist())

    def images() -> np.ndarray:
        raise AssertionError("only the first process reads images")

    transform = airbench.initialize_whitening("whiten", images, MEAN, STD)
    topology = Topology.create(1, RecordingPeers())
    init = make_init(adapt(NET), optax.sgd(0.1), (32, 32, 3), topology, transform=transform)
    jax.eval_shape(init, jax.random.key(0))
    assert names == ["whitening kernel"]


@pytest.mark.parametrize("features", [3, 8])
def test_an_identity_like_convolution_passes_its_inputs_on(features):
    kernel = airbench.identity_like(jax.random.key(0), (3, 3, 5, features))
    images = jax.random.normal(jax.random.key(1), (2, 6, 6, 5))
    outputs = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    num_copied = min(5, features)
    np.testing.assert_allclose(outputs[..., :num_copied], images[..., :num_copied], rtol=1e-5, atol=1e-6)
    other_filters = np.asarray(kernel[..., num_copied:])
    # The other filters have PyTorch's default initialization: uniform in +- 1 / sqrt(fan-in).
    assert other_filters.size == 0 or 0.9 / 45**0.5 < abs(other_filters).max() <= 1 / 45**0.5


def numpy_logits(params, images: np.ndarray, depth: int = 2, divisor: float | None = None) -> np.ndarray:
    """Compute the logits of training in float64, with NumPy and one convolution at a time."""

    def gelu(x):
        return x * (1 + np.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2

    def convolve(x, kernel, margin):
        padded = np.pad(x, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
        size = kernel.shape[0]
        windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (1, 2))
        return np.einsum("bhwcij,ijcf->bhwf", windows, kernel)

    def batch_norm(x, bias):
        return (x - x.mean((0, 1, 2))) / np.sqrt(x.var((0, 1, 2)) + 1e-5) + bias

    def max_pool(x):
        side = x.shape[1] // 2
        return x[:, : 2 * side, : 2 * side].reshape(len(x), side, 2, side, 2, -1).max((2, 4))

    x = gelu(convolve(images, params["whiten"]["kernel"], 0) + params["whiten"]["bias"])
    for group in (1, 2, 3):
        x = max_pool(convolve(x, params[f"conv{group}_1"]["kernel"], 1))
        first = x = gelu(batch_norm(x, params[f"norm{group}_1"]["bias"]))
        x = gelu(batch_norm(convolve(x, params[f"conv{group}_2"]["kernel"], 1), params[f"norm{group}_2"]["bias"]))
        if depth == 3:
            x = convolve(x, params[f"conv{group}_3"]["kernel"], 1)
            x = gelu(first + batch_norm(x, params[f"norm{group}_3"]["bias"]))
    x = x.max((1, 2))
    return x @ params["head"]["kernel"] / (divisor or x.shape[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "widths", "depth", "divisor"), [("airbench", [2, 8, 8], 2, None), ("airbench96", [2, 6, 8], 3, 9)]
)
def test_network_equals_numpy(name, widths, depth, divisor):
    with jax.enable_x64(True):
        net = airbench.Airbench(3, width=2, architecture=airbench.ARCHITECTURES[name], **WIDE)
        images = np.random.default_rng(0).normal(size=(4, 16, 16, 3))
        params, state = jax.jit(adapt(net).init)(jax.random.key(0), jnp.asarray(images))
        params = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape), params)
        assert [params[f"conv{stage}_{depth}"]["kernel"].shape[-1] for stage in (1, 2, 3)] == widths
        expected = numpy_logits(jax.device_get(params), images, depth, divisor)
        for platform in ("cpu", "gpu"):
            apply = jax.jit(functools.partial(for_platform(adapt(net), platform).apply, train=True, key=None))
            logits, _ = apply(params, state, jnp.asarray(images))
            np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_whitening_kernel_has_no_gradient_and_every_other_parameter_has():
    model = for_platform(adapt(NET), "cpu")
    images = jax.random.normal(jax.random.key(1), (4, 16, 16, 3))
    params, state = jax.jit(model.init)(jax.random.key(0), images)
    grads = jax.jit(jax.grad(lambda p: (model.apply(p, state, images, train=True, key=None)[0][:, 0] ** 2).sum()))(
        randomized(params)
    )
    has_zero_gradient = jax.tree.map(lambda g: not np.any(g), grads)
    zero = [jax.tree_util.keystr(path) for path, is_zero in jax.tree.leaves_with_path(has_zero_gradient) if is_zero]
    assert zero == ["['whiten']['kernel']"]


def test_a_config_selects_the_airbench_network_by_name():
    config = Config().replace(
        model={"name": "airbench", "width": 8, "batch_norm": "sync"}, train={"precision": "bfloat16"}
    )
    net = MODELS.get("airbench")(config, 7)
    assert (net.num_classes, net.width, net.axis_name, net.group, net.dtype) == (7, 8, "data", None, "bfloat16")
    net = MODELS.get("airbench")(config.replace(model={"batch_norm": "ghost:20"}), 7)
    assert (net.axis_name, net.group) == (None, 20)
    assert [MODELS.get(f"airbench{top1}")(Config(), 10).width for top1 in (94, 95, 96)] == [64, 128, 128]
    logits = jax.eval_shape(airbench.Airbench(7).init_with_output, jax.random.key(0), jnp.zeros((2, 9, 12, 3)))[0]
    assert logits.shape == (2, 7) and logits.dtype == jnp.float32


def test_whitening_another_network_or_too_small_images_raises_a_one_line_error():
    message = "airbench: images of 8x32 pixels are too small; give data.image_size=9 or more"
    with pytest.raises(InputError, match=message):
        jax.eval_shape(NET.init, jax.random.key(0), jnp.zeros((2, 8, 32, 3)))
    message = "fc/bias is not a parameter of the network airbench; set model.name to airbench"
    with pytest.raises(InputError, match=message):
        airbench.parameter_groups({"fc": {"bias": 0}})
    with pytest.raises(InputError, match="this network has no convolution 'conv1'; give the name"):
        airbench.initialize_whitening("conv1", lambda: random_images(2, 4), MEAN, STD)({"whiten": {"kernel": 0}}, {})


def test_the_first_of_several_largest_pixels_has_the_whole_gradient():
    images = jnp.array([[1.0, 5, 2], [5, -1, 5]]).reshape(1, 2, 3, 1)
    images = jnp.concatenate([images, -images, jnp.full_like(images, -jnp.inf).at[0, 1, 0].set(jnp.nan)], axis=3)
    np.testing.assert_array_equal(airbench.global_max(images), images.max((1, 2)))
    gradient = jax.grad(lambda images: airbench.global_max(images)[..., :2].sum())(images)
    assert np.argwhere(gradient).tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]] and gradient.sum() == 2
