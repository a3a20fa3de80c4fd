"""Optimizers that take extra arguments get the loss and its gradient, and other optimizers keep their programs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import ci_case
from support.data import random_table
from support.networks import linear_model
from support.shared import sgd, shared

import jaxddp
from jaxddp import InputError, prepare_training, train

TABLE = random_table(32)


def recorder() -> optax.GradientTransformationExtraArgs:
    """An optimizer that stores its arguments and updates nothing."""

    def init(params):
        return {"value": jnp.zeros(()), "grad": params, "updates": params}

    def update(updates, state, params=None, *, value, grad, **extra):
        return jax.tree.map(jnp.zeros_like, updates), {"value": value, "grad": grad, "updates": updates}

    return optax.GradientTransformationExtraArgs(init, update)


RECORDER = recorder()


def make_setup(optimizer, devices=4, per_device=4, **options):
    return shared(prepare_training(linear_model(), TABLE, devices, optimizer, per_device, **options))


def first_step(setup):
    """Return the optimizer's state after a step, the expected loss and gradient, and the reported loss."""
    batch = next(setup.batches(0, 1))
    after, sums = setup.step()(jax.tree.map(jnp.copy, setup.state), batch)

    def loss(params):
        inputs = setup.preprocess(batch, train=True).images
        return jaxddp.softmax_cross_entropy(linear_model()[1](params, inputs), batch.label).mean()

    expected = jax.jit(jax.value_and_grad(loss))(setup.state.params)
    return jax.device_get((after.opt_state, *expected, sums.means()["loss"]))


@pytest.mark.parametrize("options", [{}, {"rate_factors": ("weight=0.5",)}])
def test_an_optimizer_that_refuses_extra_arguments_gets_none(options):
    optimizer = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    setup = make_setup(optimizer, **options)
    stored, _, grad, _ = first_step(setup)
    params = jax.device_get(setup.state.params)
    _, expected = optimizer.update(grad, optimizer.init(params), params)
    jax.tree.map(lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-6), stored, expected)


@pytest.mark.parametrize(("devices", "options"), [(1, {}), (4, {"accumulate": 2}), (4, {"reproducible": True})])
def test_the_optimizer_gets_the_loss_and_its_gradient_on_any_number_of_devices(devices, options):
    stored, value, grad, reported = first_step(make_setup(RECORDER, devices, 16 // devices, clip_norm=0.1, **options))
    assert np.linalg.norm(grad["weight"]) > 1
    assert stored["value"] == pytest.approx(value, rel=1e-5) == pytest.approx(reported, rel=1e-5)
    np.testing.assert_allclose(stored["grad"]["weight"], grad["weight"], rtol=1e-4, atol=1e-6)
    # Clipping changes the optimizer's gradients, but not the extra argument `grad`.
    assert np.linalg.norm(stored["updates"]["weight"]) == pytest.approx(0.1, rel=1e-4)


PLATEAU = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0, accumulation_size=1)
STEEP = optax.chain(sgd(3.0), PLATEAU)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, ci_case({"rate_factors": "weight=0.5", "unfreeze": "weight=1 steps"})], ids=["plain", "layers"]
)
def test_reduce_on_plateau_lowers_the_rate_and_its_run_resumes(options, tmp_path):
    setup = make_setup(STEEP, epochs=6, **options)
    state, history = train(jaxddp.softmax_cross_entropy, setup, listeners=(), log_every="1 step", workdir=tmp_path)
    expected = PLATEAU.init({})
    for loss in history.train["loss"]:
        _, expected = PLATEAU.update({}, expected, value=jnp.float32(loss))
    (scale,) = [leaf for _, leaf in optax.tree_utils.tree_get_all_with_path(state.opt_state, "scale")]
    assert scale == expected.scale < 1
    # A run resumes only with an optimizer of the same identity.
    resumed, _ = train(jaxddp.softmax_cross_entropy, setup, listeners=(), workdir=tmp_path)
    np.testing.assert_array_equal(resumed.params["weight"], state.params["weight"])
    with pytest.raises(InputError, match="objects.optimizer was|optimizer was"):
        train(jaxddp.softmax_cross_entropy, make_setup(sgd(3.0), epochs=6), listeners=(), workdir=tmp_path)


def test_a_run_resumes_with_a_random_key_in_the_state_of_the_optimizer(tmp_path):
    noisy, loss = optax.chain(optax.add_noise(0.1, 0.5, 0), sgd(0.1)), jaxddp.softmax_cross_entropy
    for epochs in (1, 2):
        resumed, _ = train(loss, make_setup(noisy, epochs=epochs), listeners=(), workdir=tmp_path)
    whole, _ = train(loss, make_setup(noisy, epochs=2), listeners=())
    np.testing.assert_array_equal(resumed.params["weight"], whole.params["weight"])


def test_an_optimizer_state_with_infinity_is_saved(tmp_path):
    plateau = optax.contrib.reduce_on_plateau(accumulation_size=100)
    state, _ = train(
        jaxddp.softmax_cross_entropy, make_setup(optax.chain(sgd(0.1), plateau)), listeners=(), workdir=tmp_path
    )
    assert np.isinf(state.opt_state[1].best_value)
    assert (tmp_path / "checkpoints" / "2").is_dir()


def test_frozen_parameters_pass_no_gradient_to_the_optimizer():
    def two_layers():
        init, apply = linear_model()

        def init_both(key, example):
            return {**init(key, example), "bias": jnp.zeros(5)}

        return init_both, lambda params, images: apply(params, images) + params["bias"]

    setup = prepare_training(two_layers(), TABLE, 4, RECORDER, 4, freeze="bias", rate_factors="weight=2")
    state, _ = setup.step()(setup.state, next(setup.batches(0, 1)))
    assert state.opt_state["grad"]["bias"] is None is state.opt_state["updates"]["bias"]
    np.testing.assert_array_equal(state.opt_state["grad"]["weight"], state.opt_state["updates"]["weight"])
    _, new_state = setup.optimizer.update(state.params, state.opt_state, state.params, value=0.0, grad=state.params)
    assert new_state["grad"]["bias"] is None


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (optax.contrib.schedule_free_sgd(0.1), {}),
        (optax.apply_if_finite(sgd(0.1, momentum=0.9), 3), {"clip_norm": 1.0}),
    ],
)
def test_an_optimizer_that_ignores_extra_arguments_has_the_program_of_a_plain_optimizer(optimizer, options):
    assert isinstance(optimizer, optax.GradientTransformationExtraArgs)
    programs = []
    for transformation in (optimizer, optax.GradientTransformation(*optimizer)):
        setup = make_setup(transformation, **options)
        traced = jax.make_jaxpr(setup.step())(setup.state, next(setup.batches(0, 1)))
        programs.append(re.sub(" at 0x[0-9a-f]+", "", str(traced)))
    assert programs[0] == programs[1]


def test_an_extra_argument_that_a_step_lacks_raises_a_one_line_error():
    advice = (
        "; the step passes only value (the mean loss) and grad (its gradient) to an "
        "optax.GradientTransformationExtraArgs; choose an optimizer that needs no other argument"
    )
    for optimizer, missing in (
        (optax.lbfgs(), "'value_fn'"),
        (optax.contrib.sophia(0.1), "obj_fn must be provided to hutchinson update function"),
        (optax.GradientTransformation(*RECORDER), "'value' and 'grad'"),
    ):
        with pytest.raises(InputError) as error:
            train(jaxddp.softmax_cross_entropy, make_setup(optimizer), listeners=())
        assert str(error.value).startswith("optimizer: ") and str(error.value).endswith(f"{missing}{advice}")
