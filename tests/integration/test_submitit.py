"""Submitit on this machine: `launch/submitit_job.py` starts tasks, which save and resume after a signal."""

import os
import signal
import sys
from pathlib import Path

import pytest
import support.processes as processes

pytest.importorskip("submitit", reason="submitit is missing: pip install submitit")

pytestmark = pytest.mark.ci


class SubmittedJob(processes.Program):
    """The script with two tasks, for which it waits."""

    def __init__(self, folder: Path, words: list[str]):
        self.logs = folder / "jobs"
        script_words = ["--cluster", "local", "--tasks", "2", "--folder", str(self.logs)]
        script = str(processes.REPOSITORY / "launch" / "submitit_job.py")
        super().__init__([sys.executable, script, *script_words, "--", *words], folder, processes.environment())
        self.workdir = Path(words[words.index("--workdir") + 1])

    def printed(self, task: int) -> str:
        """Return the output of a task on both streams."""
        return "".join(file.read_text() for file in sorted(self.logs.glob(f"*_{task}_log.*")))

    def tasks(self) -> list[int]:
        """Return the pids of the tasks in order, which are children of submitit's controller."""
        (controller,) = children(self.process.pid)
        return sorted(children(controller), key=lambda pid: environment_of(pid)["SUBMITIT_LOCAL_GLOBALID"])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def environment_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.fixture
def job(start, arrays, tmp_path):
    def started(length: list[str], name: str = "run") -> SubmittedJob:
        words = [*processes.TRAIN, "--data.path", str(arrays), "--workdir", str(tmp_path / name), *length]
        return start(SubmittedJob, tmp_path / f"submitted-{name}", words)

    return started


def test_a_killed_process_ends_the_other_and_errors_name_both(job):
    run = job(processes.ENDLESS)
    run.wait_until(lambda: processes.losses(run.workdir))
    (process,) = children(run.tasks()[1])
    os.kill(process, signal.SIGKILL)
    assert run.end(within=40) == 1
    assert "submitit_job.py: process 0: exit code 1\n" in run.err
    assert "submitit_job.py: process 1: killed by SIGKILL\n" in run.err
    assert "jaxddp: process 1 was lost (on " in run.printed(0)


def test_two_tasks_train_as_one_and_a_preempted_job_is_queued_again_and_ends_with_the_same_bits(
    job, undisturbed, reference
):
    run = job(processes.LONGER)
    run.wait_until(lambda: (run.workdir / "checkpoints").is_dir() and processes.checkpoint_steps(run.workdir))
    # The signal goes to every process of every task, as SLURM sends it.
    tasks = run.tasks()
    for pid in [*(child for task in tasks for child in children(task)), *tasks]:
        os.kill(pid, signal.SIGUSR2)
    run.ends_well()
    assert "Requeued job" in run.printed(0) and "resum" in run.printed(0)
    assert "joined: process 0 of 2, coordinator 127.0.0.1:" in run.printed(0)
    assert "(from SUBMITIT_LOCAL_JOB_ID, SUBMITIT_LOCAL_NTASKS, SUBMITIT_LOCAL_GLOBALID" in run.printed(0)
    end, expected = processes.result(run.workdir), processes.losses(reference)
    assert (end["status"], end["devices"], end["processes"], end["val"]["count"]) == ("done", 2, 2, 11)
    assert processes.close({step: processes.losses(run.workdir)[step] for step in expected}, expected)
    assert processes.losses(run.workdir) == processes.losses(undisturbed)
    assert processes.checkpoint_bytes(run.workdir) == processes.checkpoint_bytes(undisturbed)
