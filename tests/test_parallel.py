"""The placement of a batch on the devices of a process, and the simulated devices."""

import jax
import numpy as np
import pytest

from jaxddp.core.errors import InputError
from jaxddp.mesh import Topology, simulate_cpu_devices


def test_placing_a_batch_gives_each_device_its_rows():
    topology = Topology.create(4)
    rows = np.arange(12)
    placed = topology.place(rows)
    assert [np.asarray(shard.data).tolist() for shard in placed.addressable_shards] == rows.reshape(4, 3).tolist()
    assert topology.replicate({"w": rows})["w"].sharding.is_fully_replicated


@pytest.mark.parametrize(("size", "expected"), [(9, "8 or 12 would do"), (3, "4 would do"), (0, "4 would do")])
def test_a_batch_that_cannot_be_divided_is_rejected(size, expected):
    with pytest.raises(InputError, match=f"train.batch_size={size} cannot be divided among 4 devices; {expected}$"):
        Topology.create(4).check_batch_size(size)


def test_devices_cannot_be_simulated_once_jax_has_started():
    assert len(jax.devices()) == 8
    simulate_cpu_devices(8)
    with pytest.raises(InputError, match="JAX already runs with 8 devices"):
        simulate_cpu_devices(2)
    with pytest.raises(InputError, match="parallel.cpu_devices=0: JAX already runs with 8 devices"):
        simulate_cpu_devices(0)
