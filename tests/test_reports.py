"""Reports: their content equals the runs' files, missing files are left out, and names are never read as markup."""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.data import random_table, write_arrays, write_pictures
from support.networks import linear_model
from support.reports import BATCH_SIZE, STEPS, hostile_page, outcome_of_noise, rows_of, write_run
from support.runs import SMALL

from jaxddp.cli import main
from jaxddp.core.duration import Duration
from jaxddp.core.errors import duration, metric_name, speed
from jaxddp.inference.predictions import Outcome
from jaxddp.reports.charts import MOST_POINTS, Chart, curves
from jaxddp.reports.classes import accuracy_tables, predict_validation_images, run_classes
from jaxddp.reports.compose import Page, render
from jaxddp.reports.tables import (
    Cell,
    Estimate,
    RunFiles,
    TextTable,
    changes,
    differences,
    group_names,
    mean_curve,
    number,
    read_runs,
    run_table,
    seed_groups,
    speed_table,
)


def runs_of(folder: Path, seeds: int = 3, **changes) -> list[RunFiles]:
    return read_runs([write_run(folder / f"seed{seed}", seed, **changes) for seed in range(seeds)])


def write_rows(workdir: Path, rows: list[dict]) -> None:
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def change_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def texts(table: TextTable) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def chart(charts, title: str) -> Chart:
    return next(chart for chart in charts if chart.title == title)


def test_the_time_of_a_step_is_the_sum_of_the_earlier_steps_times(tmp_path):
    (run,) = runs_of(tmp_path, 1)
    expected, total, before = {}, 0.0, 0
    for row in rows_of(run.directory, "train"):
        total += (row["step"] - before) * BATCH_SIZE / row["images_per_second"]
        before = row["step"]
        expected[row["step"]] = total
    train, val = run.positions(run.series.train), run.positions(run.series.val)
    assert train["time"].tolist() == pytest.approx(list(expected.values()), rel=1e-12)
    assert val["time"].tolist() == pytest.approx([expected[step] for step in (10, 20, 30, 40)], rel=1e-12)
    assert val["epoch"].tolist() == [1, 2, 3, 4] and val["step"].tolist() == [10, 20, 30, 40]
    validations = sum(row["seconds"] for row in rows_of(run.directory, "val"))
    assert run.duration == pytest.approx(total + validations, rel=1e-12)


def test_every_metric_of_every_run_is_drawn_as_it_was_logged(tmp_path):
    runs = runs_of(tmp_path)
    charts = curves(runs, ["#0072B2"] * 3)
    axis = chart(charts, "top-1 accuracy").layout["yaxis"]
    assert axis["tickformat"] == ".4~%" and (axis["minallowed"], axis["maxallowed"]) == (-0.02, 1.02)
    assert [chart.title for chart in charts] == [
        *("loss", "top-1 accuracy", "learning rate", "images/s", "time spent waiting for data"),
        "peak memory of a device",
    ]
    for metric, title in (("loss", "loss"), ("top1", "top-1 accuracy")):
        drawn = {trace["meta"]["where"]: trace["y"] for trace in chart(charts, title).data}
        for index, run in enumerate(runs):
            logged, validated = rows_of(run.directory, "train"), rows_of(run.directory, "val")
            assert drawn[f"{index} steps"] == pytest.approx([row[metric] for row in logged], rel=1e-6)
            means = [row[f"epoch_{metric}"] for row in logged if f"epoch_{metric}" in row]
            assert drawn[f"{index} epochs"] == pytest.approx(means, rel=1e-6)
            assert drawn[f"{index} validation"] == pytest.approx([row[metric] for row in validated], rel=1e-6)


@pytest.mark.slow
def test_reducing_many_points_keeps_all_peaks(tmp_path):
    workdir = write_run(tmp_path / "long")
    losses = np.random.default_rng(0).random(10 * MOST_POINTS)
    losses[12_345], losses[777] = 50, -3
    rows = [{"step": step, "epoch": step / 10, "split": "train", "loss": loss} for step, loss in enumerate(losses)]
    rows[17]["loss"] = None
    write_rows(workdir, rows)
    page = Page(read_runs([workdir]))
    (trace,) = chart(page.curves, "loss").data
    assert len(trace["y"]) <= MOST_POINTS and (max(trace["y"]), min(trace["y"])) == (50, -3)
    kept_rows = trace["meta"]["rows"]
    assert kept_rows == sorted(kept_rows) and {12_345, 777} <= {*kept_rows}
    assert trace["y"] == pytest.approx([losses[row] for row in kept_rows], rel=1e-6)
    assert len(page.positions["0 steps"]["step"]) == len(losses)


@pytest.mark.parametrize(("losses", "wide"), [((0.01, 1.01), 1), ((0.011, 1), 0), ((0, 1, 101), 0), ((), 0)])
def test_a_loss_with_a_wide_range_starts_with_a_logarithmic_axis(tmp_path, losses, wide):
    workdir = write_run(tmp_path / "run")
    rows = [{"step": step, "split": "val", "loss": loss} for step, loss in enumerate((*losses, None))]
    write_rows(workdir, rows)
    page = Page(read_runs([workdir]))
    assert page.is_wide == wide
    html = render(page)
    assert ('data-scale="log" aria-pressed="true"' in html) == (wide and bool(page.curves))


def test_mean_and_spread_over_seeds_are_those_of_numpy(tmp_path):
    runs = runs_of(tmp_path, 4)
    page = Page(runs)
    validated = [rows_of(run.directory, "val") for run in runs]
    best = [max(rows, key=lambda row: row["top1"]) for rows in validated]
    for metric in ("loss", "top1"):
        for moment, rows in (("best", best), ("last", [rows[-1] for rows in validated])):
            values = np.array([row[metric] for row in rows])
            mean, std = values.mean(), values.std(ddof=1)
            measured = f"{number(metric, mean).removesuffix('%')} ± {number(metric, std / 2)}"
            rest = (number(metric, value) for value in (std, values.min(), values.max()))
            assert ["all runs", metric_name(metric), moment, "4", measured, *rest] in texts(page.seed_table)
    assert len(page.seed_table.rows) == 4
    least, most, mean = chart(page.seed_charts, "loss of validation").data
    values = np.array([[row["loss"] for row in rows] for rows in validated])
    for curve, of_runs in ((mean, values.mean(0)), (least, values.min(0)), (most, values.max(0))):
        assert curve["y"] == pytest.approx(of_runs, rel=1e-6)
    assert page.positions[mean["meta"]["where"]]["step"] == [10, 20, 30, 40]


# The last validations of the runs, what the source states, and the end of the sentence.
CASES = (
    ((0.97, 0.95), {"runs": 4, "deviation": 0.02}, "2.00 ± 1.41 points, not more than two standard errors"),
    ((0.98, 0.96), {"runs": 4, "deviation": 0.006}, "3.00 ± 1.04 points, more than two standard errors"),
    ((0.9,), {}, "-4.00 ± 3.00 points, not more than two standard errors"),
    ((-0.1,), {}, "-104.00 points, whose standard error is unknown"),
    ((0.8,), {"runs": 1}, "-14.00 ± 4.00 points, more than two standard errors"),
)


def write_ends(folder: Path, values: Sequence[float], **changes) -> list[Path]:
    """Write a run for each value, which is its last top-1 accuracy."""
    workdirs = [write_run(folder / f"{seed}", seed, **changes) for seed in range(len(values))]
    for workdir, value in zip(workdirs, values, strict=True):
        rows = [row for split in ("train", "val") for row in rows_of(workdir, split)]
        write_rows(workdir, [*rows[:-1], rows[-1] | {"top1": value}])
    return workdirs


@pytest.mark.parametrize(("values", "stated", "expected"), CASES)
def test_a_run_is_compared_with_the_published_result_of_its_recipe(values, stated, expected, tmp_path):
    workdirs, reference = write_ends(tmp_path, values), {"value": 0.94, "source": "<b>", "at": "8 epochs"} | stated
    for workdir in workdirs:
        (workdir / "reference.json").write_text(json.dumps(reference))
    page = Page(read_runs(workdirs))
    (sentence,) = page.comparisons
    assert sentence.startswith("Published: top-1 94%") and "after 8 epochs, <b>" in sentence
    assert f"({len(values)} run{'s' * (len(values) > 1)}, 100 images) after 4 epochs" in sentence
    assert sentence.endswith(f"a difference of {expected}.")
    assert ("states no spread" in sentence) == ("deviation" not in stated)
    for drawn in [chart(page.curves, "top-1 accuracy"), *page.seed_charts[1:2]]:
        (band,), (note,) = drawn.layout["shapes"], drawn.layout["annotations"]
        assert band["y1"] - band["y0"] == pytest.approx(4 * stated.get("deviation", 0))
        assert note["text"].startswith("published 94%") and ("unknown" in note["text"]) == ("deviation" not in stated)
    assert not chart(page.curves, "loss").layout["shapes"] and "<b>" not in render(page).split("<script")[0]


def test_the_two_best_recipes_are_compared(tmp_path):
    workdirs = write_ends(tmp_path / "a", (0.5, 0.52))
    workdirs += write_ends(tmp_path / "b", (0.8, 0.82, 0.1), optimizer={"learning_rate": 0.2})
    change_json(workdirs[4] / "config.json", optimizer={"learning_rate": 0.3})
    (workdirs[0] / "reference.json").write_text('{"value": 3}')
    (sentence,) = Page(read_runs(workdirs)).comparisons
    two = "learning_rate 0.2 with 81.00 ± 1.00% (2 runs, 100 images), and learning_rate 0.1 with 51.00 ± 1.00%"
    assert two in sentence and sentence.endswith("30.00 ± 1.41 points, more than two standard errors.")
    change_json(workdirs[2] / "result.json", status="failed")
    assert "0.2 with 82.00 ± 3.84% (1 run, 100 images)" in Page(read_runs(workdirs)).comparisons[0]
    assert str(Estimate("val_ema mean_class_accuracy", 0.9, images=100)) == "90.00%"
    assert Estimate.of("top1", [0.5], float("nan")).images == 0
    assert not Page(read_runs(workdirs[:2])).comparisons
    for workdir in workdirs[2:]:
        change_json(workdir / "config.json", fingerprint={"val": "c" * 64})
    assert not Page(read_runs(workdirs)).comparisons


def test_a_mean_is_over_the_steps_that_all_runs_have(tmp_path):
    workdirs = [write_run(tmp_path / f"{seed}", seed) for seed in range(2)]
    validated = [{row["step"]: row["loss"] for row in rows_of(workdir, "val")} for workdir in workdirs]
    for workdir, step, lost_step in zip(workdirs, (10, 40), (20, 0), strict=True):
        rows = [r for split in ("train", "val") for r in rows_of(workdir, split) if (split, r["step"]) != ("val", step)]
        write_rows(workdir, [row | ({"loss": None} if row["step"] == lost_step else {}) for row in rows])
    page = Page(runs := read_runs(workdirs))
    for title, steps in (("loss of validation", [30]), ("top-1 accuracy of validation", [20, 30])):
        assert page.positions[chart(page.seed_charts, title).data[-1]["meta"]["where"]]["step"] == steps
    assert (curve := mean_curve(runs, "loss")) and curve.mean.tolist() == [np.mean([each[30] for each in validated])]


def test_runs_that_differ_only_in_seed_fold_and_machine_are_one_group(tmp_path):
    workdirs = [
        write_run(tmp_path / "a", 0),
        write_run(tmp_path / "b", 1, parallel={"devices": 4}, log={"every": "7 steps"}, data={"path": "elsewhere"}),
        write_run(tmp_path / "c", 0, optimizer={"learning_rate": 0.3}),
        write_run(tmp_path / "d", 5, optimizer={"learning_rate": 0.3}),
        write_run(tmp_path / "e", 6, parallel={"reproducible": True}),
        write_run(tmp_path / "f", 7),
    ]
    change_json(workdirs[5] / "config.json", fingerprint={"train": "c" * 64, "val": "b" * 64})
    workdirs.append(write_run(tmp_path / "g", 8))
    (workdirs[6] / "config.json").write_text("{")
    for n, keys in enumerate(({"fold": "0/2"}, {"fold": "1/2"}, {"fold": "0/3"}, {"val_fold": "a"}, {"val_fold": "b"})):
        workdirs.append(write_run(tmp_path / f"fold{n}", 0, data=keys))
        change_json(workdirs[-1] / "config.json", fingerprint={"train": f"{n}" * 64})
    groups = seed_groups(runs := read_runs(workdirs))
    assert groups == [(0, 1), (2, 3), (4,), (5,), (6,), (7, 8), (9,), (10, 11)]
    names = ["learning_rate 0.1", "learning_rate 0.3, c", "learning_rate 0.3, d"]
    assert group_names(runs, [*groups[:2], (3,)]) == names
    legend = Page(runs[:4]).legend
    assert legend[0].colour == legend[1].colour != legend[2].colour == legend[3].colour
    single_runs = Page([runs[0], runs[2]])
    assert single_runs.legend[0].colour != single_runs.legend[1].colour and not single_runs.seed_table.rows


def test_runs_are_not_seeds_of_one_recipe_if_another_key_changes_their_results(tmp_path):
    slow = {"train": {"sync_every": Duration.parse("5 steps")}}
    workdirs = [
        write_run(tmp_path / "a", 0),
        write_run(tmp_path / "b", 1, parallel={"groups": 2}, **slow),
        write_run(tmp_path / "c", 2, parallel={"groups": 4}, **slow),
        write_run(tmp_path / "d", 3, checkpoint={"best": "val loss"}),
        write_run(tmp_path / "e", 4, checkpoint={"best_smoothing": 0.5}),
        write_run(tmp_path / "f", 5, **slow),
        write_run(tmp_path / "g", 6, **slow),
        write_run(tmp_path / "h", 0),
        write_run(tmp_path / "i", 7),
    ]
    # Without `parallel.groups`, each process is a group.
    change_json(workdirs[6] / "result.json", processes=8)
    # The second run with seed 0 is no further seed.
    assert seed_groups(read_runs(workdirs)) == [(0, 8), *((run,) for run in range(1, 8))]


@pytest.mark.parametrize("status", ["failed", None])
def test_only_runs_that_are_done_are_in_the_means_of_a_report(tmp_path, status):
    workdirs = [write_run(tmp_path / "a", 0), write_run(tmp_path / "b", 1, status="stopped")]
    expected = texts(Page(read_runs(workdirs)).seed_table)
    page = Page(read_runs([*workdirs, write_run(tmp_path / "c", 2, status=status)]))
    assert texts(page.seed_table) == expected and len(page.legend) == 3
    (mean,) = {trace["name"] for trace in page.seed_charts[0].data if "mean" in trace.get("name", "")}
    assert mean == "all runs, mean of 2"


def test_the_settings_name_the_hooks_of_a_recipe(tmp_path):
    workdirs = [write_run(tmp_path / "a", 0), write_run(tmp_path / "b", 0)]
    hooks = {"file": "mine.py", "digest": "d" * 64, "hooks": ["get_loss", "get_model"]}
    change_json(workdirs[1] / "config.json", recipe=hooks)
    runs = read_runs(workdirs)
    assert differences(runs)["recipe.hooks"] == ("none", "get_loss, get_model")
    assert ["recipe.hooks", "none", "get_loss, get_model"] in texts(Page(runs[1:]).settings)
    assert "recipe.hooks" not in changes(runs[0])


def test_the_tables_have_steps_metrics_and_speed(tmp_path):
    (run,) = runs_of(tmp_path, 1)
    train, val = rows_of(run.directory, "train"), rows_of(run.directory, "val")
    best = max(val, key=lambda row: row["top1"])
    (row,) = texts(run_table([run]))
    last = f"top-1 {val[-1]['top1']:.2%}"
    assert row == [
        *("seed0", "done", "40 of 40", f"top-1 {best['top1']:.2%}", str(best["step"]), last, "4"),
        duration(run.duration),
    ]
    table = speed_table([run], [""])
    (row_texts,) = texts(table)
    cells = dict(zip(table.titles, row_texts, strict=True))
    assert cells["images/s"] == speed(float(np.median([row["images_per_second"] for row in train])))
    assert cells["waiting for data"] == f"{np.median([row['data_wait_fraction'] for row in train]):.1%}"
    (without_result,) = texts(speed_table([dataclasses.replace(run, result={})], [""]))
    assert "40 MB" in without_result
    assert (cells["peak memory"], cells["devices"], cells["processes"]) == ("1.0 GB", "2", "1")
    assert cells["validation"] == "2.0 s" and "FLOP utilization" not in cells


def test_confusions_and_accuracies_are_counted_as_by_hand():
    outcome = outcome_of_noise().outcome
    guesses = [max(range(5), key=lambda label: row[label]) for row in outcome.probabilities]
    expected = np.zeros((5, 5), int)
    for label, guess in zip(outcome.labels, guesses, strict=True):
        expected[label, guess] += 1
    assert np.array_equal(outcome.confusion, expected) and expected.sum() == 60
    assert outcome.accuracy == np.mean(outcome.labels == guesses)
    for label in range(5):
        of_class = outcome.labels == label
        assert outcome.class_accuracy[label] == np.mean(np.array(guesses)[of_class] == label)
    assert (outcome.class_accuracy * outcome.class_counts).sum() / 60 == pytest.approx(outcome.accuracy, rel=1e-12)
    confusions = outcome.confusions(100)
    assert sum(confusion.images for confusion in confusions) == (outcome.labels != guesses).sum()
    counts = [confusion.images for confusion in confusions]
    assert counts == sorted(counts, reverse=True) and all(pair.label != pair.prediction for pair in confusions)
    first = confusions[0]
    assert first.images == expected[first.label, first.prediction]
    assert first.share == first.images / (outcome.labels == first.label).sum()
    rows, wrong = outcome.surest_mistakes(7), outcome.labels != outcome.predictions
    shares = np.where(wrong, outcome.probabilities.max(1), 0)
    assert shares[rows].tolist() == sorted(shares, reverse=True)[:7] and wrong[rows].all()
    assert len(outcome.surest_mistakes(1000)) == wrong.sum()


def test_images_without_a_label_or_finite_probability_are_not_counted():
    labels = np.array([0, 1, -1, 1])
    probabilities = np.array([[0.9, 0.1], [np.nan, np.nan], [0.2, 0.8], [0.7, 0.3]])
    outcome = Outcome(labels, probabilities, ("a", "b"), 1)
    assert outcome.confusion.tolist() == [[1, 0], [1, 0]] and outcome.accuracy == 0.5
    assert outcome.surest_mistakes(9).tolist() == [3]
    unlabelled = Outcome(np.array([-1]), np.ones((1, 2)), ("a", "b"), 1)
    assert (
        np.isnan(unlabelled.accuracy) and np.isnan(unlabelled.class_accuracy).all() and unlabelled.confusions(5) == []
    )


def test_the_worst_class_comes_first_and_the_other_classes_have_a_separate_table():
    other = outcome_of_noise(names=("v", "w", "x", "y", "z"))
    images_of = {"one": outcome_of_noise(), "other": other, "third": outcome_of_noise()}
    tables = accuracy_tables([run_classes(0, Cell(name, "#000000"), images) for name, images in images_of.items()])
    assert [table.titles for table in tables] == [("class", "images", "one", "third"), ("class", "images", "other")]
    shares = [row[2].share for row in tables[0].rows]
    assert shares == sorted(other.outcome.class_accuracy) and tables[0].rows[0][2].text == f"{shares[0]:.1%}"


def test_a_row_of_the_matrix_holds_the_shares_of_a_class():
    images = outcome_of_noise()
    counts = images.outcome.confusion
    assert counts.sum(0).tolist() != counts.sum(1).tolist()
    matrix = run_classes(0, Cell("a", "#000000"), images).matrix
    assert matrix is not None
    np.testing.assert_allclose(matrix.data[0]["z"], counts / counts.sum(1)[:, None], atol=1e-4)
    assert matrix.layout["xaxis"]["autotickangles"] == [0, 90]


def test_no_name_is_interpreted_as_markup(tmp_path):
    html = render(hostile_page(tmp_path))
    assert "alert(1)" in html and "<script>alert" not in html and "<img src=x" not in html and "<i>b</i>" not in html
    assert html.count("<script") == 3 and "{{ 7 * 7 }}" in html
    # Plotly interprets some markup, so its texts are escaped twice.
    figures = html.partition('id="figures">')[2].partition("</script>")[0]
    content = json.loads(figures)
    names = [trace.get("name", "") for entry in content["charts"] for trace in entry["data"]]
    assert all("<" not in name for name in names) and any("&lt;img" in name for name in names)
    assert "&quot;" not in str(content)  # Plotly would show it.


def test_the_same_runs_give_the_same_bytes_and_the_page_loads_no_other_file(tmp_path):
    runs = runs_of(tmp_path)
    first, second = render(Page(runs)), render(Page(read_runs([run.directory for run in runs])))
    assert first == second
    page = first.replace(first[first.index("<script>") : first.index("</script>", first.index("<script>"))], "")
    assert "http:" not in page and "https:" not in page and "default-src 'none'" in page


def delete(name: str):
    return lambda workdir: (workdir / name).unlink()


def write(name: str, content: str):
    return lambda workdir: (workdir / name).write_text(content)


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (delete("config.json"), "config.json is missing; its settings and its time are left out"),
        (delete("metrics.jsonl"), "metrics.jsonl is missing; its curves are left out"),
        (delete("result.json"), None),
        (write("config.json", "[1]"), "config.json is damaged (it holds [1]); its settings"),
        (write("config.json", '{"seed": 0, "data": {}, "train": 5}'), None),
        (write("config.json", f'{{"seed": [], "data": 0, "train": {{"duration": 5, "batch_size": {9**30}}}}}'), None),
        (write("result.json", f'{{"peak_memory": {10**400}}}'), None),
        (write("result.json", "{"), "result.json is damaged (Expecting"),
        (write("metrics.jsonl", '{"step": 5, "split": "train", "loss": null}\n{"step": 10, "spl'), None),
        (write("metrics.jsonl", f'{{"step": {10**30}, "split": "val"}}\n'), "metrics.jsonl:1: not a JSON object with"),
        (write("metrics.jsonl", f'{{"step": 5, "split": "val", "top1": {10**400}}}\n'), "metrics.jsonl:1: not a JSON"),
        (
            write("metrics.jsonl", '{"step": 5, "split": "train"}\n{"step": 2, "split": "train"}\n'),
            "metrics.jsonl goes back to earlier steps; more than one run wrote into it",
        ),
    ],
)
def test_a_run_with_a_missing_or_damaged_file_is_still_reported(tmp_path, capfd, spoil, fault):
    workdir, other = write_run(tmp_path / "bad\x1b"), write_run(tmp_path / "whole", 1)
    spoil(workdir)
    assert main(["report", str(workdir), str(other), "--out", str(tmp_path / "r.html"), "--no-predictions"]) == 0
    printed = capfd.readouterr()
    assert printed.err == "" and "\x1b" not in printed.out
    for runs in ([workdir, other], [workdir]):
        page = Page(read_runs(runs))
        assert [fault and line.startswith(f"bad\x1b: {fault}") for line in page.faults] == [True] * (fault is not None)


def test_a_metric_that_is_not_finite_is_not_the_best(tmp_path):
    workdir = write_run(tmp_path / "run")
    tops = ("NaN", "0.5", "Infinity", "0.25")
    lines = [f'{{"step": {step}, "split": "val", "top1": {top}}}\n' for step, top in enumerate(tops)]
    (workdir / "metrics.jsonl").write_text("".join(lines))
    (run,) = read_runs([workdir])
    assert run.best == ("top1", 0.5, 1, 1, False)
    assert curves([run], ["#0072B2"])[0].data[0]["y"] == [None, 0.5, None, 0.25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "{tmp}/none", "--out", "r.html"], "{tmp}/none: not the work directory of a run, which contains con"),
        (["{run}", "{run}", "--out", "r.html"], "{run}: is given twice; give each run once"),
        (["{run}", "--out", "r.html", "--step", "bset"], "--step bset: give best, latest, or the step of a checkpoint"),
        (["{run}", "--out", "r.html", "--features", "--no-predictions"], "--features: needs the checkpoint's network;"),
        (["{run}", "--out", "{tmp}/r.pdf"], "{tmp}/r.pdf: the report is an HTML page; give a name that ends in .html"),
    ],
)
def test_a_mistake_raises_a_one_line_error(tmp_path, capfd, arguments, message):
    workdirs = {"tmp": tmp_path, "run": write_run(tmp_path / "runs" / "run")}
    assert main(["report", *(word.format(**workdirs) for word in arguments)]) == 2
    last = capfd.readouterr().err.rstrip("\n").split("\n")[-1]
    assert last.startswith(f"jaxddp: {message.format(**workdirs)}")


@pytest.mark.ci
def test_reports_without_predictions_do_not_import_jax(tmp_path):
    report = ["report", str(write_run(tmp_path / "a/b").parent), "--out", f"{tmp_path}/r.html", "--no-predictions"]
    program = "import sys; from jaxddp.cli import main\n"
    program += f"codes = [main({report!r}), main(['runs', {str(tmp_path)!r}])]; print(codes, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "[0, 0] False", done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("trained")
    data = write_arrays(folder / "images.npz", random_table(48, image=16), random_table(24, seed=1, image=16))
    words = ["train", "digits", *SMALL, "--data.path", str(data), "--workdir", str(folder / "run")]
    words += ["--parallel.self-test", "never", "--parallel.devices", "1", "--eval.limit", "20"]
    # The network does not matter to a report. The tests open the run again, so the replacement stays.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("jaxddp.models.resnet.build", lambda settings, classes, *_: linear_model(classes))
        assert main([*words, "--train.duration", "12 steps", "--eval.every", "6 steps"]) == 0
        yield folder / "run"


@pytest.mark.slow
def test_the_page_of_a_run_shows_its_classes(trained, tmp_path, capfd):
    out = tmp_path / "pages" / "report.html"
    assert main(["report", str(trained), "--out", str(out)]) == 0
    assert capfd.readouterr().out.startswith(f"{out}: 1 run, ")
    html = out.read_text()
    assert "of 20 images right" in html and "data:image/png;base64," in html and "confusion matrix" in html
    first = out.read_bytes()
    assert main(["report", str(trained), "--out", str(out)]) == 0 and out.read_bytes() == first
    others = write_pictures(tmp_path / "others", 1, 9, 16) / "val"
    for label, name in enumerate("abcde"):
        (others / name).rename(others / str(label))
    shutil.rmtree(others / "0")
    assert main(["report", str(trained), "--data", str(others), "--out", str(out)]) == 0
    assert "of 7 images right" in out.read_text()
    assert main(["eval", str(trained), "--data", str(others)]) == 0 and "count: 7" in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_without_available_classes_is_left_out_and_logged(trained, tmp_path, capfd):
    content = json.loads((trained / "config.json").read_text())
    workdirs = [write_run(tmp_path / name) for name in ("python", "moved", "empty")]
    (workdirs[0] / "config.json").write_text(json.dumps({key: content[key] for key in ("seed", "data", "train")}))
    moved_config = content | {"data": content["data"] | {"path": str(tmp_path / "gone.npz")}}
    (workdirs[1] / "config.json").write_text(json.dumps(moved_config))
    (workdirs[1] / "checkpoints").symlink_to(trained / "checkpoints")
    (workdirs[1] / "signature.json").symlink_to(trained / "signature.json")
    (workdirs[2] / "config.json").write_text(json.dumps(content))
    runs = read_runs([*workdirs, trained])
    page = Page(runs)
    page.add_classes(runs, lambda directory: predict_validation_images(directory, "best"))
    assert len(page.classes) == 1 and page.classes[0].name == runs[3].name
    python, moved_run, empty = page.class_faults
    assert "the run came from Python, and its config does not name the network" in python
    assert "gone.npz: no such directory or file" in moved_run
    assert f"{workdirs[2]}: not the work directory of a run: it has no folder checkpoints/" in empty
    assert STEPS == 40 and render(page).count("its classes are left out:") == 3
