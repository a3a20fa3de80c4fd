"""Mixup and cutmix: pairs, weights, labels and losses equal their definitions in NumPy, on any number of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support.networks as networks
from support.cases import rare_case
from support.data import random_batch
from support.networks import linear_model
from support.shared import sgd, topology_of

from jaxddp.augment.mixing import cutmix_mask, mixup_weight
from jaxddp.augment.preprocess import Inputs, Preprocess
from jaxddp.config import AugmentConfig
from jaxddp.data.batch import Batch
from jaxddp.engine.objective import Objective
from jaxddp.engine.programs import make_eval_step

MODES = {"mixup": {"mixup": 0.4}, "cutmix": {"cutmix": 1.0}, "both": {"mixup": 0.4, "cutmix": 1.0}}
SIZE = 24
BATCH = random_batch(SIZE, image=12)
NEIGHBOUR = np.arange(SIZE) ^ 1


def inputs_of(batch: Batch, mode: str, seed: int = 0) -> Inputs:
    """Return the mixed batch without flips and normalization, so pixels range from 0 to 255."""
    augment = AugmentConfig(flip=False, **MODES[mode])
    plain = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}
    return jax.device_get(preprocessed(batch, Preprocess(augment=augment, **plain), jax.random.key(seed)))


@functools.partial(jax.jit, static_argnums=1)
def preprocessed(batch: Batch, preprocess: Preprocess, key: jax.Array | None = None) -> Inputs:
    return preprocess(batch, train=True, key=key)


def is_boxed(image: np.ndarray, first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether each pixel comes from one of the two other images."""
    return bool(((np.abs(image - first) < 0.01).all(-1) | (np.abs(image - second) < 0.01).all(-1)).all())


def test_mixup_is_a_weighted_sum_of_an_image_and_its_neighbour():
    images, mixing = inputs_of(BATCH, "mixup")
    weight = mixing.weight[:, None, None, None]
    pixels = BATCH.image.astype(np.float64)
    assert np.abs(images - (weight * pixels + (1 - weight) * pixels[NEIGHBOUR])).max() < 1e-3
    assert (mixing.label == BATCH.label[NEIGHBOUR]).all()
    # Each example has its own weight.
    assert len(set(mixing.weight.tolist())) == SIZE


def test_cutmix_takes_a_box_from_the_neighbour():
    images, mixing = inputs_of(BATCH, "cutmix")
    for index in range(SIZE):
        original, neighbour = (BATCH.image[position].astype(float) for position in (index, index ^ 1))
        from_neighbour = (np.abs(images[index] - neighbour) < 0.01).all(-1)
        assert is_boxed(images[index], original, neighbour)
        assert abs(mixing.weight[index] - (1 - from_neighbour.mean())) < 1e-6
        if from_neighbour.any():
            rows, columns = np.flatnonzero(from_neighbour.any(1)), np.flatnonzero(from_neighbour.any(0))
            assert from_neighbour[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    assert (mixing.label == BATCH.label[NEIGHBOUR]).all()
    assert 0.1 < mixing.weight.mean() < 0.9


@pytest.mark.slow
def test_with_mixup_and_cutmix_each_pair_uses_one_of_them():
    batch = random_batch(400, image=12)
    images, mixing = inputs_of(batch, "both")
    pixels = batch.image.astype(float)
    weight = mixing.weight[:, None, None, None]
    blended = (np.abs(images - (weight * pixels + (1 - weight) * pixels[np.arange(400) ^ 1])) < 1e-3).all((1, 2, 3))
    boxed = np.array([is_boxed(images[i], pixels[i], pixels[i ^ 1]) for i in range(400)])
    # An image with weight 0 or 1 matches both methods.
    pair_matches = {name: matches.reshape(-1, 2).all(1) for name, matches in (("blended", blended), ("boxed", boxed))}
    assert (pair_matches["blended"] | pair_matches["boxed"]).all()
    assert abs((~pair_matches["blended"]).sum() - 100) < 5 * np.sqrt(50)


weights_of = jax.jit(jax.vmap(mixup_weight, (0, None)))
"""`mixup_weight` for many keys, as one compiled program for every alpha."""


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_lambda_is_beta_distributed(alpha):
    keys = jax.random.split(jax.random.key(0), 4000)
    assert "while" not in weights_of.trace(keys, alpha).lower(lowering_platforms=("cuda",)).as_text()
    drawn = np.array(weights_of(keys, alpha), np.float64)
    variance = 1 / (4 * (2 * alpha + 1))
    assert drawn.min() >= 0 and drawn.max() <= 1
    assert abs(drawn.mean() - 0.5) < 5 * np.sqrt(variance / 4000)
    assert abs(drawn.var() - variance) < 0.1 * variance


@pytest.mark.slow
@pytest.mark.parametrize(("height", "width"), [(20, 48), rare_case(32, 32)])
def test_a_cutmix_box_has_sides_that_follow_from_lambda_and_a_uniform_centre(height, width):
    keys = jax.random.split(jax.random.key(1), 3000)
    kept = np.array(jax.jit(jax.vmap(lambda key: cutmix_mask(key, 1.0, height, width)))(keys))
    weights = jax.jit(jax.vmap(lambda key: mixup_weight(jax.random.split(key)[0], 1.0)))(keys)
    unclipped = 0
    for mask, side in zip(~kept, np.sqrt(1 - np.array(weights, np.float64)), strict=True):
        box_height, box_width = mask.any(1).sum(), mask.any(0).sum()
        assert mask.sum() == box_height * box_width
        assert box_height <= side * height + 1e-3 and box_width <= side * width + 1e-3
        unclipped += box_height == int(side * height) and box_width == int(side * width)
        # The centre is inside the image, so at most half the box is clipped on one side.
        assert not mask.any() or (box_height >= int(side * height) // 2 and box_width >= int(side * width) // 2)
        assert mask.any() or int(side * height) <= 1 or int(side * width) <= 1
    assert 0 < unclipped < 3000
    # The position is uniform: opposite pixels are covered equally often.
    coverage = (~kept).mean(0)
    assert np.abs(coverage - coverage[::-1]).max() < 0.06 and np.abs(coverage - coverage[:, ::-1]).max() < 0.06
    assert coverage.min() > 0.05


@pytest.mark.parametrize("mode", MODES)
def test_an_example_whose_partner_is_padding_is_not_mixed(mode):
    batch = BATCH._replace(mask=BATCH.mask.copy(), label=BATCH.label.copy())
    batch.mask[[3, 8, 9]] = 0
    batch.label[[3, 8, 9]] = 10**6
    images, mixing = inputs_of(batch, mode)
    assert mixing.weight[2] == 1 and mixing.label[2] == batch.label[2]
    assert np.abs(images[2] - batch.image[2]).max() < 1e-3
    other_rows = [row for row in range(SIZE) if row not in (2, 3, 8, 9)]
    assert (mixing.weight[other_rows] == inputs_of(BATCH, mode).mixing.weight[other_rows]).all()


def objective_of(model, mode: str | None = "both", loss=None, **augment) -> Objective:
    config = AugmentConfig(**{"pad": 1, **augment, **(MODES[mode] if mode else {})})
    return networks.objective_of(model, loss, augment=config)


def numpy_losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), labels]


def mean_loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "masked", "loss"),
    [("both", 5, None), ("both", 5, mean_loss), rare_case("mixup", 0, None), rare_case("cutmix", 5, None)],
)
def test_the_mixed_loss_is_the_weighted_sum_of_the_losses_of_both_labels(mode, masked, loss):
    with jax.enable_x64(True):
        objective = objective_of(linear_model(), mode, loss)
        batch = random_batch(SIZE, masked=masked)
        batch.label[SIZE - masked :] = -1  # Padding, whose label may be invalid, must not change the loss.
        batch = batch._replace(weight=np.linspace(1, 3, SIZE) * batch.mask)
        params, _ = objective.model.init(jax.random.key(0), jnp.zeros((1, 6, 6, 3)))
        sums, _ = jax.jit(lambda batch: objective(params, {}, batch, train=True))(batch)
        images, mixing = jax.device_get(preprocessed(batch, objective.preprocess))
        logits = images.reshape(SIZE, -1) @ np.array(params["weight"])
        is_real, weight, predicted = batch.mask > 0, mixing.weight.astype(np.float64), logits.argmax(-1)
        own, other = weight * batch.weight, (1 - weight) * batch.weight[NEIGHBOUR]
        losses = own * numpy_losses(logits, batch.label) + other * numpy_losses(logits, mixing.label)
        hits = weight * (predicted == batch.label) + (1 - weight) * (predicted == mixing.label)
        assert abs(float(sums.values[0, 0]) - losses[is_real].sum()) < 1e-9
        assert abs(float(sums.values[1, 0]) - hits[is_real].sum()) < 1e-5
        assert sums.values[:2, 1] == pytest.approx([(own + other)[is_real].sum(), SIZE - masked])
        assert 0 < hits[is_real].sum() != (predicted == batch.label)[is_real].sum()


def test_evaluation_does_not_mix():
    with jax.enable_x64(True):
        topology = topology_of(2)
        means = []
        for mode in ("both", None):
            objective = objective_of(linear_model(), mode)
            state = networks.fresh_state(objective, sgd(0.1), topology)
            sums = make_eval_step(objective, topology)(state, topology.place(random_batch(SIZE, masked=3)))
            means.append(sums.means())
        assert means[0] == means[1]
