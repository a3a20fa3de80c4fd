"""Out of memory in one of two processes: both end with one line."""

import pytest
from support.processes import BRIEF, TRAIN, Launched, checkpoint_steps

SOON = 60
"""Maximum seconds until both end on a busy machine: the start, the promised 15, the launcher's grace period."""

LITTLE_MEMORY = """
import os, sys
from jaxddp.cli import main
from jaxddp.mesh import Topology

if os.environ["JAX_PROCESS_ID"] == "1":
    Topology.free_memory = lambda _: 1_000
sys.exit(main(sys.argv[1:]))
"""

OUT_OF_MEMORY = """
import itertools, os, sys
import jax
from jaxddp.cli import main
from jaxddp.engine.programs import Program

if os.environ["JAX_PROCESS_ID"] == "1":
    run, calls = Program.__call__, itertools.count(1)
    def failing(program, *arguments):
        if next(calls) == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5.00GiB.")
        return run(program, *arguments)
    Program.__call__ = failing
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def training(arrays, start, tmp_path):
    """Run two processes that train by a script instead of `jaxddp` until both have ended."""

    def run(script: str) -> Launched:
        (tmp_path / "script.py").write_text(script)
        words = ["python", str(tmp_path / "script.py"), *TRAIN, "--data.path", str(arrays), *BRIEF]
        words += ["--workdir", str(tmp_path / "run")]
        launched = start(Launched, tmp_path / "launch", 2, words, "--grace", "2")
        assert launched.end(SOON) == 2, launched.out + launched.err
        assert all(f"process {rank}: exit code 2\n" in launched.err for rank in (0, 1))
        assert not any("Traceback" in (launched.logs / f"process-{rank}.log").read_text() for rank in (0, 1))
        return launched

    return run


# tests/test_memory.py tests the message.
@pytest.mark.ci
def test_a_step_too_large_for_one_process_ends_both_before_it_with_the_same_message(training, tmp_path):
    launched = training(LITTLE_MEMORY)
    lines = [launched.last_of(rank) for rank in (0, 1)]
    assert lines[0] == lines[1]
    assert lines[0].startswith("jaxddp: the step needs ") and ", and cpu of process 1 has " in lines[0]
    assert "step 1/" not in launched.out and checkpoint_steps(tmp_path / "run") == []


# tests/test_memory.py tests the message; test_faults.py tests other failures of one process.
@pytest.mark.ci
def test_memory_that_runs_out_in_one_process_ends_both_with_its_message(training):
    launched = training(OUT_OF_MEMORY)
    lines = [launched.last_of(rank) for rank in (0, 1)]
    expected = "memory ran out by step 3 (Out of memory while trying to allocate 5.00GiB): the step needs "
    assert lines[1].startswith(f"jaxddp: {expected}")
    # Process 0 may see the collective fail before it gets the cause.
    assert lines[0] == f"jaxddp: process 1 ended: {lines[1].removeprefix('jaxddp: ')}; the job ends here"
