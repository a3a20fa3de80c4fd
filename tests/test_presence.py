"""A work directory that is removed during a run: the run ends with one line, and does not make it again."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.data import random_table
from support.networks import linear_model
from support.peers import Second
from support.shared import sgd, shared

import jaxddp
import jaxddp.core.phases as phases
import jaxddp.workdir.presence as presence
from jaxddp.core.errors import InputError
from jaxddp.core.peers import ALONE

TABLE = random_table(24)


def removed(workdir: Path) -> None:
    while workdir.exists():
        shutil.rmtree(workdir, ignore_errors=True)


def moved(workdir: Path) -> None:
    workdir.rename(workdir.with_name("elsewhere"))


def replaced_by_a_file(workdir: Path) -> None:
    moved(workdir)
    workdir.write_text("")


def replaced_by_another(workdir: Path) -> None:
    moved(workdir)
    shutil.copytree(workdir.with_name("elsewhere"), workdir)


def without_its_checkpoints(workdir: Path) -> None:
    removed(workdir / "checkpoints")


def without_its_config(workdir: Path) -> None:
    (workdir / "config.json").unlink()


CHANGES: dict[Callable[[Path], None], str] = {
    removed: "run",
    moved: "run",
    replaced_by_a_file: "run",
    replaced_by_another: "run",
    without_its_checkpoints: "run/checkpoints",
    without_its_config: "run/config.json",
}
"""Each change, with the path that the message names."""


class Changes:
    """A listener that changes the work directory in one of its methods at a step."""

    def __init__(self, change: Callable[[Path], None], moment: str, step: int):
        self._change, self._at = change, (moment, step)

    def start(self, run):
        self._workdir = run.workdir

    def step(self, record):
        self._hear("step", record.step)

    def evaluation(self, record):
        self._hear("evaluation", record.step)

    def _hear(self, moment: str, step: int) -> None:
        if (moment, step) == self._at:
            self._change(self._workdir)


# A checkpoint is saved right after the second step, and is still being written at the third.
AT = [("step", 1), ("step", 2), ("step", 3), ("evaluation", 2)]
CASES = [*((removed, *at) for at in AT), *((change, "step", 1) for change in CHANGES if change is not removed)]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "moment", "step"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_a_run_ends_with_a_one_line_error_and_makes_no_other_directory(change, moment, step, tmp_path, capfd, caplog):
    workdir = tmp_path / "run"
    setup = shared(jaxddp.prepare_training(linear_model(), TABLE, 1, sgd(0.1), 4))
    more = {"listeners": [Changes(change, moment, step)], "workdir": workdir, "val": TABLE, "log_every": "1 step"}
    line = (
        f"/{CHANGES[change]}: was removed, moved or replaced while the run wrote there; bring {workdir} back, and the"
    )
    with pytest.raises(InputError, match=line) as end:
        jaxddp.train(jaxddp.softmax_cross_entropy, setup, save_every="2 steps", eval_every="2 steps", **more)
    assert end.value.exit_code == 2
    assert workdir.exists() == change.__name__.startswith(("replaced", "without"))
    assert (workdir / "config.json").exists() == (change in (replaced_by_another, without_its_checkpoints))
    assert "Traceback" not in capfd.readouterr().err and not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(("peers", "phase"), [(Second(), "device"), (ALONE, "save")])
def test_a_process_that_may_wait_forever_ends_after_the_removal(peers, phase, tmp_path, monkeypatch):
    workdir, said, ended = tmp_path / "run", list[tuple[str, int]](), threading.Event()

    def end_now(reason: str, code: int) -> None:
        said.append((reason, code))
        ended.set()

    # This process must not exit; the time that it has to end by itself is private.
    monkeypatch.setattr(presence, "end_now", end_now)
    monkeypatch.setattr(presence, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(presence, "_EXIT_SECONDS", 0.05)
    workdir.mkdir()
    with pytest.raises(InputError), presence.watch_workdir(workdir, peers), phases.phase(phase):
        workdir.rmdir()
        assert ended.wait(30)
        raise TimeoutError
    reason, code = said[0]
    assert code == 2 and reason.startswith(f"{workdir}: was removed, moved or replaced while the run")


def test_a_check_reads_only_the_directory_while_its_entries_are_unchanged(tmp_path, monkeypatch):
    workdir = tmp_path / "run"
    (workdir / "checkpoints").mkdir(parents=True)
    (workdir / "config.json").touch()
    known, looked, stat = presence.Presence(workdir), list[Path](), os.stat
    known.check()
    monkeypatch.setattr(presence.os, "stat", lambda path: looked.append(Path(path)) or stat(path))
    known.check()
    assert looked == [workdir]
    times = stat(workdir)
    (workdir / "config.json").unlink()
    # Simulates a file system without modification times, where the thread finds the change before the next check.
    os.utime(workdir, ns=(times.st_atime_ns, times.st_mtime_ns))
    known.check()
    assert known.fault() is not None
    with pytest.raises(InputError, match=r"config\.json: was removed"):
        known.check()
