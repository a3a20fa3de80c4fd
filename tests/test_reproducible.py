"""`parallel.reproducible`: the same bits on 1, 2, 4 and 8 devices."""

import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.cases import ci_case, rare_case
from support.data import random_table
from support.exact import REPRODUCIBLE, bytes_of, trained
from support.networks import SmallNet
from support.shared import sgd

from jaxddp.api import prepare_training
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.engine.ways.choice import choose_way
from jaxddp.engine.ways.reproducible import SHARDS, add_barrier, mean_in_order
from jaxddp.mesh import AXIS, Topology, fix_cpu_threads

DEVICES = (1, 2, 4, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "accumulate", "batch_size", "cache"),
    [
        ci_case((1, 8), 1, 16, "none"),
        ci_case((4, 8), 1, 8, "device"),
        ((4, 8), 2, 16, "none"),
        rare_case(DEVICES, 1, 16, "none"),
    ],
)
def test_the_bits_are_the_same_on_any_number_of_devices(devices, accumulate, batch_size, cache):
    # Crops and flips take long to compile, so they are tested with few shards on a device.
    pad = int(min(devices) > 1)
    first, *others = (trained(n, accumulate=accumulate, batch_size=batch_size, cache=cache, pad=pad) for n in devices)
    assert np.abs(jax.device_get(first.params["kernel"])).max() > 0 and int(first.step) == 5
    assert all(bytes_of(first) == bytes_of(other) for other in others)


OPTIMIZED_PROGRAM = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
from jaxddp.engine.ways.reproducible import Reproducible
from jaxddp.mesh import Topology
from jaxddp.models.resnet import BASIC, Architecture, ResNet
from support.data import CLASSES
from support.exact import bytes_of, trained
network = ResNet(Architecture((1, 1), BASIC), CLASSES, width=4, stem="small")
four, eight = (trained(n, network, batch_size=16) for n in (4, 8))
pair = [*jax.random.normal(jax.random.key(0), (2, 1000))]
update = lambda pair, count: [array / count - array * array for array in pair]
one, two = (bytes_of(Reproducible(Topology.create(n)).jit_between(update)(pair, 3.0)) for n in (1, 2))
differing = (one != two) + sum(one != other for one, other in zip(bytes_of(four), bytes_of(eight), strict=True))
sys.exit(f"{differing} arrays differ" if differing else 0)
"""


@pytest.mark.ci
def test_a_fully_optimized_resnet_has_the_same_bits_on_any_devices():
    """Test with full optimization. Programs of other tests are compiled without it, and XLA fuses nothing in them."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", OPTIMIZED_PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("devices", DEVICES)
def test_the_sum_has_one_order_and_no_sign_of_zero(devices):
    """Rounding depends on the order: here ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)) gives 0 and not 1/8."""
    values = np.array([1.0, 1e8, 1.0, -1e8, 1.0, 1e8, 1.0, -1e8], np.float32)
    pairs = values
    while len(pairs) > 1:
        pairs = pairs[0::2] + pairs[1::2]
    expected = pairs[0] / np.float32(8)
    assert expected != np.float32(values.astype(np.float64).sum() / 8)
    columns = {"value": values, "zero": np.full(SHARDS, -0.0, np.float32), "count": np.arange(SHARDS, dtype=np.int32)}
    topology = Topology.create(devices)
    mean = jax.shard_map(mean_in_order, mesh=topology.mesh, in_specs=P(AXIS), out_specs=P())
    actual = jax.device_get(jax.jit(mean)(topology.place(columns)))
    assert actual["value"] == expected
    assert not np.signbit(actual["zero"]) and actual["count"] == SHARDS - 1


@pytest.mark.parametrize("for_cpu", [False, True])
def test_barriers_change_no_result(for_cpu):
    tree = {"float": jnp.array([1.5, jnp.nan, -0.0]), "byte": jnp.uint8(7), "empty": jnp.zeros((0, 3))}
    assert bytes_of(jax.jit(lambda *arguments: add_barrier(*arguments, for_cpu))(tree, jnp.int32(0))) == bytes_of(tree)


@pytest.mark.parametrize(
    ("devices", "config", "message"),
    [
        (3, {}, "parallel.reproducible: 8 shards cannot be divided evenly among 3 devices; use 1, 2, 4 or 8 devices"),
        (2, {"model": {"batch_norm": "sync"}}, "parallel.reproducible: model.batch_norm=sync normalizes .* leave one"),
        (2, {"parallel": {"buckets": 3}}, "parallel.reproducible: parallel.buckets=3 does not apply .* leave one of"),
        (2, {"train": {"gradient_precision": "bfloat16"}}, "train.gradient_precision=bfloat16 does not apply"),
    ],
)
def test_settings_that_exclude_reproducible_raise_a_one_line_error(devices, config, message):
    with pytest.raises(InputError, match=message):
        choose_way(Config().replace(**config).replace(**REPRODUCIBLE), Topology.create(devices))


def test_a_batch_that_8_shards_cannot_share_raises_a_one_line_error():
    with pytest.raises(InputError, match="^a global batch of 12 cannot be divided among 8 shards; 8 or 16 would do$"):
        prepare_training(SmallNet(), random_table(50), 2, sgd(0.1), 6, reproducible=True)


def test_a_network_with_a_collective_raises_a_one_line_error():
    line = r"^parallel.reproducible: the network or the loss communicates between devices \(psum_invariant\)"
    with pytest.raises(InputError, match=line):
        trained(2, SmallNet(batch_norm=True, sync="data"))


def test_the_number_of_threads_is_set_before_jax_starts_and_a_late_change_is_logged(monkeypatch, caplog):
    monkeypatch.delenv("NPROC", raising=False)
    jax.devices()
    with caplog.at_level(logging.WARNING, "jaxddp.mesh"):
        fix_cpu_threads()
        assert os.environ["NPROC"] == "8" and "start Python with NPROC=8" in caplog.text
        caplog.clear()
        fix_cpu_threads()
        assert not caplog.text
