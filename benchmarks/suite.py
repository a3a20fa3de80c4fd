"""Profiles the tests by file, test and fixture, with the time in JAX and in child processes.

    python benchmarks/suite.py [--out FILE.json] [--top 25] [-- PYTEST'S ARGUMENTS]

It runs pytest with this file as a plugin, and prints the longest rows. The seconds of a test include its setup, call
and teardown. Tracing, lowering and compiling are reported by JAX; nested events are subtracted. `starts` counts the
programs that a test starts, and `child_cpu` their CPU seconds if the test waited for them.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = "JAXDDP_SUITE_TIMES"
KINDS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
PARTS = ("seconds", "cpu", "child_cpu", "starts", *KINDS.values())


class Clock:
    """Seconds and counts of this worker so far, by kind."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self._whole: list[tuple[float, float]] = []

    def audited(self, event: str, arguments: tuple) -> None:
        self.totals["starts"] += event == "subprocess.Popen"

    def timed(self, event: str, duration_secs: float, **_: Any) -> None:
        """Record an event of JAX that ends now. Nested events have ended before."""
        if event not in KINDS:
            return
        end = time.perf_counter()
        within = [(start, stop) for start, stop in self._whole if start >= end - duration_secs]
        self._whole = [*(total for total in self._whole[-100:] if total not in within), (end - duration_secs, end)]
        self.totals[KINDS[event]] += max(0.0, duration_secs - sum(stop - start for start, stop in within))

    def now(self) -> dict[str, float]:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = {"seconds": time.perf_counter(), "cpu": time.process_time()}
        spent["child_cpu"] = children.ru_utime + children.ru_stime
        return {part: 0.0 for part in PARTS} | self.totals | spent


class Times:
    """The pytest plugin. Writes a line of JSON for each test and fixture into a file of this worker."""

    def __init__(self, folder: Path):
        import jax

        self.clock = Clock()
        sys.addaudithook(self.clock.audited)
        jax.monitoring.register_event_duration_secs_listener(self.clock.timed)
        self.file = (folder / f"{os.getpid()}.jsonl").open("w")

    def write(self, kind: str, name: str, before: dict[str, float]) -> None:
        spent = {part: round(value - before[part], 4) for part, value in self.clock.now().items()}
        self.file.write(json.dumps({"kind": kind, "name": name} | spent) + "\n")
        self.file.flush()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = self.clock.now()
        result = yield
        self.write("test", item.nodeid, before)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[None]:
        before = self.clock.now()
        result = yield
        self.write("fixture", f"{fixturedef.baseid}::{fixturedef.argname} ({fixturedef.scope})", before)
        return result


def pytest_configure(config: pytest.Config) -> None:
    if FOLDER in os.environ and not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return  # Only workers run tests.
    if FOLDER in os.environ:
        config.pluginmanager.register(Times(Path(os.environ[FOLDER])))


def summed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum rows with the same name, and sort them by seconds."""
    sums: dict[str, dict[str, Any]] = {}
    for row in rows:
        total = sums.setdefault(row["name"], {"name": row["name"], "count": 0} | dict.fromkeys(PARTS, 0.0))
        total["count"] += 1
        for part in PARTS:
            total[part] = round(total[part] + row[part], 4)
    return sorted(sums.values(), key=lambda total: -total["seconds"])


def table(title: str, rows: list[dict[str, Any]], top: int) -> str:
    """Format the longest rows and the sum of all as Markdown."""
    whole = summed({**row, "name": f"all {len(rows)}"} for row in rows)
    lines = [f"| {title} | count | {' | '.join(PARTS)} |", "|" + "---|" * (len(PARTS) + 2)]
    for row in [*rows[:top], *whole]:
        lines.append(f"| {row['name']} | {row['count']} | {' | '.join(f'{row[part]:.1f}' for part in PARTS)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="JSON file for all rows")
    parser.add_argument("--top", type=int, default=25, help="rows of each table")
    parser.add_argument("arguments", nargs="*", help="arguments of pytest, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {FOLDER: folder, "PYTHONPATH": str(ROOT)}
        began = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.suite", *options.arguments]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        wall = time.perf_counter() - began
        rows = [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    tests = [row for row in rows if row["kind"] == "test"]
    tables = {
        "file": summed({**row, "name": row["name"].split("::")[0]} for row in tests),
        "test": summed(tests),
        "fixture": summed(row for row in rows if row["kind"] == "fixture"),
    }
    for title, results in tables.items():
        print(table(title, results, options.top), end="\n\n")
    print(f"{wall:.0f} s in total, exit code {code}")
    if options.out:
        options.out.write_text(json.dumps({"wall": wall, "exit_code": code} | tables, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())
