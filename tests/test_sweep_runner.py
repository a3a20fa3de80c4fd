"""The processes of a sweep: trials that fail, stop, report bad input or are trained by another process."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jaxddp.core.errors import InputError, Unreachable
from jaxddp.sweeps.folder import SweepFolder
from jaxddp.sweeps.queues import GridQueue
from jaxddp.sweeps.runner import Runner, Slot, describe, slots
from jaxddp.sweeps.trials import Trial
from jaxddp.workdir.lock import locked

TRAIN = """
import fcntl, json, os, pathlib, signal, sys, time
words = sys.argv[1:]
workdir, kind = (pathlib.Path(words[words.index(name) + 1]) for name in ("--workdir", "--kind"))
kind = kind.name
with (workdir / "starts").open("a") as file:
    file.write(f"{os.environ['JAX_NUM_PROCESSES']} {sorted(os.sched_getaffinity(0))}\\n")
starts = len((workdir / "starts").read_text().splitlines())
lock = (workdir / ".lock").open("ab")
def end(code, line):
    print(line, flush=True)
    sys.exit(code)
def save(*_):
    (workdir / "result.json").write_text(json.dumps({"status": "preempted", "step": 1}))
    end(75, "saved")
if kind == "waits" and starts == 1:
    signal.signal(signal.SIGTERM, save)
    (workdir / "ready").touch()
    time.sleep(60)
if kind == "stuck":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (workdir / "ready").touch()
    time.sleep(60)
if kind == "fails" or (kind == "fails-once" and starts == 1):
    end(3, "jaxddp: broken")
if kind == "quits":
    with open(int(os.environ["JAXDDP_STATUS_FD"]), "wb", buffering=0) as pipe:
        pipe.write(b"+!-")
    end(3, "the user's exit")
if kind == "bad":
    while not any(workdir.parent.glob("*/re[as]*")):
        time.sleep(0.02)
    end(2, "jaxddp: --lr 9: expected another")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    end(1, "jaxddp: another run is writing there")
(workdir / "result.json").write_text(json.dumps({"status": "done", "step": 2}))
"""


def result_of(folder: Path) -> str:
    return json.loads((folder / "result.json").read_text())["status"]


def trials(*kinds: str) -> list[Trial]:
    return [Trial(f"{number}-{kind}", {"kind": kind}, ["--kind", kind]) for number, kind in enumerate(kinds)]


class Sweeps:
    """Sweeps of one folder, with a stand-in for `jaxddp train`."""

    def __init__(self, folder: Path):
        self.folder, self._script = folder / "sweep", folder / "train.py"
        self._script.write_text(TRAIN)

    def queue(self, of: Sequence[Trial]) -> GridQueue:
        return GridQueue(SweepFolder(self.folder, "a config"), of)

    def runner(self, queue: GridQueue, slots: Sequence[Slot] = (Slot(),), **options) -> Runner:
        return Runner(self.folder, queue, slots, program=(sys.executable, "-S", str(self._script)), **options)

    def run(self, of: Sequence[Trial], jobs: int = 1, **options) -> int:
        return self.runner(self.queue(of), [Slot()] * jobs, **options).run()

    def starts(self) -> list[int]:
        """Return how often each trial was started, in the order of their names."""
        files = (folder / "starts" for folder in sorted(self.folder.glob("[0-9]*")))
        return [len(file.read_text().splitlines()) if file.exists() else 0 for file in files]


@pytest.fixture
def sweeps(tmp_path) -> Sweeps:
    return Sweeps(tmp_path)


def send_when(ready: Callable[[], bool], *signals: signal.Signals) -> threading.Thread:
    """Send signals to this process when a condition is met."""

    def send() -> None:
        give_up = time.monotonic() + 30
        while not ready() and time.monotonic() < give_up:
            time.sleep(0.02)
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_finished_trials_are_skipped_and_failed_ones_are_started_again(sweeps, capfd):
    some = trials("good", "fails-once", "fails", "good")
    assert sweeps.run(some, jobs=2) == 1
    assert sweeps.starts() == [1, 2, 2, 1]
    err = capfd.readouterr().err
    assert "1-fails-once: failed with exit code 3: broken; started again (1 of 1)\n" in err
    assert "2-fails: failed with exit code 3: broken\n" in err and "0-good: done, - (" in err
    assert [trial.name for trial in sweeps.queue(some).unfinished()] == ["2-fails"]
    # The same command starts only the failed trial. Without restarts, it is started once.
    assert sweeps.run(some, restarts=0) == 1
    assert sweeps.starts() == [1, 2, 3, 1]
    # The grid gets more values, and loses one.
    more = [*trials("good", "fails-once"), Trial("9-good", {"kind": "good"}, ["--kind", "good"])]
    queue = sweeps.queue(more)
    assert queue.earlier == ["2-fails", "3-good"] and [trial.name for trial in queue.unfinished()] == ["9-good"]
    assert sweeps.run(more) == 0 and sweeps.starts() == [1, 2, 3, 1, 1]


def test_a_trial_that_the_users_code_ended_is_not_started_again(sweeps):
    assert sweeps.run(trials("quits")) == 1 and sweeps.starts() == [1]


def test_bad_input_ends_a_sweep_that_begins_and_the_other_trials_save(sweeps, capfd):
    some = trials("waits", "bad", "good")
    with pytest.raises(InputError, match=r"^1-bad: --lr 9: expected another$"):
        sweeps.run(some, jobs=2)
    assert sweeps.starts() == [1, 1] and not (sweeps.folder / "2-good").exists()
    assert "jaxddp sweep: an error: the running trials were asked to save and stop" in capfd.readouterr().err
    # It may be a fault of this trial alone, such as a batch that needs too much memory, if another has finished.
    assert sweeps.run(trials("good", "bad", "good")) == 1 and sweeps.starts() == [1, 1, 2, 1]
    assert "1-bad: failed with exit code 2: --lr 9: expected another\n" in capfd.readouterr().err
    (sweeps.folder / "1-bad/metrics.jsonl").write_text('{"step": 5, "split": "train", "loss": 1.0}\n')
    with pytest.raises(InputError):
        sweeps.run(trials("good", "bad"))


def test_an_error_of_the_source_ends_the_sweep_and_the_running_trials_save(sweeps):
    class Queue(GridQueue):
        def next(self) -> Trial | None:
            if (sweeps.folder / "0-waits" / "ready").exists():
                raise Unreachable("sweep.json: cannot be written")
            return super().next()

    queue = Queue(SweepFolder(sweeps.folder, "a config"), trials("waits"))
    with pytest.raises(Unreachable, match=r"^sweep\.json: cannot be written$"):
        sweeps.runner(queue, [Slot()] * 2).run()
    assert result_of(sweeps.folder / "0-waits") == "preempted"


def test_a_trial_that_failed_before_does_not_change_the_exit_code_of_a_stop(sweeps):
    sender = send_when((sweeps.folder / "1-waits" / "ready").exists, signal.SIGTERM)
    assert sweeps.run(trials("fails", "waits", "good"), restarts=0) == 75
    sender.join()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stopped_sweep_saves_and_the_same_command_continues(number, code, sweeps):
    some = trials("waits", "good")
    sender = send_when((sweeps.folder / "0-waits" / "ready").exists, number)
    assert sweeps.run(some) == code
    sender.join()
    assert result_of(sweeps.folder / "0-waits") == "preempted"
    assert sweeps.starts() == [1] and sweeps.run(some) == 0 and sweeps.starts() == [2, 1]


@pytest.mark.parametrize(("signals", "grace"), [((signal.SIGTERM,), 0.3), ((signal.SIGINT, signal.SIGINT), 60)])
def test_a_trial_that_does_not_stop_is_killed(signals, grace, sweeps):
    sender = send_when((sweeps.folder / "0-stuck" / "ready").exists, *signals)
    assert sweeps.run(trials("stuck", "good"), save_grace=grace) == 128 + signals[0]
    sender.join()
    assert sweeps.starts() == [1]


def test_a_trial_of_another_process_is_left_to_it(sweeps, capfd):
    some = trials("good", "good")
    (sweeps.folder / "0-good").mkdir(parents=True)
    with locked(sweeps.folder / "0-good"):
        assert sweeps.run(some) == 0
        assert not (sweeps.folder / "0-good" / "starts").exists()
    assert [trial.name for trial in sweeps.queue(some).unfinished()] == ["0-good"]
    # A run that takes the directory after the sweep looked is reported by the trial itself.
    queue = sweeps.queue(some)
    queue.next = iter([queue.next(), None]).__next__  # type: ignore[method-assign]
    with locked(sweeps.folder / "0-good"):
        assert sweeps.runner(queue).run() == 0
    assert "0-good: another process trains it" in capfd.readouterr().err
    assert not (sweeps.folder / "0-good" / "result.json").exists()


def test_two_sweeps_of_one_folder_claim_different_trials(sweeps):
    some = trials("good", "good", "good")
    first, second = sweeps.queue(some), sweeps.queue(some)
    claimed = [queue.next() for queue in (first, second, first, second)]
    assert [trial and trial.name for trial in claimed] == ["0-good", "1-good", "2-good", None]
    first.folder.release("0-good")
    assert (trial := second.next()) is not None and trial.name == "0-good"


def test_a_trial_with_other_arguments_is_not_finished(tmp_path):
    folder, words, result = SweepFolder(tmp_path, "a config"), ["digits", "--epochs", "2"], tmp_path / "a/result.json"
    result.parent.mkdir()
    result.write_text('{"status": "done"}')
    assert folder.is_finished(Trial("a", {}, words, finished_words=words))
    # Without the sweep, the trial may have had other arguments.
    for others in (None, ["digits", "--epochs", "1"]):
        assert not folder.is_finished(Trial("a", {}, words, finished_words=others))
    for content in ('{"status": "preempted"}', "[]", "{"):
        result.write_text(content)
        assert not folder.is_finished(Trial("a", {}, words, finished_words=words))


def test_each_trial_has_its_share_of_the_cores(sweeps, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    places = slots(2)
    assert sorted(core for place in places for core in place.cores) == cores
    assert sweeps.runner(sweeps.queue(trials("good", "good")), places).run() == 0
    lines = {(sweeps.folder / name / "starts").read_text() for name in ("0-good", "1-good")}
    assert lines == {f"1 {sorted(place.cores)}\n" for place in places}
    assert describe(places) == "2 side by side" and describe(slots(1)) == "one after another"
    assert slots(len(cores) + 1) == [Slot()] * (len(cores) + 1)


def test_gpus_are_divided_among_the_trials(monkeypatch):
    gpus = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert [place.gpus for place in slots(2, gpus)] == [("4", "5"), ("6", "7")]
    assert slots(2, gpus)[1].environment()["CUDA_VISIBLE_DEVICES"] == "6,7"
    with pytest.raises(InputError, match=r"^--jobs 3: 4 GPUs cannot be divided evenly among the trials; 1 or 2 or 4"):
        slots(3, gpus)
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    monkeypatch.setattr("jaxddp.sweeps.runner.local_chips", lambda: ["0", "1"])
    assert "JAX_PROCESS_ID" not in Slot().environment()
    with pytest.raises(InputError, match="a process uses all 2 TPU chips of this machine; give --jobs 1"):
        slots(2)
