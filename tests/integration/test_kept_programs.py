"""Each process of a job on CPUs compiles its own programs, and loads them from the cache at the next start."""

import json
import re
from pathlib import Path

import pytest
from support.processes import HANGING, Launched, brief_words, result

SCRIPT = """
import collections, json, sys
import jax.monitoring, numpy as np, optax
import jaxddp
import jaxddp.engine.compilation as compiler_options

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
# jaxddp tries an option by compiling a program. A program that jaxlib rejects is neither found nor stored.
refused = compiler_options._rejection_reason(*compiler_options._NO_EMITTERS) is not None
asked = events["compile_requests_use_cache"] - refused
print(json.dumps({"asked": asked, "hits": events["cache_hits"], "kept": events["cache_misses"]}))
"""


def count_programs(start, folder: Path, script: Path) -> list[dict[str, int]]:
    """Return by process how many programs were requested from the cache, found in it, and compiled and stored."""
    run = start(Launched, folder, 2, ["python", str(script), str(folder / "run")])
    run.ends_well()
    logs = [(run.logs / f"process-{rank}.log").read_text() for rank in (0, 1)]
    return [json.loads(re.findall(r"^\{.*\}$", log, re.MULTILINE)[-1]) for log in logs]


@pytest.mark.ci
def test_a_second_start_of_two_processes_compiles_nothing(start, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "kept"))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cold, warm = (count_programs(start, tmp_path / name, script) for name in ("cold", "warm"))
    # A program that is neither found nor stored would be compiled silently at each start.
    assert all(process == {"asked": process["kept"], "hits": 0, "kept": process["kept"]} for process in cold), cold
    assert all(process["kept"] > 3 for process in cold), cold
    assert warm == [{"asked": process["kept"], "hits": process["kept"], "kept": 0} for process in cold]


# This happens if only one process finds its program in the cache. gloo's first collective times out after 30 s.
SLOW = """
import os, sys, time
import jaxddp.engine.programs as made
from jaxddp.cli import main

compiles = made.compile_with_cost
if os.environ["JAX_PROCESS_ID"] == "1":
    made.compile_with_cost = lambda *arguments: (time.sleep(35), compiles(*arguments))[1]
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.ci
def test_a_process_may_compile_much_longer_than_the_other(arrays, start, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    words = brief_words(arrays, tmp_path / "run", "--train.duration", "1 step")
    launched = start(Launched, tmp_path / "launch", 2, ["python", str(tmp_path / "slow.py"), *words])
    assert launched.end(HANGING) == 0, launched.out + launched.err
    assert result(tmp_path / "run")["status"] == "done"
