"""AugMix's consistency loss: its formula, its views, and its independence of the number of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import essential_and_rare
from support.data import CLASSES, random_batch, random_table
from support.networks import largest_difference, linear_model, objective_of, train_steps
from support.runs import setup_of
from support.shared import sgd, topology_of

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.core.errors import InputError
from jaxddp.engine.ways.way import Way
from jaxddp.losses import cross_entropy
from jaxddp.objectives.jensen_shannon import JensenShannon, views_of

AUGMENT = AugmentConfig(flip=False, policy="trivial_augment", cutout=2)


def objectives(model=None, weights=None):
    """Return the objective with the consistency loss, and the supervised one."""
    dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    supervised = objective_of(model or linear_model(), cross_entropy(0.0, weights), augment=AUGMENT, dtype=dtype)
    return JensenShannon(12.0)(supervised), supervised


def viewed(preprocess: Preprocess, batch, key: jax.Array) -> list[np.ndarray]:
    views = jax.jit(lambda batch: [view(batch, train=True, key=key).images for view in views_of(preprocess)])
    return [*map(np.asarray, views(batch))]


@pytest.mark.slow
@pytest.mark.parametrize("weights", essential_and_rare(((1.0, 4.0, 0.5, 2.0, 3.0),), None))
def test_the_loss_equals_the_papers(weights):
    """Compute CE + 12 JS in NumPy, as a mean over the unmasked examples with their class weights."""
    batch, count, key = random_batch(12, masked=3), 9, jax.random.key(4)
    with jax.enable_x64(True):
        objective, supervised = objectives(weights=weights)
        params = {"weight": jax.random.normal(jax.random.key(1), (108, CLASSES), jnp.float64) / 8}
        sums, _ = jax.jit(functools.partial(objective, train=True))(params, {}, batch, image_key=key)
        images = [view[:count] for view in viewed(supervised.preprocess, batch, key)]
        value = sums.means()["loss"]
    logits = [image.reshape(count, -1) @ np.asarray(params["weight"]) for image in images]
    probs = [np.exp(each) / np.exp(each).sum(1, keepdims=True) for each in logits]
    mean = sum(probs) / 3
    divergence = sum((each * np.log(each / mean)).sum(1) for each in probs) / 3
    assert (divergence > 1e-5).all()
    labels = batch.label[:count]
    exact = -np.log(probs[0][np.arange(count), labels]) + 12 * divergence
    assert value == pytest.approx(np.average(exact, weights=np.array(weights or (1.0,) * 5)[labels]), rel=1e-9)


@pytest.mark.slow
def test_the_views_differ_by_the_draws_of_the_policy_only():
    batch, seen = random_batch(16, image=12), []
    key = jax.random.key(2)
    plain, first, second = viewed(Preprocess(augment=AugmentConfig(policy="trivial_augment", cutout=4)), batch, key)
    without = jax.jit(lambda batch: Preprocess(augment=AugmentConfig(cutout=4))(batch, train=True, key=key).images)
    assert (plain == np.asarray(without(batch))).all()
    for one, other in [(plain, first), (plain, second), (first, second)]:
        assert (one != other).any((1, 2, 3)).mean() > 0.6
    # The black squares of cutout are at the same places, which are not black otherwise.
    black = (plain == plain.min((0, 1, 2))).all(-1)
    assert black.sum() > 16 * 6
    for view in (first, second):
        assert (view[black] == plain.min((0, 1, 2))).all()

    def apply(params, state, images):
        seen.append(images.shape)
        return images.reshape(len(images), -1) @ params["weight"], {}

    objective, _ = objectives(model=(lambda key, example: (linear_model()[0](key, example), {}), apply))
    params = linear_model()[0](jax.random.key(0), jnp.zeros((1, 12, 12, 3)))
    jax.eval_shape(functools.partial(objective, train=True), params, {}, batch)
    assert seen == [(48, 12, 12, 3)]


@pytest.mark.slow
def test_a_step_is_the_same_on_any_number_of_devices():
    results = []
    with jax.enable_x64(True):
        for devices in (1, 8):
            (objective, supervised), batch = objectives(), random_batch(24, masked=5)
            _, (sums,), state = train_steps(supervised, Way(topology_of(devices)), [batch], minimized=objective)
            results.append((state.params, sums.means()["loss"]))
    (one, value), (eight, other) = results
    assert largest_difference(one, eight) < 1e-9 and value == pytest.approx(other, abs=1e-9)


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ({}, "objective.name=jensen_shannon compares an image with augmented copies; give data.augment.policy"),
        (
            {"policy": "augmix", "mixup": 0.2},
            "objective.name=jensen_shannon does not mix images, and data.augment.mixup=0.2 is set; leave it out",
        ),
    ],
)
def test_settings_without_views_are_refused_before_compiling(augment, message):
    data = DataConfig(augment=AugmentConfig(**augment))
    with pytest.raises(InputError, match=f"^{message}$"):
        setup_of(linear_model(), sgd(0.1), random_table(20), data=data, objective=JensenShannon())
