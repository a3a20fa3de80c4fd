"""Starts the jobs of `benchmarks/chaos.py`, one launcher on each host, reads their output, and waits for their end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common.process_samples import children, last_step, rank_of

REPOSITORY = Path(__file__).parents[2]
RECIPE = REPOSITORY / "tests" / "recipes" / "small_recipe.py"
MARK = "JAXDDP_CHAOS"
"""Environment variable that marks all processes of a job, so that leftover processes can be found and killed."""
HEARTBEAT, START_TIMEOUT, STALL = 3, 12, 8
STEPS, EVERY = 60, 10
_POLL = 0.003


class TookTooLong(Exception):
    """A condition did not become true in time."""


class Job:
    """One start of the same command on each host of a job.

    Args:
        hosts: Names of network namespaces; an empty name is this machine.
        folder: Folder for the output of launchers and processes.
        words: The command that each launcher runs in its processes.
        options: Options of each launcher, in addition to those that depend on the host.
        processes: Number of processes on each host.
        cache: Folder for compiled programs.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        folder: Path,
        words: Sequence[str],
        options: Sequence[str],
        processes: int,
        cache: Path,
    ):
        folder.mkdir(parents=True)
        self.folder, self.hosts, self.processes = folder, hosts, processes
        self._words, self._options = words, options
        self.mark = uuid.uuid4().hex
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "JAXDDP_"))}
        environ |= {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
        self._environ = environ | {"JAXDDP_CACHE": str(cache), MARK: self.mark}
        self.launchers = [self._launch(number) for number in range(len(hosts))]

    def _launch(self, number: int) -> subprocess.Popen[bytes]:
        has_several, host = len(self.hosts) > 1, self.hosts[number]
        inside = ["ip", "netns", "exec", host] if host else []
        host_options = ["--processes", str(self.processes), "--logs", str(self.folder / "logs"), "--grace", "2"]
        host_options += ["--nodes", str(len(self.hosts)), "--nr", str(number)] if has_several else []
        command = [*inside, sys.executable, "-m", "jaxddp", "launch", *host_options, *self._options, "--", *self._words]
        with (self.folder / f"launcher-{number}.log").open("ab") as output:
            return subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def launch_again(self, number: int) -> None:
        """Start the launcher of a host again, after the previous one has ended."""
        self.launchers[number].wait(10)
        self.launchers[number] = self._launch(number)

    @property
    def is_over(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers)

    @property
    def codes(self) -> list[int | None]:
        """The exit code of each launcher, or None while it runs."""
        return [launcher.poll() for launcher in self.launchers]

    @property
    def output(self) -> str:
        """The output of all launchers and processes."""
        results = [*self.folder.glob("*.log"), *self.folder.glob("logs/*.log")]
        return "\n".join(file.read_text(errors="replace") for file in sorted(results))

    def host_of(self, rank: int) -> int:
        return rank // self.processes

    def worker(self, rank: int) -> int:
        """Return the pid of a process of the job. Raises ProcessLookupError if it does not run (yet)."""
        with contextlib.suppress(OSError):
            # `ip netns exec` replaces itself by the launcher, so both have the same pid.
            for child in children(self.launchers[self.host_of(rank)].pid):
                if rank_of(child) == rank:
                    return child
        raise ProcessLookupError(f"process {rank} does not run")

    def keeper(self, rank: int) -> int:
        """Return the pid of the helper that holds a process's connection to JAX's coordinator. Raises like `worker`."""
        with contextlib.suppress(OSError):
            for child in children(self.worker(rank)):
                if b"coordinator_proxy.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return child
        raise ProcessLookupError(f"process {rank} has no keeper")

    def processes_of_host(self, number: int) -> list[int]:
        """Return the pids of a host's launcher and of its descendants."""
        results, unseen = [], [self.launchers[number].pid]
        while unseen:
            results.append(unseen.pop())
            with contextlib.suppress(OSError):
                unseen += children(results[-1])
        return results

    def running_processes(self) -> list[int]:
        """Return the pids of all running processes of the job, including orphans."""
        results, mark = [], f"{MARK}={self.mark}".encode()
        for place in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if place.name.isdecimal() and mark in (place / "environ").read_bytes():
                    results.append(int(place.name))
        return results

    def wait_until(self, condition: Callable[[], object], seconds: float) -> bool:
        """Wait for a condition. Returns False if the job ends first. Raises TookTooLong after `seconds`."""
        give_up = time.monotonic() + seconds
        while not condition():
            if self.is_over:
                return False
            if time.monotonic() > give_up:
                raise TookTooLong(f"the condition was not met in {seconds:g} s")
            time.sleep(_POLL)
        return True

    def wait_for_end(self, seconds: float, words: str = "") -> float | None:
        """Wait until no process of the job runs.

        Returns:
            The seconds until the output matched `words`, or None.

        Raises:
            TookTooLong: Processes still run after `seconds`.
        """
        began, named = time.monotonic(), None
        while not self.is_over or self.running_processes():
            if named is None and words and re.search(words, self.output):
                named = time.monotonic() - began
            if time.monotonic() > began + seconds:
                raise TookTooLong(f"not over after {seconds:g} s: {self.codes}, pids {self.running_processes()}")
            time.sleep(0.02)
        return named

    def close(self) -> None:
        """Kill all processes that still run."""
        for pid in self.running_processes():
            send_signal(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait(30)


def send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def train_command(data: str, workdir: Path, *more: str) -> list[str]:
    """Return the command of a short training run with frequent checkpoints and validations."""
    every = [word for key in ("eval", "checkpoint") for word in (f"--{key}.every", f"{EVERY} steps")]
    timeouts = {"heartbeat": HEARTBEAT, "start": START_TIMEOUT, "shutdown": START_TIMEOUT, "stall": STALL}
    bounds = [word for name, value in timeouts.items() for word in (f"--parallel.{name}-timeout", str(value))]
    length = ["--train.duration", f"{STEPS} steps", "--log.to", "jsonl"]
    return ["train", str(RECIPE), "--data.path", data, "--workdir", str(workdir), *length, *every, *bounds, *more]


def is_done(workdir: Path) -> bool:
    """Return whether the status in the run's result.json is "done"."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((workdir / "result.json").read_bytes())["status"] == "done"
    return False


def unfinished_checkpoints(workdir: Path) -> set[int]:
    """Return the steps of unfinished checkpoints."""
    with contextlib.suppress(OSError):
        names = os.listdir(workdir / "checkpoints")
        return {int(name.split(".")[0]) for name in names if ".orbax-checkpoint-tmp" in name}
    return set()


def logged_step(workdir: Path) -> int:
    """Return the last step in metrics.jsonl."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        return last_step(workdir)
    return 0
