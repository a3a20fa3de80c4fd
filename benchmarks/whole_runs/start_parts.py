"""Runs `jaxddp train` up to its first step for `benchmarks/start.py`, and times each part of the start.

    python benchmarks/whole_runs/start_parts.py BEGIN CONFIG WORKDIR [overrides]

BEGIN is the `time.monotonic()` of the command. The script prints a line of JSON and ends.
"""

import dataclasses
import gc
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

seconds: defaultdict[str, float] = defaultdict(float)
compiled: Counter[str] = Counter()


def main(begin: float, name: str, workdir: str, overrides: list[str]) -> None:
    seconds["interpreter"] = time.monotonic() - begin
    since = time.monotonic()

    gc.set_threshold(50_000, 20, 20)  # As the command does.
    import jax.monitoring

    from jaxddp.command_line.parse import parse
    from jaxddp.commands.train import Train
    from jaxddp.data import opening
    from jaxddp.recipe.file import read_recipe
    from jaxddp.setup.feed import Feed
    from jaxddp.setup.run_setup import open_recipe
    from jaxddp.setup.run_training import train

    file = read_recipe(name)
    options = parse(Train, Train(file.config, Path(workdir)), "start", overrides)
    seconds["imports"] = time.monotonic() - since
    opening.open_tables = timed("data set", opening.open_tables)
    Feed.batches = time_first(Feed.batches)
    jax.monitoring.register_event_duration_secs_listener(note_duration)
    jax.monitoring.register_event_listener(lambda event, **_: compiled.update([event.rpartition("/")[2]]))
    opened = open_recipe(dataclasses.replace(file, config=options.config))
    train(opened, options.workdir, listeners=[FirstStep(begin)])


def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        since = time.monotonic()
        try:
            return function(*arguments)
        finally:
            seconds[part] += time.monotonic() - since

    return call


def time_first(batches: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Wrap an iterator of placed batches, and time the first one."""

    def timed_batches(*arguments: Any) -> Iterator[Any]:
        stream = batches(*arguments)
        yield timed("data set", next)(stream)
        yield from stream

    return timed_batches


def note_duration(event: str, duration_secs: float, **_: Any) -> None:
    """Record JAX's durations of tracing, lowering, and compiling or loading programs."""
    if event in ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/jaxpr_to_mlir_module_duration"):
        seconds["trace"] += duration_secs
    elif event == "/jax/core/compile/backend_compile_duration":
        seconds["compile or load"] += duration_secs


class FirstStep:
    """A listener that ends the process after the metrics of the first step."""

    def __init__(self, begin: float):
        self._begin = begin

    def step(self, record: Any) -> None:
        total, cpu = time.monotonic() - self._begin, time.process_time()
        seconds["the rest"] = total - sum(seconds.values())
        results = {"seconds": dict(seconds), "total": total, "cpu": cpu, "loss": record.metrics["loss"]}
        print(
            json.dumps(results | {"loaded": compiled["cache_hits"], "compiled": compiled["cache_misses"]}), flush=True
        )
        os._exit(0)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
