"""Batch norm with addition and ReLU has the values, statistics and gradients of Flax's layers."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support.cases import essential_and_rare, rare_case

from jaxddp.core.errors import InputError
from jaxddp.mesh import AXIS, Topology
from jaxddp.models.ops.batch_norm import BatchNorm
from jaxddp.models.ops.layers import flax_max_pool

FORMS = [(relu, residual) for relu in (False, True) for residual in (False, True)]
TWO_FORMS = [(False, False), (True, True), rare_case(False, True), rare_case(True, False)]
# There is one shape of vectors and one of maps, because every operation is compiled for each new shape.
VECTORS, MAPS = (16, 2), (8, 3, 2, 5)


class FlaxBatchNorm(nn.Module):
    """Batch norm, addition and ReLU with Flax's layers."""

    use_running_average: bool
    axis_name: str | None = None
    dtype: jnp.dtype = jnp.float32
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, residual=None, relu=False, pool=None):
        norm = nn.BatchNorm(
            self.use_running_average,
            momentum=0.9,
            axis_name=self.axis_name,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            force_float32_reductions=self.param_dtype != jnp.float64,
            name="norm",
        )
        y = norm(x) if residual is None else norm(x) + residual
        y = nn.relu(y) if relu else y
        return y if pool is None else flax_max_pool(y, *pool)


class InGroups:
    """A module that normalizes each group of `size` images separately, one after the other."""

    def __init__(self, module, size):
        self.module, self.size = module, size

    def apply(self, variables, x, residual, **settings):
        def group(start):
            inputs = (images if images is None else images[start : start + self.size] for images in (x, residual))
            return self.module.apply(variables, *inputs, **settings)

        outputs, updated = zip(*map(group, range(0, len(x), self.size)), strict=True)
        return jnp.concatenate(outputs), jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *updated)


def results(module, variables, x, residual, weights, relu, **options):
    """Return result, new statistics, and gradients of sum(result * weights) by parameters, input and residual."""

    def loss(params, x, residual):
        settings = {"relu": relu, "mutable": ["batch_stats"], **options}
        result, updated = module.apply({**variables, "params": params}, x, residual, **settings)
        return jnp.sum(result * weights), (result, updated["batch_stats"])

    differentiated = jax.jit(jax.grad(loss, (0, 1) if residual is None else (0, 1, 2), has_aux=True))
    gradients, (result, stats) = differentiated(variables["params"], x, residual)
    return result, stats, gradients


def results_of_both(module, plain, variables, *arguments, **options):
    ours = results(module, variables, *arguments, **options)
    flax_variables = {collection: {"norm": leaves} for collection, leaves in variables.items()}
    result, stats, (params, *input_gradients) = results(plain, flax_variables, *arguments, **options)
    return ours, (result, stats["norm"], (params["norm"], *input_gradients))


def assert_close(actual, expected, tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), actual, expected)


def random_arguments(seed, shape, dtype):
    rng = np.random.default_rng(seed)
    x, residual, weights = (jnp.asarray(rng.standard_normal(shape), dtype) for _ in range(3))
    scale, bias, mean, var = (jnp.asarray(rng.standard_normal(shape[-1]), dtype) for _ in range(4))
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": mean, "var": jnp.square(var) + 0.5}}
    return variables, x, residual, weights


@pytest.mark.slow
@given(st.sampled_from(FORMS), st.booleans(), st.booleans(), st.integers(0, 1000), st.sampled_from([VECTORS, MAPS]))
def test_batch_norm_equals_flaxs_in_float64(form, running, custom_gradient, seed, shape):
    relu, has_residual = form
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        variables, x, residual, weights = random_arguments(seed, shape, jnp.float64)
        ours = functools.partial(BatchNorm, custom_gradient=custom_gradient)
        modules = (module(running, dtype=jnp.float64, param_dtype=jnp.float64) for module in (ours, FlaxBatchNorm))
        actual, expected = results_of_both(*modules, variables, x, residual if has_residual else None, weights, relu)
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {jnp.dtype("float64")}
    assert_close(actual, expected, 1e-9)


GROUPED = [
    (*form, custom_gradient, group) for form in FORMS for custom_gradient in (True, False) for group in (1, 2, 4, 8)
]


def is_run_by_default(relu: bool, has_residual: bool, custom_gradient: bool, group: int) -> bool:
    return (group == 2 and custom_gradient) or (relu and has_residual and group in (2, 8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("relu", "has_residual", "custom_gradient", "group"),
    [case if is_run_by_default(*case) else rare_case(*case) for case in GROUPED],
)
def test_each_group_is_normalized_as_flax_normalizes_it_alone(relu, has_residual, custom_gradient, group):
    with jax.enable_x64(True):
        variables, x, residual, weights = random_arguments(3, MAPS, jnp.float64)
        dtypes = {"dtype": jnp.float64, "param_dtype": jnp.float64}
        ours = BatchNorm(False, group=group, custom_gradient=custom_gradient, **dtypes)
        plain = InGroups(FlaxBatchNorm(False, **dtypes), group)
        actual, expected = results_of_both(ours, plain, variables, x, residual if has_residual else None, weights, relu)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(expected))
    assert_close(actual, expected, 1e-9)


@pytest.mark.parametrize(("relu", "running", "group"), [(True, False, 2), (False, False, None), (False, True, None)])
def test_a_max_pool_after_a_norm_equals_flaxs(relu, running, group, monkeypatch):
    """The custom gradient takes the maximum before the norm, and the minimum where the scale is negative."""
    monkeypatch.setattr("jaxddp.models.ops.batch_norm._FEW_PIXELS", 1)
    with jax.enable_x64(True):
        variables, x, _, weights = random_arguments(3, MAPS, jnp.float64)
        dtypes = {"dtype": jnp.float64, "param_dtype": jnp.float64}
        plain = FlaxBatchNorm(running, **dtypes) if group is None else InGroups(FlaxBatchNorm(running, **dtypes), group)
        ours = BatchNorm(running, group=group, **dtypes)
        actual, expected = results_of_both(ours, plain, variables, x, None, weights[:, :2, :1], relu, pool=(3, 2, 1))
    assert_close(actual, expected, 1e-9)


@pytest.mark.slow
def test_a_group_of_all_images_equals_plain_batch_norm_and_evaluation_ignores_groups():
    variables, x, residual, weights = random_arguments(4, MAPS, jnp.float32)
    both = [results(BatchNorm(False, group=group), variables, x, residual, weights, True) for group in (8, None)]
    assert_close(*both, 1e-5)
    for group in (4, None):
        evaluated = BatchNorm(True, group=group).apply(variables, x, residual)
        np.testing.assert_array_equal(evaluated, BatchNorm(True).apply(variables, x, residual))


@pytest.mark.parametrize(("size", "group"), [(6, 4), (2, 3)])
def test_images_that_do_not_fill_whole_groups_raise_a_one_line_error(size, group):
    variables, x, *_ = random_arguments(0, (size, 2), jnp.float32)
    message = f"^batch norm: {size} images cannot be normalized in groups of {group}; give each device a mul"
    with pytest.raises(InputError, match=message):
        jax.eval_shape(lambda x: BatchNorm(False, group=group).apply(variables, x, mutable=["batch_stats"]), x)


@pytest.mark.parametrize("custom_gradient", [True, False])
def test_batch_norm_without_a_scale_equals_a_scale_of_one(custom_gradient):
    variables, x, residual, weights = random_arguments(5, VECTORS, jnp.float32)
    variables["params"]["scale"] = jnp.ones(2)
    norm = functools.partial(BatchNorm, False, custom_gradient=custom_gradient)
    result, stats, gradients = results(norm(), variables, x, residual, weights, True)
    expected = result, stats, ({"bias": gradients[0]["bias"]}, *gradients[1:])
    del variables["params"]["scale"]
    module = norm(scale_init=None)
    assert_close(results(module, variables, x, residual, weights, True), expected, 1e-6)
    assert jax.tree.structure(module.init(jax.random.key(0), x)) == jax.tree.structure(variables)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1.0])
@pytest.mark.parametrize("bias", [0.0, -1.0, 1.0])
@pytest.mark.parametrize("constant", [0.0, 0.25])
@pytest.mark.parametrize("dtype", essential_and_rare(("float64",), "float32"))
def test_gradients_are_right_for_zero_and_negative_scales_and_constant_inputs(scale, bias, constant, dtype):
    """All pixels of the second channel are equal, so without a bias each input of its ReLU is 0."""
    with jax.enable_x64(dtype == "float64"):
        variables, x, _, weights = random_arguments(0, VECTORS, dtype)
        x = x.at[:, 1].set(constant)
        variables["params"] = {"scale": jnp.full(2, scale, dtype), "bias": jnp.full(2, bias, dtype)}
        modules = (module(False, dtype=dtype, param_dtype=jnp.dtype(dtype)) for module in (BatchNorm, FlaxBatchNorm))
        both = results_of_both(*modules, variables, x, None, weights, True)
    assert_close(*both, 1e-9 if dtype == "float64" else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("relu", "has_residual"), TWO_FORMS)
def test_the_gradient_of_batch_norm_can_be_differentiated(relu, has_residual):
    with jax.enable_x64(True):
        variables, x, residual, weights = random_arguments(2, VECTORS, jnp.float64)
        modules = (module(False, dtype=jnp.float64, param_dtype=jnp.float64) for module in (BatchNorm, FlaxBatchNorm))
        flax_variables = {collection: {"norm": leaves} for collection, leaves in variables.items()}

        def penalty(module, variables):
            def squared_norm(x):
                _, _, (_, by_input, *_) = results(module, variables, x, residual_or_none, weights, relu)
                return jnp.sum(jnp.square(by_input))

            return jax.grad(squared_norm)(x)

        residual_or_none = residual if has_residual else None
        ours, flax = modules
        assert_close(penalty(ours, variables), penalty(flax, flax_variables), 1e-8)


@pytest.mark.parametrize("devices", essential_and_rare((2,), 4))
@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize(("relu", "has_residual"), TWO_FORMS)
def test_with_an_axis_name_the_shards_are_normalized_as_one_batch(devices, cast, relu, has_residual):
    """JAX sums gradients of parameters over the devices, but not of parameters that were cast to varying."""
    with jax.enable_x64(True):
        variables, x, residual, weights = random_arguments(1, MAPS, jnp.float64)
        arguments = (x, residual if has_residual else None, weights)
        module = functools.partial(BatchNorm, False, dtype=jnp.float64, param_dtype=jnp.float64)
        expected = results(module(), variables, *arguments, relu)

        def shard(variables, x, residual, weights):
            variables = jax.lax.pcast(variables, AXIS, to="varying") if cast else variables
            result, stats, (params, *inputs) = results(module(axis_name=AXIS), variables, x, residual, weights, relu)
            params = jax.lax.psum(params, AXIS) if cast else params
            return result, jax.lax.pmean(stats, AXIS), (params, *inputs)

        input_specs = (P(AXIS),) * len(expected[2][1:])
        specs = {"in_specs": (P(), P(AXIS), P(AXIS), P(AXIS)), "out_specs": (P(AXIS), P(), (P(), *input_specs))}
        mesh = Topology.create(jax.devices()[:devices]).mesh
        actual = jax.jit(jax.shard_map(shard, mesh=mesh, **specs))(variables, *arguments)
    assert_close(actual, expected, 1e-9)


@pytest.mark.parametrize(("relu", "has_residual"), TWO_FORMS)
def test_batch_norm_does_not_hide_a_nan(relu, has_residual):
    variables, x, residual, weights = random_arguments(0, VECTORS, jnp.float32)
    arguments = x.at[3, 0].set(jnp.nan), residual if has_residual else None, weights, relu
    result, stats, gradients = results(BatchNorm(False), variables, *arguments)
    assert np.isnan(result[:, 0]).all() and np.isfinite(result[:, 1]).all()
    assert np.isnan(stats["mean"][0]) and np.isnan(gradients[1][:, 0]).all()
