"""Each process of a job on CPUs finds its own compiled programs at the next start."""

import json
import re
from pathlib import Path

from started import Launched

SCRIPT = """
import collections, json, sys
import jax.monitoring, numpy as np, optax
import jaxddp

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
images = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 3), np.uint8)
table = jaxddp.ArrayTable(images, np.arange(40) % 5, tuple("abcde"))
net = (
    lambda key, example: {"weight": np.zeros((example[0].size, 5), np.float32)},
    lambda params, images: images.reshape(len(images), -1) @ params["weight"],
)
setup = jaxddp.prepare_training(net, table, None, optax.sgd(0.01), 2, epochs=1)
jaxddp.train(jaxddp.softmax_cross_entropy, setup, workdir=sys.argv[1], listeners=[])
print(json.dumps({"hits": events["cache_hits"], "misses": events["cache_misses"]}))
"""


def counts(start, folder: Path, script: Path) -> list[dict[str, int]]:
    """By process, how many programs were found and how many were compiled and kept."""
    run = start(Launched, folder, 2, ["python", str(script), str(folder / "run")])
    run.ends_well()
    logs = [(run.logs / f"process-{rank}.log").read_text() for rank in (0, 1)]
    return [json.loads(re.findall(r"^\{.*\}$", log, re.MULTILINE)[-1]) for log in logs]


def test_a_second_start_of_two_processes_compiles_nothing(start, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "kept"))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cold, warm = (counts(start, tmp_path / name, script) for name in ("cold", "warm"))
    assert all(process["misses"] > 3 and process["hits"] == 0 for process in cold), cold
    assert [process["misses"] for process in warm] == [0, 0], (cold, warm)
    assert [process["hits"] for process in warm] == [process["misses"] for process in cold]
