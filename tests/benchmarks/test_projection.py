"""The projection to many GPUs has the properties of its model."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.processes import scale
from benchmarks.programs.communication import Interconnect, Link, ring
from benchmarks.programs.projection import Message, Projection, fit_link, project, project_schedule

links = st.builds(Link, bandwidth=st.floats(1e6, 1e12), latency=st.floats(0, 1e-2))
machines = st.builds(Interconnect, devices=st.sampled_from([1, 2, 4, 8]), inside=links, outside=links)
sizes = st.floats(1, 1e12)
gpu_counts = st.integers(0, 9).map(lambda power: 8 * 2**power)
overlaps = st.floats(0, 1)


def step(machine: Interconnect, num_gpus: int, num_bytes: float, overlap: float = 0) -> Projection:
    return project(machine, num_gpus, num_bytes=num_bytes, compute=0.1, batch_per_gpu=256, overlap=overlap)


@given(sizes, links)
def test_two_peers_each_send_all_bytes(num_bytes, link):
    expected = num_bytes / link.bandwidth + 2 * link.latency
    assert ring(num_bytes, 2, link) == pytest.approx(expected)
    assert Interconnect(1, Link(1, 1e9), link).all_reduce(num_bytes, 2) == pytest.approx(expected)
    assert Interconnect(2, link, Link(1, 1e9)).all_reduce(num_bytes, 2) == pytest.approx(expected)


def test_a_projection_equals_a_calculation_by_hand():
    machine = Interconnect(8, Link(200e9, 3e-6), Link(20e9, 10e-6))
    # Within the node 14 messages of 10 MB, between 4 nodes 6 messages of 2.5 MB.
    inside, outside = 14 * (10e6 / 200e9 + 3e-6), 6 * (2.5e6 / 20e9 + 10e-6)
    assert machine.all_reduce(80e6, 32) == pytest.approx(inside + outside)
    half = step(machine, 32, 80e6, overlap=0.5)
    assert half.exposed == pytest.approx((inside + outside) / 2)
    assert half.images_per_second == pytest.approx(32 * 256 / (0.1 + half.exposed))
    assert half.efficiency == pytest.approx(half.images_per_second / (32 * 256 / 0.1))


@given(machines, gpu_counts, sizes, overlaps)
def test_more_nodes_never_take_less_time_and_efficiency_is_at_most_1(machine, num_gpus, num_bytes, overlap):
    projection, twice = (step(machine, gpus, num_bytes, overlap) for gpus in (num_gpus, 2 * num_gpus))
    assert 0 < twice.efficiency <= projection.efficiency <= 1
    assert projection.efficiency == pytest.approx(projection.images_per_second / (num_gpus * 256 / 0.1))


@given(links)
def test_a_fitted_link_equals_the_measured_link(link):
    few, many = 4e3, 1e12
    projection = fit_link((few, ring(few, 2, link)), (many, ring(many, 2, link)))
    assert projection.bandwidth == pytest.approx(link.bandwidth, rel=1e-3)
    assert projection.latency == pytest.approx(link.latency, rel=1e-3, abs=1e-3 * few / link.bandwidth)


def test_impossible_measurements_are_rejected_or_give_no_latency():
    with pytest.raises(ValueError, match="measure again"):
        fit_link((4e3, 1e-3), (1e6, 1e-3))
    # The smaller all-reduce was too fast: a link cannot have a negative latency.
    assert fit_link((1e6, 1e-6), (2e6, 1.0)).latency == 0


@given(machines, gpu_counts, sizes)
def test_a_schedule_of_one_exposed_message_equals_the_projection_without_overlap(machine, num_gpus, num_bytes):
    one = project_schedule(machine, num_gpus, messages=[Message(num_bytes, 0)], compute=0.1, batch_per_gpu=256)
    assert one == step(machine, num_gpus, num_bytes)


def test_the_scheduled_all_reduces_are_those_of_the_program_for_two_hosts(tmp_path, capsys):
    assert scale.scheduled(tmp_path / "none.json") is None
    assert "python benchmarks/gpu_program.py imagenet_resnet50 --topology 1x2x8" in capsys.readouterr().out
    one_host = {"topology": "1x1x8", "collectives": []}
    collectives = [{"bytes": 30, "bytes_between": 500}, {"bytes": 10, "bytes_between": 0}]
    two_hosts = {"topology": "1x2x8", "bytes_per_image": 100, "batch": 10, "collectives": collectives}
    for report in (two_hosts | {"others": {}}, one_host | {"others": {"1x2x8": two_hosts}}):
        (tmp_path / "program.json").write_text(json.dumps(report))
        assert scale.scheduled(tmp_path / "program.json") == [scale.Message(30, 0.5), scale.Message(10, 0)]
    (tmp_path / "program.json").write_text(json.dumps(one_host))
    assert scale.scheduled(tmp_path / "program.json") is None


interconnects = st.builds(Interconnect, devices=st.just(8), inside=links, outside=links, has_trees=st.booleans())
hosts = st.integers(1, 20_000)


@given(interconnects, hosts, sizes)
def test_trees_never_take_more_time_than_rings_and_few_latencies(interconnect, num_hosts, size):
    rings, trees = (dataclasses.replace(interconnect, has_trees=each) for each in (False, True))
    assert trees.all_reduce(size, 8 * num_hosts) <= rings.all_reduce(size, 8 * num_hosts)
    steps = 14 * interconnect.inside.latency + 2 * (num_hosts - 1).bit_length() * interconnect.outside.latency
    assert trees.all_reduce(0, 8 * num_hosts) <= steps * (1 + 1e-9)


def test_the_time_of_an_all_reduce_equals_a_calculation_by_hand():
    """Within a host 14 messages of 10 MB; between 64 hosts 126 of 156 kB, or 12 latencies and two times 10 MB."""
    interconnect = Interconnect(8, Link(200e9, 3e-6), Link(20e9, 10e-6))
    inside = 14 * (10e6 / 200e9 + 3e-6)
    rings, trees = 126 * (10e6 / 64 / 20e9 + 10e-6), 12 * 10e-6 + 2 * 10e6 / (0.92 * 20e9)
    assert interconnect.all_reduce(80e6, 512) == pytest.approx(inside + min(rings, trees)) and trees < rings
    assert interconnect.reduce_scatter(80e6, 512) == pytest.approx((inside + rings) / 2)
