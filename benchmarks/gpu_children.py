"""Starts the contenders of `benchmarks/gpu.py`, one process at a time on the GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness import CHILD_SECONDS, Figures

sys.path.append(str(Path(__file__).with_name("contenders")))
from case import Case, Task

CONTENDERS = Path(__file__).with_name("contenders")
OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "OutOfMemoryError", "out of memory")


@dataclass(frozen=True)
class Children:
    """Attributes:
    folder: holds their tasks and their results.
    torch: the interpreter that has torch.
    environment: of all of them, beside this process's.
    """

    folder: Path
    torch: str
    environment: Mapping[str, str]

    def platform(self) -> str:
        """JAX's platform. Another process asks for it: a process that has asked keeps most of the GPU's memory."""
        command = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
        done = subprocess.run(command, env=self._environ(), capture_output=True, text=True, timeout=CHILD_SECONDS)
        return done.stdout.strip()

    def has_torch(self) -> bool:
        try:
            return not subprocess.run([self.torch, "-c", "import torch"], capture_output=True).returncode
        except OSError:
            return False

    def start(self, script: str, case: Case, steps: int, turns: int) -> Figures | None:
        """What a script of the contenders' folder writes for a case; None where it runs out of memory."""
        task = Task(case, self.folder / f"{case.network}.npz", steps, turns, self.folder / "out.json")
        described = self.folder / "task.json"
        task.write(described)
        python = self.torch if script.startswith("torch") else sys.executable
        # JAX's default in float32 is TF32 where a GPU has it; torch's contender sets it from the precision.
        exact = {"JAX_DEFAULT_MATMUL_PRECISION": "highest"} if case.precision == "float32" else {}
        return self.run([python, str(CONTENDERS / f"{script}.py"), str(described)], task.out, exact)

    def run(self, command: list[str], out: Path, environment: Mapping[str, str] | None = None) -> Figures | None:
        """What a command writes to `out`; None where it runs out of memory. Any other failure ends this process."""
        out.unlink(missing_ok=True)
        environ = {**self._environ(), **(environment or {})}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=CHILD_SECONDS)
        if not done.returncode:
            return json.loads(out.read_text())
        if any(sign in done.stderr for sign in OUT_OF_MEMORY):
            return None
        sys.exit(f"{command[1]} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")

    def _environ(self) -> dict[str, str]:
        # One GPU, whatever the machine has: torch's contender uses only the first.
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        root = os.pathsep.join([str(CONTENDERS.parent.parent), os.environ.get("PYTHONPATH", "")])
        return {**os.environ, "CUDA_VISIBLE_DEVICES": first, "PYTHONPATH": root, **self.environment}
