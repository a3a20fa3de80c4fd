"""Trains the trials of `jaxddp sweep` as tasks of a Ray cluster, each with its GPUs or CPUs:

    python launch/ray_sweep.py --gpus 1 -- digits --data.path /data/digits --lr 1e-3,3e-3 --seed 0:3 \\
        --workdir /shared/runs/rates

The arguments after `--` are those of `jaxddp sweep`, without --search, --jobs and --index. Run the script where a Ray
driver can run. All machines must have jaxddp and share the work directory. Paths must be absolute.

Each trial is an ordinary run of `jaxddp train`, so the same command resumes the sweep. A failed trial is started again
once (--restarts). Bad input ends the sweep with exit code 2. After Ctrl-C or SIGTERM, the trials save, and the exit
code is 75. When all trials have finished, the script prints the table of `jaxddp sweep` and writes its files.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, TaskCancelledError

import jaxddp.cluster.starter as starter
from jaxddp.core.errors import InputError, Preempted

FORWARDED = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "JAXDDP_CACHE", "JAXDDP_DATASETS")
"""Environment variables of this machine that are set in all trials. Other variables come from their machines."""
SAVE_GRACE = 120.0
"""Seconds from SIGTERM to SIGKILL."""
BAD_INPUT, PREEMPTED = InputError.exit_code, Preempted.exit_code
JAXDDP = (sys.executable, "-m", "jaxddp")


def train(words: Sequence[str], environ: dict[str, str]) -> int:
    """Run a trial in a child of this task, and return its exit code. A cancelled task lets the trial save."""
    log = Path(words[words.index("--workdir") + 1]) / "output.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # The kernel kills the trial when the process of this task ends.
    command = [sys.executable, "-I", "-S", starter.__file__, str(os.getpid()), "", *JAXDDP, *words]
    with log.open("ab") as output:
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", "JAX_NUM_PROCESSES": "1", **environ}
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        # Ray cannot interrupt a single long wait.
        while process.poll() is None:
            time.sleep(0.2)
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        return process.wait(SAVE_GRACE)
    finally:
        process.kill()


def commands(words: Sequence[str]) -> list[list[str]]:
    """Return the arguments of `jaxddp` for each trial. Raises: SystemExit if the words are not accepted."""
    listed = subprocess.run([*JAXDDP, "sweep", *words, "--list"], stdout=subprocess.PIPE, text=True, check=False)
    if listed.returncode:
        sys.exit(listed.returncode)
    return [shlex.split(line)[1:] for line in listed.stdout.splitlines()]


class Sweep:
    """The tasks of all trials."""

    def __init__(self, trials: Sequence[Sequence[str]], options: argparse.Namespace):
        self._task: Any = ray.remote(train).options(num_cpus=options.cpus, num_gpus=options.gpus, max_retries=0)
        self._environ = {name: os.environ[name] for name in FORWARDED if name in os.environ}
        if not options.gpus:
            self._environ |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        self._restarts = {index: options.restarts for index in range(len(trials))}
        self._trials, self._pending, self._codes = trials, dict[ray.ObjectRef, int](), dict[int, int]()
        self._is_stopping = False
        for index in range(len(trials)):
            self._start(index)

    def watch(self, received: list[signal.Signals]) -> int:
        """Wait until all trials have ended, and return the exit code. A signal handler appends to `received`."""
        while self._pending:
            for reference in ray.wait(list(self._pending), timeout=0.5)[0]:
                self._finish(self._pending.pop(reference), self._code(reference))
            if received and not self._is_stopping:
                self._stop(f"{received[0].name}: every trial was asked to save and stop")
        codes = set(self._codes.values())
        return next((code for code in (BAD_INPUT, *sorted(codes - {0, PREEMPTED}), PREEMPTED) if code in codes), 0)

    def _start(self, index: int) -> None:
        self._pending[self._task.remote(self._trials[index], self._environ)] = index

    def _code(self, reference: ray.ObjectRef) -> int:
        try:
            code = ray.get(reference)
            return code if code >= 0 else 128 - code
        except TaskCancelledError:
            return PREEMPTED
        except RayError:
            return 1  # The machine of the trial is lost, for example.

    def _finish(self, index: int, code: int) -> None:
        workdir = self._trials[index][-1]
        report(f"{workdir}: " + ("done" if code == 0 else f"exit code {code}; see output.log there"))
        if code in (0, PREEMPTED, BAD_INPUT) or self._is_stopping or not self._restarts[index]:
            # A process that was stopped before it trained is interrupted, too.
            self._codes[index] = PREEMPTED if self._is_stopping and code not in (0, BAD_INPUT) else code
        else:
            self._restarts[index] -= 1
            self._start(index)
        if code == BAD_INPUT and not self._is_stopping:
            self._stop("bad input: the other trials were asked to save and stop")

    def _stop(self, line: str) -> None:
        self._is_stopping = True
        report(line)
        for reference in self._pending:
            ray.cancel(reference, force=False)


def report(line: str) -> None:
    print(f"ray_sweep.py: {line}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each trial (default: none; the CPU is used)")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs of each trial")
    parser.add_argument("--restarts", type=int, default=1, help="restarts of each trial after failures")
    parser.add_argument("--address", help="address of the cluster (default: Ray's default; `local` starts a new Ray)")
    parser.add_argument("words", nargs="+", metavar="-- CONFIG", help="arguments of `jaxddp sweep`")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    trials = commands(options.words)
    ray.init(address=options.address, include_dashboard=False, log_to_driver=False)
    received: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.append(signal.Signals(number)))
    try:
        code = Sweep(trials, options).watch(received)
    finally:
        ray.shutdown()
    return code or subprocess.call([*JAXDDP, "sweep", *options.words])


if __name__ == "__main__":
    sys.exit(main())
