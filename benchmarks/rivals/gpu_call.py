"""Runs one call of `benchmarks/gpu.py`: measures missing results until the table is complete or the time is up."""

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
        """Measure the missing results of some parts, in order. Returns False if the gate failed."""
        for part in parts:
            try:
                while pending := self.plan.pending(part):
                    self._measure(pending[0])
            except NotRun:
                continue
            except CutOff:
                return True
            if part == "gate" and not judge(self.plan.table)[1]:
                return False
        return True

    def left(self, parts: Sequence[str]) -> list[str]:
        """Return the missing keys, and the parts whose keys depend on them."""
        keys: list[str] = []
        for part in parts:
            try:
                keys += [key for measurement in self.plan.pending(part) for key in measurement.missing(self.plan.table)]
            except NotRun:
                # The part may become possible after other measurements.
                keys += [part] if keys else []
        return keys

    def _measure(self, measurement: Measurement) -> None:
        """Start a child, and put its results into the table. Raises CutOff if the call's time is up."""
        table, begin = self.plan.table, time.monotonic()
        if smaller := next((key for key in measurement.smaller if table.failures.get(key) == OUT_OF_MEMORY), None):
            self._put(measurement.key, {"failed": f"not started: {smaller} ran out of memory"})
            return
        left = self.end - begin
        if left < self._needed(measurement):
            raise CutOff
        failed = self.children.run(
            measurement.key,
            self._command(measurement),
            min(measurement.limit, left),
            # JAX's default for float32 is TF32 on GPUs that have it; torch's contender sets it from the precision.
            {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
            if measurement.task and measurement.task.case.precision == "float32"
            else {},
            lambda figures: self._take(measurement, figures, begin),
            cut=left < measurement.limit,
        )
        if failed is None and measurement.missing(table):
            failed = {"failed": f"it succeeded, but without {', '.join(measurement.missing(table))}"}
        if failed is not None:
            self._put(measurement.key, failed | {"took": time.monotonic() - begin})

    def _command(self, measurement: Measurement) -> list[str]:
        python = self.torch if measurement.script.startswith(RIVAL) else sys.executable
        command = [python, str(CONTENDERS / f"{measurement.script}.py"), *measurement.words]
        if measurement.task is not None:
            described = self.children.folder / "task.json"
            measurement.task.write(described)
            command.append(str(described))
        if measurement.keys:
            command += [
                "--keys",
                *(key.removeprefix(f"{measurement.key}/") for key in measurement.missing(self.plan.table)),
            ]
        return command

    def _take(self, measurement: Measurement, figures: Figures, begin: float) -> None:
        key = f"{measurement.key}/{figures['key']}" if measurement.keys else measurement.key
        others = {name: value for name, value in figures.items() if name != "key"}
        self._put(key, others | {"took": time.monotonic() - begin})

    def _put(self, key: str, figures: Figures) -> None:
        self.plan.table.put(key, figures)
        shown = {"failed": figures["failed"]} if "failed" in figures else figures
        # Long lists, such as kernels, are only in the table.
        words = (f"{name} {value}" for name, value in shown.items() if not isinstance(value, (list, dict)))
        print(f"{key}: {', '.join(words)}"[:2000], flush=True)

    def _needed(self, measurement: Measurement) -> float:
        """Return the seconds that a start needs: the maximum of similar children, or a fraction of the limit."""
        alike = measurement.key.rpartition("/")[0]
        took = [results["took"] for results in self.plan.table.below(f"{alike}/").values()]
        return min(measurement.limit, max(took) if took and not measurement.keys else LEAST_SHARE * measurement.limit)
