"""`parallel.shard_optimizer`: the run equals a run without it, on any number of devices and with every optimizer. The
memory of the state on a device falls with the number of devices, and the bytes that are sent stay the same."""

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import ci_case, essential_and_ci, essential_and_rare, rare_case
from support.collectives import collectives
from support.data import CLASSES, random_table
from support.networks import largest_difference
from support.optimizers import optimizer_of
from support.runs import Recorder, setup_of, train

from jaxddp.config import Config
from jaxddp.config.registry import OPTIMIZERS
from jaxddp.core.errors import Preempted
from jaxddp.engine.parts.averages import Lookahead, ParameterAverage
from jaxddp.engine.parts.guard import GradientNorm, Guard, LossScale
from jaxddp.engine.parts.part import Part
from jaxddp.engine.replicas import checksums
from jaxddp.engine.state import EVAL_MODEL_STATE
from jaxddp.setup.identity import checksum
from jaxddp.training.checkpoints.manager import Checkpoints

STEPS = 20
TABLE = random_table(50)
CHANGES = {"train": {"duration": f"{STEPS} steps"}, "log": {"every": "5 steps"}, "eval": {"every": "0 steps"}}

pytestmark = pytest.mark.usefixtures("float64")


class Net(nn.Module):
    """A convolution, a synchronized norm, and two dense layers. The last bias cannot be divided."""

    @nn.compact
    def __call__(self, images, train: bool):
        x = nn.Conv(8, (3, 3), strides=3, param_dtype=jnp.float64)(images)
        x = nn.BatchNorm(not train, axis_name="data", param_dtype=jnp.float64, dtype=jnp.float64)(x)
        x = nn.Dense(16, param_dtype=jnp.float64)(nn.tanh(x.reshape(len(x), -1)))
        return nn.Dense(CLASSES, param_dtype=jnp.float64)(nn.tanh(x))


def config_of(sharded: bool, **sections: Any) -> Config:
    parallel = {"shard_optimizer": sharded, "self_test": "never", **sections.pop("parallel", {})}
    return Config().replace(parallel=parallel, **sections)


def make_setup(sharded: bool, devices: int = 4, optimizer: str = "adamw", *, parts: tuple = (), **sections: Any) -> Any:
    config = config_of(sharded, **sections)
    return setup_of(Net(), optimizer_of(optimizer, STEPS), TABLE, devices=devices, seed=5, config=config, parts=parts)


@functools.cache
def trained(sharded: bool, devices: int = 4, optimizer: str = "adamw") -> Any:
    return jax.device_get(train(make_setup(sharded, devices, optimizer), CHANGES))


# An optimizer of single elements, and one of whole arrays.
ESSENTIAL = ("adamw", "muon")


@pytest.mark.parametrize("devices", essential_and_rare((4,), 1, 2, 8))
@pytest.mark.parametrize("optimizer", essential_and_ci(ESSENTIAL, OPTIMIZERS.names()))
def test_a_run_with_a_sharded_optimizer_equals_one_without(optimizer, devices):
    states = [trained(True, devices, optimizer), trained(False, 4, optimizer)]
    if optimizer == "schedule_free":
        # These statistics are in float32, and are computed from differences of the network's.
        arrays = [state.parts[optimizer] for state in states]
        assert largest_difference(*(each[EVAL_MODEL_STATE] for each in arrays)) < 1e-5
        parts = [{optimizer: {**each, EVAL_MODEL_STATE: {}}} for each in arrays]
        states = [state.replace(parts=each) for state, each in zip(states, parts, strict=True)]
    assert largest_difference(*states) < 1e-9


PARTS: dict[str, tuple[tuple[Part, ...], dict[str, Any]]] = {
    "moving average": ((ParameterAverage(0.9),), {}),
    "lookahead": ((Lookahead(5, optax.constant_schedule(0.5), STEPS),), {}),
    "loss scale": ((Guard(), LossScale(8)), {}),
    "accumulation, buckets": ((GradientNorm(0.05),), {"train": {"accumulate": 2}, "parallel": {"buckets": 3}}),
    "all parts": ((GradientNorm(0.05), ParameterAverage(0.9), Guard(), LossScale(8)), {}),
}


@pytest.mark.parametrize("case", essential_and_rare(("accumulation, buckets", "lookahead", "all parts"), *PARTS))
def test_parts_of_the_step_and_its_metrics_are_those_of_a_run_without_sharding(case):
    parts, sections = PARTS[case]
    records, states = [], []
    for sharded in (True, False):
        listener = Recorder()
        setup = make_setup(sharded, parts=parts, **sections)
        states.append(jax.device_get(train(setup, CHANGES, listeners=[listener])))
        records.append([dict(record.metrics) for record in listener.steps])
    assert largest_difference(*states) < 1e-9
    assert largest_difference(*records) < 1e-9


@functools.cache
def lopsided_model():
    """Return a linear model with a finite loss. One number of its gradient is NaN, the derivative of a root at 0."""

    def init(key, example):
        return {"weight": jnp.full((example[0].size, CLASSES), 0.1, example.dtype)}

    def apply(params, images):
        weight = params["weight"]
        return images.reshape(len(images), -1) @ weight + jnp.sqrt(0 * weight[0, 0])

    return init, apply


def test_a_step_in_which_one_number_of_the_gradient_is_not_finite_changes_nothing():
    """Only the first device has this number, and all devices skip the step."""
    words = {"devices": 4, "config": config_of(True), "parts": (Guard(),)}
    setup = setup_of(lopsided_model(), optimizer_of("momentum", STEPS), TABLE, **words)
    before = jax.device_get(setup.state.params)
    after = train(setup, CHANGES | {"train": {"duration": "3 steps"}})
    np.testing.assert_array_equal(after.params["weight"], before["weight"])


class NewArrays(Part):
    """A part whose arrays do not depend on any other array, so XLA is free to choose their sharding."""

    name, follows = "new", True

    def init(self, params, model_state):
        return {"zeros": jax.tree.map(jnp.zeros_like, params)}

    def update(self, own, before, after, grads):
        return {"zeros": jax.tree.map(jnp.zeros_like, after.params)}, after


def test_new_arrays_of_a_part_are_divided_too():
    setup = make_setup(True, parts=(NewArrays(),))
    program, chunks = setup.program()
    before = [leaf.sharding for leaf in jax.tree.leaves(setup.state)]
    state, _ = program(setup.state, *next(chunks(0)).feed)
    followed = setup.way.follow(setup.parts)(state, {"loss": 1.0})
    assert all([leaf.sharding for leaf in jax.tree.leaves(each)] == before for each in (state, followed))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((True, 4), (False, 2)),
        ci_case((False, 4), (True, 2)),
        rare_case((True, 8), (True, 2)),
        rare_case((True, 2), (True, 8)),
    ],
)
def test_a_run_resumes_across_the_option_and_any_number_of_devices(tmp_path, first, second):
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(Preempted):
            train(make_setup(*first), CHANGES, checkpoints=checkpoints, should_stop=lambda step: step == 10)
        resumed = train(make_setup(*second), CHANGES, checkpoints=checkpoints, resume_step=10)
    assert largest_difference(jax.device_get(resumed), trained(False)) < 1e-9


def state_bytes(state: Any) -> tuple[int, int]:
    """Return the bytes of parameters and optimizer state on the first device, and of the whole arrays."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return sum(leaf.addressable_data(0).nbytes for leaf in leaves), sum(leaf.nbytes for leaf in leaves)


@pytest.mark.parametrize("devices", [2, 8])
def test_the_memory_of_the_state_on_a_device_falls_with_the_number_of_devices(devices):
    on_device, whole = state_bytes(make_setup(True, devices).state)
    # The vectors, two moments of each, and two counters are whole.
    undivided = 3 * 8 * (8 + 8 + 8 + 16 + CLASSES) + 2 * 4
    assert on_device == (whole - undivided) // devices + undivided
    assert state_bytes(make_setup(False, devices).state) == (whole, whole)


@functools.cache
def compiled(sharded: bool, buckets: int | None = None, optimizer: str = "adamw") -> Any:
    setup = make_setup(sharded, 8, optimizer, parallel={"buckets": buckets})
    program, _ = setup.program()
    return program.prepare(setup.state, setup.feed.abstract_batch(), setup.key)


SHARES_SENT = {"all-reduce": 2 * 7 / 8, "all-gather": 7 / 8, "reduce-scatter": 7}
"""The bytes that each of 8 devices sends by a ring, as a multiple of the bytes of the result."""


def bytes_sent(program: Any) -> float:
    return sum(SHARES_SENT[each.name] * each.num_bytes for each in collectives(program.as_text()))


def test_a_sharded_step_sends_no_more_bytes_than_an_all_reduce():
    plain, sharded = bytes_sent(compiled(False)), bytes_sent(compiled(True))
    # One more number, whether the gradients are finite, is sent.
    assert plain < sharded + 64 and sharded <= plain + 64


@pytest.mark.parametrize("buckets", [1, 2])
def test_each_bucket_is_a_reduce_scatter_and_an_all_gather(buckets):
    names = [each.name for each in collectives(compiled(True, buckets).as_text())]
    assert names.count("reduce-scatter") == names.count("all-gather") == buckets


def test_the_parameters_that_are_used_first_are_gathered_first():
    """Gradients are ready in the reverse of this order, so the all-gathers have the buckets of the reduce-scatters."""
    setup = make_setup(True, 8, parallel={"buckets": 2})
    program, _ = setup.program()
    text = program.function.lower(setup.state, setup.feed.abstract_batch(), setup.key).as_text()
    gathered = [int(n) for n in re.findall(r"stablehlo.all_gather.*?-> tensor<8x(\d+)xf64>", text, re.DOTALL)]
    scattered = [int(n) for n in re.findall(r"stablehlo.reduce_scatter.*?-> tensor<(\d+)xf64>", text, re.DOTALL)]
    assert len(gathered) == 2 and gathered == scattered[::-1]
    # The gradient of the convolution's kernel is ready last.
    assert gathered[0] == 3 * 3 * 3 * 8 // 8


def test_the_self_test_compares_scattered_gradients():
    setup = make_setup(True, parallel={"self_test": "always"})
    test, (_, chunks) = setup.self_test(), setup.program()
    test(setup.way.whole(setup.state), *next(chunks(0)).feed)
    assert test.operations


def test_replicas_are_compared_where_an_array_has_replicas(monkeypatch):
    """A comparison of a divided array would gather it on every device."""
    compared = []

    def record(topology, groups=None):
        checksum = checksums(topology, groups)
        return lambda state: compared.append(state) or checksum(state)

    monkeypatch.setattr("jaxddp.engine.replicas.checksums", record)
    state = train(make_setup(True), CHANGES | {"parallel": {"check_replicas": "10 steps"}})
    assert largest_difference(jax.device_get(state), trained(True)) == 0
    leaves = [leaf for each in compared for leaf in jax.tree.leaves(each)]
    assert len(compared) == 2 and all(leaf.sharding.is_fully_replicated for leaf in leaves)
    assert {leaf.shape for leaf in leaves} == {(), (8,), (16,), (CLASSES,)}


def test_a_validation_and_the_returned_state_have_whole_parameters():
    measured = []
    for sharded in (True, False):
        listener, setup = Recorder(), make_setup(sharded, parts=(ParameterAverage(0.9),))
        state = train(setup, CHANGES | {"eval": {"every": "10 steps"}}, val=TABLE, listeners=[listener])
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves((state.params, state.parts)))
        measured.append([dict(record.metrics) for record in listener.evaluations])
    assert len(measured[0]) == 4 and largest_difference(*measured) < 1e-9


def test_processes_do_not_compare_the_values_of_divided_arrays():
    """Each process has other slices. A schedule-free optimizer begins with a copy of the parameters."""
    state = make_setup(True, optimizer="schedule_free").state
    doubled = jax.tree.map(lambda leaf: leaf * 2, state.opt_state)
    leaves, structure = jax.tree.flatten(state.opt_state)
    whole = [leaf.sharding.is_fully_replicated for leaf in leaves]
    divided = [not each for each in whole]
    pairs = list(zip(leaves, jax.tree.leaves(doubled), strict=True))

    def checksum_with(changed: list[bool]) -> str:
        chosen = [new if change else old for (old, new), change in zip(pairs, changed, strict=True)]
        return checksum(jax.tree.unflatten(structure, chosen))

    assert any(divided) and checksum_with(divided) == checksum(state.opt_state) != checksum_with(whole)
