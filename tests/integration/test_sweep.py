"""Real sweeps: their runs equal those of plain commands, also after a kill, and a search prunes a running trial."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes import (
    BRIEF,
    LONGER,
    REPOSITORY,
    TRAIN,
    Program,
    checkpoint_bytes,
    environment,
    is_checkpointed,
    losses,
    result,
)

import jaxddp.commands.sweep as sweep_command

pytestmark = pytest.mark.ci
JAXDDP = [sys.executable, "-m", "jaxddp"]
SEEDS = ("seed=0", "seed=1")


class Sweep(Program):
    """`jaxddp sweep` in its own process."""

    def __init__(self, folder: Path, output: Path, data: Path, *more: str):
        words = [*TRAIN[1:], "--data.path", str(data), "--workdir", str(folder), *more]
        super().__init__([*JAXDDP, "sweep", *words], output)

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def record(folder: Path) -> dict:
    return json.loads((folder / "sweep.json").read_text())


def is_running(pid: int) -> bool:
    """Return whether a process runs. The kernel may need a moment to end it, or nobody may wait for it."""
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        if state in "ZX":
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_sweep_ends_with_the_same_bits_as_plain_commands(number, arrays, start, tmp_path):
    folder, words = tmp_path / "sweep", ["--seed", "0:2", *LONGER]
    sweep = start(Sweep, folder, tmp_path / "first", arrays, *words)
    sweep.wait_until(lambda: is_checkpointed(folder / SEEDS[0]))
    (child,) = sweep.children()
    sweep.process.send_signal(number)
    assert sweep.end() == (75 if number == signal.SIGTERM else -number), sweep.out + sweep.err
    assert not is_running(child)
    sweep = start(Sweep, folder, tmp_path / "second", arrays, *words)
    sweep.ends_well()
    assert "2 trials" in sweep.err and "report.html: 2 runs" in sweep.out and "mean best val" in sweep.out
    again = start(Sweep, folder, tmp_path / "third", arrays, *words)
    again.ends_well()
    assert "started" not in again.err
    for seed, name in enumerate(SEEDS):
        plain = tmp_path / f"plain-{seed}"
        plain_words = [*TRAIN, "--data.path", str(arrays), "--seed", str(seed), *LONGER, "--workdir", str(plain)]
        start(Program, [*JAXDDP, *plain_words], tmp_path / f"plain-out-{seed}").ends_well()
        assert losses(folder / name) == losses(plain) and checkpoint_bytes(folder / name) == checkpoint_bytes(plain)


def test_trials_continue_with_a_longer_duration_and_are_trained_by_their_numbers(arrays, start, tmp_path):
    folder, words = tmp_path / "sweep", ["--seed", "0:2", "--jobs", "2"]
    start(Sweep, folder, tmp_path / "task", arrays, *words, *BRIEF, "--index", "1").ends_well()
    assert result(folder / SEEDS[1])["status"] == "done" and not (folder / SEEDS[0]).exists()
    sweep = start(Sweep, folder, tmp_path / "rest", arrays, *words, *BRIEF)
    sweep.ends_well()
    assert "2 trials (1 finished)" in sweep.err and "seed=1: started" not in sweep.err
    start(Sweep, folder, tmp_path / "longer", arrays, *words, "--train.duration", "9 steps").ends_well()
    assert [result(folder / name)["step"] for name in SEEDS] == [9, 9]
    changed = start(Sweep, folder, tmp_path / "changed", arrays, *words, *BRIEF, "--train.batch-size", "4")
    assert changed.end() == 2
    assert changed.last.startswith("jaxddp: seed=") and "batch" in changed.last, changed.err


def test_a_search_prunes_a_trial_that_runs(arrays, start, tmp_path):
    pytest.importorskip("optuna", reason="optuna is missing: pip install 'jaxddp[search]'")
    folder = tmp_path / "sweep"
    words = ["--optimizer.learning-rate", "0.001..0.02:log", "--search", "optuna", "--checkpoint.best", "val loss"]
    start(Sweep, folder, tmp_path / "first", arrays, *words, "--trials", "5", *BRIEF).ends_well()
    content = record(folder)
    assert len(content["trials"]) == 5
    endless = ["--train.duration", "1000000 steps", "--eval.every", "200 steps"]
    # The losses of the first trials become so low that the sixth, which would train for hours, is worse.
    for trial in content["trials"]:
        trial["finished_words"] = longer = [*trial["words"][: -len(BRIEF)], *endless]
        template = SimpleNamespace(words=lambda _, longer=longer: longer)
        trial["recipe"] = sweep_command._trial(template, folder, trial["values"]).recipe
        file = folder / trial["name"] / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row | {"loss": row["loss"] / 1000}) + "\n" for row in rows))
    (folder / "sweep.json").write_text(json.dumps(content))
    sweep = start(Sweep, folder, tmp_path / "second", arrays, *words, "--trials", "6", "--prune", *endless)
    sweep.ends_well()
    last = record(folder)["trials"][-1]
    assert f"{last['name']}: pruned, loss " in sweep.err
    assert last["ended"] == "pruned" and result(folder / last["name"])["status"] == "preempted"


def test_ray_tasks_train_the_trials(arrays, start, tmp_path):
    pytest.importorskip("ray", reason="ray is missing: pip install ray")
    env = environment(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
    script, folder = str(REPOSITORY / "launch" / "ray_sweep.py"), tmp_path / "sweep"
    words = [*TRAIN[1:], "--data.path", str(arrays), "--seed", "0:2", "--workdir", str(folder)]
    command = [sys.executable, script, "--address", "local", "--", *words]
    run = start(Program, [*command, "--train.duration", "100000 steps"], tmp_path / "stopped", env)
    run.wait_until(lambda: any(losses(folder / name) for name in SEEDS))
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 75, run.out + run.err
    bad = [*command, "--train.duration", "100000 steps", "--train.batch-size", "7"]
    run = start(Program, bad, tmp_path / "bad", env)
    assert run.end() == 2, run.out + run.err
    folder.rename(tmp_path / "before")
    run = start(Program, [*command, *BRIEF], tmp_path / "whole", env)
    run.ends_well()
    assert [result(folder / name)["status"] for name in SEEDS] == ["done", "done"]
    # The sweep starts each trial once more, which ends at once.
    assert "(2 of 2)" in run.err and "mean best val" in run.out
    assert os.path.getsize(folder / SEEDS[0] / "output.log")
