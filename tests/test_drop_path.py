"""Stochastic depth: an example's random numbers depend only on seed, epoch and row, on any number of devices."""

import functools
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data import CLASSES, random_batch
from support.networks import largest_difference, objective_of, train_steps
from support.shared import topology_of

import jaxddp.models.ops.layers as layers
from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config
from jaxddp.config.registry import MODELS
from jaxddp.core.errors import InputError
from jaxddp.data.source import LabelKind
from jaxddp.engine.gradients import Averaging, Gradients
from jaxddp.engine.objective import Objective, example_loss
from jaxddp.engine.ways.reproducible import OrderedGradients, Reproducible
from jaxddp.engine.ways.way import Way
from jaxddp.losses import cross_entropy
from jaxddp.models.adapt import adapt, for_platform
from jaxddp.models.convnext import ConvNeXt, ConvNeXtSize
from jaxddp.models.ops.layers import branch_factors
from jaxddp.models.swin import Swin
from jaxddp.models.vit import ViT, ViTSize

FLOAT64 = {"dtype": jnp.float64, "param_dtype": jnp.float64}


NETWORKS = {
    "vit": functools.partial(ViT, ViTSize(8, 2, 3, 16), CLASSES),
    "convnext": functools.partial(ConvNeXt, ConvNeXtSize((1, 0, 0, 1), 4), CLASSES),
    "swin": functools.partial(Swin, (1, 1), CLASSES, 8),
}


@functools.cache
def train_two_steps(network: str, devices: int, make_way: Any, drop_path: float = 0.3):
    """Return the parameters before and after each of two steps of plain SGD in float64, and the losses."""
    with jax.enable_x64(True):
        model = for_platform(NETWORKS[network](drop_path, **FLOAT64), "cpu")
        batches = [random_batch(16, masked=3, seed=number, image=32) for number in range(2)]
        batches = [batch._replace(epoch=np.full(16, number, np.int32)) for number, batch in enumerate(batches)]
        params, sums, _ = train_steps(objective_of(model), make_way(topology_of(devices)), batches, image=32)
        return params, [each.means()["loss"] for each in sums]


MODES = {
    "2 devices": (2, Way),
    "4 microbatches": (2, partial(Way, gradients=Gradients(accumulate=4))),
    "reproducible": (8, partial(Reproducible, gradients=OrderedGradients())),
    "8 devices": (8, partial(Way, gradients=Gradients(Averaging(3)))),
}
# All networks draw with the same function, so one network is enough to test that a mode passes the keys.
ALWAYS_RUN = {("vit", "2 devices"), ("vit", "4 microbatches")}
ALL = [(network, mode) for network in NETWORKS for mode in MODES]


def marked_case(network: str, mode: str):
    """Return a test case, with a mark that makes all but the cases of `ALWAYS_RUN` rare."""
    second = {("vit", "reproducible"), ("convnext", "2 devices")}
    marks = (
        [] if (network, mode) in ALWAYS_RUN else pytest.mark.ci if (network, mode) in second else pytest.mark.exhaustive
    )
    return pytest.param(network, mode, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("network", "mode"), [marked_case(*case) for case in ALL])
def test_any_number_of_devices_and_microbatches_gives_the_same_result(network, mode):
    (expected, losses), (params, mode_losses) = (
        train_two_steps(network, 1, Way),
        train_two_steps(network, *MODES[mode]),
    )
    changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), *expected[:2])
    assert min(jax.tree.leaves(changes)) > 1e-9, "a zero gradient proves nothing"
    assert largest_difference(params, expected) < 1e-9
    assert np.abs(np.subtract(losses, mode_losses)).max() < 1e-9


def store_draws(params, state, images, *, train, key, example_keys=None):
    """Return zeros as logits, and a random number for each image as the network's state."""
    drawn = jnp.zeros(len(images)) if example_keys is None else jax.vmap(jax.random.uniform)(example_keys)
    return jnp.zeros((len(images), CLASSES)), {"drawn": drawn}


class StoreDraws:
    """The network `store_draws` as an object with the methods of a `Model`."""

    def init(self, key, example):
        return {}, {"drawn": jnp.zeros(1)}

    def apply(self, params, model_state, images, *, train, key, example_keys=None):
        return store_draws(params, model_state, images, train=train, key=key, example_keys=example_keys)


def without_draws(params, state, images):
    """Return the same logits, and a state without random numbers."""
    return jnp.zeros((len(images), CLASSES)), {"drawn": jnp.zeros(len(images))}


LOSS = example_loss(cross_entropy(), LabelKind(CLASSES))


def make_objective(apply):
    model = apply if isinstance(apply, StoreDraws) else (lambda key, example: ({}, {}), apply)
    return Objective(adapt(model), LOSS, Preprocess())


@functools.partial(jax.jit, static_argnums=0, static_argnames="train")
def draws(apply, batch, seed=0, device=0, train=True):
    keys = {"key": jax.random.key(device), "image_key": jax.random.key(seed)}
    _, state = make_objective(apply)({}, {"drawn": None}, batch, train=train, **keys)
    return state["drawn"]


def test_the_keys_of_examples_depend_on_seed_epoch_and_row_alone():
    batch = random_batch(8)
    first = draws(store_draws, batch)
    assert len(set(first.tolist())) == 8
    for rows in (slice(0, 4), slice(4, 8), slice(None, None, -1)):
        selection = jax.tree.map(lambda column, rows=rows: column[rows], batch)
        assert draws(store_draws, selection, device=5).tolist() == first[rows].tolist()
    next_epoch, other_rows = batch._replace(epoch=batch.epoch + 1), batch._replace(row=batch.row + 8)
    others = [draws(store_draws, batch, seed=1), draws(store_draws, next_epoch), draws(store_draws, other_rows)]
    assert len({value for drawn in (first, *others) for value in drawn.tolist()}) == 32
    assert draws(StoreDraws(), batch).tolist() == first.tolist()
    assert draws(store_draws, batch, train=False) is None


def test_a_model_without_example_keys_is_traced_without_them():
    """An unused operation for keys would change the program of every network without example keys."""

    def folds(apply):
        return str(jax.make_jaxpr(lambda batch: draws(apply, batch))(random_batch(8))).count("random_fold_in")

    assert folds(store_draws) == folds(without_draws) + 3


def test_branches_are_skipped_at_a_rate_that_grows_with_depth():
    examples, blocks, rate = 4000, 4, 0.6
    with jax.numpy_dtype_promotion("strict"):
        factors = np.stack(branch_factors(rate, blocks, 2, jax.random.split(jax.random.key(3), examples)), 1)
    assert factors.shape == (examples, blocks, 2)
    for block, expected in enumerate(np.linspace(0, rate, blocks)):
        block_factors = factors[:, block]
        # Five standard deviations of a binomial distribution.
        assert (
            abs((block_factors == 0).mean() - expected) <= 5 * (expected * (1 - expected) / block_factors.size) ** 0.5
        )
        np.testing.assert_allclose(block_factors[block_factors > 0], 1 / (1 - expected), rtol=1e-6)
    assert (factors[:, -1, 0] != factors[:, -1, 1]).mean() > 0.4
    assert (factors[:, -1, 0] != factors[:, -2, 0]).mean() > 0.4


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("efficientnet_b0", (0.1875, 16)),
        pytest.param("efficientnet_v2_s", (0.195, 40), marks=pytest.mark.ci),
        pytest.param("convnext_tiny", (0.2, 18), marks=pytest.mark.ci),
        pytest.param("swin_t", (0.2, 12), marks=pytest.mark.ci),
        pytest.param("vit_s16", (0.2, 12), marks=pytest.mark.ci),
    ],
)
def test_the_last_block_has_the_rate_of_the_networks_source(network, expected, monkeypatch):
    """The rates are the `p` of `StochasticDepth` in torchvision 0.29 and of `DropPath` in timm 1.0, for 0.2."""
    model, drawn = MODELS.get(network)(Config().replace(model={"name": network, "drop_path": 0.2}), CLASSES), []

    def record(rate, blocks, *others):
        drawn.append((pytest.approx(rate), blocks))
        return branch_factors(rate, blocks, *others)

    module = sys.modules[type(model).__module__]
    monkeypatch.setattr(module if hasattr(module, "branch_factors") else layers, "branch_factors", record)
    images, keys = jnp.zeros((1, 224, 224, 3)), jax.random.split(jax.random.key(0), 1)
    jax.eval_shape(lambda key: model.init(key, images, train=True, example_keys=keys), jax.random.key(0))
    assert drawn == [expected]


@pytest.mark.slow
@pytest.mark.parametrize("network", ["vit", "convnext", pytest.param("swin", marks=pytest.mark.ci)])
def test_evaluation_has_all_branches_and_training_needs_keys(network):
    images = np.random.default_rng(0).standard_normal((4, 32, 32, 3), np.float32)
    plain, dropping = NETWORKS[network](), for_platform(NETWORKS[network](0.5), "cpu")
    params = jax.jit(plain.init)(jax.random.key(0), images)
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)

    @functools.partial(jax.jit, static_argnums=0, static_argnames="train")
    def logits(model, images=images, **mode):
        return model.apply(params, images, **mode)

    keys = jax.random.split(jax.random.key(0), 4)
    dropped = logits(dropping, train=True, example_keys=keys)
    np.testing.assert_array_equal(logits(dropping), logits(for_platform(plain, "cpu"), train=True))
    assert np.abs(dropped - logits(dropping)).max() > 1e-4
    # An example's logits do not depend on its position in the batch.
    reversed_logits = logits(dropping, images[::-1], train=True, example_keys=keys[::-1])
    np.testing.assert_allclose(reversed_logits, dropped[::-1], rtol=1e-4, atol=1e-5)
    message = "^drop_path: in training every image needs its own random key; pass example_keys"
    with pytest.raises(InputError, match=message):
        logits(dropping, train=True)
