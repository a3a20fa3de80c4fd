"""The functions of `benchmarks/chaos.py` that start no process: scenarios, promises, comparison of outcomes, table."""

import re

import pytest

from benchmarks.faults.outcomes import difference, without_times
from benchmarks.faults.promises import FAULTS, Promise
from benchmarks.faults.scenario import draw


def test_equal_seeds_draw_equal_faults() -> None:
    drawn = draw(0, 50, FAULTS)
    assert drawn == draw(0, 50, FAULTS) != draw(1, 50, FAULTS)
    assert drawn[:20] == draw(0, 20, FAULTS)
    assert [each.rng.random() for each in drawn] == [each.rng.random() for each in draw(0, 50, FAULTS)]


def test_every_fault_is_drawn_equally_often() -> None:
    names = [scenario.fault for scenario in draw(3, 3 * len(FAULTS), FAULTS)]
    assert all(names.count(name) == 3 for name in FAULTS)
    for scenario in draw(3, 200, FAULTS):
        fault = FAULTS[scenario.fault]
        assert scenario.place in fault.places and scenario.moment in fault.moments


@pytest.mark.parametrize(
    "codes, said, broken",
    [
        ([1, 1], "process 1 was lost", ""),
        ([0, 0], "", ""),
        ([1, 2], "process 1 was lost", r"exit codes \[1, 2\], expected each among \[0, 1\]"),
        ([1, 1], "Segmentation fault", "no output matches 'was lost'"),
        ([1, None], "process 1 was lost", r"exit codes \[1, None\]"),
    ],
)
def test_a_broken_promise_is_described(codes: list[int | None], said: str, broken: str) -> None:
    results = Promise(frozenset({0, 1}), "was lost").broken_by(codes, said)
    assert bool(results) == bool(broken) and re.search(broken, results)


def test_outcomes_are_compared_without_times() -> None:
    row = {"step": 3, "loss": 1.5, "images_per_second": 10.0}
    outcome = {"metrics.jsonl": [without_times(row)], "checkpoints": {"60": {"['params']": "abc"}}}
    faster = {**outcome, "metrics.jsonl": [without_times({**row, "images_per_second": 20.0})]}
    assert difference(outcome, faster) == ""
    other = {**outcome, "checkpoints": {"60": {"['params']": "abd"}}}
    assert difference(other, outcome) == "checkpoints: 60: ['params']: abd instead of abc"
    assert difference({**outcome, "metrics.jsonl": []}, outcome).startswith("metrics.jsonl: [] instead of [{'step': 3")
