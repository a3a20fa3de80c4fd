"""Clipping of the averaged gradient, and the reported norm of the gradient before clipping."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.data import NO_AUGMENTATION, random_table
from support.networks import largest_difference, linear_model
from support.runs import setup_of
from support.shared import sgd

from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.engine.parts.guard import GradientNorm, Guard, LossScale, norm_by_type
from jaxddp.engine.parts.part import Part
from jaxddp.schedules import Steps
from jaxddp.setup.user_objects import check_name, objects_of_arguments, parts_of

TABLE = random_table(50)
CLIP = 0.25


def make_setup(parts, **more):
    return setup_of(linear_model(), sgd(1.0), TABLE, parts=parts, data=NO_AUGMENTATION, seed=5, **more)


def compute_clipped_step(params, batch, setup, clip):
    """Return the parameters after an SGD step of rate 1 with the batch's clipped gradient, and the gradient's norm."""
    keys = {"key": jax.random.key(0), "image_key": setup.key}

    def loss(params):
        sums, _ = setup.supervised(params, setup.state.model_state, batch, train=True, **keys)
        return sums.values[0, 0] / sums.values[0, 1]

    grads = jax.jit(jax.grad(loss))(params)
    norm = np.sqrt(sum(float((np.asarray(g) ** 2).sum()) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda p, g: np.asarray(p) - np.asarray(g) * min(1, clip / norm), params, grads), norm


@pytest.mark.parametrize("clip", [CLIP, 100.0])
def test_the_averaged_gradient_is_clipped_and_its_norm_before_clipping_is_reported(clip):
    setup = make_setup((GradientNorm(clip),), devices=4)
    batch = next(setup.batches(0, 1))
    expected, norm = compute_clipped_step(setup.state.params, batch, setup, clip)
    after, sums = setup.step()(setup.state, batch)
    assert CLIP < norm < 100 and sums.means()["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert largest_difference(jax.device_get(after.params), expected) < 1e-6


class Doubled(Part):
    """A part that doubles the gradients. Any true value of `judges` counts."""

    name, judges = "doubled", 1

    def gradients(self, own, grads):
        return jax.tree.map(lambda g: 2 * g, grads)


def test_the_reported_norm_is_computed_before_any_part_changes_the_gradient():
    config = Config().replace(optimizer={"clip_norm": CLIP}, train={"max_bad_steps": 0})
    parts = parts_of(config, Steps(10, 0), objects_of_arguments(parts=[Doubled()]))
    assert parts == (GradientNorm(CLIP), parts[1])
    setups = [make_setup(chosen) for chosen in (parts, (GradientNorm(),))]
    before = jax.device_get(setups[0].state.params["weight"])
    (after, sums), (_, plain) = (setup.step()(setup.state, next(setup.batches(0, 1))) for setup in setups)
    assert sums.means()["gradient_norm"] == plain.means()["gradient_norm"] > CLIP
    assert np.linalg.norm(np.asarray(after.params["weight"]) - before) == pytest.approx(2 * CLIP, rel=1e-5)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_clipping_does_not_make_a_nan_or_infinite_gradient_finite(value):
    grads = {"a": jnp.array([1.0, value]), "b": jnp.ones(2), "frozen": None}
    clipped = GradientNorm(CLIP).gradients({}, grads)
    assert not np.isfinite(clipped["a"]).all() and clipped["frozen"] is None


def test_on_a_gpu_arrays_of_one_type_are_reduced_together():
    grads = {"a": jnp.arange(6.0), "b": jnp.full(6, 3.0), "c": jnp.ones((2, 3)), "d": jnp.float16(2), "frozen": None}
    assert float(norm_by_type(grads)) == pytest.approx(float(optax.tree.norm(grads)), rel=1e-6)
    traced = jax.jit(lambda grads: GradientNorm().report({}, grads)).trace(grads)
    texts = [traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")]
    assert [text.count("stablehlo.reduce(") for text in texts] == [3, 4]


def test_in_float16_the_reported_norm_does_not_include_the_loss_scale():
    norms = []
    for parts in ((GradientNorm(CLIP),), (GradientNorm(CLIP), Guard(), LossScale(8))):
        setup = make_setup(parts)
        _, sums = setup.step()(setup.state, next(setup.batches(0, 1)))
        norms.append(sums.means()["gradient_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_norms_metric_name_is_reserved_and_a_clip_must_be_above_0():
    with pytest.raises(InputError, match="'gradient_norm' cannot be the name of a metric"):
        check_name("gradient_norm", "metrics")
    with pytest.raises(InputError, match="^GradientNorm: clip=0.0: expected above 0"):
        dataclasses.replace(GradientNorm(), clip=0)
