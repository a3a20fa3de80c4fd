"""Test-time augmentation: the views of an image, their weights, and the uses in evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.data import NO_AUGMENTATION, random_table
from support.networks import SmallNet
from support.runs import setup_of
from support.shared import sgd

from jaxddp.config import Config
from jaxddp.engine.objective import mean_logits

VAL = random_table(23, seed=1)


def by_hand(classify, images: np.ndarray, views: str) -> np.ndarray:
    """Compute the weighted mean of the views' logits by definition, in NumPy."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect")
    copies = {"one": [(1, images)], "mirror": [(1, images)]}
    copies["mirror_translate"] = [(0.5, images), (0.25, padded[:, :-2, :-2]), (0.25, padded[:, 2:, 2:])]
    sides = (slice(None),) if views == "one" else (slice(None), slice(None, None, -1))
    return sum(w / len(sides) * classify(copy[:, :, side]) for w, copy in copies[views] for side in sides)


@pytest.mark.parametrize("views", ["one", "mirror", "mirror_translate"])
def test_logits_are_the_weighted_mean_of_the_logits_of_the_views(views):
    rng = np.random.default_rng(0)
    images, weight = rng.normal(size=(4, 5, 6, 2)), rng.normal(size=(5, 6, 2, 3))

    def classify(images):
        return (images[..., None] * weight).sum((1, 2, 3)) ** 2

    with jax.enable_x64(True):
        actual = mean_logits(classify, jnp.asarray(images), views)
    np.testing.assert_allclose(actual, by_hand(classify, images, views), rtol=1e-12)


def test_logits_in_bfloat16_are_averaged_in_float32():
    third = jnp.full((1, 2), 1 / 3, jnp.bfloat16)
    actual = mean_logits(lambda images: third * (1 + images.sum()), jnp.ones((1, 4, 4, 1), jnp.bfloat16), "mirror")
    assert actual.dtype == jnp.float32
    assert mean_logits(lambda images: third, jnp.ones((1, 4, 4, 1)), "one").dtype == jnp.bfloat16


def setup(views: str, devices: int = 2):
    config = Config().replace(eval={"views": views})
    return setup_of(SmallNet(), sgd(0.1), devices=devices, config=config, data=NO_AUGMENTATION)


@pytest.mark.slow
@pytest.mark.parametrize("resident", [False, True])
def test_evaluation_measures_the_views_and_training_does_not(resident):
    plain, mirrored = setup("one"), setup("mirror_translate")
    unchanged, averaged = (made.evaluator(VAL, 8, resident=resident)(made.state) for made in (plain, mirrored))
    assert unchanged["count"] == averaged["count"] == 23
    assert unchanged["loss"] != averaged["loss"]
    # Compute the loss of mean logits in NumPy.
    images = (VAL.images / 255 - plain.config.data.mean) / plain.config.data.std

    def classify(images):
        params, state = mirrored.state.params, mirrored.state.model_state
        return np.asarray(mirrored.model.apply(params, state, jnp.float32(images), train=False, key=None)[0])

    logits = by_hand(classify, images, "mirror_translate")
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, VAL.labels).mean()
    assert averaged["loss"] == pytest.approx(float(expected), rel=1e-5)
    batch = next(plain.batches(0, 1))
    losses = [made.step()(made.state, batch)[1].means()["loss"] for made in (plain, mirrored)]
    assert losses[0] == losses[1]
