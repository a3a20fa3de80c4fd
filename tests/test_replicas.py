"""Replicas: a device whose state differs in one bit is found and named, and equal states pass."""

import dataclasses
import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import runs
from support.data import NO_AUGMENTATION, random_table
from support.errors import error_line
from support.networks import SmallNet, linear_model
from support.shared import sgd

from jaxddp.config import Config
from jaxddp.core.errors import ReplicaError
from jaxddp.engine.replicas import Replicas, checksums
from jaxddp.engine.state import TrainState
from jaxddp.engine.ways.way import Way
from jaxddp.mesh import Topology
from jaxddp.setup.run_training import make_run
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.plan import Plan

FOUR = Topology.create(4)
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "int8", "uint16", "complex64")
TABLE = random_table(50)


def device_copies(array: jax.Array, topology: Topology = FOUR) -> list[np.ndarray]:
    """Return the copy of a replicated array on each device of a mesh."""
    copies = {shard.device: np.array(shard.data) for shard in array.addressable_shards}
    return [copies[device] for device in topology.mesh.devices.flat]


def from_device_copies(arrays: list[np.ndarray], topology: Topology = FOUR) -> jax.Array:
    """Create an array that is marked as replicated, with different data on each device."""
    buffers = [jax.device_put(array, device) for array, device in zip(arrays, topology.mesh.devices.flat, strict=True)]
    return jax.make_array_from_single_device_arrays(arrays[0].shape, topology.replicated, buffers)


def flip_bit(array: jax.Array, bit: int, device: int = 1, topology: Topology = FOUR) -> jax.Array:
    """Flip one bit of one device's copy of an array, counted from the array's first byte."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = flip_bit(jax.random.key_data(array), bit, device, topology)
        return jax.jit(jax.random.wrap_key_data, out_shardings=topology.replicated)(data)
    copies = device_copies(array, topology)
    copies[device].reshape(-1).view(np.uint8)[bit // 8] ^= np.uint8(1 << bit % 8)
    return from_device_copies(copies, topology)


def state_of(params: Mapping[str, object], topology: Topology = FOUR) -> TrainState:
    tree = TrainState(np.int32(7), dict(params), {"mean": np.ones(3, np.float32)}, (optax.EmptyState(),))
    return topology.replicate(tree)


def odd_arrays() -> dict[str, np.ndarray]:
    """Create arrays of every dtype, with NaN payloads, signed zeros, and sizes that are no multiple of a word."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(3, 5)).astype(jnp.dtype(name)) for name in DTYPES}
    payloads = np.array([0x7FC00001, 0xFFC12345, 0x80000000, 0, 0x7F800000, 1], np.uint32).view(np.float32)
    return arrays | {
        "bool": np.array([True, False, True]),
        "payloads": payloads,
        "nothing": np.zeros((0, 4), np.float32),
        "scalar": np.float32(2.5),
        "large": rng.normal(size=(1 << 18) + 3).astype(np.float32),
    }


STATE = state_of(odd_arrays() | {"key": jax.random.key(3), "none": {}})


def differing_devices(state: TrainState, topology: Topology = FOUR) -> list[int]:
    """Return the mesh indices of devices whose checksum differs from that of the first device."""
    sums = np.asarray(checksums(topology.mesh)(state))
    return np.flatnonzero(sums != sums[0]).tolist()


def message(state: TrainState, topology: Topology = FOUR) -> str:
    return error_line(Replicas(Way(topology)).check, 12, state, kind=ReplicaError)


def test_equal_replicas_pass():
    Replicas(Way(FOUR)).check(12, STATE)
    assert differing_devices(STATE) == []
    assert np.ptp(np.asarray(checksums(FOUR.mesh, of_each=True)(STATE)), axis=0).max() == 0


@pytest.mark.parametrize("name", [*DTYPES, "payloads", "scalar", "large", "key"])
def test_a_flipped_bit_is_found_in_every_dtype(name):
    leaf = STATE.params[name]
    bits = 8 * (8 if name == "key" else leaf.nbytes)
    for bit in (0, bits // 2, bits - 1):
        state = STATE.replace(params=STATE.params | {name: flip_bit(leaf, bit, device=2)})
        assert differing_devices(state) == [2]
        assert f"in 1 of 16 arrays, first in params/{name}." in message(state)


def test_every_part_of_the_state_is_compared_and_named():
    ones = FOUR.replicate(np.ones(9))
    for name, changes in {
        "step": {"step": flip_bit(STATE.step, 0)},
        "model_state/mean": {"model_state": {"mean": flip_bit(STATE.model_state["mean"], 40)}},
        "parts/slow/x": {"parts": {"slow": {"x": flip_bit(ones, 1)}}},
        "opt_state/0": {"opt_state": (flip_bit(ones, 1),)},
    }.items():
        assert f"first in {name}. " in message(STATE.replace(**changes))


@given(st.integers(0, 32 * 101 - 1), st.integers(0, 3))
def test_any_bit_of_any_device_is_found(bit, device):
    weights = FOUR.replicate(np.random.default_rng(1).normal(size=101).astype(np.float32))
    totals = np.asarray(checksums(FOUR.mesh)({"weights": flip_bit(weights, bit, device)}))
    assert np.flatnonzero(totals != np.median(totals)).tolist() == [device]


@pytest.mark.parametrize(("first", "second"), [(0, 1), (5, 21), (0, 32)])
def test_two_numbers_that_changed_places_are_found(first, second):
    values = np.arange(33, dtype=np.float32)
    copies = [values.copy() for _ in range(4)]
    copies[1][[first, second]] = copies[1][[second, first]]
    assert differing_devices(STATE.replace(params={"values": from_device_copies(copies)})) == [1]


def with_versions(versions: list[int]) -> tuple[TrainState, Topology]:
    """Create a state in which each device holds the given version."""
    topology = Topology.create(len(versions))
    weights = from_device_copies([np.full(3, float(version)) for version in versions], topology)
    return state_of({}, topology).replace(params={"w": weights}), topology


def test_the_message_names_step_device_process_and_array_and_gives_advice():
    state, topology = with_versions([0, 0, 1, 0])
    assert message(state, topology) == (
        "step 12: the devices no longer hold the same state: "
        f"device {topology.mesh.devices.flat[2]} of process 0 differs from the other 3, in 1 of 3 arrays, first in "
        "params/w. This state is not saved: run the same command again to continue from the last checkpoint; "
        "if the same device differs again, remove it from the job"
    )


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ([0, 1], "there is no majority (device {0} of process 0 against device {1} of process 0)"),
        ([0, 1, 0, 1], "there is no majority (device {0} of process 0, device {2} of process 0 against device {1}"),
        ([0, 1, 2], "against device {2} of process 0)"),
        ([0, 1, 0, 0, 2], "device {1} of process 0, device {4} of process 0 differ from the other 3,"),
        ([1, 1, 0, 0, 0], "device {0} of process 0, device {1} of process 0 differ from the other 3,"),
    ],
)
def test_the_message_names_the_devices_that_differ(versions, expected):
    state, topology = with_versions(versions)
    assert expected.format(*topology.mesh.devices.flat) in message(state, topology)


class FlipsAt:
    """A program of steps that flips a bit of the result of one step, on one device."""

    def __init__(self, program, step: int, topology: Topology):
        self._program, self._step, self._topology = program, step, topology

    def __getattr__(self, name):
        return getattr(self._program, name)

    def __call__(self, state, *feed):
        state, sums = self._program(state, *feed)
        if int(state.step) == self._step:
            leaves, structure = jax.tree.flatten(state.params)
            leaves[0] = flip_bit(leaves[0], 3, topology=self._topology)
            state = state.replace(params=jax.tree.unflatten(structure, leaves))
        return state, sums


def run_with_fault(tmp_path, step: int, **changes):
    """Run 20 steps with a replica on device 1 that differs after `step`; return the checkpoints."""
    setup = runs.setup_of(SmallNet(), sgd(0.05, momentum=0.9), TABLE, devices=4, data=NO_AUGMENTATION)
    plan = {"log": {"every": "50 steps"}, "train": {"duration": "20 steps"}, "checkpoint": {"every": "8 steps"}}
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    run = dataclasses.replace(make_run(runs.changed(setup, plan | changes)), checkpoints=checkpoints)
    run = dataclasses.replace(run, program=FlipsAt(run.program, step, setup.topology))
    try:
        runs.fit(run)
    finally:
        checkpoints.wait()
    return checkpoints


def test_a_state_that_differs_is_not_saved(tmp_path):
    with pytest.raises(ReplicaError, match="step 16: "):
        run_with_fault(tmp_path, 9)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [8]


def test_without_comparisons_a_difference_is_not_found(tmp_path):
    checkpoints = run_with_fault(tmp_path, 5, parallel={"check_replicas": "0 steps"})
    assert checkpoints.latest() == 20


def test_without_checkpoints_replicas_are_compared_only_when_due(monkeypatch):
    compared = []
    monkeypatch.setattr(Replicas, "check", lambda self, step, state: compared.append(step))
    setup = runs.setup_of(linear_model(), sgd(0.1), TABLE, devices=2, data=NO_AUGMENTATION)
    runs.train(setup, {"train": {"duration": "20 steps"}, "parallel": {"check_replicas": "8 steps"}})
    assert compared == [8, 16]


@pytest.mark.parametrize(
    ("every", "expected"), [("5 steps", [8, 16, 20]), ("16 steps", [16]), ("1 step", [8, *range(16, 21)])]
)
def test_comparisons_do_not_change_chunks_and_happen_at_their_ends(every, expected):
    plan = plan_of(every)
    chunks = list(plan.chunks(0, plan.chunk_length(8)))
    assert chunks == list(plan_of("0 steps").chunks(0, 8))
    ends = [0, *(chunk.stop for chunk in chunks)]
    assert [end for before, end in itertools.pairwise(ends) if plan.replicas.due(end, before)] == expected


def plan_of(every: str) -> Plan:
    changes = {"log": "8 steps", "eval": "0 steps", "checkpoint": "0 steps"}
    config = Config().replace(
        train={"batch_size": 4, "duration": "20 steps"},
        parallel={"check_replicas": every},
        **{name: {"every": value} for name, value in changes.items()},
    )
    return Plan.of(config, 10**6)
