"""Mistakes that need several processes: each ends all of them with code 2 and a message that names it."""

from pathlib import Path

import numpy as np
import pytest
from support.processes import Launched, brief_words

# Changes process 1 of a job, because the launcher gives all processes the same command.
CHANGED = """
import os, sys
from jaxddp.cli import main
words = sys.argv[1:]
if os.environ["JAX_PROCESS_ID"] == "1":
    {change}
sys.exit(main(words))
"""


# tests/test_parallel.py tests the message.
@pytest.mark.ci
def test_a_batch_that_cannot_be_divided_among_the_devices_ends_all_processes(arrays, start, tmp_path):
    more = ["--train.batch-size", "6", "--parallel.cpu-devices", "2"]
    run = start(Launched, tmp_path / "launch", 2, brief_words(arrays, tmp_path / "run", *more))
    assert run.end() == 2
    expected = "--train.batch-size 6 cannot be divided among 4 devices; 4 or 8 would do"
    assert f"jaxddp: {expected}" in (run.last_of(0), run.last_of(1))
    # A process may end first because the other one ended.
    assert expected in run.last
    assert not (tmp_path / "run").exists()


@pytest.fixture
def run_changed(arrays, start, tmp_path):
    """Run two processes, the second with a change, which end with code 2. Returns their last lines."""

    def run(change: str, data: Path = arrays) -> list[str]:
        program = tmp_path / "twisted.py"
        program.write_text(CHANGED.format(change=change))
        command = ["python", str(program), *brief_words(data, tmp_path / "run")]
        launched = start(Launched, tmp_path / "launch", 2, command)
        assert launched.end() == 2, launched.out + launched.err
        last_lines = [launched.last_of(rank) for rank in (0, 1)]
        assert all(line.startswith("jaxddp: ") for line in last_lines), last_lines
        assert all(f"process {rank}: exit code 2" in launched.err for rank in (0, 1)), launched.err
        assert launched.last.removeprefix("[0] ").removeprefix("[1] ") in last_lines
        return last_lines

    return run


@pytest.mark.ci
def test_an_error_gives_both_values_of_a_key_that_differs(run_changed):
    last_lines = run_changed("words += ['--optimizer.weight-decay', '0.25']")
    for rank, line in enumerate(last_lines):
        # The first process to find the difference may end before the other compares.
        assert f" differs: process {rank} has " in line or f"process {1 - rank}" in line
        # The second process has it as an option.
        named = "optimizer.weight_decay differs" in line or "--optimizer.weight-decay differs" in line
        assert "'0.25'" in line and "'0.05'" in line and named


# test_together.py tests tables that differ.
@pytest.mark.ci
def test_an_error_names_data_that_differs(run_changed, arrays, tmp_path, monkeypatch):
    """The path is relative, and leads to another file in the second process's working directory."""
    with np.load(arrays) as columns:
        changed = {name: column[1:] if name.startswith("train") else column for name, column in columns.items()}
    np.savez(tmp_path / arrays.name, **changed)
    monkeypatch.chdir(arrays.parent)
    last_lines = run_changed(f"os.chdir({str(tmp_path)!r})", Path(arrays.name))
    assert all("training data differs: process" in line for line in last_lines), last_lines


def test_a_work_directory_that_is_not_shared_ends_both_processes(run_changed, tmp_path):
    # The tolerated delay of network file systems is a private constant.
    at_once = "import jaxddp.workdir.session as made; made._SHARED_SECONDS = 0.5"
    last_lines = run_changed(f"{at_once}; words[words.index('--workdir') + 1] = {str(tmp_path / 'private')!r}")
    seen = "process 1 does not see what process 0 writes there"
    for rank, directory in enumerate((tmp_path / "run", tmp_path / "private")):
        # A process that ends after the other one repeats its line.
        line = last_lines[rank]
        assert seen in line and (f"{directory}: " in line or f"process {1 - rank} ended: " in line), last_lines
