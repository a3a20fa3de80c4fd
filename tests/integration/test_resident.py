"""Resident data in several processes: the same chunks and validations, also after SIGTERM."""

import re
import signal
import sys
from pathlib import Path

import pytest
from support.processes import Launched, Program, close, environment, losses

SCRIPT = """
import sys, time
import jax, numpy as np, optax
import jaxddp

# Its arguments: the work directory, how many seconds a record takes, the devices of this process.
class Slow(jaxddp.History):
    def step(self, record):
        time.sleep(float(sys.argv[2]))

jax.config.update("jax_num_cpu_devices", int(sys.argv[3]))
rng = np.random.default_rng(0)
images = rng.integers(0, 256, (300, 6, 6, 3), np.uint8)
table = jaxddp.ArrayTable(images, rng.integers(0, 5, 300), tuple("abcde"))
val = jaxddp.ArrayTable(images[:101], table.labels[:101], table.class_names)
net = (
    lambda key, example: {"weight": np.zeros((example[0].size, 5), np.float32)},
    lambda params, images: images.reshape(len(images), -1) @ params["weight"],
)
data = jaxddp.DataConfig(augment=jaxddp.AugmentConfig(pad=1), cache="device")
setup = jaxddp.prepare_training(net, table, None, optax.sgd(0.01), 2, data=data, epochs=8)
jaxddp.train(
    jaxddp.softmax_cross_entropy, setup, workdir=sys.argv[1], listeners=[Slow()], val=val,
    log_every="7 steps", save_every="40 steps", eval_every="60 steps", log_to=["jsonl"],
)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


# tests/test_resident.py tests the devices of one process.
@pytest.mark.ci
def test_two_processes_take_the_same_chunks_and_stop_at_one_step(script, start, tmp_path):
    alone = [sys.executable, str(script), str(tmp_path / "one"), "0", "4"]
    start(Program, alone, tmp_path / "alone", environment()).ends_well()
    words = ["python", str(script), str(tmp_path / "two")]
    launched = start(Launched, tmp_path / "first", 2, [*words, "0.3", "2"])
    launched.wait_until(lambda: len(losses(tmp_path / "two")) > 5)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end() == 75, launched.out + launched.err
    matches = [re.search(r"asked to stop: saved step (\d+) of 300", launched.last_of(rank)) for rank in (0, 1)]
    assert matches[0] and matches[1] and matches[0][1] == matches[1][1]
    start(Launched, tmp_path / "second", 2, [*words, "0", "2"]).ends_well()
    assert len(losses(tmp_path / "one")) > 40
    for split in ("train", "val"):
        one, two = losses(tmp_path / "one", split), losses(tmp_path / "two", split)
        # A run that is stopped between two logged steps writes an additional line.
        assert two.keys() - one.keys() <= {int(matches[0][1])}
        assert close({step: two[step] for step in one}, one)
    assert len(losses(tmp_path / "one", "val")) == 5
