"""Runs the launcher in this process or in others, with small Python programs."""

import fcntl
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from jaxddp.cluster.launcher import launch
from jaxddp.cluster.options import Launch

HANGING = 60
PRELUDE = """
import os, signal, socket, subprocess, sys, time
rank = int(os.environ["JAX_PROCESS_ID"])
def say(*words):
    print(*words, flush=True)
"""


def program(text: str) -> list[str]:
    return ["python", "-c", PRELUDE + textwrap.dedent(text)]


class LaunchResult:
    """A launch in this process, and its results."""

    def __init__(self, capfd, logs: Path, text: str, **options):
        options = {"processes": 2, "logs": logs} | options
        self.code = launch(Launch(**options), program(text))
        self.out, self.err = capfd.readouterr()
        self.lines = self.out.splitlines()
        self.errors = self.err.splitlines()

    def of(self, rank: int) -> list[str]:
        """Return the lines that a process wrote."""
        return [line.removeprefix(f"[{rank}] ") for line in self.lines if line.startswith(f"[{rank}] ")]

    def environments(self) -> list[dict[str, str]]:
        """Return the environments that processes wrote by `PRINT_ENVIRONMENT`."""
        ranks = sorted({int(re.match(r"\[(\d+)\]", line)[1]) for line in self.lines})
        return [dict(line.split("=", 1) for line in self.of(rank)) for rank in ranks]


def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove variables of GPUs and of a surrounding job from the environment."""
    names = ("CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS", "GLIBC_TUNABLES", "PYTHONUNBUFFERED", "JAXDDP_JOB_KEY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def wait_for(lock: Path) -> None:
    """Wait until the lock is free. Pytest's timeout bounds the wait."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


ROOT = Path(__file__).parents[2]
# Imports only the launcher, without the imports of `import jaxddp`, which the launcher does not need.
LAUNCHER = f"""
import sys, types
package = types.ModuleType("jaxddp")
package.__path__ = [{str(ROOT / "jaxddp")!r}]
sys.modules["jaxddp"] = package
from pathlib import Path
from jaxddp.cluster.launcher import launch
from jaxddp.cluster.options import Launch
"""
PRINT_ENVIRONMENT = """
for name, value in os.environ.items():
    if name.startswith(("JAX", "CUDA", "GLIBC", "PYTHONUNBUFFERED")):
        say(f"{name}={value}")
"""


class LauncherProcess:
    """A launcher in a separate process, whose output goes to files."""

    def __init__(self, folder: Path, command: list[str]):
        self.paths = folder / "out", folder / "err"
        with self.paths[0].open("wb") as out, self.paths[1].open("wb") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self.paths[0].read_text()

    @property
    def err(self) -> str:
        return self.paths[1].read_text()

    def wait_until(self, happened: Callable[[], object]) -> None:
        give_up = time.monotonic() + HANGING
        while not happened():
            assert self.process.poll() is None and time.monotonic() < give_up, self.out + self.err
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> Self:
        self.process.send_signal(number)
        return self

    def end(self) -> int:
        try:
            return self.process.wait(HANGING)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running:\n{self.out}{self.err}")


class Machine(LauncherProcess):
    """The launcher of one of several machines."""

    def __init__(self, folder: Path, text: str, options: str):
        folder.mkdir(exist_ok=True)
        options = f"processes=1, grace=2, save_grace=1, logs=Path({str(folder / 'logs')!r}), {options}"
        code = (
            f"{LAUNCHER}\nfrom jaxddp.core.errors import JaxddpError\n"
            f"try:\n    sys.exit(launch(Launch({options}), {program(text)!r}))\n"
            f"except JaxddpError as error:\n    print(error, file=sys.stderr)\n    sys.exit(error.exit_code)\n"
        )
        super().__init__(folder, [sys.executable, "-c", code])

    def expect(self, *lines: str) -> "Machine":
        """Wait until the output has all of these lines."""
        self.wait_until(lambda: all(line in self.out + self.err for line in lines))
        return self


GENERATION = "generation = int(os.environ['JAXDDP_GENERATION'])"
# Programs for a machine: the first fails, and the second saves at SIGTERM.
FAILING = "say('begun'); sys.exit(9)"
SAVING = f"""
{GENERATION}
def save(*_):
    say("saved", generation)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
say(f"generation {{generation}}: process {{rank}} of {{os.environ['JAX_NUM_PROCESSES']}}")
time.sleep(600)
"""
