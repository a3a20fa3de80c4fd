"""Starts the contenders of `benchmarks/gpu.py`, one process at a time, each with a time limit."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.harness import Figures
from benchmarks.rivals.gpu_guard import SIGNALLED

CONTENDERS = Path(__file__).with_name("contenders")
GUARD = Path(__file__).with_name("gpu_guard.py")
REPOSITORY = Path(__file__).parents[2]
POLL_SECONDS = 0.1
TAIL = 2000
"""Characters of a failed child's output that are kept in the table."""


class CutOff(Exception):
    """The call ended before the child's limit."""


@dataclass(frozen=True)
class Children:
    """A starter of child processes.

    Attributes:
        folder: Temporary folder for their tasks and results.
        cache: Folder for compiled and tuned programs, and for their output.
        environment: Environment variables for all of them, in addition to those of this process.
    """

    folder: Path
    cache: Path
    environment: Mapping[str, str]

    @property
    def out(self) -> Path:
        """The file to which a child writes its results, one a line."""
        return self.folder / "out.jsonl"

    def run(
        self,
        key: str,
        command: Sequence[str],
        limit: float,
        environment: Mapping[str, str],
        take: Callable[[Figures], None],
        *,
        cut: bool = False,
    ) -> Figures | None:
        """Run a command, and call `take` with every line of its results at once, also with the failures of keys.

        Args:
            cut: Whether `limit` is the remaining time of the call.

        Returns:
            The failure, or None.

        Raises:
            CutOff: The call's time is up.
        """
        self.out.unlink(missing_ok=True)
        log = self.cache / "logs" / f"{re.sub('[^a-zA-Z0-9.=_-]+', '-', key)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        results: list[Figures] = []
        lines = _Lines(self.out)
        with log.open("w+") as output, self._started(command, environment, output) as child:
            end = time.monotonic() + limit
            while (code := child.poll()) is None and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
                self._pass_on(lines, results, take)
            self._pass_on(lines, results, take)
        if code is None and cut:
            raise CutOff
        reason = next((figures["failed"] for figures in results if _is_failure_of_child(figures)), None)
        if code == 0 and reason is None:
            return None if results else {"failed": "it succeeded, but without a result"}
        text = log.read_text(errors="replace")
        return {
            "failed": f"no result within {limit:.0f} s" if code is None else reason or _describe_end(code, text)
        } | {"output": text[-TAIL:]}

    @contextlib.contextmanager
    def _started(
        self, command: Sequence[str], environment: Mapping[str, str], output: object
    ) -> Iterator[subprocess.Popen[Any]]:
        """Yield a child in its own process group, which is killed when the block ends."""
        guarded = [sys.executable, "-S", str(GUARD), *command]
        environ = {**os.environ, **self._library_environment(), **self.environment, **environment}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(guarded, env=environ, start_new_session=True, **pipes)
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    @staticmethod
    def _pass_on(lines: "_Lines", results: list[Figures], take: Callable[[Figures], None]) -> None:
        for figures in lines.new():
            results.append(figures)
            if not _is_failure_of_child(figures):
                take(figures)

    def _library_environment(self) -> dict[str, str]:
        """Return environment variables for a single GPU and for the folders of compiled and tuned programs.

        JAX also keeps XLA's autotuning results in its folder.
        """
        # Always one GPU: torch's contender uses only the first.
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        root = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        return {
            "CUDA_VISIBLE_DEVICES": first,
            "PYTHONPATH": root,
            # A child is alone on the GPU. Torch allocates on demand, JAX by default three quarters of the memory.
            "XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92"),
            "JAXDDP_CACHE": str(self.cache),
            "JAX_COMPILATION_CACHE_DIR": str(self.cache / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache / "inductor"),
            "TRITON_CACHE_DIR": str(self.cache / "triton"),
        }


class _Lines:
    """A reader of a growing file, which yields each complete line once."""

    def __init__(self, path: Path):
        self._path, self._read = path, 0

    def new(self) -> Iterator[Figures]:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(newline)
        yield from (json.loads(line) for line in whole.splitlines())


def _is_failure_of_child(figures: Figures) -> bool:
    """Return whether a line reports the failure of the whole child, and not that of a key."""
    return "failed" in figures and "key" not in figures


def _describe_end(code: int, text: str) -> str:
    """Describe the end of a process that reported no reason."""
    if code > SIGNALLED:
        return f"killed by {signal.Signals(code - SIGNALLED).name}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"exit code {code}: {lines[-1][:300] if lines else 'it printed nothing'}"


def probe_device(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return JAX's platform and device kind, from a child, because a process that starts JAX keeps GPU memory."""
    program = "import jax; print(jax.default_backend(), jax.devices()[0].device_kind, sep='\\n')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
    if done.returncode:
        return "", _describe_end(done.returncode, done.stderr)
    platform, device = done.stdout.strip().splitlines()[-2:]
    return platform, device


def has_torch(python: str) -> bool:
    try:
        return not subprocess.run([python, "-c", "import torch"], capture_output=True, timeout=120).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False
