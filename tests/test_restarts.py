"""Restarts on one machine, and the numbers of machines that can share a batch."""

import os
import signal
import sys

import pytest
from support.launches import FAILING, GENERATION, LaunchResult, program

import jaxddp.job.environment as work_status
from jaxddp.cluster.launcher import launch, valid_machine_counts
from jaxddp.cluster.options import Launch
from jaxddp.cluster.states import Budget, Generation
from jaxddp.cluster.worker import End
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.job.environment import STATUS_PIPE, WorkStatus, report_work

SAVED = End(75, "asked to stop")
KILLED = End(137, "process 1: killed by SIGKILL")


def test_restart_delays_double_up_to_a_minute_and_reset_after_a_long_run():
    budget, delays = Budget(2000), []
    for seconds in [*[1.0] * 8, 600.0, 599.0, *[1.0] * 1200]:
        assert budget.spend(seconds)
        delays.append(budget.delay)
    assert delays[:12] == [1, 2, 4, 8, 16, 32, 60, 60, 1, 2, 4, 8]
    assert max(delays) == 60 and budget.used == len(delays)


@pytest.mark.parametrize("limit", (0, 1, 3))
def test_a_job_restarts_no_more_than_the_requested_number(limit):
    budget, used = Budget(limit), 0
    while budget.spend(1.0):
        used += 1
    assert used == limit


ASKED = End(75, "asked to stop", stop_requested=True)
UNSAVED = End(143, "SIGTERM", stop_requested=True)
EARLY = End(143, "process 0: killed by SIGTERM")
DONE, BAD = End(0, "asked to stop"), End(2, "process 0: exit code 2")
# fmt: off
VERDICTS = {
    "done": ({0: DONE, 1: DONE}, None, "", 0),
    "done, though asked to stop": ({0: End(0, "asked to stop", stop_requested=True)}, None, "", 0),
    "saved": ({0: SAVED, 1: DONE}, None, "", 75),
    "asked": ({0: SAVED, 1: ASKED}, None, "", 75),
    "asked and not saved": ({0: UNSAVED}, UNSAVED, "", 143),
    "asked as it failed": ({0: End(137, "", stop_requested=True)}, KILLED, "", 137),
    "machine 0 of an elastic job was asked": ({0: ASKED, 1: SAVED}, None, "elastic", 75),
    "bad input": ({0: BAD, 1: BAD}, BAD, "", 2),
    "ended by the user's code": ({0: End(1, "x"), 1: End(1, "y", user_exit=True)}, End(1, "x"), "", 1),
    "bad input of a job that grows": ({0: BAD, 1: SAVED}, BAD, "elastic growing", 2),
    "done before it could grow": ({0: DONE, 1: DONE}, None, "elastic growing", 0),
    "killed": ({0: End(1, "x"), 1: KILLED}, KILLED, "", "process 1: killed by SIGKILL; restart 1 of 1 in 1 s"),
    "killed as it grew": ({0: SAVED, 1: KILLED}, KILLED, "elastic growing", "process 1: killed by S"),
    "grew before it began": ({0: EARLY}, EARLY, "elastic growing", "all processes restart with the"),
    "a machine left": ({0: SAVED, 1: ASKED}, None, "elastic", "machine 1 left; the other machines continue"),
    "a machine grew": ({0: SAVED}, None, "elastic growing", "saved; all processes restart wi")
}
# fmt: on


@pytest.mark.parametrize("case", VERDICTS)
def test_the_ends_of_a_job_give_its_exit_code_or_a_restart(case):
    ends, failure, options, expected = VERDICTS[case]
    ended = Generation(0, [*ends], ends, failure, growing="growing" in options)
    budget = Budget(1)
    decision = ended.decide(budget, 5.0, elastic="elastic" in options)
    if isinstance(expected, int):
        assert decision == expected
    else:
        assert decision.startswith(expected)
        # Only failures are counted.
        assert (budget.used, budget.delay) == ((1, 1.0) if failure is KILLED else (0, 0.0))
    if failure is KILLED:
        assert ended.decide(Budget(0), 5.0, elastic="elastic" in options) == 137


pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.mark.slow
def test_a_killed_process_restarts_the_job(capfd, tmp_path):
    ran = LaunchResult(
        capfd,
        tmp_path,
        f"""
        {GENERATION}
        say(generation, os.environ["JAXDDP_RUN_ID"], len(os.environ["JAXDDP_JOB_KEY"]))
        if rank == 0:
            socket.socket(fileno=int(os.environ["JAXDDP_COORDINATOR_FD"])).getsockname()
        if generation == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        restarts=3,
    )
    assert ran.code == 0
    starts = [line.split() for line in ran.of(1)]
    assert [(generation, key) for generation, _, key in starts] == [("0", "64"), ("1", "64")]
    # The run ids differ, so a late process of the first start cannot join the second.
    assert starts[0][1] != starts[1][1] and ran.of(0)[1].split()[1] == starts[1][1]
    assert "jaxddp launch: process 1: killed by SIGKILL; restart 1 of 3 in 1 s" in ran.errors
    assert "its last lines" not in ran.err
    assert "--- started again" in (tmp_path / "process-1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("code", "starts"), [(2, 1), (3, 2)])
def test_only_failures_are_restarted_up_to_the_limit(code, starts, capfd, tmp_path):
    ran = LaunchResult(capfd, tmp_path, f"say('begun'); sys.exit({code})", processes=1, restarts=1)
    assert (ran.code, ran.of(0)) == (code, ["begun"] * starts)
    assert ran.err.count("restart 1 of 1 in 1 s") == starts - 1
    # The last failure ends the job as it does without restarts.
    assert ran.errors[-2].startswith(f"process 0: exit code {code}; its last lines") and "begun" in ran.errors[-1]


@pytest.mark.parametrize(("words", "code", "line"), [("+", 1, "during its work, as from os._exit(0)"), ("+-", 0, "")])
def test_an_exit_code_of_0_is_a_success_only_after_the_work_has_ended(words, code, line, capfd, tmp_path):
    text = f"os.write(int(os.environ['{STATUS_PIPE}']), b'{words}'); os._exit(0)"
    ran = LaunchResult(capfd, tmp_path, text, processes=1, restarts=1)
    assert ran.code == code and (f"process 0: exit code 0 {line}" in ran.errors) == bool(line)
    assert "restart 1" not in ran.err


def test_a_process_reports_its_work_to_the_launcher(monkeypatch):
    status = WorkStatus()
    monkeypatch.setenv(STATUS_PIPE, str(status.writing))
    # The pipe is cached for the process. Other tests must not write to this pipe.
    work_status._pipe.cache_clear()
    try:
        with report_work(), report_work():
            status.read()
            assert status.is_working and STATUS_PIPE not in os.environ
        status.read()
        assert not status.is_working and not status.has_quit
        with pytest.raises(SystemExit), report_work():
            sys.exit(3)
        status.read()
        assert not status.is_working and status.has_quit
    finally:
        work_status._pipe.cache_clear()
        os.close(status.writing)
        status.close()


@pytest.mark.slow
def test_a_signal_ends_the_delay_before_a_restart(machine):
    launcher = machine(FAILING, "restarts=9").expect("restart 2 of 9 in 2 s")
    assert launcher.send(signal.SIGINT).end() == 130
    assert launcher.out.count("begun") == 2 and "SIGINT: no process runs here" in launcher.err


def test_launchers_meet_only_if_necessary(tmp_path):
    assert launch(Launch(nodes="1", restarts=3, processes=1, logs=tmp_path), program("")) == 0
    assert not Launch(restarts=3).launchers_meet and not Launch(nodes="2").launchers_meet
    assert Launch(nodes="2", restarts=1).launchers_meet and Launch(nodes="1:2").launchers_meet


def counts(nodes: str, processes: int = 1, gpus: int = 0, **changes: dict) -> list[int]:
    config = Config().replace(**({"train": {"batch_size": 24}, "eval": {"batch_size": 48}} | changes))
    return valid_machine_counts(config, Launch(nodes=nodes, nr=0, coordinator="127.0.0.1:1"), processes, gpus)


def test_a_valid_number_of_machines_divides_the_batches(capfd, monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    assert counts("1:4") == [1, 2, 3, 4] and capfd.readouterr().err == ""
    assert counts("1:5") == [1, 2, 3, 4]
    problem = "train.batch_size=24 cannot be divided among 5 devices"
    line = f"the job cannot run on 5 machines: {problem}; surplus machines wait as spares"
    assert capfd.readouterr().err == f"jaxddp launch: {line}\n"
    assert counts("1:8", processes=2) == [1, 2, 3, 4, 6] and counts("1:3", processes=2, gpus=2) == [1, 2, 3]
    assert counts("1:3", train={"batch_size": 24, "accumulate": 8}) == [1, 3]
    assert counts("1:3", data={"augment": {"mixup": 0.2}}, train={"batch_size": 8}, eval={"batch_size": 8}) == [1, 2]
    assert counts("1:4", eval={"batch_size": 8}) == counts("1:4", parallel={"cpu_devices": 3}) == [1, 2, 4]
    assert counts("1:4", parallel={"devices": 2, "cpu_devices": 2}) == [1, 2]
    assert counts("1:4", parallel={"reproducible": True}) == [1, 2, 4]
    assert counts("1:4", train={"batch_size": 24, "sync_every": "9 steps"}, parallel={"groups": 2}) == [2, 4]
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "5")
    with pytest.raises(InputError, match=f"--nodes 1:4: {problem}, and no other number of machines is possible"):
        counts("1:4")
    assert counts("4") == [4]
