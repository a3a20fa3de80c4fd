"""Starts real programs and waits for them, with a bound on every wait."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxddp.training.checkpoints.integrity import INDEX

REPOSITORY = Path(__file__).parents[2]
HANGING = 150
"""Maximum seconds of a wait, ten times the longest on an idle machine with two cores."""

TRAIN = [
    "train", str(REPOSITORY / "tests" / "recipes" / "small_recipe.py"),
    # Plain SGD at a constant rate: it reveals gradients that are off by a factor, and its losses do not depend on the
    # length of the run. At this rate losses change by 1% and more, and rounding errors do not grow (at 0.1 they do).
    "--optimizer.name", "momentum", "--optimizer.momentum", "0", "--optimizer.no-nesterov",
    "--optimizer.schedule", "constant", "--optimizer.warmup", "0 steps", "--optimizer.learning-rate", "0.02",
    # Curves and TensorBoard's file would take a third of the time of such a short run.
    "--log.to", "jsonl"
]  # fmt: skip
STEPS = 6
BRIEF = ["--train.duration", f"{STEPS} steps"]
LONGER_STEPS = 36
LONGER = ["--train.duration", f"{LONGER_STEPS} steps", "--checkpoint.every", "4 steps", "--eval.every", "18 steps"]
THREADS = ["--cores", "0"]
"""Options of `launch`: all processes use all cores, because the last bits of sums depend on the number of threads."""
ENDLESS = ["--train.duration", "100000 steps", "--eval.every", "100000 steps", "--checkpoint.every", "100000 steps"]

_OF_A_JOB = re.compile(
    r"JAX_(COORDINATOR|NUM|PROCESS|LOCAL)_|JAXDDP_|SLURM_|OMPI_|PMI|RANK$|LOCAL_RANK|WORLD_SIZE"
    r"|SUBMITIT_|PET_|COORDINATOR_ADDRESS$|JOBSET_NAME$|SKYPILOT_|AWS_BATCH_|JOB_COMPLETION_INDEX$"
    r"|TPU_WORKER_|MEGASCALE_"
)


def environment(**more: str) -> dict[str, str]:
    """Return an environment without the variables of a surrounding job."""
    inherited = {name: value for name, value in os.environ.items() if not _OF_A_JOB.match(name)}
    path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests", REPOSITORY / "tests" / "recipes")))
    return {**inherited, "PYTHONPATH": path, **more}


class Program:
    """A started program. Its output goes to files, so that it never blocks on a pipe."""

    def __init__(self, command: Sequence[str], folder: Path, env: Mapping[str, str] | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                list(command), env=env or environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return without_progress_lines(self._err.read_text())

    @property
    def last(self) -> str:
        """The last line of stderr."""
        return last_line(self._err)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition. Fails if the program ends first."""
        give_up = time.monotonic() + HANGING
        while not condition():
            assert self.process.poll() is None, f"ended with exit code {self.process.poll()}:\n{self.out}{self.err}"
            assert time.monotonic() < give_up, f"condition not met:\n{self.out}{self.err}"
            time.sleep(0.05)

    def end(self, within: float = HANGING) -> int:
        """Wait for the end in bounded time, and return the exit code."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {within:g} s:\n{self.out}{self.err}")

    def ends_well(self) -> None:
        """Wait for a successful end. A program that fails or hangs is ended."""
        try:
            assert self.end() == 0, self.out + self.err
        finally:
            self.close()

    def close(self) -> None:
        """End the program if it still runs. SIGTERM comes first, so that a launcher ends its processes."""
        for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 30)):
            if self.process.poll() is None:
                self.process.send_signal(number)
                try:
                    self.process.wait(seconds)
                except subprocess.TimeoutExpired:
                    continue


class Launched(Program):
    """`jaxddp launch` with several processes on this machine."""

    def __init__(self, folder: Path, processes: int, command: Sequence[str], *options: str):
        self.logs = folder / "logs"
        launch_options = ["--processes", str(processes), "--logs", str(self.logs), *options]
        super().__init__([sys.executable, "-m", "jaxddp", "launch", *launch_options, "--", *command], folder)

    def last_of(self, rank: int) -> str:
        """Return the last line that a process wrote to either stream."""
        return last_line(self.logs / f"process-{rank}.log")

    def worker(self, rank: int) -> int:
        """Return the pid of a process of the job."""
        launcher = self.process.pid
        for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
            if f"JAX_PROCESS_ID={rank}\0" in Path(f"/proc/{pid}/environ").read_text():
                return int(pid)
        pytest.fail(f"process {rank} does not run:\n{self.out}{self.err}")


def without_progress_lines(text: str) -> str:
    """Remove lines that only appear on slow machines, such as `importing JAX ...`."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.endswith(" ...\n"))


def last_line(file: Path) -> str:
    return file.read_text().rstrip("\n").split("\n")[-1]


def lines(workdir: Path, split: str = "train") -> list[dict]:
    """Read the complete lines of a split in metrics.jsonl."""
    file = workdir / "metrics.jsonl"
    whole = file.read_text().split("\n")[:-1] if file.exists() else []
    return [line for line in map(json.loads, whole) if line["split"] == split]


def losses(workdir: Path, split: str = "train") -> dict[int, float]:
    """Return the losses of a split by step."""
    return {line["step"]: line["loss"] for line in lines(workdir, split)}


def result(workdir: Path) -> dict:
    return json.loads((workdir / "result.json").read_text())


def checkpoint_steps(workdir: Path) -> list[int]:
    return sorted(int(folder.name) for folder in (workdir / "checkpoints").iterdir() if folder.name.isdecimal())


def is_checkpointed(workdir: Path) -> bool:
    """Return whether a first checkpoint is complete. Steps continue while it is written."""
    index = workdir / "checkpoints" / INDEX
    return index.is_file() and bool(json.loads(index.read_text())["steps"])


def brief_words(data: Path, workdir: Path, *more: str) -> list[str]:
    """Return the command of a brief training run."""
    return [*TRAIN, "--data.path", str(data), "--workdir", str(workdir), *BRIEF, *more]


def series(workdir: Path) -> dict[str, dict[int, float]]:
    """Return the losses of both splits."""
    return {split: losses(workdir, split) for split in ("train", "val")}


def is_whole(workdir: Path, *, processes: int, devices: int = 4) -> bool:
    """Return whether a brief run made every step and validated every image."""
    end = result(workdir)
    return (
        (end["status"], end["step"], end["devices"], end["processes"]) == ("done", STEPS, devices, processes)
        and list(losses(workdir)) == list(range(1, STEPS + 1))
        and {line["count"] for line in lines(workdir, "val")} == {11}
    )


def are_the_same(workdir: Path, reference: Path) -> bool:
    """Return whether two runs differ only by rounding."""
    ours, theirs = series(workdir), series(reference)
    return (
        all(close(ours[split], theirs[split]) for split in ours)
        and result(workdir)["val"]["top1"] == result(reference)["val"]["top1"]
    )


def close(series: dict[int, float], expected: dict[int, float]) -> bool:
    """Return whether two series have equal steps, and values that differ only by rounding."""
    return series == pytest.approx(expected, rel=2e-5)


def checkpoint_bytes(workdir: Path) -> dict[str, bytes]:
    """Return the bytes of the arrays of the last checkpoint, read without jaxddp."""
    place = workdir / "checkpoints" / str(checkpoint_steps(workdir)[-1]) / "state"
    reader = ocp.PyTreeCheckpointer()
    tree = reader.metadata(place).item_metadata.tree
    as_arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    state = reader.restore(place, args=ocp.args.PyTreeRestore(restore_args=as_arrays))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
