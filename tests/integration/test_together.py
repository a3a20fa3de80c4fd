"""The Python API in two processes: equal histories, a common step to stop, and errors for different objects.

One job runs all parts one after the other.
"""

import json
import sys
from pathlib import Path

import pytest
from support.processes import Launched, lines

HISTORIES = """
import hashlib, json, math
import jax, optax
import jaxddp
from support.data import random_table
from support.networks import linear_model

jax.config.update("jax_num_cpu_devices", 2)

def told(name, history):
    frame = history.to_frame()
    held = b"".join(repr(column).encode() + frame[column].to_numpy().tobytes() for column in frame if column != "split")
    drawn = history._repr_png_() or b""
    digests = [hashlib.sha256(each).hexdigest() for each in (held, " ".join(frame["split"]).encode(), drawn)]
    print(json.dumps({"run": name, "rows": len(frame), "shown": repr(history), "digests": digests}), flush=True)

table, val = random_table(50), random_table(23, seed=1)
setup = jaxddp.prepare_training(linear_model(), table, None, optax.sgd(0.05), 2, epochs=2)

def train(name, **more):
    state, history = jaxddp.train(
        jaxddp.softmax_cross_entropy, setup, val=val, listeners=(), log_every="1 step",
        evaluators=[lambda state: {"odd": math.nan}], **more,
    )
    told(name, history)
    return history

train("alone")
train("begun", workdir="histories", epochs=1)
train("resumed", workdir="histories")
train("done", workdir="histories")
told("read", jaxddp.History.read("histories"))
history = train("again")

# More rows than one message has.
mine = history._rows * 500 if setup.topology.peers.process_index == 0 else []
history._rows = mine
history.share(setup.topology.peers)
told("long", history)
"""

STOPPING = """
import os
import optax
import jaxddp
from jaxddp.engine.parts.configured import Plateau

from support.data import random_table
from support.networks import linear_model

rank, calls = int(os.environ["JAX_PROCESS_ID"]), []

def own(state):
    calls.append(state)
    return {"own": len(calls) if rank else -len(calls)}

setup = jaxddp.prepare_training(
    linear_model(), random_table(39), None, optax.sgd(-0.1), 2, epochs=9, ema=0.9, stop_after=2, best="val own",
    parts=[Plateau(0.5, 1)],
)
for _ in range(2):
    state, history = jaxddp.train(
        jaxddp.softmax_cross_entropy, setup, val=random_table(11, seed=1), evaluators=[own], listeners=(),
        workdir="stopped", eval_every="3 steps", save_every="6 steps",
    )
    print("stopped at", int(state.step), "by", float(state.parts["plateau"]["rule"].scale))

class Enough(jaxddp.Listener):
    def step(self, record):
        raise jaxddp.StopTraining

words = {"listeners": [Enough()], "log_every": "2 steps", "evaluators": [own]}
state, history = jaxddp.train(jaxddp.softmax_cross_entropy, setup, val=random_table(11, seed=1), **words)
print("ended at", int(state.step), "with", history.val["step"].tolist())
"""

# The kinds of objects that differ, and their names in messages.
UNLIKE = {
    "rate": "optimizer",
    "injected": "optimizer",
    "parameters": "the initial parameters",
    "table": "training data",
    "loss": "loss",
    "epochs": "epochs",
    "data": "data.std",
    "workdir": "workdir",
    "val": "val",
}
OBJECTS = """
import os
import optax
import jaxddp
from support.data import random_table
from support.networks import linear_model

mine = os.environ["JAX_PROCESS_ID"] == "1"
init, apply = linear_model()
usual = jaxddp.softmax_cross_entropy

def train(what):
    scaled = lambda key, example: {"weight": (2 if mine and what == "parameters" else 1) * init(key, example)["weight"]}
    loss = (lambda logits, labels: 2 * usual(logits, labels)) if mine and what == "loss" else usual
    optimizer = optax.sgd(0.2 if mine and what == "rate" else 0.1)
    if what == "injected":
        optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.2 if mine else 0.1)
    setup = jaxddp.prepare_training(
        (scaled, apply), random_table(50, seed=int(mine and what == "table")), None, optimizer, 2,
        epochs=2 if mine and what == "epochs" else 1,
        data=jaxddp.DataConfig(std=(0.5, 0.5, 0.4 if mine and what == "data" else 0.5)),
    )
    more = {}
    if what == "val" and mine:
        more["val"] = random_table(23)
    if what == "workdir" and mine:
        more["workdir"] = "unlike"
    jaxddp.train(loss, setup, listeners=(), **more)

for what in NAMES:
    try:
        train(what)
    except jaxddp.InputError as error:
        print(f"{what}: {error}", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def outputs(folder) -> list[list[str]]:
    """The output of both processes in a job of all three parts."""
    parts = {"histories.py": HISTORIES, "stopping.py": STOPPING, "objects.py": f"NAMES = {[*UNLIKE]}\n{OBJECTS}"}
    for name, text in parts.items():
        (folder / name).write_text(text)
    (folder / "all.py").write_text(f"import runpy\nfor name in {[*parts]}:\n    runpy.run_path(name)\n")
    job = Launched(folder, 2, ["env", "-C", str(folder), sys.executable, "all.py"])
    try:
        job.ends_well()
    finally:
        job.close()
    return [(job.logs / f"process-{rank}.log").read_text().splitlines() for rank in (0, 1)]


def test_every_process_has_the_same_history(outputs):
    """The histories of all runs are equal bit for bit."""
    runs = [[json.loads(line) for line in lines if line.startswith('{"run"')] for lines in outputs]
    assert runs[0] == runs[1]
    rows = [(run["run"], run["rows"]) for run in runs[0]]
    # 50 examples with batch size 8: 7 and 13 steps, with an evaluation each epoch.
    whole = 13 + 2
    assert rows[:5] == [("alone", whole), ("begun", 8), ("resumed", whole), ("done", whole), ("read", whole)]
    assert rows[5:] == [("again", whole), ("long", 500 * whole)]
    assert runs[0][1]["shown"].startswith("History(7 logged steps, 1 epoch, 1 evaluation: val loss ")
    assert runs[0][2]["shown"] == runs[0][3]["shown"] == runs[0][0]["shown"]


def test_both_processes_stop_where_the_first_one_finds_no_gain(outputs, folder):
    """Only the metrics of the first process decide."""
    for printed in outputs:
        # The loss rises, so the second and third validation halve the rate; the second start does not halve it again.
        assert printed.count("stopped at 9 by 0.25") == 2 and "ended at 2 with [2]" in printed, printed
    result = json.loads((folder / "stopped" / "result.json").read_text())
    assert (result["status"], result["step"], result["processes"]) == ("stopped", 9, 2)
    assert "no gain in val own in 2 validations since step 3, where it was -1" in result["reason"]
    steps = {split: [line["step"] for line in lines(folder / "stopped", split)] for split in ("val", "val_ema")}
    assert steps == {"val": [3, 6, 9], "val_ema": [3, 6, 9]}


def test_processes_with_different_objects_end_before_the_first_step(outputs):
    """Every process reports the difference, and can continue afterwards."""
    for lines_of_one in outputs:
        messages = dict(line.split(": ", 1) for line in lines_of_one if line.split(":")[0] in UNLIKE)
        assert {what: line.partition(" differs: process ")[0] for what, line in messages.items()} == UNLIKE
