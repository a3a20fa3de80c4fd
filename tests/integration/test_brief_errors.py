"""Errors stay short although C++ libraries and threads print, too: only few lines precede the last line."""

import sys
from pathlib import Path

import pytest
from support.processes import BRIEF, TRAIN, Program

FEW = 3
"""Maximum number of lines besides the last one and the usual output."""

SMALL_FILES = """
import resource, sys
from jaxddp.cli import main
from jaxddp.training.checkpoints.manager import Checkpoints

save = Checkpoints.save
def limited(*arguments):
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_500, 2_500))
    return save(*arguments)
Checkpoints.save = limited
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def usual_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the log level of a user's shell. `conftest.py` sets a lower one."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)


def test_a_full_disk_prints_one_line(arrays, start, tmp_path):
    script = Path(tmp_path / "script.py")
    script.write_text(SMALL_FILES)
    words = [*TRAIN, "--data.path", str(arrays), "--workdir", str(tmp_path / "run"), *BRIEF]
    run = start(Program, [sys.executable, str(script), *words, "--checkpoint.every", "2 steps"], tmp_path / "output")
    assert run.end() == 2, run.out + run.err
    assert run.last.startswith(f"jaxddp: {tmp_path / 'run'}/checkpoints: cannot be written (File too large)")
    assert "Traceback" not in run.err and len(run.err.splitlines()) <= 1 + FEW
