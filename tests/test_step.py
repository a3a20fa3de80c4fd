"""Promise 1: N devices give the same result as one. The reference is `jax.grad` of the mean over unmasked examples."""

import functools
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_recipe import SmallNet
from support.cases import ci_case, essential_and_rare, rare_case
from support.data import CLASSES, random_batch
from support.networks import fresh_state, largest_difference, linear_model, objective_of, randomized, train_steps
from support.shared import adapted, plain_loss, sgd, taken_apart, topology_of

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import AugmentConfig
from jaxddp.data.batch import Batch
from jaxddp.data.source import LabelKind
from jaxddp.engine.initial_state import make_init
from jaxddp.engine.objective import Objective
from jaxddp.engine.programs import make_eval_step
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Way
from jaxddp.mesh import AXIS
from jaxddp.metrics import TopK
from jaxddp.models.adapt import adapt, for_platform
from jaxddp.models.airbench import Airbench
from jaxddp.models.resnet import BASIC, Architecture, ResNet

PLAIN = SmallNet(dtype=jnp.float64)
LINEAR = linear_model()

pytestmark = pytest.mark.usefixtures("float64")


@functools.cache
def compiled_step(net, devices: int, loss=None, augment: bool = True):
    """Return an objective, a mesh, an optimizer and a step. Tests with equal arguments share the compiled program."""
    objective = objective_of(net, loss, augment=AugmentConfig(pad=1) if augment else AugmentConfig(flip=False))
    topology, optimizer = topology_of(devices), sgd(1.0)
    return objective, topology, optimizer, Way(topology).step(Phases(objective, optimizer))


def sgd_gradient(net, batch: Batch, devices: int, **settings):
    """Return the gradient of a step (the parameter change of plain SGD at rate 1), its sums and the new state."""
    objective, topology, optimizer, step = compiled_step(net, devices, **settings)
    state = fresh_state(objective, optimizer, topology, batch.image.shape[1])
    before = jax.device_get(state.params)
    state, sums = step(state, topology.place(batch))
    return jax.tree.map(lambda a, b: a - b, before, jax.device_get(state.params)), sums, jax.device_get(state)


@functools.cache
def plain_gradient(net, size: int, masked: int):
    """Return the gradient of a random batch by definition: no mesh, no collective, and padding removed by indexing."""
    objective, batch = objective_of(net, augment=AugmentConfig(pad=1)), random_batch(size, masked=masked)
    real = jax.tree.map(lambda column: column[batch.mask > 0], batch)
    params, model_state = objective.model.init(jax.random.key(0), jnp.zeros((1, *batch.image.shape[1:]), jnp.float64))

    def mean_loss(params):
        images = objective.preprocess(real, train=True).images
        logits, _ = objective.model.apply(params, model_state, images, train=True, key=jax.random.key(0))
        return optax.softmax_cross_entropy_with_integer_labels(logits, real.label).mean()

    return jax.device_get(jax.jit(jax.grad(mean_loss))(randomized(params)))


CASES = [(devices, *case) for devices in (1, 2, 3, 4, 8) for case in ((24, 0), (24, 7), (24, 23), (72, 1))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "size", "masked"),
    [case if case[:2] in ((2, 24), (3, 24)) or case[0] == 8 else rare_case(*case) for case in CASES],
)
def test_gradients_equal_plain_grad(devices, size, masked):
    expected = plain_gradient(PLAIN, size, masked)
    gradient, sums, _ = sgd_gradient(PLAIN, random_batch(size, masked=masked), devices)
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(gradient))
    assert largest_difference(gradient, expected) < 1e-9
    assert round(float(sums.values[0, 1])) == size - masked


@pytest.mark.slow
@given(st.lists(st.booleans(), min_size=12, max_size=12).filter(any), st.sampled_from((2, 3, 4)))
def test_gradients_under_any_mask_equal_the_softmax_formula(mask, devices):
    with jax.enable_x64(True):
        batch = random_batch(12)._replace(mask=np.array(mask, np.float32))
        gradient, _, _ = sgd_gradient(LINEAR, batch, devices, augment=False)
        objective = compiled_step(LINEAR, devices, augment=False)[0]
        pixels = np.array(objective.preprocess(batch, train=False).images).reshape(12, -1)[mask]
        weight = np.array(objective.model.init(jax.random.key(0), np.zeros((1, 6, 6, 3)))[0]["weight"])
        scores = np.exp(pixels @ weight)
        error = scores / scores.sum(1, keepdims=True) - np.eye(CLASSES)[batch.label[mask]]
        assert np.abs(gradient["weight"] - pixels.T @ error / sum(mask)).max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("devices", essential_and_rare((3, 8), 2, 4))
def test_synchronized_batch_norm_equals_one_device(devices):
    net, batch = SmallNet(batch_norm=True, sync="data", dtype=jnp.float64), random_batch(24)
    one, _, state_one = sgd_gradient(net, batch, 1, augment=False)
    many, _, state_many = sgd_gradient(net, batch, devices, augment=False)
    assert all(np.abs(leaf).max() > 1e-12 for leaf in jax.tree.leaves(one))
    assert largest_difference(one, many) < 1e-9
    assert largest_difference(state_one.model_state, state_many.model_state) < 1e-9


@pytest.mark.slow
def test_local_batch_norm_differs_and_its_statistics_are_the_average():
    net, batch = SmallNet(batch_norm=True, dtype=jnp.float64), random_batch(24)
    halves = [jax.tree.map(itemgetter(part), batch) for part in (slice(0, 12), slice(12, 24))]

    def running_mean(batch: Batch, devices: int) -> np.ndarray:
        return sgd_gradient(net, batch, devices, augment=False)[2].model_state["batch_stats"]["BatchNorm_0"]["mean"]

    means = [running_mean(half, 1) for half in halves]
    assert np.abs(running_mean(batch, 2) - np.mean(means, 0)).max() < 1e-12
    assert np.abs(means[0] - means[1]).max() > 1e-3


def two_blocks(dtype=jnp.float64, **normalization):
    """Build a ResNet of two blocks."""
    normalization |= {"dtype": dtype, "param_dtype": dtype}
    return ResNet(Architecture((1, 1), BASIC), CLASSES, width=2, stem="small", **normalization)


def ghost(group: int | None, platform: str = "gpu"):
    """Build a ResNet with ghost batch norm, adapted to a platform."""
    return for_platform(two_blocks(group=group), platform)


# Its norms have no scale, and its first kernel has no gradient.
AIRBENCH = Airbench(CLASSES, width=2, group=4, dtype=jnp.float64, param_dtype=jnp.float64)


class Trajectory(NamedTuple):
    """The results of a few steps of plain SGD."""

    gradient: Any
    """The gradient of the first step."""
    losses: list[float]
    state: Any


@functools.cache
def take_steps(net, devices: int, dtype=jnp.float64, *, size: int = 16, image: int = 6, steps: int = 4) -> Trajectory:
    """Take a few steps with padding, whose images count in the statistics of ghost batch norm."""
    objective, way = objective_of(net, dtype=dtype), Way(topology_of(devices))
    batches = [random_batch(size, masked=3, seed=number, image=image) for number in range(steps)]
    params, sums, state = train_steps(objective, way, batches, rate=0.02, image=image, dtype=dtype)
    losses = [each.means()["loss"] for each in sums]
    return Trajectory(jax.tree.map(lambda a, b: (a - b) / 0.02, *params[:2]), losses, state)


def assert_same(one: Trajectory, many: Trajectory, tolerance: float) -> None:
    assert len(set(one.losses)) == len(one.losses)
    assert np.abs(np.subtract(one.losses, many.losses)).max() < tolerance
    assert largest_difference(one.gradient, many.gradient) < tolerance
    assert largest_difference(one.state.params, many.state.params) < tolerance
    assert largest_difference(one.state.model_state, many.state.model_state) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("devices", essential_and_rare((4,), 2, 8))
@pytest.mark.parametrize(("net", "image"), [(ghost(2), 6), ci_case(ghost(3, "cpu"), 6), (AIRBENCH, 10)])
def test_with_ghost_batch_norm_any_number_of_devices_equals_one(net, image, devices):
    one, many = (take_steps(net, count, size=8 * net.group, image=image) for count in (1, devices))
    without_gradient = [
        path for path, leaf in jax.tree_util.tree_leaves_with_path(one.gradient) if np.abs(leaf).max() < 1e-6
    ]
    assert [path[0].key for path in without_gradient] == (["whiten"] if isinstance(net, Airbench) else [])
    assert_same(one, many, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("devices", essential_and_rare((4,), 2, 8))
@pytest.mark.parametrize(
    ("dtype", "steps", "tolerance"), [(jnp.float64, 5, 1e-9), pytest.param(jnp.float32, 20, 2e-4, marks=pytest.mark.ci)]
)
def test_resnet_losses_and_parameters_are_the_same_on_any_number_of_devices(dtype, steps, devices, tolerance):
    network = two_blocks(dtype, axis_name=AXIS)
    one, many = (take_steps(network, count, dtype, image=16, steps=steps) for count in (1, devices))
    assert all(np.abs(leaf).max() > 1e-6 for leaf in jax.tree.leaves(one.gradient))
    # The gradient is computed from a difference of parameters, divided by the rate.
    assert_same(one, many._replace(gradient=one.gradient) if dtype == jnp.float32 else many, tolerance)


def test_the_step_has_one_collective():
    topology, optimizer = topology_of(4), sgd(0.1, momentum=0.9)
    objective = objective_of(SmallNet(batch_norm=True, dtype=jnp.float64))
    state = fresh_state(objective, optimizer, topology)
    step = Way(topology).step(Phases(objective, optimizer))
    # The unoptimized program: XLA would merge several all-reduces into one operation, which gloo sends one by one.
    text = step.lower(state, topology.place(random_batch(24))).as_text()  # pyright: ignore[reportFunctionMemberAccess]
    assert text.count("stablehlo.all_reduce") == 1


def test_the_state_is_consumed_and_counts_its_steps():
    objective, topology, optimizer, step = compiled_step(PLAIN, 3)
    state = fresh_state(objective, optimizer, topology)
    new, _ = step(state, topology.place(random_batch(24)))
    assert int(new.step) == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


@pytest.mark.slow
@pytest.mark.parametrize("devices", essential_and_rare((3,), 1, 8))
def test_evaluation_does_not_count_padding(devices):
    objective, topology = objective_of(SmallNet(batch_norm=True, dtype=jnp.float64)), topology_of(devices)
    state = fresh_state(objective, sgd(0.1), topology)
    batch = random_batch(24, masked=11)
    sums = make_eval_step(objective, topology)(state, topology.place(batch))
    images = objective.preprocess(batch, train=False).images[:13]
    apply = jax.jit(functools.partial(objective.model.apply, train=False, key=None))
    logits, _ = apply(*jax.device_get((state.params, state.model_state)), images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.label[:13])
    assert float(sums.values[0, 1]) == 13
    assert abs(sums.means()["loss"] - float(losses.mean())) < 1e-12
    assert float(sums.values[1, 0]) == int((np.argmax(logits, -1) == batch.label[:13]).sum())


def test_padding_with_nan_outputs_is_not_counted():
    objective = Objective(
        adapted(LINEAR), taken_apart(plain_loss(), LabelKind(CLASSES)), Preprocess(), {"top1": TopK(1)}
    )
    values = jnp.array([1.0, 2.0, 3.0, jnp.nan])
    sums = objective.sums([(values, jnp.ones(4)), (values, values)], random_batch(4, masked=1))
    assert sums.means() == {"loss": 2, "top1": 1} and sums.count() == 3


def test_a_metric_does_not_change_the_gradient():
    """The derivative of a root at 0 is infinite."""
    root, batch = {"root": lambda logits, labels: jnp.sqrt(0 * logits[:, 0])}, random_batch(4)
    objective = Objective(adapted(LINEAR), taken_apart(plain_loss(), LabelKind(CLASSES)), Preprocess(), root)
    gradient = jax.grad(lambda logits: objective.sums(objective.columns(logits, batch, None), batch).values[0, 0])
    assert jnp.isfinite(gradient(jnp.ones((4, CLASSES)))).all()


@given(st.lists(st.integers(0, 3), min_size=6, max_size=6), st.integers(0, 5), st.integers(1, 6))
def test_top_k_takes_the_first_of_equal_logits(values, label, k):
    order = np.argsort(-np.array(values), kind="stable")
    measured = compiled(TopK(k))(np.array([values], np.float32), np.array([label]))
    assert float(measured[0]) == float(label in order[:k])


@functools.cache
def compiled(metric):
    return jax.jit(metric)


def test_initialization_is_the_same_on_any_number_of_devices():
    model, optimizer = adapt(SmallNet(batch_norm=True)), sgd(0.1, momentum=0.9)
    states = [make_init(model, optimizer, (6, 6, 3), topology_of(n))(jax.random.key(3)) for n in (1, 8)]
    assert largest_difference(states[0].params, states[1].params) == 0
    assert states[1].params["Conv_0"]["kernel"].sharding.is_fully_replicated
