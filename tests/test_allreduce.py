"""The all-reduce that the doctor and the benchmarks measure: its sum and its ring bandwidth."""

import numpy as np
import pytest

from jaxddp.cluster import doctor as checklist
from jaxddp.mesh import Topology


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_the_sums_of_the_all_reduce_equal_those_of_numpy(devices):
    topology = Topology.create(devices)
    contributions = checklist.contributions(topology, 13)
    total = checklist.make_all_reduce(topology)(contributions)
    np.testing.assert_array_equal(total, np.asarray(contributions).reshape(devices, 13).sum(0))
    checklist.check_sum(topology, total)


def test_ring_bandwidth_is_the_bytes_per_second_through_a_link():
    assert checklist.bus_bandwidth(1, 1000, 1.0) == 0
    assert checklist.bus_bandwidth(2, 1000, 0.5) == 2000
    assert checklist.bus_bandwidth(8, 800, 1.0) == 1400
