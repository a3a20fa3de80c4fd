"""A real Ray on this machine: `launch/ray_job.py` starts, ends and restarts the processes of a job."""

import os
import signal
import sys
from pathlib import Path

import pytest
import support.processes as processes

pytest.importorskip("ray", reason="ray is missing: pip install ray")

pytestmark = pytest.mark.ci
ENVIRONMENT = processes.environment(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")


class RayJob(processes.Program):
    """The driver of two processes with a core each. It starts and ends its own Ray."""

    def __init__(self, folder: Path, words: list[str], *options: str):
        driver = [str(processes.REPOSITORY / "launch" / "ray_job.py"), "--address", "local", "--processes", "2"]
        super().__init__([sys.executable, *driver, *options, "--", *words], folder, ENVIRONMENT)
        self.workdir = Path(words[words.index("--workdir") + 1])

    def worker(self, rank: int) -> int:
        """Return the pid of a process of the job. It is a descendant of Ray's daemon, a child of the driver."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and self._is_worker(folder, rank):
                return int(folder.name)
        pytest.fail(f"process {rank} does not run:\n{self.out}{self.err}")

    def _is_worker(self, folder: Path, rank: int) -> bool:
        try:
            variables, words = ((folder / name).read_bytes().split(b"\0") for name in ("environ", "cmdline"))
        except OSError:
            return False
        return f"JAX_PROCESS_ID={rank}".encode() in variables and str(self.workdir).encode() in words


@pytest.fixture
def job(start, arrays, tmp_path):
    def started(length: list[str], *options: str) -> RayJob:
        words = [*processes.TRAIN, "--data.path", str(arrays), "--workdir", str(tmp_path / "run"), *length]
        return start(RayJob, tmp_path / "ray", words, *options)

    return started


def test_a_killed_process_ends_the_job_with_its_code(job):
    run = job(processes.ENDLESS)
    run.wait_until(lambda: processes.losses(run.workdir))
    os.kill(run.worker(1), signal.SIGKILL)
    assert run.end(within=40) == 128 + signal.SIGKILL, run.out + run.err
    assert run.last == "ray_job.py: process 1: killed by SIGKILL"
    assert "[0] jaxddp: process 1 was lost (on " in run.out


def test_two_actors_train_as_one_and_a_restarted_job_ends_with_the_same_bits(job, undisturbed, reference):
    run = job(processes.LONGER, "--restarts", "2")
    run.wait_until(lambda: (run.workdir / "checkpoints").is_dir() and processes.checkpoint_steps(run.workdir))
    os.kill(run.worker(0), signal.SIGKILL)
    run.ends_well()
    assert "[0] joined: process 0 of 2, coordinator " in run.out
    assert "ray_job.py: process 0: killed by SIGKILL; restart 1 of 2 in 1 s\n" in run.err
    end, expected = processes.result(run.workdir), processes.losses(reference)
    assert (end["status"], end["devices"], end["processes"], end["val"]["count"]) == ("done", 2, 2, 11)
    assert processes.close({step: processes.losses(run.workdir)[step] for step in expected}, expected)
    assert processes.losses(run.workdir) == processes.losses(undisturbed)
    assert processes.checkpoint_bytes(run.workdir) == processes.checkpoint_bytes(undisturbed)


def test_a_mistake_is_not_restarted_and_a_job_that_is_asked_to_stop_saves(job):
    run = job([*processes.BRIEF, "--train.batch-size", "7"], "--restarts", "2")
    assert run.end() == 2, run.out + run.err
    assert "restart" not in run.err and "jaxddp: --train.batch-size 7 cannot be divided among 2 devices" in run.out
    run = job(processes.ENDLESS, "--restarts", "2")
    run.wait_until(lambda: processes.losses(run.workdir))
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 75, run.out + run.err
    assert processes.result(run.workdir)["status"] == "preempted" and processes.checkpoint_steps(run.workdir)
