"""Runs one call of `benchmarks/gpu.py`: measures what the table lacks until it is complete or time is up."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.common.harness import Figures
from benchmarks.rivals.contenders.outcome import OUT_OF_MEMORY
from benchmarks.rivals.gpu_children import CONTENDERS, Children, CutOff
from benchmarks.rivals.gpu_gate import judge
from benchmarks.rivals.gpu_parts import RIVAL, Measurement, NotRun, Plan

LEAST_SHARE = 0.25
"""Fraction of its limit that must be left before a child starts, if no similar child was measured."""


@dataclass(frozen=True)
class Call:
    """One call of the benchmark.

    Attributes:
        torch: The interpreter of the rival.
        end: End of the call, in seconds of `time.monotonic`.
    """

    plan: Plan
    children: Children
    torch: str
    end: float

    def take(self, parts: Sequence[str]) -> bool:
        """Measures the missing results of some parts, in order. Returns False if the gate failed."""
        for part in parts:
            try:
                while waiting := self.plan.waiting(part):
                    self._measure(waiting[0])
            except NotRun:
                continue
            except CutOff:
                return True
            if part == "gate" and not judge(self.plan.table)[1]:
                return False
        return True

    def left(self, parts: Sequence[str]) -> list[str]:
        """Returns the missing keys, and the parts whose keys depend on them."""
        found: list[str] = []
        for part in parts:
            try:
                found += [key for each in self.plan.waiting(part) for key in each.missing(self.plan.table)]
            except NotRun:
                # It may become possible after other measurements.
                found += [part] if found else []
        return found

    def _measure(self, each: Measurement) -> None:
        """Starts a child, and puts its results into the table. Raises CutOff if the call's time is up."""
        table, begin = self.plan.table, time.monotonic()
        if same := next((key for key in each.smaller if table.failures.get(key) == OUT_OF_MEMORY), None):
            self._put(each.key, {"failed": f"not started: {same} ran out of memory"})
            return
        left = self.end - begin
        if left < self._needed(each):
            raise CutOff
        failed = self.children.run(
            each.key,
            self._command(each),
            min(each.limit, left),
            # JAX's default for float32 is TF32 on GPUs that have it; torch's contender sets it from the precision.
            {"JAX_DEFAULT_MATMUL_PRECISION": "highest"} if each.task and each.task.case.precision == "float32" else {},
            lambda figures: self._take(each, figures, begin),
            cut=left < each.limit,
        )
        if failed is None and each.missing(table):
            failed = {"failed": f"it succeeded, but without {', '.join(each.missing(table))}"}
        if failed is not None:
            self._put(each.key, failed | {"took": time.monotonic() - begin})

    def _command(self, each: Measurement) -> list[str]:
        python = self.torch if each.script.startswith(RIVAL) else sys.executable
        command = [python, str(CONTENDERS / f"{each.script}.py"), *each.words]
        if each.task is not None:
            described = self.children.folder / "task.json"
            each.task.write(described)
            command.append(str(described))
        if each.keys:
            command += ["--keys", *(key.removeprefix(f"{each.key}/") for key in each.missing(self.plan.table))]
        return command

    def _take(self, each: Measurement, figures: Figures, begin: float) -> None:
        key = f"{each.key}/{figures.pop('key')}" if each.keys else each.key
        self._put(key, figures | {"took": time.monotonic() - begin})

    def _put(self, key: str, figures: Figures) -> None:
        self.plan.table.put(key, figures)
        failure = f": {figures['failed']}" if "failed" in figures else ""
        print(f"{key}{failure}", flush=True)

    def _needed(self, each: Measurement) -> float:
        """Returns the seconds needed for a start: those of similar children, or a fraction of its limit."""
        alike = each.key.rpartition("/")[0]
        took = [found["took"] for found in self.plan.table.below(f"{alike}/").values()]
        return min(each.limit, max(took) if took and not each.keys else LEAST_SHARE * each.limit)
