"""A train command whose run has ended prints what the run reached, from the files of the work directory."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from jaxddp.cli import main
from jaxddp.config import load
from jaxddp.core.errors import InputError
from jaxddp.core.peers import ALONE
from jaxddp.recipe.file import read_recipe
from jaxddp.training.checkpoints.integrity import _REQUIRED_FILES, CHECKPOINTS, Integrity
from jaxddp.workdir.claim import Claim, claim, describe_end, nothing_to_train, with_absolute_paths
from jaxddp.workdir.lock import locked

RESULT = {"status": "done", "step": 12, "val": {"loss": 0.5, "top1": 0.75, "count": 8}}
HEAVY = ("jax", "flax", "orbax", "tensorflow")
WRITTEN = datetime(2026, 1, 2, 3, 4).timestamp()


def write_checkpoint(directory: Path, step: int) -> None:
    """Write files in the places of Orbax's files, without a manifest."""
    for name in _REQUIRED_FILES:
        file = directory / CHECKPOINTS / str(step) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def write_result(directory: Path, **changes) -> None:
    (directory / "result.json").write_text(json.dumps(RESULT | changes))
    os.utime(directory / "result.json", (WRITTEN, WRITTEN))


@pytest.fixture
def ended(tmp_path, monkeypatch) -> Path:
    """Return the work directory `run` of a run of the digits that has ended at step 12, in the current directory."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "run"
    directory.mkdir()
    config = with_absolute_paths(load("digits").replace(data={"path": "digits"}, train={"precision": "float32"}))
    claim(directory, Claim(config.to_dict(), {"train": "a", "val": "b"}, read_recipe("digits")), resuming=False)
    for step in (8, 12):
        write_checkpoint(directory, step)
    (directory / CHECKPOINTS / "validation.json").write_text('{"4":{"top1":1},"8":{"top1":0.8},"12":{"top1":0.75}}')
    write_result(directory)
    return directory


def words(*options: str) -> list[str]:
    return ["train", "digits", "--data", "digits", "--workdir", "run", *options]


def lines_of(**changes) -> str:
    """Return the lines for the command with changed sections."""
    file = read_recipe("digits")
    config = file.config.replace(data={"path": "digits"}).replace(**changes)
    return nothing_to_train(replace(file, config=config), Path("run"))


def test_the_same_command_prints_what_the_run_reached_and_how_to_go_on(ended, capsys):
    assert main(words()) == 0
    reached, advice = capsys.readouterr().out.splitlines()
    result = "result: val loss 0.5000 top-1 75.00%; best: top-1 80.00% at step 8"
    assert reached == f"{ended}: done at step 12 on 2026-01-02 03:04: nothing to train; {result}"
    assert re.search(rf"--epochs; .* --workdir; .*: jaxddp eval {ended}$", advice)


@pytest.mark.parametrize(
    "command",
    [
        words(),
        pytest.param(["train", "run"], marks=pytest.mark.ci),
        pytest.param(["launch", "--processes", "2", "--", *words()], marks=pytest.mark.ci),
    ],
)
def test_an_ended_run_needs_neither_jax_nor_tensorflow(command, ended):
    program = f"""
import sys
from dataclasses import replace
from jaxddp.cli import main
assert main({command!r}) == 0
assert not {{*{HEAVY!r}}} & {{*sys.modules}}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{ended}: done at step 12 on ")


def test_keys_that_change_neither_the_length_nor_the_data_leave_nothing_to_train(ended):
    # Nor is a default that a config spells out a change.
    assert json.loads((ended / "config.json").read_text())["optimizer"]["beta2"] is None
    changes = {"parallel": {"cpu_devices": 2}, "eval": {"batch_size": 5}, "optimizer": {"beta2": 0.999}}
    assert lines_of() == lines_of(**changes, log={"every": "3 steps"}) != ""


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"duration": "7 epochs"}},
        {"train": {"stop_after": 3}},
        {"checkpoint": {"best": "val loss"}},
        {"data": {"path": "elsewhere"}},
    ],
)
def test_a_run_with_another_length_or_other_data_starts(changes, ended):
    assert lines_of(**changes) == ""


def test_another_setting_is_an_error_as_on_a_resume(ended):
    with pytest.raises(InputError, match=r"config\.json: optimizer\.learning_rate was .* and is now 0\.7; a resumed"):
        lines_of(optimizer={"learning_rate": 0.7})
    saved = json.loads((ended / "config.json").read_text())
    (ended / "config.json").write_text(json.dumps(saved | {"fingerprint": 5}))
    assert lines_of() == ""
    (ended / "config.json").write_text(json.dumps(saved | {"optimizer": {"name": [[]]}}))
    with pytest.raises(InputError, match=r"config\.json: optimizer\.name was \[\[\]\] and is now 'adamw'"):
        lines_of()


@pytest.mark.parametrize("status", ["failed", "preempted"])
def test_a_run_that_has_not_ended_starts(status, ended):
    write_result(ended, status="stopped", reason="no better loss")
    assert "stopped at step 12 (no better loss) on " in lines_of()
    write_result(ended, status=status)
    assert lines_of() == "" == describe_end(ended, 12, ALONE, is_same=True)


@pytest.mark.parametrize("name", ["result.json", "config.json", f"{CHECKPOINTS}/12/progress/metadata"])
def test_a_run_with_a_missing_file_starts(name, ended):
    (ended / name).unlink()
    assert lines_of() == ""


def test_a_run_with_a_damaged_checkpoint_starts(ended):
    file = ended / CHECKPOINTS / "12/progress/metadata"
    file.write_bytes(b"saved")
    Integrity(ended / CHECKPOINTS).write(12)
    assert "done at step 12" in lines_of()
    file.write_bytes(b"other")
    assert lines_of() == ""


def test_a_run_that_is_writing_starts_and_reports_the_lock(ended):
    with locked(ended):
        assert lines_of() == ""
    for content in ("[]", '{"status": "done", "step": "12", "val": null}', "[" * 100_000):
        (ended / "result.json").write_text(content)
        assert lines_of() == ""


def test_a_start_describes_the_end_unless_the_length_has_changed(ended):
    assert describe_end(ended, 12, ALONE, is_same=True) == lines_of()
    assert describe_end(ended, 8, ALONE, is_same=True) == describe_end(ended, None, ALONE, is_same=True) == ""
    assert describe_end(ended, 12, ALONE, is_same=False) == ""


def test_a_resume_knows_whether_the_length_has_changed(ended):
    config, recipe = load("run").replace(parallel={"cpu_devices": 2}), read_recipe("digits")
    claimed = Claim(config.to_dict(), {"train": "a", "val": "b"}, recipe)
    assert claim(ended, claimed, resuming=True)[1] is True
    longer = config.replace(train={"duration": "9 epochs"})
    assert claim(ended, Claim(longer.to_dict(), claimed.fingerprints, recipe), resuming=True)[1] is False
    assert lines_of(train={"duration": "9 epochs"}) == ""  # As if the longer run had been killed before its first step.
