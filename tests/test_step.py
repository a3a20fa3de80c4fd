"""Promise 1: N devices equal one. The reference is plain `jax.grad` of the mean over the examples that count."""

import functools
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import CLASSES, SmallNet, largest_difference, linear_model, random_batch, randomized

from jaxddp.api import resnet
from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import AugmentConfig
from jaxddp.data.batch import Batch
from jaxddp.engine.loss import example_loss
from jaxddp.engine.objective import Objective
from jaxddp.engine.state import TrainState, create_state
from jaxddp.engine.step import make_eval_step, make_local_step, make_train_step
from jaxddp.losses.cross_entropy import cross_entropy
from jaxddp.mesh import Topology
from jaxddp.metrics.top_k import TopK
from jaxddp.models.adapt import adapt, for_platform
from jaxddp.models.airbench import Airbench
from jaxddp.models.resnet import BASIC, Architecture, ResNet
from jaxddp.models.stems import small_stem

DEVICES = (1, 2, 3, 4, 8)
PLAIN = SmallNet(dtype=jnp.float64)
LINEAR = linear_model()


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def objective_of(model, loss=None, **preprocess) -> Objective:
    settings = {"augment": AugmentConfig(pad=1), "dtype": jnp.float64, **preprocess}
    return Objective(
        adapt(model),
        example_loss(loss or cross_entropy(), CLASSES),
        Preprocess(**settings),
        {"top1": TopK(1)},
    )


def fresh_state(objective: Objective, optimizer, topology: Topology, image: int = 6, dtype=jnp.float64) -> TrainState:
    initial = objective.model.init(jax.random.key(0), jnp.zeros((1, image, image, 3), jnp.float64))
    # Statistics too: of another type after the first step, they would have it compiled a second time.
    params, model_state = jax.tree.map(lambda x: x.astype(dtype), (randomized(initial[0]), initial[1]))
    return topology.replicate(TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params)))


@functools.cache
def compiled_step(net, devices: int, loss=None, augment: bool = True):
    """One compiled program serves every test that asks for the same."""
    objective = objective_of(net, loss) if augment else objective_of(net, loss, augment=AugmentConfig(flip=False))
    topology, optimizer = Topology.create(devices), optax.sgd(1.0)
    return objective, topology, optimizer, make_train_step(make_local_step(objective, optimizer, topology), topology)


def sgd_gradient(net, batch: Batch, devices: int, **settings):
    """The gradient that a step took, as the difference that plain SGD at rate 1 makes; its sums; the new state."""
    objective, topology, optimizer, step = compiled_step(net, devices, **settings)
    state = fresh_state(objective, optimizer, topology, batch.image.shape[1])
    before = jax.device_get(state.params)
    state, sums = step(state, topology.place(batch))
    return jax.tree.map(lambda a, b: a - b, before, jax.device_get(state.params)), sums, jax.device_get(state)


@functools.cache
def plain_gradient(net, size: int, masked: int):
    """Of a random batch by the definition: no mesh, no collective, and padding left out by indexing."""
    objective, batch = objective_of(net), random_batch(size, masked=masked)
    real = jax.tree.map(lambda column: column[batch.mask > 0], batch)
    params, model_state = objective.model.init(jax.random.key(0), jnp.zeros((1, *batch.image.shape[1:]), jnp.float64))

    def mean_loss(params):
        images = objective.preprocess(real, train=True).images
        logits, _ = objective.model.apply(params, model_state, images, train=True, key=jax.random.key(0))
        return optax.softmax_cross_entropy_with_integer_labels(logits, real.label).mean()

    return jax.device_get(jax.jit(jax.grad(mean_loss))(randomized(params)))


@pytest.mark.parametrize(("size", "masked"), [(24, 0), (24, 7), (24, 23), (72, 1)])
@pytest.mark.parametrize("devices", DEVICES)
def test_gradients_equal_plain_grad(devices, size, masked):
    expected = plain_gradient(PLAIN, size, masked)
    gradient, sums, _ = sgd_gradient(PLAIN, random_batch(size, masked=masked), devices)
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(gradient))
    assert largest_difference(gradient, expected) < 1e-9
    assert round(float(sums.values[0, 1])) == size - masked


@pytest.mark.parametrize(("size", "devices"), [(9, 3), (15, 5), (14, 7)])
def test_gradients_of_odd_sizes(size, devices):
    gradient, _, _ = sgd_gradient(PLAIN, random_batch(size, masked=2), devices)
    assert largest_difference(gradient, plain_gradient(PLAIN, size, 2)) < 1e-9


@settings(max_examples=50)
@given(st.lists(st.booleans(), min_size=12, max_size=12).filter(any), st.sampled_from(DEVICES[1:4]))
def test_gradients_under_any_mask(mask, devices):
    with jax.enable_x64(True):
        batch = random_batch(12)._replace(mask=np.array(mask, np.float32))
        gradient, _, _ = sgd_gradient(LINEAR, batch, devices, augment=False)
        objective = compiled_step(LINEAR, devices, augment=False)[0]
        pixels = np.array(objective.preprocess(batch, train=False).images).reshape(12, -1)[mask]
        weight = np.array(objective.model.init(jax.random.key(0), np.zeros((1, 6, 6, 3)))[0]["weight"])
        scores = np.exp(pixels @ weight)
        error = scores / scores.sum(1, keepdims=True) - np.eye(CLASSES)[batch.label[mask]]
        assert np.abs(gradient["weight"] - pixels.T @ error / sum(mask)).max() < 1e-9


@pytest.mark.parametrize("devices", DEVICES[1:])
def test_synchronized_batch_norm_equals_one_device(devices):
    net, batch = SmallNet(batch_norm=True, sync="data", dtype=jnp.float64), random_batch(24)
    one, _, state_one = sgd_gradient(net, batch, 1)
    many, _, state_many = sgd_gradient(net, batch, devices)
    assert all(np.abs(leaf).max() > 1e-12 for leaf in jax.tree.leaves(one))
    assert largest_difference(one, many) < 1e-9
    assert largest_difference(state_one.model_state, state_many.model_state) < 1e-9


def test_local_batch_norm_differs_and_its_statistics_are_the_average():
    net, batch = SmallNet(batch_norm=True, dtype=jnp.float64), random_batch(24)
    halves = [jax.tree.map(itemgetter(part), batch) for part in (slice(0, 12), slice(12, 24))]

    def running_mean(batch: Batch, devices: int) -> np.ndarray:
        return sgd_gradient(net, batch, devices, augment=False)[2].model_state["batch_stats"]["BatchNorm_0"]["mean"]

    means = [running_mean(half, 1) for half in halves]
    assert np.abs(running_mean(batch, 2) - np.mean(means, 0)).max() < 1e-12
    assert np.abs(means[0] - means[1]).max() > 1e-3


def ghost(group: int | None, platform: str = "gpu"):
    """A ResNet of two blocks that normalizes so many images together, as it is on a platform."""
    network = ResNet(
        Architecture((1, 1), BASIC),
        CLASSES,
        width=2,
        stem=small_stem,
        group=group,
        dtype=jnp.float64,
        param_dtype=jnp.float64,
    )
    return for_platform(network, platform)


def ghost_airbench():
    """Its norms have no scale, and its first kernel no gradient."""
    return Airbench(CLASSES, width=2, group=4, dtype=jnp.float64, param_dtype=jnp.float64)


@pytest.mark.parametrize(("net", "image"), [(ghost(2), 6), (ghost(3, "cpu"), 6), (ghost_airbench(), 10)])
def test_with_ghost_batch_norm_any_number_of_devices_is_one(net, image):
    """With padding, whose images count in the statistics."""
    batch = random_batch(8 * net.group, masked=3, image=image)
    one, sums, state = sgd_gradient(net, batch, 1)
    flat = [path for path, leaf in jax.tree_util.tree_leaves_with_path(one) if np.abs(leaf).max() < 1e-6]
    assert [path[0].key for path in flat] == (["whiten"] if isinstance(net, Airbench) else [])
    for devices in (2, 4, 8):
        many, of_many, other = sgd_gradient(net, batch, devices)
        assert largest_difference(one, many) < 1e-9
        assert largest_difference(sums.values, of_many.values) < 1e-9
        assert largest_difference(state.model_state, other.model_state) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_with_ghost_batch_norm_runs_are_the_same_on_any_number_of_devices(platform):
    objective = objective_of(ghost(2, platform))
    losses, state = loss_series(objective, Topology.create(1), 5, jnp.float64)
    assert len(set(losses)) == 5
    for count in (2, 4, 8):
        again, other = loss_series(objective, Topology.create(count), 5, jnp.float64)
        assert np.abs(np.array(losses) - again).max() < 1e-9
        assert largest_difference(state.params, other.params) < 1e-9
        assert largest_difference(state.model_state, other.model_state) < 1e-9


@pytest.mark.parametrize("devices", [1, 4])
def test_a_group_that_is_a_device_s_slice_is_local_batch_norm(devices):
    batch = random_batch(16)
    local, _, state = sgd_gradient(ghost(None), batch, devices)
    grouped, _, other = sgd_gradient(ghost(16 // devices), batch, devices)
    assert largest_difference(local, grouped) < 1e-9
    assert largest_difference(state.model_state, other.model_state) < 1e-9
    apart, *_ = sgd_gradient(ghost(2), batch, devices)
    assert largest_difference(local, apart) > 1e-3


def loss_series(objective, topology, steps: int, dtype) -> tuple[list[float], TrainState]:
    optimizer = optax.sgd(0.02)
    state = fresh_state(objective, optimizer, topology, 16, dtype)
    step, losses = make_train_step(make_local_step(objective, optimizer, topology), topology), []
    for number in range(steps):
        state, sums = step(state, topology.place(random_batch(16, seed=number, image=16)))
        losses.append(sums.means()["loss"])
    return losses, jax.device_get(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "steps", "devices", "tolerance"), [(jnp.float64, 5, (2, 4, 8), 1e-9), (jnp.float32, 20, (4,), 2e-4)]
)
def test_resnet_losses_and_parameters_are_the_same_on_any_number_of_devices(dtype, steps, devices, tolerance):
    network = resnet("resnet10", CLASSES, width=2, stem="small", batch_norm="sync", dtype=dtype, param_dtype=dtype)
    objective = objective_of(network, dtype=dtype)
    losses, state = loss_series(objective, Topology.create(1), steps, dtype)
    for count in devices:
        again, other = loss_series(objective, Topology.create(count), steps, dtype)
        assert np.abs(np.array(losses) - again).max() < tolerance
        assert largest_difference(state.params, other.params) < tolerance
        assert largest_difference(state.model_state, other.model_state) < tolerance


def test_the_step_has_one_collective():
    topology, optimizer = Topology.create(4), optax.sgd(0.1, momentum=0.9)
    objective = objective_of(SmallNet(batch_norm=True, dtype=jnp.float64))
    state = fresh_state(objective, optimizer, topology)
    step = make_train_step(make_local_step(objective, optimizer, topology), topology)
    # As written: XLA would merge several into one operation of as many buffers, which gloo then sends one by one.
    text = step.lower(state, topology.place(random_batch(24))).as_text()  # pyright: ignore[reportFunctionMemberAccess]
    assert text.count("stablehlo.all_reduce") == 1


def test_the_state_is_consumed_and_counts_its_steps():
    topology, optimizer = Topology.create(2), optax.sgd(0.1)
    objective = objective_of(SmallNet(dtype=jnp.float64))
    state = fresh_state(objective, optimizer, topology)
    new, _ = make_train_step(make_local_step(objective, optimizer, topology), topology)(
        state, topology.place(random_batch(24))
    )
    assert int(new.step) == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("devices", (1, 3, 8))
def test_evaluation_counts_only_what_is_not_padding(devices):
    objective, topology = objective_of(SmallNet(batch_norm=True, dtype=jnp.float64)), Topology.create(devices)
    state = fresh_state(objective, optax.sgd(0.1), topology)
    batch = random_batch(24, masked=11)
    sums = make_eval_step(objective, topology)(state, topology.place(batch))
    images = objective.preprocess(batch, train=False).images[:13]
    logits, _ = objective.model.apply(
        jax.device_get(state.params), jax.device_get(state.model_state), images, train=False, key=None
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.label[:13])
    assert float(sums.values[0, 1]) == 13
    assert abs(sums.means()["loss"] - float(losses.mean())) < 1e-12
    assert float(sums.values[1, 0]) == int((np.argmax(logits, -1) == batch.label[:13]).sum())


def test_a_loss_that_is_a_mean_is_as_good_as_one_per_example():
    def mean_loss(logits, labels):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    mean, _, _ = sgd_gradient(PLAIN, random_batch(24, masked=7), 4, loss=mean_loss)
    assert largest_difference(mean, plain_gradient(PLAIN, 24, 7)) < 1e-9


def test_label_smoothing_is_the_mixture_with_the_uniform_distribution():
    logits, labels = jnp.array([[2.0, -1.0, 0.5]]), jnp.array([0])
    logp = np.array(jax.nn.log_softmax(logits))[0]
    expected = -(0.9 * logp[0] + 0.1 * logp.mean())
    assert abs(float(cross_entropy(0.1)(logits, labels)[0]) - expected) < 1e-12


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=8), st.data())
def test_top_k_takes_the_first_of_equal_logits(values, data):
    label, k = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(1, len(values)))
    order = np.argsort(-np.array(values), kind="stable")
    measured = TopK(k)(jnp.array([values], jnp.float32), jnp.array([label]))
    assert float(measured[0]) == float(label in order[:k])


def test_a_nan_is_never_right():
    assert float(TopK(1)(jnp.array([[jnp.nan, jnp.nan]]), jnp.array([0]))[0]) == 0


def test_normalizing_is_exact_to_rounding():
    preprocess, batch = Preprocess(dtype=jnp.float64), random_batch(4)
    expected = (batch.image / 255 - np.array(preprocess.mean)) / np.array(preprocess.std)
    assert np.abs(np.array(preprocess(batch, train=False).images) - expected).max() < 1e-6


def test_initialization_is_the_same_on_any_number_of_devices():
    model, optimizer = adapt(SmallNet(batch_norm=True)), optax.sgd(0.1, momentum=0.9)
    states = [create_state(model, optimizer, (6, 6, 3), seed=3, topology=Topology.create(n)) for n in (1, 8)]
    assert largest_difference(states[0].params, states[1].params) == 0
    assert states[1].params["Conv_0"]["kernel"].sharding.is_fully_replicated
