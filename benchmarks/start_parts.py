"""One start for `benchmarks/start.py`: what `jaxddp train` does up to its first step, and how long each part took.

    python benchmarks/start_parts.py BEGIN CONFIG WORKDIR [overrides]

BEGIN is what `time.monotonic()` gave when the command was. Prints a line of JSON, and ends there.
"""

import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

seconds: defaultdict[str, float] = defaultdict(float)
compiled: Counter[str] = Counter()


def main(begin: float, name: str, workdir: str, overrides: list[str]) -> None:
    seconds["interpreter"] = time.monotonic() - begin
    since = time.monotonic()
    import jax.monitoring

    from jaxddp.cli import Train
    from jaxddp.commands.parse import parse
    from jaxddp.config import load
    from jaxddp.experiment import recipe, setup

    options = parse(Train, Train(load(name), Path(workdir)), "start", overrides)
    seconds["imports"] = time.monotonic() - since
    open_tables = recipe.open_tables

    def open_then_import(data: Any) -> Any:
        tables = timed("data set", open_tables)(data)
        # The run would import it at its first batch, which is no less of a start, and harder to tell apart.
        if not hasattr(tables[0], "images"):
            timed("TensorFlow", import_tensorflow)()
        return tables

    recipe.open_tables = open_then_import
    train_batches = setup.train_batches
    setup.train_batches = lambda *arguments: FirstTimed(timed("data set", train_batches)(*arguments))
    jax.monitoring.register_event_duration_secs_listener(note_duration)
    jax.monitoring.register_event_listener(lambda event, **_: compiled.update([event.rpartition("/")[2]]))
    recipe.train_recipe(options.config, options.workdir, listeners=[FirstStep(begin)])


def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        since = time.monotonic()
        try:
            return function(*arguments)
        finally:
            seconds[part] += time.monotonic() - since

    return call


def import_tensorflow() -> None:
    import jaxddp.data.stream  # noqa: F401


class FirstTimed:
    """Placed batches, of which the first is timed."""

    def __init__(self, batches: Any):
        self._next = timed("data set", batches.__next__)

    def __iter__(self) -> "FirstTimed":
        return self

    def __next__(self) -> Any:
        return self._next()


def note_duration(event: str, duration_secs: float, **_: Any) -> None:
    """JAX's own figures: to trace a program, to lower it, to compile it or to load what was kept of it."""
    if event in ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration"):
        seconds["trace"] += duration_secs
    elif event == "/jax/core/compile/backend_compile_duration":
        seconds["compile or load"] += duration_secs


class FirstStep:
    """Ends the process when the first step's figures are known."""

    def __init__(self, begin: float):
        self._begin = begin

    def start(self, run: Any) -> None:
        pass

    def step(self, record: Any) -> None:
        total, cpu = time.monotonic() - self._begin, time.process_time()
        seconds["the rest"] = total - sum(seconds.values())
        found = {"seconds": dict(seconds), "total": total, "cpu": cpu, "loss": record.metrics["loss"]}
        print(json.dumps(found | {"loaded": compiled["cache_hits"], "compiled": compiled["cache_misses"]}), flush=True)
        os._exit(0)

    def evaluation(self, record: Any) -> None:
        pass

    def end(self, run: Any) -> None:
        pass


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
