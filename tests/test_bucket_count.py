"""The number of all-reduces follows from the bytes of the gradients, the devices and the hosts, by a model."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import runs
from support.data import random_table
from support.networks import SmallNet
from support.peers import Second
from support.shared import sgd

from jaxddp.api import resnet
from jaxddp.cluster.doctor import rehearsal
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.engine.gradients import Gradients
from jaxddp.measure.communication import DGX_H200, Interconnect, Link
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.models.variables import trees_of
from jaxddp.platforms import PLATFORMS
from jaxddp.setup import bucket_count
from jaxddp.setup.bucket_count import best_count, decide, exposed_seconds, gradient_bytes, hosts_of

MOST = PLATFORMS["gpu"].buckets
SHAPE = (224, 224, 3)
links = st.builds(Link, bandwidth=st.floats(1e6, 1e12), latency=st.floats(0, 1e-2))
interconnects = st.builds(Interconnect, devices=st.just(8), inside=links, outside=links, has_trees=st.booleans())
hosts = st.integers(1, 20_000)
sizes = st.floats(1, 1e12)
windows = st.floats(0, 1)
counts = st.integers(1, 20)


def seconds_over(interconnect: Interconnect, num_hosts: int):
    return lambda num_bytes: interconnect.all_reduce(num_bytes, 8 * num_hosts)


# --- The time of an all-reduce ---


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


@given(interconnects)
def test_one_device_sends_nothing(interconnect):
    assert interconnect.all_reduce(1e9, 1) == 0


@given(interconnects, st.sampled_from([1, 2, 4]), hosts, sizes)
def test_devices_may_be_a_part_of_each_host(interconnect, here, num_hosts, size):
    smaller = dataclasses.replace(interconnect, devices=here)
    expected = smaller.all_reduce(size, here * num_hosts)
    assert interconnect.all_reduce(size, here * num_hosts, num_hosts) == pytest.approx(expected)


# --- The best number ---


@given(interconnects, hosts, sizes, windows)
def test_no_other_number_ends_a_step_earlier(interconnect, num_hosts, size, window):
    arguments = size, window, seconds_over(interconnect, num_hosts)
    count = best_count(MOST, *arguments)
    assert 1 <= count <= MOST
    best = exposed_seconds(count, *arguments)
    assert all(best <= exposed_seconds(other, *arguments) for other in range(1, MOST + 1))


@given(interconnects, hosts, sizes, sizes, windows, counts)
def test_more_bytes_never_end_a_step_earlier(interconnect, num_hosts, one, other, window, count):
    few, many = sorted([one, other])
    all_reduce = seconds_over(interconnect, num_hosts)
    assert exposed_seconds(count, few, window, all_reduce) <= exposed_seconds(count, many, window, all_reduce)


@given(interconnects, hosts, sizes, windows, windows, counts)
def test_a_longer_window_hides_no_less(interconnect, num_hosts, size, one, other, count):
    short, long = sorted([one, other])
    all_reduce = seconds_over(interconnect, num_hosts)
    slack = 1e-9 * (long + exposed_seconds(count, size, 0, all_reduce))
    assert exposed_seconds(count, size, long, all_reduce) <= exposed_seconds(count, size, short, all_reduce) + slack


@given(interconnects, hosts, sizes, windows, counts)
def test_a_step_waits_at_least_for_its_last_all_reduce_and_at_most_for_all(
    interconnect, num_hosts, size, window, count
):
    all_reduce = seconds_over(interconnect, num_hosts)
    parts = [size / 2 ** min(number, count - 1) for number in range(1, count + 1)]
    assert sum(parts) == pytest.approx(size)
    exposed = exposed_seconds(count, size, window, all_reduce)
    copies = exposed_seconds(count, size, window, lambda num_bytes: 0.0)
    assert exposed >= all_reduce(parts[-1]) * (1 - 1e-9) - 1e-9 * window
    assert exposed <= (copies + sum(map(all_reduce, parts))) * (1 + 1e-9) + 1e-9 * window


def test_a_number_equals_a_calculation_by_hand():
    """All-reduces of 4, 2 and 2 MB take 5, 3 and 3 ms. Of each but the last, half of the window hides its time."""
    exposed = exposed_seconds(3, 8e6, 0.010, lambda num_bytes: 0.001 + num_bytes * 1e-9)
    added = 3 * bucket_count.SECONDS_OF_A_BUCKET + 8e6 * bucket_count.SECONDS_OF_A_BYTE
    assert exposed == pytest.approx(0.003 + added)
    # Of 5 + 3 + 3 ms, 0.5 + 0.5 ms are hidden.
    exposed = exposed_seconds(3, 8e6, 0.001, lambda num_bytes: 0.001 + num_bytes * 1e-9)
    assert exposed == pytest.approx(0.010 + added)


# --- The decision for a run ---


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Described devices, in the place of a `Topology`."""

    hosts: int
    devices: int = 8
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    process_count: int = 1

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices

    @property
    def mesh(self):
        each = [SimpleNamespace(process_index=i // self.devices, slice_index=0) for i in range(self.num_devices)]
        return SimpleNamespace(devices=np.array(each, object))


@pytest.fixture(autouse=True, scope="module")
def one_trace_for_each_size():
    """Trace a network once for each number of images."""
    compute, seconds = bucket_count.compute_seconds, {}

    def cached(model, params, model_state, shape, device_kind):
        key = model, shape, device_kind, bucket_count.SHARE_OF_PEAK
        if key not in seconds:
            seconds[key] = compute(model, params, model_state, shape, device_kind)
        return seconds[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket_count, "compute_seconds", cached)
        yield


NETWORK = adapt(resnet("resnet50", 1000, dtype="bfloat16"))
TREES = trees_of(NETWORK, SHAPE)


def decided(fleet: Fleet, images: int, **changes):
    config = Config().replace(train={"batch_size": images * fleet.num_devices} | changes.pop("train", {}), **changes)
    return decide(Gradients.of(config, fleet), config, fleet, NETWORK, *TREES, SHAPE)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("images", [1, 256])
@pytest.mark.parametrize("num_hosts", [1, 2])
def test_jobs_of_up_to_two_hosts_keep_the_number_that_was_counted(num_hosts, images):
    result = decided(Fleet(num_hosts), images)
    assert (result.count, result.by_model) == (MOST, False)
    assert str(result) == "up to 7 all-reduces: counted in the programs compiled for up to 2 hosts"


def test_with_256_images_the_model_agrees_with_the_count(monkeypatch):
    monkeypatch.setitem(PLATFORMS, "gpu", dataclasses.replace(PLATFORMS["gpu"], counted_hosts=0))
    for num_hosts in (1, 2):
        result = decided(Fleet(num_hosts), 256)
        assert (result.count, result.by_model) == (MOST, True)


# The largest batch of a shipped config is 32,768 (imagenet_resnet50_lars).
@pytest.mark.parametrize(
    ("num_hosts", "images", "count"), [(8, 256, 7), (8, 64, 3), (64, 64, 3), (128, 32, 2), (512, 256, 6), (512, 8, 2)]
)
def test_the_model_decides_for_larger_jobs(num_hosts, images, count):
    result = decided(Fleet(num_hosts), images)
    assert (result.count, result.by_model) == (count, True)


def test_with_rings_alone_thousands_of_gpus_need_one_all_reduce():
    """The latency of a ring grows with the number of hosts, so NCCL does not choose it there."""
    rings = dataclasses.replace(DGX_H200, has_trees=False)
    assert [best_count(MOST, 102e6, 5e-3, seconds_over(rings, n)) for n in (2, 64, 128, 512)] == [7, 3, 2, 1]


def test_the_bytes_are_those_that_are_sent():
    """They are in the dtype of the message, and without frozen layers."""
    params = TREES[0]
    whole = gradient_bytes(Config(), params)
    assert whole == 4 * 25_557_032
    assert gradient_bytes(Config().replace(train={"gradient_precision": "bfloat16"}), params) == whole // 2
    frozen = Config().replace(model={"freeze": "conv1,layer1"})
    assert 0 < gradient_bytes(frozen, params) < whole


@pytest.mark.parametrize(
    ("fleet", "changes", "line"),
    [
        (Fleet(1, 1), {}, "1 all-reduce: one device sends nothing"),
        (Fleet(64, platform="cpu"), {}, "1 all-reduce: on the platform cpu, communication does not overlap"),
        (Fleet(64, platform="tpu"), {}, "1 all-reduce: on the platform tpu, communication does not overlap"),
        (Fleet(64), {"parallel": {"buckets": 4}}, "up to 4 all-reduces: parallel.buckets is 4"),
        (Fleet(1), {"parallel": {"reproducible": True}}, "unused, because parallel.reproducible"),
        (Fleet(64), {"train": {"accumulate": 2}}, "1 all-reduce: all gradients are ready after the last microbatch"),
        (Fleet(64, device_kind="a new GPU"), {}, "up to 7 all-reduces: the speed of a new GPU is unknown"),
        (Fleet(64), {}, "up to 3 all-reduces: by the model, 102 MB on 512 devices on"),
    ],
)
def test_the_line_gives_the_reason(fleet, changes, line):
    assert line in str(decided(fleet, 64, **changes))


def test_the_line_of_the_model_compares_with_the_number_of_small_jobs():
    line = str(decided(Fleet(64), 64))
    assert line.startswith("up to 3 all-reduces: by the model, 102 MB on 512 devices on 64 hosts add ")
    assert line.count(" ms") == 2 and ", and 7 would add " in line
    assert ", and" not in str(decided(Fleet(64), 256))


def test_reduce_scatters_have_no_trees():
    fleet = Fleet(512)
    assert (decided(fleet, 256).count, decided(fleet, 256, parallel={"shard_optimizer": True}).count) == (6, 1)


def test_hosts_are_counted_by_the_numbers_that_jax_gives_to_machines():
    assert hosts_of(Fleet(3)) == 3  # pyright: ignore[reportArgumentType]
    # Eight processes with one GPU each on one machine.
    job = SimpleNamespace(mesh=Fleet(8, 1).mesh, process_count=8)
    assert hosts_of(job) == 1  # pyright: ignore[reportArgumentType]
    for number, device in enumerate(devices := job.mesh.devices.copy()):
        device.slice_index = number // 4
    job.mesh = SimpleNamespace(devices=devices)
    assert hosts_of(job) == 2  # pyright: ignore[reportArgumentType]


# --- In a run ---


@pytest.fixture
def large_job(monkeypatch):
    """Make the simulated devices look like those of many hosts of GPUs."""
    monkeypatch.setattr(Topology, "platform", "gpu")
    monkeypatch.setattr(Topology, "device_kind", "NVIDIA H200")
    monkeypatch.setattr(bucket_count, "hosts_of", lambda topology: 4)
    # The network is small, so the links and the devices are slow.
    slow = Link(1e6, 1e-6)
    monkeypatch.setattr(bucket_count, "DGX_H200", Interconnect(8, slow, slow))


def setup_of(**config):
    changes = {"parallel": {"self_test": "never", **config.pop("parallel", {})}}
    return runs.setup_of(
        SmallNet(), sgd(0.1), random_table(16), devices=8, config=Config().replace(**changes), share=False
    )


def test_a_run_compiles_the_number_that_the_model_decides(large_job, monkeypatch):
    numbers = []
    for share in (1e-8, 1e3):
        monkeypatch.setattr(bucket_count, "SHARE_OF_PEAK", share)
        setup = setup_of()
        count = setup.layout.gradients.averaging.buckets
        # `doctor` reports the same number, and a changed config keeps it.
        assert rehearsal.gradients(setup).detail.startswith(f"up to {count} " if count > 1 else "1 all-reduce: by")
        assert runs.changed(setup, {"log": {"every": "3 steps"}}).layout.gradients.averaging.buckets == count
        program = str(jax.make_jaxpr(setup.step())(setup.state, next(setup.batches(0, 1))))
        numbers.append((count, program.count(" psum")))
    (several, messages), (one, message) = numbers
    assert one == 1 < several and message < messages


def test_the_config_overrides_the_model(large_job):
    assert setup_of(parallel={"buckets": 2}).layout.gradients.averaging.buckets == 2


def test_processes_that_decide_differently_are_refused(large_job):
    class Other(Second):
        def agree(self, values):
            if "the number of all-reduces" in values:
                raise InputError(f"the number of all-reduces: {values['the number of all-reduces']}")

    topology = dataclasses.replace(Topology.create(8), peers=Other())
    with pytest.raises(InputError, match="^the number of all-reduces: [1-7]$"):
        runs.setup_of(SmallNet(), sgd(0.1), random_table(16), devices=topology, share=False)
