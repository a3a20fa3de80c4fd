"""The fused 1x1 convolution: values and gradients of its parts in interpret mode, and compilation for an H200."""

import functools
import itertools
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec as P
from support.programs import needs_plugin, uncached

from benchmarks.fused import pointwise
from benchmarks.fused.convolution import Form, convolve_between_norms
from benchmarks.fused.kernels import Incoming, Norm, NormGradient, convolve, image_gradient, kernel_gradient
from benchmarks.programs import gpu_plugin
from jaxddp.api import resnet
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.ops.batch_norm import BatchNorm

ROOT = Path(__file__).parents[2]

# (before, residual, relu) of a bottleneck's first, shortcut and last convolution, and of one without a residual.
FORMS = [(False, False, True), (False, False, False), (True, True, True), (True, False, True)]
# Smaller than a block, full and partial blocks, and several blocks along each axis.
SIZES = [(1, 8, 16), (37, 24, 40), (128, 64, 128), (300, 136, 72), (600, 16, 136)]
ESSENTIAL = [(SIZES[0], True, True), (SIZES[2], False, False), (SIZES[3], True, True), (SIZES[4], False, True)]


def normalize(x, pair, axis_name, residual=None, *, relu):
    """Apply `BatchNorm` with given parameters. Returns its result and the batch's mean and variance."""
    module = BatchNorm(False, momentum=0.0, axis_name=axis_name, dtype=x.dtype, param_dtype=pair[0].dtype)
    zeros = jnp.zeros_like(pair[0])
    variables = {"params": {"scale": pair[0], "bias": pair[1]}, "batch_stats": {"mean": zeros, "var": zeros}}
    result, updated = module.apply(variables, x, residual, relu=relu, mutable=["batch_stats"])
    return result, (updated["batch_stats"]["mean"], updated["batch_stats"]["var"])


def composed(x, kernel, after, before=None, residual=None, *, relu, axis_name=None):
    """Compute `convolve_between_norms` with the network's layers."""
    others = None
    if before is not None:
        x, others = normalize(x, before, axis_name, relu=True)
    kernel = kernel.reshape(1, 1, *kernel.shape).astype(x.dtype)
    y = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    result, y_moments = normalize(y, after, axis_name, residual, relu=relu)
    return result, y_moments, others


def fused(x, kernel, after, before=None, residual=None, *, relu, axis_name=None):
    form = Form(relu, axis_name=axis_name, interpret=True)
    return convolve_between_norms(x, kernel, after, before, residual, form=form)


def draw_inputs(seed, sizes, form, dtype, param_dtype):
    """Draw the inputs, with images [3, M / 3, 1, K], and weights of the result."""
    rng = np.random.default_rng(seed)
    pixels, depth, features = sizes
    has_before, has_residual, _ = form
    shape = (3, pixels, 1) if pixels % 3 else (3, pixels // 3, 1)
    x, residual, weights = (rng.standard_normal((*shape, c)) for c in (depth, features, features))
    pairs = [tuple(jnp.asarray(rng.standard_normal(c), param_dtype) for _ in range(2)) for c in (depth, features)]
    kernel = jnp.asarray(rng.standard_normal((depth, features)) / depth**0.5, param_dtype)
    inputs = [jnp.asarray(x + 0.5, dtype), kernel, pairs[1]]
    inputs += [pairs[0] if has_before else None, jnp.asarray(residual, dtype) if has_residual else None]
    return inputs, jnp.asarray(weights, dtype)


def results(operation, inputs, weights):
    """Return result, statistics, and all gradients of sum(result * weights)."""

    def loss(inputs):
        result, *statistics = operation(*inputs)
        return jnp.sum(result * weights), (result, statistics)

    gradients, (result, statistics) = jax.grad(loss, has_aux=True)(inputs)
    return result, statistics, gradients


def compiled(operation, inputs, weights):
    """Like `results`, in one compiled program."""
    return jax.jit(functools.partial(results, operation))(inputs, weights)


def assert_close(actual, expected, tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max()))


def assert_same_layers(sizes, form, seed):
    with jax.enable_x64(True):
        inputs, weights = draw_inputs(seed, sizes, form, jnp.float64, jnp.float64)
        ours, plain = (functools.partial(operation, relu=form[2]) for operation in (fused, composed))
        assert_close(compiled(ours, inputs, weights), compiled(plain, inputs, weights), 1e-9)


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2]])
def test_the_fused_operation_equals_the_networks_layers_in_float64(form):
    assert_same_layers((150, 24, 40), form, 0)


@pytest.mark.exhaustive
@settings(max_examples=20)
@given(
    st.tuples(st.integers(1, 300), st.integers(1, 140), st.integers(1, 140)), st.sampled_from(FORMS), st.integers(0, 9)
)
def test_the_fused_operation_equals_the_networks_layers_for_any_size(sizes, form, seed):
    assert_same_layers(sizes, form, seed)


@pytest.mark.exhaustive
def test_the_fused_operation_in_bfloat16_equals_the_networks_layers_up_to_rounding():
    """Parameters, statistics and all their gradients stay float32."""
    inputs, weights = draw_inputs(0, (600, 64, 40), FORMS[2], jnp.bfloat16, jnp.float32)
    ours, plain = (functools.partial(operation, relu=True) for operation in (fused, composed))
    # The results are not computed in one program, in which XLA would round the layers elsewhere.
    assert_close(results(ours, inputs, weights), results(plain, inputs, weights), 0.02)


@pytest.mark.parametrize("form", [pytest.param(FORMS[0], marks=pytest.mark.exhaustive), FORMS[2]])
def test_with_an_axis_name_the_shards_are_normalized_as_one_batch(form):
    with jax.enable_x64(True):
        inputs, weights = draw_inputs(1, (96, 24, 40), form, jnp.float64, jnp.float64)
        # The axis of size 32 is sharded.
        is_split = [each is not None and each.ndim == 4 if not isinstance(each, tuple) else False for each in inputs]
        expected = compiled(functools.partial(composed, relu=True), inputs, weights)

        def shard(inputs, weights):
            y_moments = results(functools.partial(fused, relu=True, axis_name=AXIS), inputs, weights)
            result, statistics, gradients = y_moments
            shared = [g if split else lax.psum(g, AXIS) for g, split in zip(gradients, is_split, strict=True)]
            return result, statistics, shared

        specs = [P(None, AXIS) if split else P() for split in is_split]
        # Interpreted kernels do not support replication checking; the compiled test below has it.
        shards = jax.shard_map(
            shard,
            mesh=Topology.create(jax.devices()[:2]).mesh,
            in_specs=(specs, P(None, AXIS)),
            out_specs=(P(None, AXIS), P(), specs),
            check_vma=False,
        )
        assert_close(jax.jit(shards)(inputs, weights), expected, 1e-9)


@pytest.mark.parametrize("form", [pytest.param(FORMS[0], marks=pytest.mark.exhaustive), FORMS[2]])
def test_a_nan_in_one_channel_reaches_all_results(form):
    """A NaN in one channel of the input reaches all results and statistics."""
    inputs, weights = draw_inputs(0, (37, 8, 16), form, jnp.float32, jnp.float32)
    inputs[0] = inputs[0].at[2, 0, 0, 3].set(jnp.nan)
    result, (y_moments, _), gradients = compiled(functools.partial(fused, relu=form[2]), inputs, weights)
    assert np.isnan(result).all() and np.isnan(y_moments[0]).all() and np.isnan(y_moments[1]).all()
    assert np.isnan(gradients[0]).all() and np.isnan(gradients[1]).all()


# --- The three products in float32 ---

EPSILON = 2.0**-24
"""Half the distance from 1 to the next float32, the largest relative error of one operation."""


def assert_within(actual, terms, magnitude, additions):
    """Check that sums have at most the error of their additions, each EPSILON of the sum of absolute terms."""
    assert actual.dtype == np.float32 and np.isfinite(actual).all()
    assert (np.abs(actual - terms) <= 2 * additions * EPSILON * magnitude).all()


def wide(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def affine(x, norm):
    """Return the normalized values, and the sum of the absolute terms."""
    mean, multiplier, bias = norm
    return (x - mean) * multiplier + bias, (np.abs(x) + np.abs(mean)) * np.abs(multiplier) + np.abs(bias)


def norm_gradient(gradient, y, after, relu):
    norm, shift, slope = after
    passed = np.where(affine(y, norm)[0] > 0, gradient, 0) if relu else gradient
    value = norm.multiplier * (passed - shift - (y - norm.mean) * slope)
    cancelled = np.abs(passed) + np.abs(shift) + (np.abs(y) + np.abs(norm.mean)) * np.abs(slope)
    return value, np.abs(norm.multiplier) * cancelled


@pytest.mark.parametrize(
    ("sizes", "has_before", "relu"),
    [
        pytest.param(*case, marks=() if case in ESSENTIAL else pytest.mark.exhaustive)
        for case in itertools.product(SIZES, (False, True), (False, True))
    ],
)
def test_the_error_of_each_product_is_bounded_by_its_additions(sizes, has_before, relu):
    pixels, depth, features = sizes
    rng = np.random.default_rng(sum(sizes))
    x, gradient, kernel = (
        rng.standard_normal(shape, np.float32) for shape in ((pixels, depth), (pixels, features), (depth, features))
    )
    norm, behind = (Norm(*rng.standard_normal((3, channels), np.float32)) for channels in (depth, features))
    after = NormGradient(behind, *rng.standard_normal((2, features), np.float32))
    before = norm if has_before else None

    y, (total, squares) = convolve(x, before, kernel, interpret=True)
    assert y.dtype == np.float32
    x64, kernel64, gradient64, y64 = wide((x, kernel, gradient, y))
    z, large = (np.maximum(a, 0) for a in affine(x64, wide(norm))) if has_before else (x64, np.abs(x64))
    assert_within(y, z @ kernel64, large @ np.abs(kernel64), depth + 4)
    # The statistics are of the rounded result.
    assert_within(total, y64.sum(0), np.abs(y64).sum(0), pixels + 1)
    assert_within(squares, np.square(y64).sum(0), np.square(y64).sum(0), pixels + 2)

    inputs, incoming = (x, norm) if has_before else None, Incoming(gradient, y, after)
    image, sums = image_gradient(incoming, kernel, inputs, relu=relu, interpret=True)
    y_moments, large_own = norm_gradient(gradient64, y64, wide(after), relu)
    passed = affine(x64, wide(norm))[0] > 0 if has_before else True
    assert_within(image, np.where(passed, y_moments @ kernel64.T, 0), large_own @ np.abs(kernel64).T, features + 7)
    assert len(sums) == 2 * has_before
    if has_before:
        image64, centered = wide(image), x64 - wide(norm).mean
        assert_within(sums[0], image64.sum(0), np.abs(image64).sum(0), pixels + 1)
        bound = np.abs(image64 * centered) + np.abs(image64) * (np.abs(x64) + np.abs(wide(norm).mean))
        assert_within(sums[1], (image64 * centered).sum(0), bound.sum(0), pixels + 3)

    actual = kernel_gradient(x, before, incoming, relu=relu, interpret=True)
    assert_within(actual, z.T @ y_moments, large.T @ large_own, pixels + 11)


@pytest.mark.parametrize(("sizes", "is_exact"), [((37, 24, 40), False), ((256, 64, 128), True)])
def test_blocks_past_the_end_of_an_array_are_masked(sizes, is_exact, monkeypatch):
    """Only a GPU needs the masks; an interpreted kernel tolerates an unmasked block past the end of an array."""
    masks = []

    def record_masks(operation):
        def recorder(*arguments, mask=None, **named):
            masks.append(mask)
            return operation(*arguments, mask=mask, **named)

        return recorder

    for name in ("load", "store"):
        monkeypatch.setattr(triton, name, record_masks(getattr(triton, name)))
    inputs, weights = draw_inputs(0, sizes, FORMS[2], jnp.float32, jnp.float32)
    jax.eval_shape(functools.partial(results, functools.partial(fused, relu=True)), inputs, weights)
    # The convolution has 8 loads and stores, the image gradient 15, the kernel gradient 12.
    assert len(masks) == 35 and all((mask is None) is is_exact for mask in masks)


# --- Compilation for a GPU ---


needs_compiler = needs_plugin(gpu_plugin)


@needs_compiler
@uncached
@pytest.mark.parametrize(
    ("sizes", "has_before", "dtype"),
    [
        ((256 * 14 * 14, 256, 1024), True, jnp.bfloat16),
        ((1000, 72, 40), True, jnp.float32),
        *(
            pytest.param(*shape, dtype, marks=pytest.mark.exhaustive)
            for shape in [((256 * 56 * 56, 64, 256), True), ((256 * 56 * 56, 256, 64), False)]
            for dtype in (jnp.bfloat16, jnp.float32)
        ),
    ],
)
def test_both_passes_compile_for_an_h200_within_a_shard_map(sizes, has_before, dtype):
    """Compile both passes within a `shard_map` with replication checking."""
    pixels, depth, features = sizes
    topology = Topology.create(gpu_plugin.described_devices("1x1x1"))
    has_residual = has_before

    def step(x, kernel, pairs, residual, weights):
        # As in the trainer, so that gradients are those of one device.
        kernel, pairs = lax.pcast((kernel, pairs), AXIS, to="varying")

        def loss(x, kernel, pairs, residual):
            before = pairs[0] if has_before else None
            form = Form(relu=True, axis_name=AXIS)
            result, y_moments, _ = convolve_between_norms(x, kernel, pairs[1], before, residual, form=form)
            return jnp.sum(result.astype(jnp.float32) * weights), y_moments

        gradients, y_moments = jax.grad(loss, (0, 1, 2, 3) if has_residual else (0, 1, 2), has_aux=True)(
            x, kernel, pairs, residual
        )
        return gradients[0], lax.pmean((gradients[1:3], y_moments), AXIS)

    split, whole = topology.sharded, topology.replicated
    pairs = [(jax.ShapeDtypeStruct((c,), jnp.float32, sharding=whole),) * 2 for c in (depth, features)]
    residual = jax.ShapeDtypeStruct((pixels, features), dtype, sharding=split)
    shapes = (
        jax.ShapeDtypeStruct((pixels, depth), dtype, sharding=split),
        jax.ShapeDtypeStruct((depth, features), jnp.float32, sharding=whole),
        pairs,
        residual if has_residual else None,
        residual,
    )
    specs = (P(AXIS), P(), P(), P(AXIS), P(AXIS))
    sharded = jax.shard_map(step, mesh=topology.mesh, in_specs=specs, out_specs=(P(AXIS), P()))
    lowered = jax.jit(sharded).trace(*shapes).lower()
    program = lowered.compile(compiler_options=gpu_plugin.compiler_options()).as_text()
    assert len(re.findall(r'custom_call_target="__gpu\$xla.gpu.triton"', program)) == 3
    assert "__cudnn" not in program
    # Triton's maximum of NaN and 0 is 0, unlike in interpreted kernels.
    assert "maxnumf" not in program


@needs_compiler
@uncached
def test_the_fused_last_convolution_of_a_block_moves_fewer_bytes():
    """The expected bytes count the necessary reads and writes; [M, F] is four times as large as [M, K]."""
    batch, side, depth, features = 8, 14, 256, 1024
    convolution = pointwise.Pointwise("last", side, depth, features)
    forward_bytes, backward_bytes = pointwise.count_moved_bytes(pointwise.fused, convolution, batch)
    plain_forward_bytes, plain_backward_bytes = pointwise.count_moved_bytes(pointwise.plain, convolution, batch)
    assert forward_bytes < plain_forward_bytes and backward_bytes < plain_backward_bytes
    unit = 2 * side**2 * depth
    # Statistics, convolution, and normalization with the residual: (1) + (1 + 4) + (4 + 4 + 4).
    assert forward_bytes >= 18 * unit


def test_the_counted_convolutions_are_those_of_the_network():
    shapes = jax.eval_shape(resnet("resnet50", 10).init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))["params"]
    sizes = {
        (block, name): layer["kernel"].shape[2:]
        for block, layers in shapes.items()
        if block.startswith("layer")
        for name, layer in layers.items()
        if "kernel" in layer and layer["kernel"].shape[:2] == (1, 1)
    }
    strided = [(f"layer{stage}_0", "downsample_conv") for stage in (2, 3, 4)]
    expected = Counter(size for place, size in sizes.items() if place not in strided)
    assert len(sizes) == 36 and Counter(tuple(each)[2:] for each in pointwise.convolutions()) == expected


def test_without_a_gpu_jax_raises_an_error():
    inputs, _ = draw_inputs(0, (16, 16, 16), FORMS[2], jnp.float32, jnp.float32)
    with pytest.raises(ValueError, match="interpret"):
        convolve_between_norms(*inputs, form=Form())


def test_no_network_uses_the_fused_operation():
    """It stays outside the package until a GPU has timed it."""
    imported = re.compile(r"^ *(from|import) benchmarks\b", re.MULTILINE)
    files = [file for folder in ("jaxddp", "configs") for file in (ROOT / folder).rglob("*.py")]
    assert files and not [file for file in files if imported.search(file.read_text())]
