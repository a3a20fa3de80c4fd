"""Where the time of the tests goes: by file, by test and by fixture, with JAX's parts and started programs apart.

    python benchmarks/suite.py [--out FILE.json] [--top 25] [-- PYTEST'S ARGUMENTS]

runs pytest with this file as its plugin, and prints what took longest. Seconds of a test are those of its setup, call
and teardown; of them tracing, lowering and compiling are JAX's own account, without what lies within another of its
events. `starts` counts programs that the tests start, `child_cpu` their CPU seconds, as far as they were waited for.
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
    """What this worker has spent so far, of each kind."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self._whole: list[tuple[float, float]] = []

    def audited(self, event: str, arguments: tuple) -> None:
        self.totals["starts"] += event == "subprocess.Popen"

    def timed(self, event: str, duration_secs: float, **_: Any) -> None:
        """One event of JAX, which ends now; those within it have ended before."""
        if event not in KINDS:
            return
        end = time.perf_counter()
        within = [(start, stop) for start, stop in self._whole if start >= end - duration_secs]
        self._whole = [*(one for one in self._whole[-100:] if one not in within), (end - duration_secs, end)]
        self.totals[KINDS[event]] += max(0.0, duration_secs - sum(stop - start for start, stop in within))

    def now(self) -> dict[str, float]:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = {"seconds": time.perf_counter(), "cpu": time.process_time()}
        spent["child_cpu"] = children.ru_utime + children.ru_stime
        return {part: 0.0 for part in PARTS} | self.totals | spent


class Times:
    """The plugin: a line of JSON for each test and for each fixture, in a file of this worker."""

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
        return  # The workers do the work.
    if FOLDER in os.environ:
        config.pluginmanager.register(Times(Path(os.environ[FOLDER])))


def summed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one name together, the longest first."""
    sums: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = sums.setdefault(row["name"], {"name": row["name"], "count": 0} | dict.fromkeys(PARTS, 0.0))
        one["count"] += 1
        for part in PARTS:
            one[part] = round(one[part] + row[part], 4)
    return sorted(sums.values(), key=lambda one: -one["seconds"])


def table(title: str, rows: list[dict[str, Any]], top: int) -> str:
    """The longest of them in Markdown, and the sum of all."""
    whole = summed({**row, "name": f"all {len(rows)}"} for row in rows)
    lines = [f"| {title} | count | {' | '.join(PARTS)} |", "|" + "---|" * (len(PARTS) + 2)]
    for row in [*rows[:top], *whole]:
        lines.append(f"| {row['name']} | {row['count']} | {' | '.join(f'{row[part]:.1f}' for part in PARTS)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="a JSON file of all rows")
    parser.add_argument("--top", type=int, default=25, help="rows of each table")
    parser.add_argument("arguments", nargs="*", help="pytest's, after --")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {FOLDER: folder, "PYTHONPATH": str(ROOT)}
        began = time.perf_counter()
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.suite", *asked.arguments]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        wall = time.perf_counter() - began
        rows = [json.loads(line) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    tests = [row for row in rows if row["kind"] == "test"]
    tables = {
        "file": summed({**row, "name": row["name"].split("::")[0]} for row in tests),
        "test": summed(tests),
        "fixture": summed(row for row in rows if row["kind"] == "fixture"),
    }
    for title, found in tables.items():
        print(table(title, found, asked.top), end="\n\n")
    print(f"{wall:.0f} s in all, exit code {code}")
    if asked.out:
        asked.out.write_text(json.dumps({"wall": wall, "exit_code": code} | tables, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())
