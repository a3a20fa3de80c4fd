"""A run whose work directory is removed ends with a one-line error, and does not make the directory again."""

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
import jaxddp.workdir.session as presence
from jaxddp.core.errors import InputError
from jaxddp.core.peers import ALONE

TABLE = random_table(24)


def remove(workdir: Path) -> None:
    while workdir.exists():
        shutil.rmtree(workdir, ignore_errors=True)


def save_after_removal(workdir: Path) -> None:
    """Remove the directory, and make what Orbax makes again if it is saving two steps at that moment."""
    remove(workdir)
    for name in ("2", "4.orbax-checkpoint-tmp"):
        (workdir / "checkpoints" / name / "state").mkdir(parents=True)
    (workdir / "curves.png").touch()


def replace_by_a_file(workdir: Path) -> None:
    workdir.rename(workdir.with_name("elsewhere"))
    workdir.write_text("")


def replace_by_another_directory(workdir: Path) -> None:
    workdir.rename(workdir.with_name("elsewhere"))
    shutil.copytree(workdir.with_name("elsewhere"), workdir)


def remove_checkpoints(workdir: Path) -> None:
    remove(workdir / "checkpoints")


class Changes:
    """A listener that changes the work directory in one of its methods at a step."""

    def __init__(self, change: Callable[[Path], None], moment: str, step: int):
        self._change, self._step = change, step
        setattr(self, moment, self._change_at)

    def start(self, run):
        self._workdir = run.workdir

    def _change_at(self, record):
        if record.step == self._step:
            self._change(self._workdir)


# A checkpoint is saved right after the second step, and is still being written at the third.
CASES = [
    *((remove, "step", step) for step in (1, 2, 3)),
    *((remove, "evaluation", 2), (save_after_removal, "evaluation", 2)),
    *((change, "step", 1) for change in (replace_by_a_file, replace_by_another_directory, remove_checkpoints)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "moment", "step"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_run_ends_with_a_one_line_error_and_makes_no_other_directory(change, moment, step, tmp_path, capfd, caplog):
    workdir = tmp_path / "run"
    setup = shared(jaxddp.prepare_training(linear_model(), TABLE, 1, sgd(0.1), 4))
    options = {"listeners": [Changes(change, moment, step)], "workdir": workdir, "val": TABLE, "log_every": "1 step"}
    lost = "run/checkpoints" if change is remove_checkpoints else "run"
    message = f"/{lost}: was removed, moved or replaced while the run wrote there; bring {workdir} back, and the"
    with pytest.raises(InputError, match=message) as error:
        jaxddp.train(jaxddp.softmax_cross_entropy, setup, save_every="2 steps", eval_every="2 steps", **options)
    assert error.value.exit_code == 2
    assert workdir.exists() == change.__name__.startswith(("replace", "remove_"))
    assert (workdir / "config.json").exists() == (change in (replace_by_another_directory, remove_checkpoints))
    assert "Traceback" not in capfd.readouterr().err and not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(("peers", "phase"), [(Second(), "device"), (ALONE, "save")])
def test_a_process_that_may_wait_forever_ends_after_its_work_directory_is_removed(peers, phase, tmp_path, monkeypatch):
    workdir, exits, ended = tmp_path / "run", list[tuple[str, int]](), threading.Event()

    def end_now(reason: str, code: int) -> None:
        exits.append((reason, code))
        ended.set()

    # The process of the tests must not exit. The time limit before an exit is a private constant.
    monkeypatch.setattr(presence, "end_now", end_now)
    monkeypatch.setattr(presence, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(presence, "_EXIT_SECONDS", 0.05)
    workdir.mkdir()
    with pytest.raises(InputError), presence.watch_workdir(workdir, peers), phases.phase(phase):
        workdir.rmdir()
        assert ended.wait(30)
        raise TimeoutError
    reason, code = exits[0]
    assert code == 2 and reason.startswith(f"{workdir}: was removed, moved or replaced while the run")


@pytest.mark.parametrize("complete", [1, 2])
def test_a_checkpoint_that_was_complete_before_the_removal_is_kept_in_a_copy(complete, tmp_path):
    workdir = tmp_path / "run"
    (workdir / "checkpoints" / "2").mkdir(parents=True)
    entries = presence.Presence(workdir)
    entries.saves = lambda: (2, complete)
    entries.check()
    workdir.rename(tmp_path / "elsewhere")
    entries.saves = lambda: (2, 2)
    (workdir / "checkpoints" / "2").mkdir(parents=True)
    entries.remove_recreated()
    assert workdir.exists() == (complete == 2)
