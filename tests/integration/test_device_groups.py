"""Two processes that average their parameters every few steps equal one process with two groups of devices."""

import pytest
from support.processes import Launched, are_the_same, brief_words, losses, result

from jaxddp.cli import main

GROUPS = ["--train.sync-every", "4 steps", "--train.outer-optimizer", "nesterov", "--checkpoint.every", "3 steps"]
ALONE = ["--parallel.devices", "2", "--parallel.groups", "2"]


@pytest.mark.ci
def test_each_process_is_a_group(arrays, start, tmp_path):
    together, alone = tmp_path / "together", tmp_path / "alone"
    assert main(brief_words(arrays, alone, *GROUPS, *ALONE)) == 0
    start(Launched, together, 2, brief_words(arrays, together, *GROUPS)).ends_well()
    assert (result(together)["devices"], result(together)["processes"]) == (2, 2)
    assert are_the_same(together, alone)
    # One process continues with the groups of two processes.
    longer = ["--train.duration", "9 steps"]
    for workdir in (together, alone):
        assert main(brief_words(arrays, workdir, *GROUPS, *ALONE, *longer)) == 0
    assert list(losses(together)) == list(range(1, 10)) and are_the_same(together, alone)
