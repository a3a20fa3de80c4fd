"""Mistakes that need several processes: each ends all of them with code 2 and a message that names it."""

from pathlib import Path

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


def test_a_work_directory_that_is_not_shared_ends_both_processes(run_changed, tmp_path):
    # The tolerated delay of network file systems is a private constant.
    at_once = "import jaxddp.workdir.session as made; made._SHARED_SECONDS = 0.5"
    last_lines = run_changed(f"{at_once}; words[words.index('--workdir') + 1] = {str(tmp_path / 'private')!r}")
    seen = "process 1 does not see what process 0 writes there"
    for rank, directory in enumerate((tmp_path / "run", tmp_path / "private")):
        # A process that ends after the other one repeats its line.
        line = last_lines[rank]
        assert seen in line and (f"{directory}: " in line or f"process {1 - rank} ended: " in line), last_lines
        assert not directory.exists()
