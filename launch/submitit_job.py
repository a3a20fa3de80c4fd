"""Runs a jaxddp command as a submitit job, on SLURM or on this machine:

    python launch/submitit_job.py --nodes 2 --tasks 8 --gpus 8 --minutes 1440 --folder /shared/runs/first/jobs -- \\
        train imagenet_resnet50 --data.path /data/imagenet --workdir /shared/runs/first
    python launch/submitit_job.py --cluster local --tasks 2 -- train digits --data.path data/digits --workdir runs/one

Each task is one process of the job, with one GPU of its machine. On SLURM, the script prints the job's id and ends;
with --wait, it waits for the job. It always waits for a job on this machine.

Before a timeout or a preemption, submitit's signal makes all processes save and stop. Then the job is queued again, up
to --timeouts times, and resumes.
"""

import argparse
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import submitit

import jaxddp.cluster.starter as starter
from jaxddp.core.errors import first_line
from jaxddp.core.threads import in_daemon
from jaxddp.job.environment import KEY

PREEMPTED = 75
SAVE_SECONDS = 120
"""Seconds in which all processes must save. SLURM sends the signal this many seconds before it ends the job."""
STOP_SIGNAL = signal.Signals[f"SIG{submitit.JobEnvironment.USR_SIG}"]


class Training:
    """The function of each task. It runs the jaxddp command as a child process, which joins the job of its environment.

    Submitit calls `checkpoint` in task 0 from its signal handler, while `__call__` waits.
    """

    def __init__(self, words: Sequence[str]):
        self.words = list(words)

    def __call__(self) -> int:
        # SLURM sends the signal to every process of the task. Without SIG_IGN, the signal would kill the child.
        previous_handler = signal.signal(STOP_SIGNAL, signal.SIG_IGN)
        starter_command = [sys.executable, "-I", "-S", starter.__file__, str(os.getpid()), ""]
        self._process = subprocess.Popen([*starter_command, sys.executable, "-m", "jaxddp", *self.words])
        signal.signal(STOP_SIGNAL, previous_handler)
        # `checkpoint` interrupts the main thread, and a lock of `wait` would block it there.
        self._code = in_daemon(self._process.wait)
        return self._conclude(self._code.result())

    def checkpoint(self) -> submitit.helpers.DelayedSubmission | None:
        """Let all processes save. Return the job to queue again; None if the processes did not save."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            # Code 0: a run that has just finished ends at once after a restart.
            if self._code.result(SAVE_SECONDS) in (0, PREEMPTED):
                return submitit.helpers.DelayedSubmission(Training(self.words))
        return None

    def _conclude(self, code: int) -> int:
        if code == 0:
            return 0
        if code == PREEMPTED:
            # Without a result the task counts as unfinished. Task 0 received the signal and queues the job again.
            sys.exit(PREEMPTED)
        how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
        raise RuntimeError(f"process {submitit.JobEnvironment().global_rank}: {how}")


def wait_for(job: submitit.Job[int]) -> int:
    """Wait for all tasks, and print a line for each failure. Return 1 if there is a failure, else 0."""
    failures = {task: job.task(task).exception() for task in range(job.num_tasks)}
    for task, error in failures.items():
        if error is not None:
            # `error` has the task's exception, or submitit's error for a missing result.
            raised = re.search(r"^RuntimeError: (.*)", str(error), re.MULTILINE)
            report(raised[1] if raised else f"process {task}: {first_line(error)}")
    if not any(failures.values()):
        return 0
    report(f"job {job.job_id} failed; its output is in {job.paths.folder}")
    return 1


def executor(options: argparse.Namespace) -> submitit.Executor:
    """Return the executor with the resources of the job."""
    shared = {"nodes": options.nodes, "gpus_per_node": options.gpus, "signal_delay_s": SAVE_SECONDS}
    if options.cluster == "local":
        local = submitit.LocalExecutor(options.folder, options.timeouts)
        local.update_parameters(tasks_per_node=options.tasks, timeout_min=options.minutes, **shared)
        return local
    slurm = submitit.SlurmExecutor(options.folder, options.timeouts)
    parameters = {"partition": options.partition, "cpus_per_task": options.cpus, **shared}
    slurm.update_parameters(
        job_name="jaxddp",
        ntasks_per_node=options.tasks,
        time=options.minutes,
        # srun does not inherit this option from the batch job.
        srun_args=[f"--cpus-per-task={options.cpus}"] if options.cpus else [],
        **{name: value for name, value in parameters.items() if value},
    )
    return slurm


def report(line: str) -> None:
    print(f"submitit_job.py: {line}", file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", choices=("slurm", "local"), default="slurm")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=1, help="tasks on each node, with one process each")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs on each node")
    parser.add_argument("--cpus", type=int, help="CPUs of each task (SLURM)")
    parser.add_argument("--partition", help="partition of SLURM")
    parser.add_argument("--minutes", type=int, default=60, help="minutes until the job must save and stop")
    parser.add_argument(
        "--timeouts", type=int, default=10, help="maximum number of times to queue the job again after a timeout"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/submitit"), help="for output, shared by all nodes")
    parser.add_argument("--wait", action="store_true", help="wait for the end of the job")
    parser.add_argument("command", nargs="+", metavar="-- COMMAND", help="of jaxddp, such as `-- train digits …`")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    # Only processes with this key can join; all tasks inherit the environment of this process.
    os.environ[KEY] = os.environ.get(KEY) or secrets.token_hex(32)
    job = executor(options).submit(Training(options.command))
    report(f"job {job.job_id}; its output is in {job.paths.folder}")
    return wait_for(job) if options.wait or options.cluster == "local" else 0


if __name__ == "__main__":
    sys.exit(main())
