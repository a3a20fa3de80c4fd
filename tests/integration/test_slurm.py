"""A real SLURM on this machine: the tasks of a step join one job, and all end if one fails."""

import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from support.processes import (
    BRIEF,
    ENDLESS,
    HANGING,
    REPOSITORY,
    STEPS,
    TRAIN,
    Program,
    close,
    environment,
    is_whole,
    lines,
    losses,
    result,
)

pytestmark = pytest.mark.ci

# Without munge and systemd, the daemons run in the foreground as children of the tests.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
KillWait=5
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={node} CPUs=8 State=UNKNOWN
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(require, tmp_path_factory) -> Iterator[dict[str, str]]:
    """An environment in which srun finds a cluster of one node with eight simulated cores."""
    require("slurmctld", "slurmd", "srun", "sinfo", package="slurm-wlm", root=True)
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    controller, node = free_ports(2)
    host = socket.gethostname().partition(".")[0]
    file = folder / "slurm.conf"
    file.write_text(CONFIGURATION.format(host=host, folder=folder, controller=controller, node=node))
    env = environment(SLURM_CONF=str(file))
    daemons = []
    try:
        for name, command in {
            "slurmctld": ["slurmctld", "-D", "-f", str(file)],
            "slurmd": ["slurmd", "-D", "-N", host, "-f", str(file)],
        }.items():
            daemons.append(Program(command, folder / name, env))
        daemons[-1].wait_until(lambda: sinfo(env) == "idle")
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.close()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def sinfo(env: dict[str, str]) -> str:
    done = subprocess.run(["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, timeout=30)
    return done.stdout.strip()


def test_srun_trains(slurm, arrays, reference, start, tmp_path):
    workdir = tmp_path / "run"
    words = [*TRAIN, "--data.path", str(arrays), "--workdir", str(workdir), *BRIEF]
    run = start(Program, ["srun", "-n", "2", sys.executable, "-m", "jaxddp", *words], tmp_path / "srun", slurm)
    run.ends_well()
    assert "joined: process 0 of 2, coordinator 127.0.0.1:" in run.out
    assert "(from SLURM_STEP_NODELIST, SLURM_STEP_NUM_TASKS, SLURM_PROCID" in run.out
    assert is_whole(workdir, processes=2, devices=2) and close(losses(workdir), losses(reference))


class Batch:
    """A job of `launch/slurm.sbatch`: two tasks on one node, with a replacement for `jaxddp`."""

    def __init__(self, folder: Path, env: Mapping[str, str], program: Sequence[str], words: Sequence[str] = ()):
        (folder / "bin").mkdir(exist_ok=True)
        stand_in = folder / "bin" / "jaxddp"
        stand_in.write_text(f'#!/bin/sh\nexec {shlex.join(program)} "$@"\n')
        stand_in.chmod(0o755)
        self.log = folder / "slurm.log"
        self.env = {**env, "PATH": f"{folder / 'bin'}:{env['PATH']}"}
        options = ["--nodes=1", "--gpus-per-node=0", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=10"]
        script = str(REPOSITORY / "launch" / "slurm.sbatch")
        self.number = self.run("sbatch", "--parsable", *options, f"--output={self.log}", script, *words).strip()

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shown(self, key: str) -> str:
        """Return a field of SLURM's record of the job."""
        record = self.run("scontrol", "show", "job", self.number)
        return dict(word.split("=", 1) for word in record.split() if "=" in word)[key]

    @property
    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def wait_until(self, condition: Callable[[], object]) -> None:
        give_up = time.monotonic() + HANGING
        while not condition():
            assert time.monotonic() < give_up, f"{self.run('scontrol', 'show', 'job', self.number)}\n{self.output}"
            time.sleep(0.2)


@pytest.fixture
def submit(slurm, tmp_path) -> Iterator[Callable[..., Batch]]:
    """Yield a function that submits jobs, and cancel them afterwards."""
    jobs: list[Batch] = []

    def submitted(program: Sequence[str], *words: str, **variables: str) -> Batch:
        jobs.append(Batch(tmp_path, slurm | variables, program, words))
        return jobs[-1]

    yield submitted
    for job in jobs:
        job.run("scancel", job.number)
        job.wait_until(lambda job=job: job.shown("JobState") in ("CANCELLED", "FAILED", "COMPLETED"))


JAXDDP = [sys.executable, "-m", "jaxddp"]


def test_a_preempted_job_requeues_itself_and_resumes(submit, arrays, reference, tmp_path):
    workdir = tmp_path / "run"
    job = submit(JAXDDP, *TRAIN[1:], "--data.path", str(arrays), "--workdir", str(workdir), *ENDLESS)
    job.wait_until(lambda: len(lines(workdir)) >= 2)
    job.run("scancel", "--signal=TERM", job.number)
    job.wait_until(lambda: job.shown("Restarts") == "1")
    assert result(workdir)["status"] == "preempted"
    step = result(workdir)["step"]
    # It starts again after some time.
    job.wait_until(lambda: f"resuming at step {step} | " in job.output and len(lines(workdir)) >= max(step, STEPS) + 1)
    expected = losses(reference)
    assert close({step: losses(workdir)[step] for step in expected}, expected)
    assert list(losses(workdir))[: step + 1] == list(range(1, step + 2))


def failing(code: int) -> list[str]:
    # Task 1 ends later.
    late = "time.sleep(2 * int(os.environ['SLURM_PROCID']))"
    return [sys.executable, "-c", f"import os, sys, time; print('begun', flush=True); {late}; sys.exit({code})"]


@pytest.mark.parametrize(("code", "starts"), [(2, 1), (3, 2)])
def test_a_failed_job_is_requeued_up_to_a_limit_but_bad_input_is_not(code, starts, submit):
    job = submit(failing(code), RESTARTS="1")
    job.wait_until(lambda: job.shown("JobState") == "FAILED")
    assert (job.shown("ExitCode"), job.shown("Restarts")) == (f"{code}:0", str(starts - 1))
    assert starts <= job.output.count("begun") <= 2 * starts


def test_a_cancelled_job_is_not_requeued(submit):
    save = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75))"
    job = submit([sys.executable, "-c", f"{save}; print('begun', flush=True); time.sleep(90)"])
    job.wait_until(lambda: job.output.count("begun") == 2)
    job.run("scancel", job.number)
    job.wait_until(lambda: job.shown("JobState") not in ("RUNNING", "COMPLETING"))
    time.sleep(3)  # In this time a job that is requeued would be queued again.
    assert (job.shown("JobState"), job.shown("Restarts")) == ("CANCELLED", "0")


def test_a_job_array_trains_the_trials_of_a_sweep(slurm, arrays, start, tmp_path):
    folder, program = tmp_path / "sweep", tmp_path / "bin" / "jaxddp"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join(JAXDDP)} "$@"\n')
    program.chmod(0o755)
    words = [*TRAIN[1:], "--data.path", str(arrays), *BRIEF, "--seed", "0:2", "--workdir", str(folder)]
    resources = ["--gpus-per-node=0", "--cpus-per-task=1", "--time=10", f"--output={tmp_path}/%a.log"]
    script = str(REPOSITORY / "launch" / "sweep.sbatch")
    env = {**slurm, "PATH": f"{program.parent}:{slurm['PATH']}"}
    run = start(Program, ["sbatch", "--wait", "--array=0-1", *resources, script, *words], tmp_path / "sbatch", env)
    run.ends_well()
    assert [result(folder / f"seed={seed}")["status"] for seed in (0, 1)] == ["done", "done"]
    # The same command finds both trials finished, and prints the table.
    run = start(Program, [*JAXDDP, "sweep", *words], tmp_path / "table", environment())
    run.ends_well()
    assert "started" not in run.err and "2 trials (2 finished)" in run.err and (folder / "results.csv").exists()
