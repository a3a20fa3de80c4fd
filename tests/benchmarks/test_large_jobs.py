"""The projection of large jobs has the properties of its models, and docs/large-jobs.md has its numbers."""

import dataclasses
import functools
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pages import ROOT

from benchmarks import large_jobs
from benchmarks.large.failures import HOURS_OF_A_DEVICE, failures
from benchmarks.large.networks import Network, networks
from benchmarks.large.tables import DEVICES, filled, sizes, tables
from benchmarks.large.ways import DECIDED, all_reduce, gather_seconds, meetings, sent_bytes, sharded, steps

projected = functools.cache(networks)
made = st.builds(
    Network,
    title=st.just("network"),
    shapes=st.lists(st.tuples(st.integers(1, 4096), st.integers(1, 4096)), min_size=1, max_size=5).map(tuple),
    model_state_bytes=st.integers(0, 10**6),
    seconds_of_an_image=st.floats(1e-6, 1e-2),
    seconds_of_a_step=st.floats(0, 1e-2),
)
device_counts = st.integers(0, 12).map(lambda power: 8 * 2**power)
image_counts = st.integers(1, 256)


def test_the_page_has_the_tables_of_the_script():
    page = (ROOT / large_jobs.PAGE).read_text()
    results = tables(projected())
    assert {"speeds-resnet50", "failures"} <= results.keys() and "<!-- table speeds-resnet50 -->" in page
    assert filled(page, results) == page, "python benchmarks/large_jobs.py --write"
    assert f"({large_jobs.FIGURE.name})" in page


@pytest.mark.slow
def test_the_script_writes_all_rows(tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["large_jobs.py", "--out", str(out)])
    large_jobs.main()
    rows = json.loads(out.read_text())
    assert {(row["network"], row["devices"], row["images"]) for row in rows["steps"]} == {
        (network.title, *pair) for network in projected() for pair in sizes(DEVICES)
    }
    assert len(rows["failures"]) == 2 * len(DEVICES) * len(HOURS_OF_A_DEVICE)
    assert "hosts, every 50 steps" in capsys.readouterr().out


def test_the_networks_have_their_published_parameters_and_the_state_of_adamw():
    resnet, vit = projected()
    assert (resnet.bytes, vit.bytes) == (4 * 25_557_032, 4 * 86_567_656)
    assert resnet.state_bytes == 3 * resnet.bytes + 4 * 2 * 26_560 and vit.state_bytes == 3 * vit.bytes
    # Vectors, and arrays whose sizes are no multiples of 8, stay whole.
    assert resnet.sharded_state_bytes(1) == resnet.state_bytes
    assert 1 / 8 <= resnet.sharded_state_bytes(8) / resnet.state_bytes < 1.03 / 8
    assert vit.sharded_state_bytes(4096) == vit.state_bytes


# --- Steps ---


@given(made, device_counts, image_counts)
def test_a_sharded_optimizer_sends_the_bytes_of_an_all_reduce_and_holds_no_more(network, devices, images):
    whole, parts = all_reduce(network, devices, images), sharded(network, devices, images)
    assert (parts.within, parts.between) == (whole.within, whole.between)
    assert whole.state / devices <= parts.state <= whole.state


@given(made, device_counts, image_counts, st.integers(1, 100))
def test_meetings_divide_the_bytes_between_groups_by_their_interval(network, devices, images, every):
    each, seldom = (meetings(network, 8 * devices, images, 8, "hosts", steps) for steps in (1, every))
    assert seldom.between == pytest.approx(each.between / every)
    assert seldom.seconds <= each.seconds
    inside = all_reduce(network, 8, images)
    assert seldom.within - inside.within == pytest.approx((each.within - inside.within) / every)
    assert seldom.state == inside.state + 2 * network.bytes


def test_the_bytes_equal_a_calculation_by_hand():
    """Of 80 MB, a device sends 14 parts of 10 MB within its host, and 6 parts of 2.5 MB to three other hosts."""
    assert sent_bytes(80e6, 32) == pytest.approx((140e6, 15e6))


def test_the_all_gathers_equal_a_calculation_by_hand():
    """All-gathers of 2, 2 and 4 MB take 1 ms for each MB, and each third of the forward pass takes 1 ms."""
    assert gather_seconds(3, 8e6, 0.003, lambda size: size * 1e-9) == pytest.approx(0.009 - 0.003)
    # Later parts are gathered during the computation: 2 ms, and then three times 10 ms.
    assert gather_seconds(3, 8e6, 0.030, lambda size: size * 1e-9) == pytest.approx(0.002)


# --- Failures ---


@pytest.mark.parametrize(
    ("source", "devices", "hours"), [("Llama 3", 16_384, 3.1), ("RSC-1", 16_384, 1.8), ("RSC-1", 131_072, 0.23)]
)
def test_the_time_between_failures_is_the_published_one(source, devices, hours):
    """Kokolis et al. project 1.8 h at 16,384 and 0.23 h at 131,072 GPUs."""
    assert failures(devices, 1e9, source).between / 3600 == pytest.approx(hours, rel=0.03)


def test_every_way_is_projected_for_every_size():
    network = dataclasses.replace(projected()[0], title="network")
    for devices, images in sizes(DEVICES):
        ways = [step.way for step in steps(network, devices, images)]
        assert ways[:3] == ["7 all-reduces", DECIDED, "sharded optimizer"] and len(set(ways)) == len(ways)
        assert len(ways) == 3 + 2 * (devices > 8) + 2 * (devices > 512)
    assert DEVICES[-1] == 100_000
