"""Faults without an exception: both of two processes end with a line that names the fault."""

import sys

import pytest
from support.processes import BRIEF, ENDLESS, TRAIN, Launched, checkpoint_steps, losses

FLIPPED_BIT = """
import os, sys
import jax, numpy as np
from jaxddp.cli import main
from jaxddp.engine.step import Program

call = Program.__call__
def flipping(program, state, *feed):
    state, sums = call(program, state, *feed)
    if int(state.step) == 12:
        kernel = state.params["Dense_0"]["kernel"]
        (shard,) = kernel.addressable_shards
        own = np.array(shard.data)
        own.view(np.uint32)[0, 0] ^= 1
        buffers = [jax.device_put(own, shard.device)]
        kernel = jax.make_array_from_single_device_arrays(kernel.shape, kernel.sharding, buffers)
        params = state.params | {"Dense_0": state.params["Dense_0"] | {"kernel": kernel}}
        state = state.replace(params=params)
    return state, sums
if os.environ["JAX_PROCESS_ID"] == "1":
    Program.__call__ = flipping
sys.exit(main(sys.argv[1:]))
"""

SUMMED_GRADIENT = """
import sys
import jaxddp.engine.gradients
from jaxddp.cli import main

jaxddp.engine.gradients.lax.pcast = lambda tree, *axes, **to: tree
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def command(arrays, tmp_path):
    """Return the command of a training that starts with a script."""

    def make_command(script: str, *words: str) -> list[str]:
        (tmp_path / "script.py").write_text(script)
        places = ["--data.path", str(arrays), "--workdir", str(tmp_path / "run")]
        return [sys.executable, str(tmp_path / "script.py"), *TRAIN, *places, *words]

    return make_command


# tests/test_replicas.py tests the devices of one process.
@pytest.mark.ci
def test_a_bit_that_flips_in_one_process_ends_both_processes(command, start, tmp_path):
    words = [*ENDLESS, "--checkpoint.every", "8 steps", "--parallel.check-replicas", "5 steps"]
    run = start(Launched, tmp_path, 2, command(FLIPPED_BIT, *words))
    assert run.end() == 1, run.out + run.err
    for rank in (0, 1):
        message = run.last_of(rank)
        assert "step 15: the devices no longer hold the same state: there is no majority (device " in message
        assert " of process 0 against device " in message
        assert " of process 1), in " in message
        assert "first in params/Dense_0/kernel. " in message
    assert checkpoint_steps(tmp_path / "run") == [8]


# tests/test_self_test.py tests the devices of one process.
@pytest.mark.ci
def test_a_gradient_that_is_summed_ends_both_processes_before_the_first_step(command, start, tmp_path):
    run = start(Launched, tmp_path, 2, command(SUMMED_GRADIENT, *BRIEF))
    assert run.end() == 1, run.out + run.err
    for rank in (0, 1):
        assert "the gradient that 2 devices average is 2 times that of one device" in run.last_of(rank)
    assert losses(tmp_path / "run") == {}
