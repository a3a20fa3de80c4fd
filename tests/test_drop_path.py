"""Stochastic depth: an example's draws depend on seed, epoch and row only, on any number of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import rarely
from support.data import CLASSES, random_batch, random_table
from support.networks import fresh_state, largest_difference, objective_of
from support.runs import setup_of
from support.shared import sgd, topology_of

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.data.labels import LabelKind
from jaxddp.engine.buckets import Averaging
from jaxddp.engine.example_loss import example_loss
from jaxddp.engine.gradients import Gradients
from jaxddp.engine.step import make_local_step, make_train_step
from jaxddp.engine.step_objective import Objective
from jaxddp.losses.cross_entropy import cross_entropy
from jaxddp.models.adapt import adapt, for_platform
from jaxddp.models.convnext import ConvNeXt
from jaxddp.models.ops.drop_path import add_branch, branch_factors
from jaxddp.models.vit import ViT, ViTSize

WIDE = {"dtype": jnp.float64, "param_dtype": jnp.float64}


def small_vit(drop_path=0.0, **dtypes):
    return ViT(ViTSize(8, 2, 3, 16), CLASSES, drop_path, **dtypes)


def small_convnext(drop_path=0.0, **dtypes):
    return ConvNeXt((1, 0, 0, 1), CLASSES, 4, drop_path, **dtypes)


NETWORKS = {"vit": small_vit, "convnext": small_convnext}


@functools.cache
def trained(network: str, devices: int, gradients: Gradients, drop_path: float = 0.3):
    """Return the parameters after each of two steps of plain SGD in float64, and the losses."""
    with jax.enable_x64(True):
        model = for_platform(NETWORKS[network](drop_path, **WIDE), "cpu")
        objective, topology, optimizer = objective_of(model), topology_of(devices), sgd(0.1)
        state = fresh_state(objective, optimizer, topology, 32)
        step = make_train_step(make_local_step(objective, optimizer, topology, gradients=gradients), topology)
        found, losses = [jax.device_get(state.params)], []
        for number in range(2):
            batch = random_batch(16, masked=3, seed=number, image=32)._replace(epoch=np.full(16, number, np.int32))
            state, sums = step(state, topology.place(batch))
            found.append(jax.device_get(state.params))
            losses.append(sums.means()["loss"])
        return found, losses


WAYS = {
    "2 devices": (2, Gradients()),
    "4 microbatches": (2, Gradients(accumulate=4)),
    "reproducible": (8, Gradients(reproducible=True)),
    "8 devices": (8, Gradients(Averaging(3))),
}
# Both networks draw with the same function. One of them shows that every way to compute a batch passes its keys.
TELLING = {("vit", "2 devices"), ("vit", "4 microbatches")}
ALL = [(network, way) for network in NETWORKS for way in WAYS]


def marked(network: str, way: str):
    """Check that draws do not depend on the place in a batch. A test of evaluation below checks whole networks."""
    second = {("vit", "reproducible"), ("convnext", "2 devices")}
    marks = [] if (network, way) in TELLING else pytest.mark.ci if (network, way) in second else pytest.mark.exhaustive
    return pytest.param(network, way, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("network", "way"), [marked(*each) for each in ALL])
def test_any_number_of_devices_and_microbatches_gives_the_same_result(network, way):
    (expected, losses), (found, again) = trained(network, 1, Gradients()), trained(network, *WAYS[way])
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), *expected[:2])
    assert min(jax.tree.leaves(moved)) > 1e-9, "a zero gradient proves nothing"
    assert largest_difference(found, expected) < 1e-9
    assert np.abs(np.subtract(losses, again)).max() < 1e-9


@pytest.mark.ci
@pytest.mark.parametrize("network", ["vit", rarely("convnext")])
def test_another_drop_path_rate_changes_the_results(network):
    """Check that branches are skipped, or the test above would prove nothing."""
    expected, found = trained(network, 2, Gradients()), trained(network, 2, Gradients(), drop_path=0.0)
    assert largest_difference(found, expected) > 1e-6


def drawing(params, state, images, *, train, key, example_keys=None):
    """A network that only stores the draws of each image."""
    drawn = jnp.zeros(len(images)) if example_keys is None else jax.vmap(jax.random.uniform)(example_keys)
    return jnp.zeros((len(images), CLASSES)), {"drawn": drawn}


class Drawing:
    """The same network as an object with a Model's methods."""

    def init(self, key, example):
        return {}, {"drawn": jnp.zeros(1)}

    def apply(self, params, model_state, images, *, train, key, example_keys=None):
        return drawing(params, model_state, images, train=train, key=key, example_keys=example_keys)


def silent(params, state, images):
    """The same network without draws."""
    return jnp.zeros((len(images), CLASSES)), {"drawn": jnp.zeros(len(images))}


LOSS = example_loss(cross_entropy(), LabelKind(CLASSES))


def objective_that(apply):
    model = apply if isinstance(apply, Drawing) else (lambda key, example: ({}, {}), apply)
    return Objective(adapt(model), LOSS, Preprocess())


@functools.partial(jax.jit, static_argnums=0, static_argnames="train")
def draws(apply, batch, seed=0, device=0, train=True):
    keys = {"key": jax.random.key(device), "image_key": jax.random.key(seed)}
    _, state = objective_that(apply)({}, {"drawn": None}, batch, train=train, **keys)
    return state["drawn"]


def test_the_keys_of_examples_depend_on_seed_epoch_and_row_alone():
    batch = random_batch(8)
    first = draws(drawing, batch)
    assert len(set(first.tolist())) == 8
    for rows in (slice(0, 4), slice(4, 8), slice(None, None, -1)):
        part = jax.tree.map(lambda column, rows=rows: column[rows], batch)
        assert draws(drawing, part, device=5).tolist() == first[rows].tolist()
    later, further = batch._replace(epoch=batch.epoch + 1), batch._replace(row=batch.row + 8)
    others = [draws(drawing, batch, seed=1), draws(drawing, later), draws(drawing, further)]
    assert len({value for found in (first, *others) for value in found.tolist()}) == 32
    assert draws(Drawing(), batch).tolist() == first.tolist()
    assert draws(drawing, batch, train=False) is None


def test_a_model_without_example_keys_is_traced_without_them():
    """Check that networks without example keys have the same program: an extra operation would recompile every
    network."""

    def folds(apply):
        return str(jax.make_jaxpr(lambda batch: draws(apply, batch))(random_batch(8))).count("random_fold_in")

    assert folds(drawing) == folds(silent) + 3


def test_branches_are_skipped_at_a_rate_that_grows_with_depth():
    examples, blocks, rate = 4000, 4, 0.6
    factors = np.asarray(branch_factors(rate, blocks, 2, jax.random.split(jax.random.key(3), examples)))
    assert factors.shape == (examples, blocks, 2)
    for block, expected in enumerate(np.linspace(0, rate, blocks)):
        own = factors[:, block]
        # Five standard deviations of a binomial distribution.
        assert abs((own == 0).mean() - expected) <= 5 * (expected * (1 - expected) / own.size) ** 0.5
        np.testing.assert_allclose(own[own > 0], 1 / (1 - expected), rtol=1e-6)
    assert (factors[:, -1, 0] != factors[:, -1, 1]).mean() > 0.4
    assert (factors[:, -1, 0] != factors[:, -2, 0]).mean() > 0.4


def test_a_skipped_branch_adds_nothing():
    x, branch = np.arange(12.0, dtype=np.float32).reshape(3, 2, 2), np.ones((3, 2, 2), np.float32)
    np.testing.assert_array_equal(
        add_branch(x, branch, jnp.array([0.0, 1.0, 2.0])), x + np.array([0, 1, 2])[:, None, None]
    )
    half = add_branch(x.astype(jnp.bfloat16), branch.astype(jnp.bfloat16), jnp.array([0.0, 1.0, 2.0]))
    assert half.dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
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
    # An example's logits do not depend on its place in the batch.
    moved = logits(dropping, images[::-1], train=True, example_keys=keys[::-1])
    np.testing.assert_allclose(moved, dropped[::-1], rtol=1e-4, atol=1e-5)
    with pytest.raises(
        InputError, match="^drop_path: in training every image needs its own random key; pass example_keys"
    ):
        logits(dropping, train=True)


@pytest.mark.slow
def test_the_drop_path_rate_is_part_of_a_runs_identity():
    table = random_table(8, image=16)
    small = functools.partial(ViT, ViTSize(8, 1, 1, 8), CLASSES)
    found = {setup_of(small(rate), sgd(0.1), table).identity()["model"] for rate in (0.0, 0.1)}
    assert len(found) == 2


def test_a_rate_of_one_is_refused():
    with pytest.raises(InputError, match=r"model.drop_path"):
        Config().replace(model={"drop_path": 1.0})
