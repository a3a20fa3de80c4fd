"""Jobs of several machines whose launchers meet: they restart together, and machines come and go.

The launchers are real, each a machine on the loopback; the processes are small programs without JAX.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.launches import FAILING, GENERATION, SAVING, Machine, free_port, machines, plain_environment

from jaxddp.core.errors import InputError
from jaxddp.job.control_plane import ControlPlane
from jaxddp.job.environment import Job


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    plain_environment(monkeypatch)


@pytest.fixture
def machine(tmp_path) -> Iterator[Callable[..., Machine]]:
    with machines(tmp_path) as start:
        yield start


@pytest.fixture
def place() -> str:
    return f"coordinator='127.0.0.1:{free_port()}'"


def kill_process_of(launcher: Machine) -> None:
    pid = launcher.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")


@pytest.mark.slow
@needs_proc
def test_two_machines_start_again_together_whatever_is_killed(machine, place):
    """Kills a process, a launcher, and the launcher of machine 0, in this order."""
    both = f"nodes='2', restarts=9, {place}"
    first, second = machine(SAVING, f"{both}, nr=0"), machine(SAVING, f"{both}, nr=1")
    first.expect("generation 0: process 0 of 2")
    second.expect("generation 0: process 1 of 2")
    kill_process_of(second)
    for each, rank in ((first, 0), (second, 1)):
        each.expect(f"generation 1: process {rank} of 2", "process 1: killed by SIGKILL; restart 1 of 9 in 1 s")
    second.send(signal.SIGKILL).end()
    first.expect("machine 1 was lost (on ", "its connection broke; restart 2 of 9 in 2 s")
    second = machine(SAVING, f"{both}, nr=1").expect("generation 2: process 1 of 2")
    first.expect("generation 2: process 0 of 2").send(signal.SIGKILL).end()
    second.expect("machine 0 was lost", "reaching machine 0 at 127.0.0.1:", " again, for up to 300 s")
    first = machine(SAVING, f"{both}, nr=0").expect("generation 0: process 0 of 2")
    second.expect("generation 0: process 1 of 2")
    # These processes do not know each other. The one on the other machine is asked to stop after time to save.
    second.send(signal.SIGTERM)
    assert (first.end(), second.end()) == (75, 75)


@pytest.mark.slow
def test_the_end_is_the_same_on_all_machines(machine, place):
    both = f"nodes='2', restarts=1, {place}"
    text = f"""
{GENERATION}
say(os.environ["JAX_COORDINATOR_ADDRESS"], os.environ["JAXDDP_RUN_ID"])
sys.exit(3 + generation) if rank == 1 else time.sleep(600)
"""
    first, second = machine(text, f"{both}, nr=0"), machine(text, f"{both}, nr=1")
    assert (first.end(), second.end()) == (4, 4)
    for each in (first, second):
        assert "jaxddp launch: process 1: exit code 3; restart 1 of 1 in 1 s" in each.err
    assert "process 1: exit code 4; its last lines" in second.err
    # Both starts are separate jobs, so a late process of the first cannot join the second.
    told = [[line.split()[1:] for line in each.out.splitlines()] for each in (first, second)]
    assert told[0] == told[1] and len(told[0]) == 2
    assert all(one != other for one, other in zip(*told[0], strict=True))


@pytest.mark.slow
def test_bad_input_on_one_machine_ends_all_machines(machine, place):
    both = f"nodes='2', restarts=5, {place}"
    text = "sys.exit(2) if rank == 1 else time.sleep(600)"
    first, second = machine(text, f"{both}, nr=0"), machine(text, f"{both}, nr=1")
    assert (first.end(), second.end()) == (2, 2)
    assert "restart" not in (first.err + second.err).replace("--restarts", "")


@pytest.mark.slow
def test_a_machine_that_cannot_start_its_process_ends_all_machines(machine, place, tmp_path):
    both = f"nodes='2', restarts=5, {place}"
    (tmp_path / "1" / "logs" / "process-1.log").mkdir(parents=True)
    first, second = machine(SAVING, f"{both}, nr=0"), machine(SAVING, f"{both}, nr=1")
    assert (first.end(), second.end()) == (2, 2)
    assert "process-1.log: cannot be written" in second.err


def test_too_few_machines_are_an_error(machine, place):
    launcher = machine(SAVING, f"nodes='3', restarts=1, wait=0.3, nr=0, {place}")
    assert launcher.end() == 1
    assert "--nodes 3: 1 of at least 3 machines came in 0.3 s: 0 (" in launcher.err
    other = machine(SAVING, f"nodes='3', restarts=1, wait=0.3, nr=2, {place}")
    assert other.end() == 1
    assert "machine 2 could not reach it in 0.3 s" in other.err


@pytest.mark.slow
def test_launchers_end_with_machine_0_if_too_few_come(machine, place):
    options = f"nodes='3', restarts=1, {place}"
    second = machine(SAVING, f"{options}, nr=1")
    first = machine(SAVING, f"{options}, wait=2, nr=0")
    assert (first.end(), second.end()) == (1, 1)
    assert "machine 0: --nodes 3: 2 of at least 3 machines came in 2 s: 0 (" in second.err


def test_an_impossible_host_name_is_a_mistake_of_the_user(machine):
    launcher = machine(SAVING, "nodes='2', restarts=1, nr=1, coordinator='.cluster:1234'")
    assert launcher.end() == 2
    assert launcher.err.endswith("--coordinator .cluster:1234: there is no host '.cluster'; give its name or address\n")


@pytest.mark.slow
@needs_proc
def test_a_machine_that_does_not_come_back_ends_the_job(machine, place):
    both = f"nodes='2', restarts=5, wait=3, {place}"
    first, second = machine(SAVING, f"{both}, nr=0"), machine(SAVING, f"{both}, nr=1")
    first.expect("generation 0: process 0 of 2")
    second.expect("generation 0: process 1 of 2").send(signal.SIGKILL)
    assert first.end() == 1
    assert "1 of at least 2 machines came in 3 s: 0 (" in first.err


@pytest.mark.slow
def test_ctrl_c_on_one_machine_ends_those_that_wait(machine, place):
    both = f"nodes='2', restarts=9, {place}"
    first, second = machine(FAILING, f"{both}, nr=0"), machine(FAILING, f"{both}, nr=1")
    second.expect("restart 3 of 9 in 4 s").send(signal.SIGINT)
    assert (first.end(), second.end()) == (130, 130)


@pytest.mark.slow
def test_launchers_with_other_options_are_rejected_and_do_not_end_the_job(machine, place):
    options = f"nodes='2', restarts=5, {place}"
    first = machine(SAVING, f"{options}, nr=0")
    other = machine(SAVING, options.replace("'2'", "'2:3'") + ", nr=1")
    assert other.end() == 2
    assert "--nodes differs: machine 0 has '2', machine 1 on " in other.err and "has '2:3'" in other.err
    two = machine(SAVING, f"{options}, nr=1, run_id='another'")
    assert two.end() == 2
    assert "launchers of another job meet there; give each job its own port" in two.err
    # A launcher that starts its processes without meeting the others.
    job = Job(place.split("'")[1], 2, 1, run_id="run")
    with pytest.raises(
        InputError, match="launchers of another job meet there; .* with the same --restarts and --nodes"
    ):
        ControlPlane.join(job, {}, 10)
    second = machine(SAVING, f"{options}, nr=1")
    second.expect("generation 0: process 1 of 2")
    first.expect("generation 0: process 0 of 2").send(signal.SIGTERM)
    assert (first.end(), second.end()) == (75, 75)


@pytest.mark.slow
def test_ctrl_c_on_a_machine_that_waits_for_another_ends_the_job(machine, place):
    text = """
signal.signal(signal.SIGTERM, lambda *_: say("not yet"))
say("begun")
if rank == 1:
    sys.exit(9)
while True:
    time.sleep(0.01)
"""
    both = f"nodes='2', restarts=9, {place}"
    first, second = machine(text, f"{both}, nr=0"), machine(text, f"{both}, nr=1")
    # Between SIGTERM and SIGKILL, two seconds later.
    first.expect("[0] not yet")
    assert second.send(signal.SIGINT).end() == 130
    assert first.end() == 9
    assert "; restart" not in first.err + second.err


# --- Machines that come and go ---


@pytest.mark.slow
@needs_proc
def test_machines_come_and_go(machine, place):
    options = f"nodes='1:2', settle=0.3, join_after=0, {place}"
    first = machine(SAVING, f"{options}, nr=0").expect("generation 0: process 0 of 1")
    second = machine(SAVING, f"{options}, nr=1").expect("generation 1: process 1 of 2")
    first.expect(
        "saved 0",
        "2 machines are connected; all processes save, and restart on these machines",
        "generation 1: process 0 of 2",
    )
    # Only its launcher is asked to stop: it leaves, and the others continue.
    assert second.send(signal.SIGTERM).end() == 75
    first.expect("saved 1", "machine 1 left; the other machines continue", "generation 2: process 0 of 1")
    second = machine(SAVING, f"{options}, nr=1").expect("generation 3: process 1 of 2")
    # Nothing so far was a failure, but this is one, and no restart is left.
    kill_process_of(second)
    assert (first.end(), second.end()) == (137, 137)


@pytest.mark.slow
def test_the_other_machines_continue_without_one_that_vanished(machine, place):
    options = f"nodes='1:2', restarts=1, settle=2, {place}"
    # In this order, so that machine 0 does not start without it.
    second, first = machine(SAVING, f"{options}, nr=1"), machine(SAVING, f"{options}, nr=0")
    first.expect("generation 0: process 0 of 2")
    second.expect("generation 0: process 1 of 2").send(signal.SIGKILL)
    first.expect("machine 1 was lost", "restart 1 of 1 in 1 s", "generation 1: process 0 of 1")
    assert first.send(signal.SIGTERM).end() == 75


@pytest.mark.slow
def test_an_additional_machine_waits_for_join_after(machine, place):
    options = f"nodes='1:2', settle=0.1, join_after=1000, {place}"
    first = machine(SAVING, f"{options}, nr=0").expect("generation 0: process 0 of 1")
    second = machine(SAVING, f"{options}, nr=1")
    first.expect("machine 1 (")
    time.sleep(0.5)  # In this time it would start again.
    assert first.send(signal.SIGTERM).end() == 75
    assert "all save" not in first.err
    assert (second.end(), second.out) == (75, "")


CONFIG = "Config().replace(train={'batch_size': 8}, eval={'batch_size': 8})"


@pytest.mark.slow
def test_a_machine_that_cannot_share_the_batch_is_a_spare(machine, place):
    options = f"nodes='1:3', restarts=1, settle=3, wait=20, {place}"
    three = [machine(SAVING, f"{options}, nr={nr}", CONFIG) for nr in (2, 1, 0)][::-1]
    problem = "train.batch_size=8 cannot be divided among 3 devices"
    line = f"the job cannot run on 3 machines: {problem}; surplus machines wait as spares"
    three[0].expect(line, "generation 0: process 0 of 2")
    three[0].expect("machine 1 (", "machine 2 (")
    three[0].wait_until(lambda: any("process 1 of 2" in each.out for each in three[1:]))
    used = next(each for each in three[1:] if "process 1 of 2" in each.out)
    spare = next(each for each in three[1:] if each is not used)
    used.send(signal.SIGKILL)
    spare.expect("generation 1: process 1 of 2")
    assert three[0].expect("generation 1: process 0 of 2").send(signal.SIGTERM).end() == 75
    assert spare.end() == 75
