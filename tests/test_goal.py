"""The comparison of validations: the best validation, and early stopping, as pure functions of metrics."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import error_line

from jaxddp.config import Config
from jaxddp.config.goal import Goal, flat, of_exported
from jaxddp.core.errors import InputError
from jaxddp.training.checkpoints.integrity import Integrity, ValidationFile
from jaxddp.training.evaluation import EarlyStopping

VALUES = st.lists(st.one_of(st.none(), st.floats(0, 1), st.sampled_from((0.25, 0.5))), max_size=12)
GOALS = st.builds(
    Goal, st.just("loss"), st.booleans(), st.one_of(st.just(0.0), st.floats(0, 0.99), st.sampled_from((0.5, 0.9)))
)


def smoothed(values: list[float], share: float) -> list[float]:
    """Return the weighted mean of each value and all earlier values. A step back multiplies the weight by `share`."""
    means = []
    for count in range(1, len(values) + 1):
        weights = [share ** (count - 1 - index) for index in range(count)]
        means.append(sum(w * v for w, v in zip(weights, values[:count], strict=True)) / sum(weights))
    return means


@given(VALUES, GOALS)
def test_the_best_validation_equals_that_of_a_plain_loop(values, goal):
    measured = {step: value for step, value in enumerate(values, start=1) if value is not None}
    means = dict(zip(measured, goal.values(measured.values()), strict=True))
    plain = smoothed(list(measured.values()), goal.smoothing)
    assert list(means.values()) == pytest.approx(plain, rel=1e-9, abs=1e-12)
    if goal.smoothing == 0:
        assert means == measured
    best = None
    for step, value in means.items():
        if best is None or value == means[best] or (value < means[best]) == goal.lowest:
            best = step
    stopping = EarlyStopping(goal)
    for step, value in enumerate(values, start=1):
        stopping = stopping.after(step, {"loss": value, "count": 3})
    if best is None:
        assert stopping.best is None
    else:
        assert [*means][goal.best([*means.values()])] == best
        # Patience is counted from the first of equal values.
        first = next(step for step, value in means.items() if value == means[best])
        assert (stopping.best, stopping.step) == (means[best], first)


@given(VALUES, GOALS, st.integers(1, 4), st.sampled_from((0.0, 0.1)), st.data())
def test_a_run_stops_after_patience_validations_without_gain_also_if_interrupted(values, goal, patience, gain, data):
    means = iter(goal.values([value for value in values if value is not None]))
    best, count, expected = None, 0, []
    for value in values:
        mean = math.nan if value is None else next(means)
        is_better = best is None or (mean < best - gain if goal.lowest else mean > best + gain)
        if not math.isnan(mean) and is_better:
            best, count = mean, 0
        else:
            count += 1
        expected.append(count >= patience)
    initial = EarlyStopping(goal, patience, gain)
    stopping, resume_step = initial, data.draw(st.integers(0, len(values)))
    for step, (value, is_stopped) in enumerate(zip(values, expected, strict=True), start=1):
        if step == resume_step:
            # A checkpoint holds the state as JSON.
            stopping = initial.restored(json.loads(json.dumps(stopping.saved())))
        stopping = stopping.after(step, {"loss": value})
        assert stopping.stops == is_stopped
    assert not dataclasses.replace(stopping, without_gain=0).stops


def test_another_goal_resets_the_comparison_and_another_patience_continues_it():
    stopping = EarlyStopping(Goal(), 2)
    for step, value in enumerate((0.5, 0.4, 0.4), start=1):
        stopping = stopping.after(step, {"top1": value})
    saved = json.loads(json.dumps(stopping.saved()))
    assert stopping.stops
    assert stopping.reason == "no gain in val top1 in 2 validations since step 1, where it was 50.00%"
    assert not EarlyStopping(Goal(), 3).restored(saved).stops
    assert EarlyStopping(Goal(), 3).restored(saved).after(4, {"top1": 0.5}).stops
    other = EarlyStopping(Goal("loss", lowest=True), 1)
    assert other.restored(saved) == other.restored(None) == other


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Goal("top1", lowest=False)),
        ({"best": "val loss"}, Goal("loss", lowest=True)),
        ({"best": "val ece"}, Goal("ece", lowest=True)),
        ({"best": "val_ema top1", "best_smoothing": 0.5}, Goal("val_ema top1", lowest=False, smoothing=0.5)),
        ({"best": "val loss", "best_is": "max"}, Goal("loss", lowest=False)),
    ],
)
def test_a_config_determines_its_goal(settings, expected):
    goal = Config().replace(checkpoint=settings).checkpoint.goal(averages=False)
    assert goal == expected == Goal.from_plain(json.loads(json.dumps(goal.plain())))


@pytest.mark.parametrize("name", ("top1", "train loss"))
def test_an_invalid_goal_raises_a_one_line_error(name):
    with pytest.raises(InputError, match=f"^checkpoint.best='{name}': give a split and a metric, \"val top1\" or"):
        Config().replace(checkpoint={"best": name})


def test_an_unknown_metric_raises_an_error_with_the_known_metrics():
    assert error_line(EarlyStopping(Goal("val_ema f1")).check, ["loss", "f1", "val_ema loss", "count"]) == (
        "checkpoint.best='val_ema f1' is not measured; did you mean 'val f1'? there are: val f1, val loss, val_ema loss"
    )
    # The default goal needs no top-1, unless the run may stop early.
    EarlyStopping().check(["loss"])
    EarlyStopping(Goal("val_ema top1")).check(["loss", "val_ema loss"])
    with pytest.raises(InputError, match="checkpoint.best='val_ema top1' is not measured"):
        EarlyStopping(Goal("val_ema top1")).check(["loss"])
    with pytest.raises(InputError, match="checkpoint.best='val top1' is not measured; .* there are: val loss"):
        EarlyStopping(stop_after=1).check(["loss"])


def test_metrics_of_splits_are_flattened_and_divided_again():
    measured = {"val": {"loss": 1.0, "count": 3}, "val_ema": {"loss": 0.5, "count": 3}}
    flat_metrics = {"loss": 1.0, "count": 3, "val_ema loss": 0.5}
    assert flat(measured) == flat_metrics
    # Exported arrays are the averaged ones, if there are any.
    assert of_exported(flat_metrics) == {"loss": 0.5, "count": 3}
    assert of_exported({"loss": 1.0, "count": 3}) == {"loss": 1.0, "count": 3} and of_exported({}) == {}


def test_the_file_records_the_goal_of_the_run(tmp_path):
    manifests, goal = Integrity(tmp_path), Goal("loss", lowest=True, smoothing=0.5)
    writer = ValidationFile(tmp_path, manifests, goal)
    for step, loss in ((2, 1.0), (4, 0.0), (6, 0.4), (8, None)):
        writer.put(step, {"loss": math.inf if loss is None else loss, "top1": 1 - step / 10})
    for reader in (ValidationFile(tmp_path, manifests), ValidationFile(tmp_path, None)):
        assert reader.goal == goal and [*reader.by_step] == [2, 4, 6, 8]
        # The means are 1, 1/3 and 0.371: a single low value is not a trend.
        assert (reader.best([2, 4, 6, 8]), reader.best([2, 6]), reader.best([8])) == (4, 6, None)
    # A new goal is written when a run resumes, and not earlier, because the run may reject it.
    resumed = ValidationFile(tmp_path, manifests, Goal())
    assert resumed.best([2, 4]) == 2 and ValidationFile(tmp_path, None).goal == goal
    resumed.resume(8)
    content = json.loads((tmp_path / "validation.json").read_text())
    assert list(content) == ["2", "4", "6", "8"] and ValidationFile(tmp_path, manifests).goal == Goal()
    resumed.resume(4)
    assert [*ValidationFile(tmp_path, manifests).by_step] == [2, 4]
