"""A command of jaxddp as a job of submitit, on SLURM or on this machine:

    python launch/submitit_job.py --nodes 2 --tasks 8 --gpus 8 --minutes 1440 --folder /shared/runs/first/jobs -- \\
        train imagenet_resnet50 --data.path /data/imagenet --workdir /shared/runs/first
    python launch/submitit_job.py --cluster local --tasks 2 -- train digits --data.path data/digits --workdir runs/one

Each task is one process of the job, with one of its machine's GPUs. On SLURM the script prints the job and ends, unless
it is told to --wait; a job on this machine is waited for.

Before its time is up, or when it is preempted, submitit's signal makes all processes save and stop, and the job is
queued again, as often as --timeouts says; it goes on from there.
"""

import argparse
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import submitit

import jaxddp.cluster.starter as starter
from jaxddp.core.wording import first_line
from jaxddp.job.environment import KEY

PREEMPTED = 75
SAVE_SECONDS = 120
"""How long all processes may take to save; SLURM is to send the signal as long before it ends the job."""
ASKED = signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]


class Training:
    """What each task calls: runs jaxddp's command as a child, which finds its place in the task's environment.

    Submitit calls `checkpoint` in task 0, within its handler of the signal, while `__call__` waits.
    """

    def __init__(self, words: Sequence[str]):
        self.words = list(words)

    def __call__(self) -> int:
        # SLURM sends the signal to every process of the task, and it would end the child.
        before = signal.signal(ASKED, signal.SIG_IGN)
        as_child = [sys.executable, "-I", "-S", starter.__file__, str(os.getpid()), ""]
        self._process = subprocess.Popen([*as_child, sys.executable, "-m", "jaxddp", *self.words])
        signal.signal(ASKED, before)
        # Not `wait`, whose lock `checkpoint` would find taken.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        return self._conclude(self._process.wait())

    def checkpoint(self) -> submitit.helpers.DelayedSubmission | None:
        """Let all processes save, and say what to queue: the same again, or nothing where they could not."""
        self._process.send_signal(signal.SIGTERM)
        give_up = time.monotonic() + SAVE_SECONDS
        while time.monotonic() < give_up:
            end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                # One that has just finished is done when it starts again.
                saved = end.si_code == os.CLD_EXITED and end.si_status in (0, PREEMPTED)
                return submitit.helpers.DelayedSubmission(Training(self.words)) if saved else None
            time.sleep(0.1)
        return None

    def _conclude(self, code: int) -> int:
        if code == 0:
            return 0
        if code == PREEMPTED:
            # Without a result the task counts as unfinished. The signal came to task 0, which has the job queued again.
            sys.exit(PREEMPTED)
        how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
        raise RuntimeError(f"process {submitit.JobEnvironment().global_rank}: {how}")


def end(job: submitit.Job[int]) -> int:
    """Wait for all tasks; 1 where one failed, with a line for each that did."""
    failures = {task: job.task(task).exception() for task in range(job.num_tasks)}
    for task, error in failures.items():
        if error is not None:
            # What the task raised, or of one without a result that there is none.
            raised = re.search(r"^RuntimeError: (.*)", str(error), re.MULTILINE)
            say(raised[1] if raised else f"process {task}: {first_line(error)}")
    if not any(failures.values()):
        return 0
    say(f"job {job.job_id} failed; what it printed is in {job.paths.folder}")
    return 1


def executor(options: argparse.Namespace) -> submitit.Executor:
    """Where and with what the job runs."""
    shared = {"nodes": options.nodes, "gpus_per_node": options.gpus, "signal_delay_s": SAVE_SECONDS}
    if options.cluster == "local":
        local = submitit.LocalExecutor(options.folder, options.timeouts)
        local.update_parameters(tasks_per_node=options.tasks, timeout_min=options.minutes, **shared)
        return local
    slurm = submitit.SlurmExecutor(options.folder, options.timeouts)
    given = {"partition": options.partition, "cpus_per_task": options.cpus, **shared}
    slurm.update_parameters(
        job_name="jaxddp",
        ntasks_per_node=options.tasks,
        time=options.minutes,
        # It does not take this one from the batch job.
        srun_args=[f"--cpus-per-task={options.cpus}"] if options.cpus else [],
        **{name: value for name, value in given.items() if value},
    )
    return slurm


def say(line: str) -> None:
    print(f"submitit_job.py: {line}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", choices=("slurm", "local"), default="slurm")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=1, help="on each node, a process each")
    parser.add_argument("--gpus", type=int, default=0, help="on each node")
    parser.add_argument("--cpus", type=int, help="of each task (SLURM)")
    parser.add_argument("--partition", help="of SLURM")
    parser.add_argument("--minutes", type=int, default=60, help="until the job is asked to save")
    parser.add_argument("--timeouts", type=int, default=10, help="how often it may be queued again because time is up")
    parser.add_argument("--folder", type=Path, default=Path("runs/submitit"), help="for output, shared by all nodes")
    parser.add_argument("--wait", action="store_true", help="for the end of the job")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="of jaxddp, such as `-- train digits …`")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    # Only processes that know it may join; all tasks are given the variables of this process.
    os.environ.setdefault(KEY, secrets.token_hex(32))
    job = executor(options).submit(Training(options.command))
    say(f"job {job.job_id}; what it prints is in {job.paths.folder}")
    return end(job) if options.wait or options.cluster == "local" else 0


if __name__ == "__main__":
    sys.exit(main())
