"""What two processes hold when `jaxddp.train` returns: the same history, bit for bit, whichever run it is of."""

import json
import shutil
import sys
from pathlib import Path

from started import Launched

SCRIPT = """
import hashlib, json, math
import jax, optax
import jaxddp
import small

jax.config.update("jax_num_cpu_devices", 2)

def told(name, history):
    frame = history.to_frame()
    held = b"".join(repr(column).encode() + frame[column].to_numpy().tobytes() for column in frame if column != "split")
    drawn = history._repr_png_() or b""
    digests = [hashlib.sha256(each).hexdigest() for each in (held, " ".join(frame["split"]).encode(), drawn)]
    print(json.dumps({"run": name, "rows": len(frame), "shown": repr(history), "digests": digests}), flush=True)

table, val = small.random_table(50), small.random_table(23, seed=1)
setup = jaxddp.prepare_training(small.linear_model(), table, None, optax.sgd(0.05), 2, epochs=2)

def train(name, **more):
    state, history = jaxddp.train(
        jaxddp.softmax_cross_entropy, setup, val=val, listeners=(), log_every="1 step",
        evaluators=[lambda state: {"odd": math.nan}], **more,
    )
    told(name, history)
    return history

train("alone")
train("begun", workdir="w", epochs=1)
train("resumed", workdir="w")
train("done", workdir="w")
told("read", jaxddp.History.read("w"))
history = train("again")

# Longer than what is sent at once.
mine = history._rows * 500 if setup.topology.process_index == 0 else []
history._rows = mine
history.share(setup.topology)
told("long", history)
"""


def test_every_process_holds_the_same_history(start, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    for helper in ("small.py", "recipes/small_recipe.py"):
        shutil.copy(Path(__file__).parents[1] / helper, tmp_path)
    job = start(Launched, tmp_path, 2, ["env", "-C", str(tmp_path), sys.executable, "script.py"])
    job.ends_well()
    said = [(job.logs / f"process-{rank}.log").read_text().splitlines() for rank in (0, 1)]
    runs = [[json.loads(line) for line in lines if line.startswith('{"run"')] for lines in said]
    assert runs[0] == runs[1]
    rows = [(run["run"], run["rows"]) for run in runs[0]]
    # 50 examples in batches of 8: 7 steps, and 13; an evaluation an epoch.
    whole = 13 + 2
    assert rows[:5] == [("alone", whole), ("begun", 8), ("resumed", 7), ("done", 0), ("read", whole)]
    assert rows[5:] == [("again", whole), ("long", 500 * whole)]
    assert runs[0][1]["shown"].startswith("History(7 logged steps, 1 epochs, 1 evaluations: val loss ")
    assert runs[0][3]["shown"] == "History(0 logged steps, 0 epochs, 0 evaluations)"
