"""`jaxddp runs`: it finds runs and their status, and does not disturb an active run."""

import fcntl
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.reports import rows_of, write_run

from jaxddp.cli import main
from jaxddp.config.goal import Goal
from jaxddp.core.errors import Unreachable
from jaxddp.reports.charts import curves
from jaxddp.reports.tables import SeedGroup, read_runs, run_table, runs_below, seed_table
from jaxddp.training.checkpoints.integrity import Integrity, ValidationFile
from jaxddp.workdir.lock import LOCK_FILE, is_locked, locked


def cells_by_run(folder: Path) -> dict[str, list[str]]:
    """Return the other cells of each row by the name of the run."""
    table = run_table(read_runs(runs_below(folder)))
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


def test_each_status_of_a_run_is_listed(tmp_path):
    statuses = (("a", "done"), ("b", "failed"), ("c", "preempted"), ("d", None), ("e", None), ("f", "preempted"))
    for name, status in statuses:
        write_run(tmp_path / name, status=status)
    (tmp_path / "e" / LOCK_FILE).unlink()
    with locked(tmp_path / "f"):
        shown_statuses = {name: cells[0] for name, cells in cells_by_run(tmp_path).items()}
    assert shown_statuses == {**dict(statuses), "d": "ended", "e": "unknown", "f": "running"}


def test_a_run_of_another_process_is_listed_as_running(tmp_path):
    workdir = write_run(tmp_path / "a", status=None)
    program = (
        "import sys, pathlib, jaxddp.workdir.lock as lock\n"
        "with lock.locked(pathlib.Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    )
    command, pipe = [sys.executable, "-c", program, str(workdir)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        assert is_locked(workdir) is True
        with pytest.raises(Unreachable, match=rf"is writing there \(process {process.pid} on "), locked(workdir):
            pass
        process.communicate()
    assert is_locked(workdir) is False


def test_listing_writes_nothing_and_several_processes_may_list(tmp_path):
    workdir = write_run(tmp_path / "a")
    with (workdir / LOCK_FILE).open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # Another process reads the run.
        assert is_locked(workdir) is False
    (workdir / LOCK_FILE).unlink()
    assert is_locked(workdir) is None and not (workdir / LOCK_FILE).exists()


def test_a_run_can_begin_while_another_process_lists(tmp_path):
    workdir = write_run(tmp_path / "a")
    with (workdir / LOCK_FILE).open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        threading.Timer(0.02, fcntl.flock, (reader, fcntl.LOCK_UN)).start()
        with locked(workdir):
            is_running = is_locked(workdir)
        # The reader's file stays open until its lock is released.
        time.sleep(0.05)
    assert is_running is True


def test_only_runs_are_found_below_a_folder(tmp_path):
    visible = [tmp_path / "a", tmp_path / "sweep" / "lr0.1" / "seed0", tmp_path / "sweep" / "lr0.1" / "seed1"]
    hidden = [tmp_path / ".trash" / "b", tmp_path / "a" / "recipe" / "inside", tmp_path.joinpath(*"123456") / "deep"]
    for workdir in (*visible, *hidden):
        write_run(workdir)
    (tmp_path / "link").symlink_to(tmp_path / "sweep")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"hidden_size": 768}')
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "metrics.jsonl").write_text('{"st')
    assert runs_below(tmp_path) == sorted([*visible, tmp_path / "torn"])
    assert runs_below(visible[0]) == [visible[0]]
    assert [*cells_by_run(tmp_path)] == ["a", "sweep/lr0.1/seed0", "sweep/lr0.1/seed1", "torn"]


def test_an_active_run_is_listed_with_its_last_complete_metrics(tmp_path):
    workdir = write_run(tmp_path / "a", status=None)
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (workdir / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:30])
    (val,) = [json.loads(line) for line in lines[:5] if '"val"' in line]
    _, step, best, best_step, last_value, epoch, _ = cells_by_run(tmp_path / "a")["a"]
    assert (step, epoch, best_step, best) == ("20 of 40", "2", "10", f"top-1 {val['top1']:.2%}") and last_value == best
    (workdir / "metrics.jsonl").unlink()
    assert cells_by_run(tmp_path / "a")["a"][1:] == ["0", "-", "-", "-", "-", "-"]


def test_the_best_validation_follows_the_goal_of_the_run(tmp_path):
    """The split val_ema is in all tables and charts."""
    goal, workdirs = Goal.parse("val_ema loss", None, 0.0), [tmp_path / "a", tmp_path / "b"]
    for seed, workdir in enumerate(workdirs):
        write_run(workdir, seed)
        measured = [row | {"split": "val_ema", "loss": row["loss"] / 2} for row in rows_of(workdir, "val")]
        with (workdir / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in measured[1:])
        (workdir / "checkpoints").mkdir()
        validations = ValidationFile(workdir / "checkpoints", Integrity(workdir / "checkpoints"), goal)
        validations.put(10, {"loss": 0.5, "top1": 0.25, "val_ema loss": 0.125, "count": 100})
    runs = read_runs(workdirs)
    first = runs[0]
    minima = [min(row["loss"] for row in rows_of(workdir, "val_ema")) for workdir in workdirs]
    assert [run.best.metric for run in runs] == ["val_ema loss"] * 2
    assert [run.best.value for run in runs] == pytest.approx(minima)
    assert np.isnan(first.validations["val_ema loss"][0]) and len(first.validations["val_ema loss"]) == 4
    assert first.validation_seconds == pytest.approx(7 * 0.5)
    rows = {(row[1].text, row[2].text): row for row in seed_table(runs, [SeedGroup("all", "#000000", (0, 1))]).rows}
    assert rows["val_ema loss", "best"][3].text == "2" and ("val_ema top-1", "last") in rows
    names = [trace["name"] for chart in curves(runs, ["#000000"] * 2) for trace in chart.data]
    assert "a, validation of averaged parameters" in names and "b, validation" in names


def test_the_command_prints_a_table(tmp_path, capfd):
    workdir = write_run(tmp_path / "first", 3)
    best = max(row["top1"] for row in rows_of(workdir, "val"))
    assert main(["runs", str(tmp_path)]) == 0
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "first" in line]
    assert "done" in line and "40 of 40" in line and f"top-1 {best:.2%}" in line
    assert main(["runs", str(tmp_path / "first" / "none")]) == 2
    assert "none: no such directory; give one that contains work directories" in capfd.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["runs", str(tmp_path / "empty")]) == 0
    assert capfd.readouterr().out == f"{tmp_path}/empty: contains no runs\n"
