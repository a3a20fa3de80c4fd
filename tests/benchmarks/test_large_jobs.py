"""The projection of large jobs has the properties of its models, and docs/large-jobs.md has its numbers."""

import functools
import json
import sys

import pytest
from support.pages import ROOT

from benchmarks import large_jobs
from benchmarks.large.failures import HOURS_OF_A_DEVICE, failures
from benchmarks.large.networks import networks
from benchmarks.large.tables import DEVICES, filled, sizes, tables
from benchmarks.large.ways import gather_seconds, sent_bytes

projected = functools.cache(networks)


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


def test_the_bytes_equal_a_calculation_by_hand():
    """Of 80 MB, a device sends 14 parts of 10 MB within its host, and 6 parts of 2.5 MB to three other hosts."""
    assert sent_bytes(80e6, 32) == pytest.approx((140e6, 15e6))


def test_the_all_gathers_equal_a_calculation_by_hand():
    """All-gathers of 2, 2 and 4 MB take 1 ms for each MB, and each third of the forward pass takes 1 ms."""
    assert gather_seconds(3, 8e6, 0.003, lambda size: size * 1e-9) == pytest.approx(0.009 - 0.003)
    # Later parts are gathered during the computation: 2 ms, and then three times 10 ms.
    assert gather_seconds(3, 8e6, 0.030, lambda size: size * 1e-9) == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("source", "devices", "hours"), [("Llama 3", 16_384, 3.1), ("RSC-1", 16_384, 1.8), ("RSC-1", 131_072, 0.23)]
)
def test_the_time_between_failures_is_the_published_one(source, devices, hours):
    """Kokolis et al. project 1.8 h at 16,384 and 0.23 h at 131,072 GPUs."""
    assert failures(devices, 1e9, source).between / 3600 == pytest.approx(hours, rel=0.03)
