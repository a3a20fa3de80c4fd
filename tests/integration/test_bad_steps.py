"""A bad row on one of two processes makes the same steps bad on both."""

import sys

import pytest
from support.processes import ENDLESS, TRAIN, Launched, losses

SCRIPT = """
import sys
import jax.numpy as jnp
from jaxddp.augment.preprocess import Preprocess
from jaxddp.cli import main

call = Preprocess.__call__
def spoiling(preprocess, batch, *, train, key=None):
    found = call(preprocess, batch, train=train, key=key)
    bad = train & (batch.row == 5)[:, None, None, None]
    return found._replace(images=jnp.where(bad, jnp.nan, found.images))
Preprocess.__call__ = spoiling
sys.exit(main(sys.argv[1:]))
"""


# tests/test_guard.py tests such rows on several devices.
@pytest.mark.ci
def test_both_processes_name_the_row_and_end(arrays, start, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [*ENDLESS, "--train.max-bad-steps", "1", "--log.every", "2 steps"]
    places = ["--data.path", str(arrays), "--workdir", str(tmp_path / "run")]
    run = start(Launched, tmp_path, 2, [sys.executable, str(tmp_path / "script.py"), *TRAIN, *places, *words])
    assert run.end() == 1, run.out + run.err
    for rank in (0, 1):
        message = run.last_of(rank)
        assert ": 1 step had no finite gradient, as many as --train.max-bad-steps 1. " in message
        # In evaluation mode, and after a ReLU, its loss is finite.
        assert message.endswith("Images are not finite after augmentation: row 5 of the training data")
    assert all(loss is not None for loss in losses(tmp_path / "run").values())
