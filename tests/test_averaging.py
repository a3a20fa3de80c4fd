"""Gradients are averaged in buckets, in the order in which they are ready, with the bits of a single all-reduce."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support import runs
from support.cases import essential_and_rare
from support.data import random_batch, random_table
from support.networks import SmallNet, fresh_state, largest_difference, objective_of
from support.shared import sgd

from jaxddp.config import Config
from jaxddp.engine.compilation import step_options
from jaxddp.engine.gradients import Averaging, Gradients, fill_in_order, order_of_readiness
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Way
from jaxddp.mesh import AXIS, Topology
from jaxddp.platforms import PLATFORMS

LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"


def filled(lengths, buckets):
    return fill_in_order([SimpleNamespace(nbytes=length) for length in lengths], range(len(lengths)), buckets)


@given(st.lists(st.integers(0, 10**9), max_size=80), st.integers(1, 12))
def test_every_leaf_is_in_one_bucket_in_the_order_of_readiness(lengths, buckets):
    found = filled(lengths, buckets)
    assert [leaf for bucket in found for leaf in bucket] == list(range(len(lengths)))
    assert len(found) <= buckets and all(found)
    # The last bucket is small unless a single leaf is large.
    rest = sum(lengths[leaf] for bucket in found[-1:] for leaf in bucket[1:])
    assert rest <= sum(lengths) / 2 ** (buckets - 1) or len(found) == 1


@given(st.integers(1, 12))
def test_a_bucket_takes_half_of_the_remaining_bytes(buckets):
    halves = [2 ** (12 - number) for number in range(1, buckets)]
    assert [len(bucket) for bucket in filled([4] * 2**12, buckets)] == [*halves, 2**12 - sum(halves)]


def readiness_order(loss, params) -> list[str]:
    gradient = jax.make_jaxpr(jax.grad(loss))(params)
    names = [jax.tree_util.keystr(path, simple=True) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return [names[leaf] for leaf in order_of_readiness(gradient, len(names))]


@pytest.mark.parametrize("cast_first", [False, True])
def test_gradients_become_ready_from_the_last_layer_to_the_first(cast_first):
    """With `cast_first`, a program casts all parameters at its start, and so all gradients at its end."""
    params = {name: jnp.eye(4) for name in "bdca"}

    def loss(params):
        if cast_first:
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        hidden = jnp.ones((2, 4))
        for name in "cadb":
            hidden = jnp.tanh(hidden @ params[name].astype(jnp.bfloat16))
        return hidden.astype(jnp.float32).sum()

    assert readiness_order(loss, params) == list("bdac")


def test_a_gradient_without_inputs_is_ready_at_once():
    params = {"used": jnp.ones(3), "unused": jnp.ones(2)}
    assert readiness_order(lambda params: jnp.sin(params["used"]).sum(), params) == ["unused", "used"]


@functools.cache
def averaged(devices: int, averaging: Averaging):
    """Return a tree that differs between devices, its average, and the lowered program."""
    rng = np.random.default_rng(0)
    grads = {f"{i}": rng.normal(size=(devices, *shape)).astype(np.float32) for i, shape in enumerate(SHAPES)}
    others = {"mean": rng.normal(size=(devices, 7)).astype(np.float32), "count": np.arange(devices, dtype=np.int32)}
    topology = Topology.create(devices)

    def local(grads, others):
        return averaging.average(*jax.tree.map(lambda leaf: leaf[0], (grads, others)), order=ORDER)

    average = jax.jit(jax.shard_map(local, mesh=topology.mesh, in_specs=P(AXIS), out_specs=P()))
    placed = topology.place((grads, others))
    return (grads, others), jax.device_get(average(*placed)), average.lower(*placed).as_text()


SHAPES = [(3, 5), (), (40,), (2, 2, 2), (1,), (100,)]
ORDER = [4, 0, 5, 2, 1, 3]


@pytest.mark.parametrize("buckets", [1, 2, 3, 4, 50])
@pytest.mark.parametrize("devices", essential_and_rare((2,), 1, 4))
def test_the_average_has_the_same_bits_in_any_number_of_buckets(devices, buckets):
    (grads, others), average, _ = averaged(devices, Averaging(buckets))
    jax.tree.map(np.testing.assert_array_equal, average[:2], averaged(devices, Averaging())[1][:2])
    means = jax.tree.map(lambda leaf: leaf.astype(np.float64).mean(0), (grads, others["mean"]))
    assert largest_difference((average[0], average[1]["mean"]), means) < 1e-6
    assert average[1]["count"] == devices - 1


@pytest.mark.parametrize(
    ("devices", "averaging", "arrays"),
    [
        (2, Averaging(3), 2),
        (2, Averaging(2, ravels=False), len(SHAPES)),
        (1, Averaging(), len(SHAPES)),
        (1, Averaging(ravels_alone=8), 4),
        (1, Averaging(ravels_alone=1000), 1),
    ],
)
def test_the_averaged_arrays_hold_every_gradient_once_and_nothing_else(devices, averaging, arrays):
    _, (grads, others, averaged_arrays), _ = averaged(devices, averaging)
    assert len(averaged_arrays) == arrays
    values, expected = (
        np.sort(np.concatenate([*map(np.ravel, jax.tree.leaves(of))])) for of in (averaged_arrays, grads)
    )
    np.testing.assert_array_equal(values, expected)
    # The averages do not depend on the arrays.
    jax.tree.map(np.testing.assert_array_equal, (grads, others), averaged(devices, Averaging())[1][:2])


@pytest.mark.parametrize(("buckets", "messages"), [(1, 1), (2, 2), (3, 2), (4, 3), (50, 4)])
def test_each_bucket_is_an_all_reduce_that_waits_for_the_previous_one(buckets, messages):
    text = averaged(2, Averaging(buckets))[2]
    # The counter has an all-reduce of its own, and the first bucket does not wait.
    assert text.count("stablehlo.all_reduce") == messages + 1
    assert text.count("stablehlo.select") == messages - 1


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_separate_gradients_have_the_same_average_as_ravelled_ones(buckets, dtype):
    _, ravelled, _ = averaged(2, Averaging(buckets, dtype))
    _, separate, text = averaged(2, Averaging(buckets, dtype, ravels=False))
    jax.tree.map(np.testing.assert_array_equal, separate[:2], ravelled[:2])
    # No bucket is copied into one array. The platform combines the all-reduces.
    assert text.count("stablehlo.concatenate") == 0
    assert text.count("stablehlo.all_reduce") == len(SHAPES) + 2


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize("devices", essential_and_rare((2,), 4, 8))
def test_with_bfloat16_gradients_are_rounded_and_all_other_values_are_exact(devices, buckets):
    (grads, _), rounded, _ = averaged(devices, Averaging(buckets, "bfloat16"))
    _, exact, _ = averaged(devices, Averaging())
    jax.tree.map(np.testing.assert_array_equal, rounded[1], exact[1])
    for name, leaf in grads.items():
        assert rounded[0][name].dtype == np.float32
        # The addends and the sum are both rounded to eight bits of mantissa.
        bound = 2.0**-8 * np.abs(leaf.astype(np.float64)).mean(0)
        assert (np.abs(rounded[0][name] - exact[0][name]) <= devices * bound).all()
    assert any((rounded[0][name] != exact[0][name]).any() for name in grads)


@functools.cache
def after_a_step(devices: int, buckets: int):
    """Return the state and the sums after a step of SGD at rate 1, and the lowered program."""
    with jax.enable_x64(True):
        objective = objective_of(SmallNet(batch_norm=True, sync=AXIS, dtype=jnp.float64))
        topology, optimizer = Topology.create(devices), optax.chain(optax.add_decayed_weights(0.1), sgd(1.0))
        state = fresh_state(objective, optimizer, topology)
        step = Way(topology, Gradients(Averaging(buckets))).step(Phases(objective, optimizer))
        batch = topology.place(random_batch(24, masked=5))
        text = step.lower(state, batch).as_text()  # pyright: ignore[reportFunctionMemberAccess]
        return jax.device_get(step(state, batch)), text


@pytest.mark.slow
@pytest.mark.parametrize("buckets", essential_and_rare((3, 8), 2))
@pytest.mark.parametrize("devices", essential_and_rare((4,), 1, 2))
def test_a_step_does_not_depend_on_the_number_of_buckets(devices, buckets):
    (state, sums), _ = after_a_step(devices, buckets)
    (one_bucket_state, one_bucket_sums), _ = after_a_step(devices, 1)
    arrays, one_bucket = ((each.params, each.model_state) for each in (state, one_bucket_state))
    jax.tree.map(np.testing.assert_array_equal, (arrays, sums.values), (one_bucket, one_bucket_sums.values))
    (one_device, one_device_sums), _ = after_a_step(1, 1)
    expected = (one_device.params, one_device.model_state), one_device_sums.values
    assert largest_difference((arrays, sums.values), expected) < 1e-9


@pytest.mark.parametrize("buckets", essential_and_rare((1, 3, 8), 2))
def test_the_optimizer_reads_the_parameters_behind_a_barrier(buckets):
    assert after_a_step(4, buckets)[1].count("stablehlo.optimization_barrier") == (buckets > 1)


@pytest.mark.parametrize(
    ("platform", "devices", "configured", "expected"),
    [("cpu", 4, None, 1), ("cpu", 4, 3, 3), ("gpu", 4, None, PLATFORMS["gpu"].buckets), ("gpu", 1, 9, 1)],
)
def test_the_number_of_buckets_comes_from_the_config_or_from_the_devices(
    platform, devices, configured, expected, monkeypatch
):
    monkeypatch.setattr(Topology, "platform", platform)
    topology, config = Topology.create(devices), Config().replace(parallel={"buckets": configured})
    assert Averaging.of(config, topology).buckets == expected
    assert step_options(config, topology) == ({LATENCY_HIDING: "True"} if expected > 1 and platform == "gpu" else {})


def test_the_users_xla_options_take_precedence_and_rejected_ones_are_left_out(monkeypatch):
    monkeypatch.setattr(Topology, "platform", "gpu")
    topology, config = Topology.create(2), Config().replace(parallel={"xla_options": [f"{LATENCY_HIDING}=false"]})
    assert step_options(config, topology) == {LATENCY_HIDING: "False"}
    # A later XLA may drop an option of this package. An invented option, which XLA does not have, stands for it.
    monkeypatch.setitem(
        PLATFORMS, "gpu", dataclasses.replace(PLATFORMS["gpu"], overlap_options={"xla_gpu_gone_since": "True"})
    )
    assert step_options(Config(), topology) == {}


def test_a_run_takes_buckets_and_precision_of_gradients_from_its_config():
    config = Config().replace(parallel={"buckets": 2}, train={"gradient_precision": "bfloat16"})
    setup = runs.setup_of(SmallNet(), sgd(0.1), random_table(16), devices=2, config=config)
    program = str(jax.make_jaxpr(setup.step())(setup.state, next(setup.batches(0, 1))))
    # The program has one all-reduce for the sums, and two for gradients.
    assert program.count("psum") == 3 and program.count("bf16[") >= 4
