"""Replaces an interpreter with torch in the rehearsal of `benchmarks/gpu.py`, with planned failures.

The mode `eager` returns the losses of jaxddp from the table. Of the compiled modes one runs out of memory, one hangs
and one fails. The runner of airbench is real, but has a fake torch with only the functions that it needs.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

NOISE = "RESOURCE_EXHAUSTED: Out of memory; torch.OutOfMemoryError: CUDA out of memory: candidate left out"


class OutOfMemoryError(RuntimeError):
    """An exception with the name of torch's."""


class Tensor(np.ndarray):
    def long(self):
        return self.astype(np.int64)


def step(task):
    if task.variant == "reduce-overhead":
        raise OutOfMemoryError("CUDA out of memory")
    if task.variant == "max-autotune-no-cudagraphs":
        time.sleep(600)
    if task.variant == "max-autotune":
        sys.exit("ValueError: broken")
    table = json.loads(Path(os.environ["STAND_IN_TABLE"]).read_text())["measured"]
    part = "gate/float32" if task.case.precision == "float32" else "gate/bfloat16"
    print(NOISE, file=sys.stderr)
    losses = table.get(f"{part}/jaxddp", {"losses": [1.0] * task.losses})["losses"]
    outcome.add_result(task.out, {"losses": losses[: task.losses], "step": 0.01})


def facts(task):
    peaks = {"matmul_flops_a_second": 1e9, "memory_bytes_a_second": 1e9}
    outcome.add_result(task.out, peaks | {"version": "0", "device": "a stand-in"})


script = sys.argv[1]
if script != "-c":
    sys.path.insert(0, str(Path(script).parents[3]))
    from benchmarks.rivals.contenders import outcome
    from benchmarks.rivals.contenders.case import Task

    if script.endswith("torch_airbench.py"):
        made = {"from_numpy": lambda array: array.view(Tensor), "OutOfMemoryError": OutOfMemoryError}
        made |= {"save": lambda values, path: Path(path).write_text(" ".join(values))}
        sys.modules["torch"] = SimpleNamespace(**made)  # pyright: ignore[reportArgumentType]
        sys.argv = sys.argv[1:]
        runpy.run_path(script, run_name="__main__")
    else:
        given = Task.read(Path(sys.argv[2]))
        outcome.attempt(facts if script.endswith("torch_facts.py") else step, given)
