"""Jobs of several machines: the machines restart together, and may join and leave a running job.

Each machine is a real launcher on the loopback interface. The processes that it starts are small programs without JAX.
"""

import os
import signal
from pathlib import Path

import pytest
from support.launches import GENERATION, SAVING, Machine, free_port

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def coordinator() -> str:
    return f"coordinator='127.0.0.1:{free_port()}'"


def kill_process_of(launcher: Machine) -> None:
    pid = launcher.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")


@pytest.mark.slow
@needs_proc
def test_two_machines_restart_together_whichever_process_is_killed(machine, coordinator):
    """Kill the process of machine 1, then the launcher of machine 1, then the launcher of machine 0."""
    options = f"nodes='2', restarts=9, {coordinator}"
    first, second = machine(SAVING, f"{options}, nr=0"), machine(SAVING, f"{options}, nr=1")
    first.expect("generation 0: process 0 of 2")
    second.expect("generation 0: process 1 of 2")
    kill_process_of(second)
    for launcher, rank in ((first, 0), (second, 1)):
        launcher.expect(f"generation 1: process {rank} of 2", "process 1: killed by SIGKILL; restart 1 of 9 in 1 s")
    second.send(signal.SIGKILL).end()
    first.expect("machine 1 was lost (on ", "its connection broke; restart 2 of 9 in 2 s")
    second = machine(SAVING, f"{options}, nr=1").expect("generation 2: process 1 of 2")
    first.expect("generation 2: process 0 of 2").send(signal.SIGKILL).end()
    second.expect("machine 0 was lost", "reaching machine 0 at 127.0.0.1:", " again, for up to 300 s")
    first = machine(SAVING, f"{options}, nr=0").expect("generation 0: process 0 of 2")
    second.expect("generation 0: process 1 of 2")
    # The processes do not communicate. The launcher of machine 0 sends SIGTERM after machine 1 had time to save.
    second.send(signal.SIGTERM)
    assert (first.end(), second.end()) == (75, 75)


@pytest.mark.slow
def test_all_machines_end_with_the_same_exit_code(machine, coordinator):
    options = f"nodes='2', restarts=1, {coordinator}"
    program = f"""
{GENERATION}
say(os.environ["JAX_COORDINATOR_ADDRESS"], os.environ["JAXDDP_RUN_ID"])
sys.exit(3 + generation) if rank == 1 else time.sleep(600)
"""
    first, second = machine(program, f"{options}, nr=0"), machine(program, f"{options}, nr=1")
    assert (first.end(), second.end()) == (4, 4)
    for launcher in (first, second):
        assert "jaxddp launch: process 1: exit code 3; restart 1 of 1 in 1 s" in launcher.err
    assert "process 1: exit code 4; its last lines" in second.err
    # The restart has another address and run ID, so a late process of the first start cannot join it.
    job_values = [[line.split()[1:] for line in launcher.out.splitlines()] for launcher in (first, second)]
    assert job_values[0] == job_values[1] and len(job_values[0]) == 2
    assert all(value != value_after_restart for value, value_after_restart in zip(*job_values[0], strict=True))


@pytest.mark.slow
def test_a_machine_that_cannot_start_its_process_ends_all_machines(machine, coordinator, tmp_path):
    options = f"nodes='2', restarts=5, {coordinator}"
    (tmp_path / "1" / "logs" / "process-1.log").mkdir(parents=True)
    first, second = machine(SAVING, f"{options}, nr=0"), machine(SAVING, f"{options}, nr=1")
    assert (first.end(), second.end()) == (2, 2)
    assert "process-1.log: cannot be written" in second.err


def test_too_few_machines_end_the_launchers_with_an_error(machine, coordinator):
    launcher = machine(SAVING, f"nodes='3', restarts=1, wait=0.3, nr=0, {coordinator}")
    assert launcher.end() == 1
    assert "--nodes 3: 1 of at least 3 machines came in 0.3 s: 0 (" in launcher.err
    other = machine(SAVING, f"nodes='3', restarts=1, wait=0.3, nr=2, {coordinator}")
    assert other.end() == 1
    assert "machine 2 could not reach it in 0.3 s" in other.err


@pytest.mark.slow
@needs_proc
def test_machines_join_and_leave_a_running_job(machine, coordinator):
    options = f"nodes='1:2', settle=0.3, join_after=0, {coordinator}"
    first = machine(SAVING, f"{options}, nr=0").expect("generation 0: process 0 of 1")
    second = machine(SAVING, f"{options}, nr=1").expect("generation 1: process 1 of 2")
    first.expect(
        "saved 0",
        "2 machines are connected; all processes save, and restart on these machines",
        "generation 1: process 0 of 2",
    )
    # After SIGTERM to one launcher, its machine leaves and the other machine continues.
    assert second.send(signal.SIGTERM).end() == 75
    first.expect("saved 1", "machine 1 left; the other machines continue", "generation 2: process 0 of 1")
    second = machine(SAVING, f"{options}, nr=1").expect("generation 3: process 1 of 2")
    # The restarts so far followed no failure. This is the first failure, and the options allow no restart after it.
    kill_process_of(second)
    assert (first.end(), second.end()) == (137, 137)
