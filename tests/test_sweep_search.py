"""A search suggests values by the trials so far, continues after a stop, and prunes; and the table of a sweep."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.reports import write_run

from jaxddp.core.errors import InputError
from jaxddp.sweeps.folder import SweepFolder, report, seed_table, table, write_results
from jaxddp.sweeps.queues import Search, SearchQueue
from jaxddp.sweeps.trials import Choices, Interval, Trial, trial_name

pytest.importorskip("optuna", reason="optuna is missing: pip install 'jaxddp[search]'")

RATE, WIDTH, NAME = "optimizer.learning_rate", "model.width", "optimizer.name"
SPACES = {RATE: Interval(1e-4, 1, log=True), WIDTH: Interval(8, 64, whole=True), NAME: Choices(("lars", "sgd"))}


def make_trial(values: Mapping[str, str]) -> Trial:
    return Trial(trial_name(values), dict(values), [f"--{key}={word}" for key, word in values.items()])


def queue(folder: Path, trials: int, spaces=SPACES, *, seed: int = 0, **more) -> SearchQueue:
    return SearchQueue(SweepFolder(folder, "a config"), Search(spaces, False, seed), make_trial, trials, **more)


def next_of(search: SearchQueue) -> Trial:
    trial = search.next()
    assert trial is not None
    return trial


def write_trial(workdir: Path, measured: list[float], status: str | None = "done", goal: str = "val top1") -> None:
    """Write the run of a trial with these validations of top1."""
    if not workdir.exists():
        write_run(workdir, status=None, checkpoint={"best": goal})
    rows = [{"step": step, "epoch": 1.0, "split": "val", "top1": value} for step, value in enumerate(measured, 1)]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if status:
        (workdir / "result.json").write_text(json.dumps({"status": status, "step": len(rows)}))


def quality(trial: Trial) -> float:
    """Return an accuracy that is best at a rate of 0.01."""
    return 1 / (1 + abs(float(trial.values[RATE]) - 0.01)) - int(trial.values[WIDTH]) / 1000


def train(search: SearchQueue, trial: Trial) -> None:
    write_trial(search.folder.directory / trial.name, [0.0, quality(trial)])
    search.record_end(trial, "done")


def test_suggestions_depend_on_the_seed_and_the_trials_alone():
    search, tried, suggested = Search(SPACES, lowest=False, seed=3), [], []
    for number in range(14):
        values = search.suggestion(tried)
        assert values == search.suggestion(tried) != search._replace(seed=4).suggestion(tried)
        assert all(values[key] in space for key, space in SPACES.items()) and values not in suggested
        suggested.append(values)
        tried.append(search.record(values, "done", (0.1, number / 20), number / 20))
    # After the first ten random trials, the suggestions follow the results.
    best, worst = ([Search(SPACES, low, seed).suggestion(tried) for seed in range(3)] for low in (False, True))
    assert best != worst


def test_a_search_that_is_stopped_continues_with_the_same_suggestions(tmp_path):
    whole = queue(tmp_path / "whole", 12)
    while (trial := whole.next()) is not None:
        train(whole, trial)
    expected = [*whole.folder.read()]
    assert len(expected) == 12
    # Each part ends during a trial, which the next part continues.
    while (trial := (part := queue(tmp_path / "parts", 12)).next()) is not None:
        part.folder.release(trial.name)
        part = queue(tmp_path / "parts", 12)
        assert next_of(part).name == trial.name
        train(part, trial)
    assert [*part.folder.read()] == expected and part.unfinished() == []
    # More trials continue it, and another seed suggests others.
    assert next_of(queue(tmp_path / "parts", 13)).name not in expected
    assert next_of(queue(tmp_path / "other", 12, seed=5)).name != expected[0]


def test_several_hosts_share_the_number_of_trials(tmp_path):
    hosts = [queue(tmp_path, 5) for _ in range(2)]
    claimed = [hosts[number % 2].next() for number in range(6)]
    names = [trial.name for trial in claimed if trial is not None]
    assert len({*names}) == 5 and claimed[5] is None
    # A failed trial counts, and is not continued; an interrupted one is.
    assert claimed[0] is not None and claimed[1] is not None
    hosts[0].record_end(claimed[0], "failed")
    hosts[1].record_end(claimed[1], "interrupted")
    assert next_of(queue(tmp_path, 5)).name == names[1]


def test_a_search_of_few_values_ends_when_all_were_tried(tmp_path, capfd):
    search = queue(tmp_path, 10, {NAME: Choices(("lars", "sgd")), WIDTH: Interval(8, 9, whole=True)})
    names = set[str]()
    while (trial := search.next()) is not None:
        names.add(trial.name)
        write_trial(tmp_path / trial.name, [0.5])
        search.record_end(trial, "done")
    assert len(names) == 4
    assert "jaxddp sweep: after 4 trials, the search suggests no new values" in capfd.readouterr().err


def test_a_suggestion_that_the_config_rejects_is_left_out(tmp_path, capfd):
    def refuse_lars(values: Mapping[str, str]) -> Trial:
        if values[NAME] == "lars":
            raise InputError("lars: has no effect")
        return make_trial(values)

    search = SearchQueue(SweepFolder(tmp_path, "a config"), Search(SPACES, lowest=False), refuse_lars, 6)
    for _ in range(6):
        train(search, next_of(search))
    assert search.next() is None
    assert "jaxddp sweep: a suggestion is left out: lars: has no effect\n" in capfd.readouterr().err


def test_a_search_ends_without_validations_and_needs_optuna(tmp_path, monkeypatch):
    search = queue(tmp_path, 3)
    write_trial(tmp_path / (trial := next_of(search)).name, [])
    search.record_end(trial, "done")
    assert search.next() is None
    assert str(search.error) == f"{trial.name}: was not validated; a search compares trials by their validations"
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"^sweep: optuna is not installed; pip install 'jaxddp\[search\]'$"):
        queue(tmp_path / "other", 3)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("lowest", [False, True])
def test_a_trial_that_is_worse_than_the_median_is_pruned(lowest, tmp_path):
    sign, search = -1 if lowest else 1, Search(SPACES, lowest)
    values = {RATE: "0.1", WIDTH: "8", NAME: "sgd"}
    measured_by_others = [[sign * n, sign * (n + 1)] for n in range(5)]
    others = [search.record(values, "done", measured, measured[1]) for measured in measured_by_others]

    def is_pruned(*measured: float, of=others, checked: int = 0) -> bool:
        return search.should_prune(of, values, [sign * each for each in measured], checked)

    # The medians are 2 and 3.
    assert (is_pruned(1.9), is_pruned(2.1), is_pruned(2.1, 2.9), is_pruned(3.1, 0)) == (True, False, True, False)
    # The trial was worse at its first validation, which may be checked with the second one, or already be checked.
    assert is_pruned(1.9, 9)
    assert not is_pruned(1.9, 9, checked=1)
    assert not is_pruned() and not is_pruned(-9, of=others[:4])


def test_a_pruned_trial_is_not_continued(tmp_path, monkeypatch):
    search = queue(tmp_path, 7, prune=True)
    for number in range(6):
        trial = next_of(search)
        write_trial(tmp_path / trial.name, [0.5 + number / 100])
        search.record_end(trial, "done")
    trial = next_of(search)
    write_trial(tmp_path / trial.name, [0.9], status=None)
    assert not search.should_prune(trial)
    write_trial(tmp_path / trial.name, [0.1], status=None)
    with monkeypatch.context() as patch:
        patch.setattr(search.folder, "read", None)
        assert not search.should_prune(trial)  # This validation was compared.
    write_trial(tmp_path / trial.name, [0.1, 0.1], status=None)
    assert not search.should_prune(trial)  # No other trial has two validations.
    search.folder.release(trial.name)
    search = queue(tmp_path, 7, prune=True)
    assert next_of(search).name == trial.name
    assert search.should_prune(trial)
    assert not queue(tmp_path, 7).should_prune(trial)
    search.record_end(trial, "pruned")
    assert search.next() is None and search.unfinished() == []
    assert search.folder.results()[-1].status == "pruned"


def sweep_of_seeds(folder: Path) -> SweepFolder:
    """Write a sweep of two rates and two seeds, and of a trial that was not started."""
    sweep = SweepFolder(folder, "digits")
    with sweep.changed() as known:
        for rate, seed in ((0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1), (0.3, 0)):
            trial = make_trial({RATE: str(rate), "seed": str(seed)})
            known[trial.name] = trial
            if rate < 0.3:
                write_run(folder / trial.name, seed, status="done", optimizer={"learning_rate": rate})
                write_trial(folder / trial.name, [0.2, rate + seed / 10, 0.1])
    return sweep


def test_the_table_has_the_best_trial_first_and_the_means_over_seeds(tmp_path):
    sweep = sweep_of_seeds(tmp_path)
    rows = sweep.results()
    titles, cells = table(rows)
    assert titles[:5] == ["learning_rate", "seed", "status", "best val", "at step"]
    assert [row[:5] for row in cells] == [
        ["0.2", "1", "done", "top-1 30.00%", "2"],
        ["0.1", "0", "done", "top-1 20.00%", "1"],
        ["0.1", "1", "done", "top-1 20.00%", "2"],
        ["0.2", "0", "done", "top-1 20.00%", "2"],
        ["0.3", "0", "not trained", "-", "-"],
    ]
    seeds = seed_table(rows)
    assert seeds is not None and seeds[0] == ["learning_rate", "seeds", "mean best val", "standard deviation"]
    assert seeds[1] == [["0.2", "2", "top-1 25.00 ± 5.00%", "7.07%"], ["0.1", "2", "top-1 20.00 ± 0.00%", "0.00%"]]
    assert len(sweep.results([rows[-1].trial.name])) == 4
    assert seed_table(rows[-1:]) is None
    assert rows[0].best == ("top1", pytest.approx(0.3), 2, 1, False)
    assert rows[0].measured == [0.2, rows[0].best.value, 0.1]


def test_the_means_are_of_trials_that_differ_in_their_seed_alone(tmp_path):
    sweep = SweepFolder(tmp_path, "digits")
    for seed, devices in enumerate(("2", "4")):
        trial = make_trial({"parallel.devices": devices, "seed": str(seed)})
        with sweep.changed() as known:
            known[trial.name] = trial
        write_run(tmp_path / trial.name, seed, status="done", parallel={"devices": int(devices)})
        write_trial(tmp_path / trial.name, [0.5])
    assert seed_table(sweep.results()) is None


@pytest.mark.parametrize("ended", ["failed", "pruned"])
def test_a_mean_over_seeds_leaves_out_trials_that_are_not_done(ended, tmp_path):
    sweep = sweep_of_seeds(tmp_path)
    last = make_trial({RATE: "0.2", "seed": "1"}).name
    with sweep.changed() as known:
        known[last].ended = ended
    result = json.loads((tmp_path / last / "result.json").read_text())
    status = "preempted" if ended == "pruned" else "failed"
    (tmp_path / last / "result.json").write_text(json.dumps(result | {"status": status}))
    rows = sweep.results()
    seeds = seed_table(rows)
    assert [row.status for row in rows if row.trial.name == last] == [ended]
    assert seeds is not None
    assert seeds[1] == [["0.1", "2", "top-1 20.00 ± 0.00%", "0.00%"], ["0.2", "1", "top-1 20.00%", "-"]]


def test_results_and_a_report_are_written(tmp_path, monkeypatch):
    rows = sweep_of_seeds(tmp_path).results()
    write_results(tmp_path, rows)
    lines = (tmp_path / "results.csv").read_text().splitlines()
    assert lines[0] == f"trial,{RATE},seed,status,metric,best,step,seconds"
    assert lines[1].startswith("learning_rate=0.2__seed=1,0.2,1,done,top1,0.30000000000000004,2,")
    assert lines[5] == "learning_rate=0.3__seed=0,0.3,0,not trained,,,,"
    assert report(tmp_path, rows).startswith(f"{tmp_path / 'report.html'}: 4 runs, ")
    assert "learning_rate=0.2__seed=1" in (tmp_path / "report.html").read_text()
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert report(tmp_path, rows) == "no report.html: report: plotly is not installed; pip install 'jaxddp[report]'"
    assert report(tmp_path, rows[-1:]) == "no report.html: no trial has written anything"
