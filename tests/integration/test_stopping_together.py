"""Two processes stop at one step, by what the first one measures, whatever the other does."""

import json
import sys
from pathlib import Path

from started import Launched, lines

SCRIPT = """
import os, sys
import optax
import jaxddp
from jaxddp.engine.parts.plateau import Plateau

sys.path += [sys.argv[2], sys.argv[2] + "/recipes"]
from small import linear_model, random_table

rank, calls = int(os.environ["JAX_PROCESS_ID"]), []

def own(state):
    calls.append(state)
    return {"own": len(calls) if rank else -len(calls)}

setup = jaxddp.prepare_training(
    linear_model(), random_table(39), None, optax.sgd(-0.1), 4, epochs=9, ema=0.9, stop_after=2, best="val own",
    parts=[Plateau(0.5, 1)],
)
for _ in range(2):
    state, history = jaxddp.train(
        jaxddp.softmax_cross_entropy, setup, val=random_table(11, seed=1), evaluators=[own], listeners=(),
        workdir=sys.argv[1], eval_every="3 steps", save_every="6 steps",
    )
    print("stopped at", int(state.step), "by", float(state.parts["plateau"]["rule"].scale))
"""


def test_both_processes_stop_where_the_first_one_finds_no_gain(start, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run"), str(Path(__file__).parents[1])]
    run = start(Launched, tmp_path, 2, words)
    run.ends_well()
    for rank in (0, 1):
        # The loss rises, so the second and the third validation each halve the rate; the second start does not again.
        said = (tmp_path / "logs" / f"process-{rank}.log").read_text()
        assert said.count("stopped at 9 by 0.25") == 2, said
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["step"], result["processes"]) == ("stopped", 9, 2)
    assert "no gain in val own in 2 validations since step 3, where it was -1" in result["reason"]
    steps = {split: [line["step"] for line in lines(tmp_path / "run", split)] for split in ("val", "val_ema")}
    assert steps == {"val": [3, 6, 9], "val_ema": [3, 6, 9]}
