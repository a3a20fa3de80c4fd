"""`parallel.shares` in two processes, of which one is slow: measured, written, and used again by a resumed run."""

import json
import re

import pytest
from support.processes import Launched, losses

SCRIPT = """
import os, sys, time
import numpy as np, optax
import jaxddp
from jaxddp.engine.ways.unequal import UnequalStep

# Its arguments: the work directory, the number of epochs, and `shares`.
if os.environ["JAX_PROCESS_ID"] == "1":
    compute = UnequalStep.compute

    def slowly(*arguments):
        time.sleep(0.1)
        return compute(*arguments)

    UnequalStep.compute = slowly
rng = np.random.default_rng(0)
images = rng.integers(0, 256, (100, 6, 6, 3), np.uint8)
table = jaxddp.ArrayTable(images, rng.integers(0, 5, 100), tuple("abcde"))
net = (
    lambda key, example: {"weight": np.zeros((example[0].size, 5), np.float32)},
    lambda params, images: images.reshape(len(images), -1) @ params["weight"],
)
data = jaxddp.DataConfig(augment=jaxddp.AugmentConfig(flip=False))
shares = None if sys.argv[3] == "equal" else sys.argv[3]
setup = jaxddp.prepare_training(net, table, None, optax.sgd(0.01), 10, data=data, shares=shares)
jaxddp.train(
    jaxddp.softmax_cross_entropy, setup, workdir=sys.argv[1], epochs=float(sys.argv[2]), listeners=(),
    log_every="1 step", save_every="1 epoch", log_to=["jsonl"],
)
"""


def shares_lines(launched: Launched) -> list[str]:
    """Return the lines about shares of all processes."""
    return re.findall(r"shares: .*", launched.out + launched.err)


# tests/test_unequal_step.py tests the devices of one process.
@pytest.mark.ci
def test_a_slow_process_gets_a_smaller_slice_also_after_a_resume(start, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words, workdir = ["python", str(tmp_path / "script.py")], tmp_path / "run"
    first = start(Launched, tmp_path / "first", 2, [*words, str(workdir), "1", "auto"])
    first.ends_well()
    (line,) = shares_lines(first)
    numbers = re.fullmatch(
        r"shares: ([\d.]+) / 1, measured [\d.e+]+ / [\d.e+]+ images/s; slices of (\d+) / (\d+) images", line
    )
    assert numbers, line
    sizes = int(numbers[2]), int(numbers[3])
    assert sizes[0] > sizes[1] >= 1 and sum(sizes) == 20
    file = workdir / "shares.json"
    saved = json.loads(file.read_text())
    assert saved["shares"] == f"{numbers[1]},1" and saved["processes"] == 2
    second = start(Launched, tmp_path / "second", 2, [*words, str(workdir), "3", "auto"])
    second.ends_well()
    kept = f"shares: {numbers[1]} / 1, as measured at the start of the run; slices of {sizes[0]} / {sizes[1]} "
    assert shares_lines(second) == [f"{kept}images"]
    assert json.loads(file.read_text()) == saved
    equal = start(Launched, tmp_path / "equal", 2, [*words, str(tmp_path / "reference"), "3", "equal"])
    equal.ends_well()
    reference = losses(tmp_path / "reference")
    assert list(reference) == list(range(1, 16))
    assert losses(workdir) == pytest.approx(reference, rel=2e-5)
