"""Jobs that start again: on one machine, on several whose launchers meet, and with machines that come and go.

The launchers are real, each a machine on the loopback; the processes are small programs without JAX.
"""

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_launcher import HANGING, LAUNCHER, Ran, free_port, program
from test_strangers import STRANGERS, answers

import jaxddp.cluster.meeting.conversation as conversation
from jaxddp.cluster.inbox import Inbox
from jaxddp.cluster.launcher import launch
from jaxddp.cluster.meeting.conversation import Arrived, Gone, Heard
from jaxddp.cluster.meeting.door import Door
from jaxddp.cluster.meeting.notes import Assignment, Ended, Failed, Over, Stop, Told, packed, unpacked
from jaxddp.cluster.meeting.visitor import Unreached, Visitor
from jaxddp.cluster.options import Launch
from jaxddp.cluster.restarts import Again, Budget, End, decide
from jaxddp.cluster.sharing import sizes_that_share
from jaxddp.config import Config
from jaxddp.errors import InputError
from jaxddp.job.environment import Job
from jaxddp.job.link import Link
from jaxddp.job.messages import Challenge, Refusal, Strange, Value

SAVED = End(75, "asked to stop")
KILLED = End(137, "process 1: killed by SIGKILL")


# --- What follows an end ---


def test_delays_double_up_to_a_minute_and_begin_anew_after_a_long_run():
    budget, delays = Budget(2000), []
    for seconds in [*[1.0] * 8, 600.0, 599.0, *[1.0] * 1200]:
        after = budget.after_failure(seconds)
        assert after is not None
        budget = after
        delays.append(budget.delay)
    assert delays[:12] == [1, 2, 4, 8, 16, 32, 60, 60, 1, 2, 4, 8]
    assert max(delays) == 60 and budget.used == len(delays)


@pytest.mark.parametrize("most", (0, 1, 3))
def test_no_more_restarts_than_were_asked_for(most):
    budget, used = Budget(most), 0
    while (after := budget.after_failure(1.0)) is not None:
        budget, used = after, used + 1
    assert used == most


ASKED = End(75, "asked to stop", asked=True)
CARELESS = End(143, "SIGTERM", asked=True)
EARLY = End(143, "process 0: killed by SIGTERM")
DONE, BAD = End(0, "asked to stop"), End(2, "process 0: exit code 2")
# fmt: off
VERDICTS = {
    "done": ({0: DONE, 1: DONE}, None, {}, 0),
    "done, though asked to stop": ({0: End(0, "asked to stop", asked=True)}, None, {}, 0),
    "saved": ({0: SAVED, 1: DONE}, None, {}, 75),
    "asked": ({0: SAVED, 1: ASKED}, None, {}, 75),
    "asked and not saved": ({0: CARELESS}, CARELESS, {}, 143),
    "asked as it failed": ({0: End(137, "", asked=True)}, KILLED, {}, 137),
    "machine 0 of an elastic job was asked": ({0: ASKED, 1: SAVED}, None, {"elastic": True}, 75),
    "bad input": ({0: BAD, 1: BAD}, BAD, {}, 2),
    "bad input of a job that grows": ({0: BAD, 1: SAVED}, BAD, {"elastic": True, "growing": True}, 2),
    "done before it could grow": ({0: DONE, 1: DONE}, None, {"elastic": True, "growing": True}, 0),
    "killed": ({0: End(1, "x"), 1: KILLED}, KILLED, {}, "process 1: killed by SIGKILL; restart 1 of 1 in 1 s"),
    "killed as it grew": ({0: SAVED, 1: KILLED}, KILLED, {"elastic": True, "growing": True}, "process 1: killed by S"),
    "grew before it began": ({0: EARLY}, EARLY, {"elastic": True, "growing": True}, "all start again with the mach"),
    "a machine left": ({0: SAVED, 1: ASKED}, None, {"elastic": True}, "machine 1 left; the others go on"),
    "a machine grew": ({0: SAVED}, None, {"elastic": True, "growing": True}, "saved; all start again with the"),
}
# fmt: on


@pytest.mark.parametrize("case", VERDICTS)
def test_verdicts(case):
    ends, failure, how, expected = VERDICTS[case]
    found = decide(ends, failure, Budget(1), 5.0, **how)
    if isinstance(expected, int):
        assert found == expected
    else:
        assert isinstance(found, Again) and found.line.startswith(expected)
        # Only what failed is counted.
        assert (found.budget.used, found.delay) == ((1, 1.0) if failure is KILLED else (0, 0.0))
    if failure is KILLED:
        assert decide(ends, failure, Budget(0), 5.0, **how) == 137


# --- One machine ---


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS", "JAXDDP_JOB_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


GENERATION = "generation = int(os.environ['JAXDDP_GENERATION'])"


def test_a_killed_process_starts_the_job_again(capfd, tmp_path):
    ran = Ran(
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
    said = [line.split() for line in ran.of(1)]
    assert [(generation, key) for generation, _, key in said] == [("0", "64"), ("1", "64")]
    # A late process of the first start would be another job's.
    assert said[0][1] != said[1][1] and ran.of(0)[1].split()[1] == said[1][1]
    assert "jaxddp launch: process 1: killed by SIGKILL; restart 1 of 3 in 1 s" in ran.errors
    assert "its last lines" not in ran.err
    assert "--- started again" in (tmp_path / "process-1.log").read_text()


@pytest.mark.parametrize(("code", "starts"), [(2, 1), (75, 1), (3, 2)])
def test_what_is_started_again_and_how_often(code, starts, capfd, tmp_path):
    ran = Ran(capfd, tmp_path, f"say('begun'); sys.exit({code})", processes=1, restarts=1)
    assert (ran.code, ran.of(0)) == (code, ["begun"] * starts)
    assert ran.err.count("restart 1 of 1 in 1 s") == starts - 1
    # In the end all is as without restarts.
    if code != 75:
        assert ran.errors[-2].startswith(f"process 0: exit code {code}; its last lines") and ran.errors[-1].endswith(
            "begun"
        )


class Machine:
    """A launcher in a process of its own."""

    def __init__(self, folder: Path, text: str, options: str, config: str = "None"):
        folder.mkdir(exist_ok=True)
        self.paths = folder / "out", folder / "err"
        options = f"processes=1, grace=2, save_grace=1, logs=Path({str(folder / 'logs')!r}), {options}"
        code = (
            f"{LAUNCHER}\nfrom jaxddp.config import Config\n"
            f"from jaxddp.errors import JaxddpError\n"
            f"try:\n    sys.exit(launch(Launch({options}), {program(text)!r}, {config}))\n"
            f"except JaxddpError as error:\n    print(error, file=sys.stderr)\n    sys.exit(error.exit_code)\n"
        )
        with self.paths[0].open("wb") as out, self.paths[1].open("wb") as err:
            self.process = subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=err)

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

    def said(self, *lines: str) -> "Machine":
        """Wait for all of these."""
        self.wait_until(lambda: all(line in self.out + self.err for line in lines))
        return self

    def send(self, number: signal.Signals) -> "Machine":
        self.process.send_signal(number)
        return self

    def end(self) -> int:
        try:
            return self.process.wait(HANGING)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running:\n{self.out}{self.err}")


@pytest.fixture
def machine(tmp_path) -> Iterator[Callable[..., Machine]]:
    """Starts launchers, which do not outlive the test."""
    started: list[Machine] = []

    def start(text: str, options: str, config: str = "None") -> Machine:
        started.append(Machine(tmp_path / str(len(started)), text, options, config))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait(HANGING)


FAILING = "say('begun'); sys.exit(9)"


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM), ids=lambda number: number.name)
def test_a_signal_ends_the_delay_before_a_restart(number, machine):
    launcher = machine(FAILING, "restarts=9").said("restart 3 of 9 in 4 s")
    assert launcher.send(number).end() == 128 + number
    assert launcher.out.count("begun") == 3 and f"{number.name}: nothing runs here" in launcher.err


SAVING = f"""
{GENERATION}
def save(*_):
    say("saved", generation)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
say(f"generation {{generation}}: process {{rank}} of {{os.environ['JAX_NUM_PROCESSES']}}")
time.sleep(600)
"""


def test_a_job_that_was_asked_to_stop_is_not_started_again(machine):
    launcher = machine(SAVING, "restarts=3").said("generation 0: process 0 of 1")
    assert launcher.send(signal.SIGTERM).end() == 75
    assert "restart" not in launcher.err.replace("restarts", "")


# --- Several machines ---


@pytest.fixture
def place() -> str:
    return f"coordinator='127.0.0.1:{free_port()}'"


def kill_process_of(launcher: Machine) -> None:
    pid = launcher.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")


@needs_proc
def test_two_machines_start_again_together_whatever_is_killed(machine, place):
    """A process, a launcher, and the launcher of machine 0."""
    both = f"nodes='2', restarts=9, {place}"
    first, second = machine(SAVING, f"{both}, nr=0"), machine(SAVING, f"{both}, nr=1")
    first.said("generation 0: process 0 of 2")
    second.said("generation 0: process 1 of 2")
    kill_process_of(second)
    for each, rank in ((first, 0), (second, 1)):
        each.said(f"generation 1: process {rank} of 2", "process 1: killed by SIGKILL; restart 1 of 9 in 1 s")
    second.send(signal.SIGKILL).end()
    first.said("machine 1 was lost (on ", "its connection broke; restart 2 of 9 in 2 s")
    second = machine(SAVING, f"{both}, nr=1").said("generation 2: process 1 of 2")
    first.said("generation 2: process 0 of 2").send(signal.SIGKILL).end()
    second.said("machine 0 was lost", "reaching machine 0 at 127.0.0.1:", " again, for up to 300 s")
    first = machine(SAVING, f"{both}, nr=0").said("generation 0: process 0 of 2")
    second.said("generation 0: process 1 of 2")
    # These processes know nothing of each other: that of the other machine is asked when it had time to save.
    second.send(signal.SIGTERM)
    assert (first.end(), second.end()) == (75, 75)


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
    # Both starts are jobs of their own: a late process of the first has no business in the second.
    told = [[line.split()[1:] for line in each.out.splitlines()] for each in (first, second)]
    assert told[0] == told[1] and len(told[0]) == 2
    assert all(one != other for one, other in zip(*told[0], strict=True))


def test_bad_input_of_one_machine_ends_all(machine, place):
    both = f"nodes='2', restarts=5, {place}"
    text = "sys.exit(2) if rank == 1 else time.sleep(600)"
    first, second = machine(text, f"{both}, nr=0"), machine(text, f"{both}, nr=1")
    assert (first.end(), second.end()) == (2, 2)
    assert "restart" not in (first.err + second.err).replace("--restarts", "")


def test_a_machine_that_cannot_start_its_process_ends_all(machine, place, tmp_path):
    both = f"nodes='2', restarts=5, {place}"
    (tmp_path / "1" / "logs" / "process-1.log").mkdir(parents=True)
    first, second = machine(SAVING, f"{both}, nr=0"), machine(SAVING, f"{both}, nr=1")
    assert (first.end(), second.end()) == (2, 2)
    assert "process-1.log: cannot be written" in second.err


def test_machines_that_do_not_come_are_counted(machine, place):
    launcher = machine(SAVING, f"nodes='3', restarts=1, wait=0.3, nr=0, {place}")
    assert launcher.end() == 1
    assert "--nodes 3: 1 of at least 3 machines came in 0.3 s: 0 (" in launcher.err
    other = machine(SAVING, f"nodes='3', restarts=1, wait=0.3, nr=2, {place}")
    assert other.end() == 1
    assert "machine 2 could not reach it in 0.3 s" in other.err


def test_those_that_came_end_as_the_one_that_counts(machine, place):
    options = f"nodes='3', restarts=1, {place}"
    second = machine(SAVING, f"{options}, nr=1")
    first = machine(SAVING, f"{options}, wait=2, nr=0")
    assert (first.end(), second.end()) == (1, 1)
    assert "machine 0: --nodes 3: 2 of at least 3 machines came in 2 s: 0 (" in second.err


def test_a_name_that_no_host_can_have_is_a_mistake(machine):
    launcher = machine(SAVING, "nodes='2', restarts=1, nr=1, coordinator='.cluster:1234'")
    assert launcher.end() == 2
    assert launcher.err.endswith("--coordinator .cluster:1234: there is no host '.cluster'; give its name or address\n")


@needs_proc
def test_a_machine_that_does_not_come_back_ends_the_job(machine, place):
    both = f"nodes='2', restarts=5, wait=3, {place}"
    first, second = machine(SAVING, f"{both}, nr=0"), machine(SAVING, f"{both}, nr=1")
    first.said("generation 0: process 0 of 2")
    second.said("generation 0: process 1 of 2").send(signal.SIGKILL)
    assert first.end() == 1
    assert "1 of at least 2 machines came in 3 s: 0 (" in first.err


def test_ctrl_c_on_one_machine_ends_those_that_wait(machine, place):
    both = f"nodes='2', restarts=9, {place}"
    first, second = machine(FAILING, f"{both}, nr=0"), machine(FAILING, f"{both}, nr=1")
    second.said("restart 3 of 9 in 4 s").send(signal.SIGINT)
    assert (first.end(), second.end()) == (130, 130)


def test_launchers_that_do_not_fit_are_turned_away_and_end_nothing(machine, place):
    options = f"nodes='2', restarts=5, {place}"
    first = machine(SAVING, f"{options}, nr=0")
    other = machine(SAVING, options.replace("'2'", "'2:3'") + ", nr=1")
    assert other.end() == 2
    assert "--nodes differs: machine 0 has '2', machine 1 (" in other.err and "has '2:3'" in other.err
    two = machine(SAVING, f"{options}, nr=1, run_id='another'")
    assert two.end() == 2
    assert "launchers of another job meet there; give each job a port of its own" in two.err
    # One that starts its processes without meeting the others.
    job = Job(place.split("'")[1], 2, 1, run_id="run")
    with pytest.raises(InputError, match="launchers of another job meet there; .* --restarts or --nodes MIN:MAX alike"):
        Link.meet(job, {}, 10)
    second = machine(SAVING, f"{options}, nr=1")
    second.said("generation 0: process 1 of 2")
    first.said("generation 0: process 0 of 2").send(signal.SIGTERM)
    assert (first.end(), second.end()) == (75, 75)


def test_a_late_process_of_an_older_start_is_turned_away():
    """As where another generation has its port by chance."""
    job = Job(f"127.0.0.1:{free_port()}", 2, 0, run_id="name.1")
    late = Job(job.coordinator, 2, 1, run_id="name.0")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Link.meet, job, {}, 20, end=print)
        with pytest.raises(InputError, match="it serves another job; give each job a port of its own"):
            Link.meet(late, {}, 20)
        second = Link.meet(Job(job.coordinator, 2, 1, run_id="name.1"), {}, 20, end=print)
        for link in (second, first.result(20)):
            link.leave()


def test_ctrl_c_on_a_machine_that_waits_for_the_processes_of_another_is_heard(machine, place):
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
    first.said("[0] not yet")
    assert second.send(signal.SIGINT).end() == 130
    assert first.end() == 9
    assert "; restart" not in first.err + second.err


# --- Machines that come and go ---


@needs_proc
def test_machines_come_and_go(machine, place):
    options = f"nodes='1:2', settle=0.3, join_after=0, {place}"
    first = machine(SAVING, f"{options}, nr=0").said("generation 0: process 0 of 1")
    second = machine(SAVING, f"{options}, nr=1").said("generation 1: process 1 of 2")
    first.said("saved 0", "2 machines are there; all save, and start again with them", "generation 1: process 0 of 2")
    # Its launcher alone is asked: it leaves, and the others go on.
    assert second.send(signal.SIGTERM).end() == 75
    first.said("saved 1", "machine 1 left; the others go on", "generation 2: process 0 of 1")
    second = machine(SAVING, f"{options}, nr=1").said("generation 3: process 1 of 2")
    # None of this was a failure, but this is one, and no restart is left.
    kill_process_of(second)
    assert (first.end(), second.end()) == (137, 137)


def test_the_others_go_on_without_a_machine_that_vanished(machine, place):
    options = f"nodes='1:2', restarts=1, settle=2, {place}"
    # In this order, so that machine 0 does not start without it.
    second, first = machine(SAVING, f"{options}, nr=1"), machine(SAVING, f"{options}, nr=0")
    first.said("generation 0: process 0 of 2")
    second.said("generation 0: process 1 of 2").send(signal.SIGKILL)
    first.said("machine 1 was lost", "restart 1 of 1 in 1 s", "generation 1: process 0 of 1")
    assert first.send(signal.SIGTERM).end() == 75


def test_a_start_is_left_alone_for_a_while(machine, place):
    options = f"nodes='1:2', settle=0.1, join_after=1000, {place}"
    first = machine(SAVING, f"{options}, nr=0").said("generation 0: process 0 of 1")
    second = machine(SAVING, f"{options}, nr=1")
    first.said("machine 1 (")
    time.sleep(0.5)  # in which it would start again
    assert first.send(signal.SIGTERM).end() == 75
    assert "all save" not in first.err
    assert (second.end(), second.out) == (75, "")


CONFIG = "Config().replace(train={'batch_size': 8}, eval={'batch_size': 8})"


def test_a_machine_that_the_batch_does_not_fit_is_a_spare(machine, place):
    options = f"nodes='1:3', restarts=1, settle=3, wait=20, {place}"
    three = [machine(SAVING, f"{options}, nr={nr}", CONFIG) for nr in (2, 1, 0)][::-1]
    line = "never on 3 machines: train.batch_size=8 cannot be divided among 3 devices; what is over waits as a spare"
    three[0].said(line, "generation 0: process 0 of 2")
    three[0].said("machine 1 (", "machine 2 (")
    three[0].wait_until(lambda: any("process 1 of 2" in each.out for each in three[1:]))
    used = next(each for each in three[1:] if "process 1 of 2" in each.out)
    spare = next(each for each in three[1:] if each is not used)
    used.send(signal.SIGKILL)
    spare.said("generation 1: process 1 of 2")
    assert three[0].said("generation 1: process 0 of 2").send(signal.SIGTERM).end() == 75
    assert spare.end() == 75


def shared(nodes: str, processes: int = 1, gpus: int = 0, **changes: dict) -> list[int]:
    config = Config().replace(**({"train": {"batch_size": 24}, "eval": {"batch_size": 48}} | changes))
    options = Launch(nodes=nodes, nr=0, coordinator="127.0.0.1:1")
    return sizes_that_share(config, options, processes, gpus)


def test_which_numbers_of_machines_share_a_batch(capfd, monkeypatch):
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    assert shared("1:4") == [1, 2, 3, 4] and capfd.readouterr().err == ""
    assert shared("1:5") == [1, 2, 3, 4]
    line = "never on 5 machines: train.batch_size=24 cannot be divided among 5 devices; what is over waits as a spare"
    assert capfd.readouterr().err == f"jaxddp launch: {line}\n"
    assert shared("1:8", processes=2) == [1, 2, 3, 4, 6]
    assert shared("1:3", processes=2, gpus=2) == [1, 2, 3]
    assert shared("1:3", train={"batch_size": 24, "accumulate": 4}) == [1, 2, 3]
    assert shared("1:3", train={"batch_size": 24, "accumulate": 8}) == [1, 3]
    assert shared("1:3", data={"augment": {"mixup": 0.2}}, train={"batch_size": 8}, eval={"batch_size": 8}) == [1, 2]
    assert shared("1:4", eval={"batch_size": 8}) == [1, 2, 4]
    assert shared("1:4", parallel={"cpu_devices": 3}) == [1, 2, 4]
    assert shared("1:4", parallel={"devices": 2, "cpu_devices": 2}) == [1, 2]
    assert shared("1:4", parallel={"reproducible": True}) == [1, 2, 4]
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "5")
    with pytest.raises(
        InputError, match="--nodes 1:4: train.batch_size=24 cannot be divided among 5 devices; no number"
    ):
        shared("1:4")
    # Where it is fixed, the processes themselves say what would do.
    assert shared("4") == [4]


# --- Strangers, and what launchers say ---


@pytest.fixture
def door() -> Iterator[tuple[Door, Inbox, Job]]:
    listener = socket.create_server(("127.0.0.1", 0))
    job = Job("{}:{}".format(*listener.getsockname()), 3, 0, run_id="run/launchers", key="secret")
    inbox = Inbox()
    opened = Door(listener, job, {"--nodes": "3"}, inbox)
    yield opened, inbox, job
    opened.close()
    inbox.close()


def visitor(job: Job, machine: int = 1, *, seconds: float = 20, **changes: object) -> tuple[Visitor, Inbox]:
    inbox = Inbox()
    facts = changes.pop("facts", {"--nodes": "3"})
    visiting = Visitor(Job(**{**vars(job), "process_id": machine, **changes}), facts, inbox)
    visiting.reach(seconds)
    return visiting, inbox


def soon(inbox: Inbox) -> object:
    found = inbox.next(time.monotonic() + HANGING)
    assert found is not None
    return found


def test_strangers_at_the_door_end_nothing(door):
    opened, inbox, job = door
    where = ("127.0.0.1", job.port)
    silent = [socket.create_connection(where, timeout=20) for _ in range(100)]
    connections = {}
    for name, said in STRANGERS.items():
        connections[name] = socket.create_connection(where, timeout=20)
        connections[name].sendall(said)
    guest, heard = visitor(job)
    assert soon(heard) == Arrived(0, "127.0.0.1") and soon(inbox).machine == 1
    for name, connection in connections.items():
        challenge, *more = answers(connection)
        assert isinstance(challenge, Challenge)
        refused = name == "another run"
        assert [type(each) for each in more] == [Refusal] * refused, name
    guest.send(Failed(4, 9, "process 7: exit code 9"))
    assert soon(inbox) == Heard(1, Failed(4, 9, "process 7: exit code 9"))
    opened.send(1, Told("a line"))
    assert soon(heard) == Heard(0, Told("a line"))
    guest.close(Ended(4, 9, "over", asked=False))
    assert soon(inbox) == Heard(1, Ended(4, 9, "over", asked=False))
    assert soon(inbox) == Gone(1, "left")
    for connection in silent:
        connection.close()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"key": "guess"}, "JAXDDP_JOB_KEY is another one there; give all machines of a job the same"),
        ({"key": ""}, "JAXDDP_JOB_KEY is another one there; give all machines of a job the same"),
        ({"run_id": "another/launchers"}, "launchers of another job meet there"),
        ({"facts": {"--nodes": "1:3"}}, "--nodes differs: machine 0 has '3', machine 1 ("),
        ({"facts": {}}, "--nodes differs: machine 0 has '3', machine 1 ("),
        ({"machine": 7}, "--nr 7 on "),
    ],
    ids=str,
)
def test_who_is_not_let_in(changes, line, door):
    _, inbox, job = door
    guest, heard = visitor(job, **changes)
    said = soon(heard)
    assert isinstance(said, Unreached) and f"--coordinator {job.coordinator}: {line}" in str(said.error)
    guest.close()
    assert inbox.next(time.monotonic()) is None


def test_a_machine_that_comes_again_takes_its_place_when_the_old_one_is_missed(door, monkeypatch):
    _, inbox, job = door
    old, _ = visitor(job)
    assert isinstance(soon(inbox), Arrived)
    monkeypatch.setattr("jaxddp.cluster.meeting.door.SILENCE_SECONDS", -0.7)
    twin, heard = visitor(job)
    said = soon(heard)
    assert isinstance(said, Unreached) and "--nr 1 twice: on " in str(said.error)
    monkeypatch.setattr("jaxddp.cluster.meeting.door.SILENCE_SECONDS", 20)
    new, heard = visitor(job)
    assert heard.next(time.monotonic() + 0.3) is None
    old.close()
    assert isinstance(soon(inbox), Gone) and isinstance(soon(inbox), Arrived) and isinstance(soon(heard), Arrived)
    for each in (twin, new):
        each.close()


def test_a_silent_machine_is_lost(door, monkeypatch):
    _, inbox, job = door
    monkeypatch.setattr(conversation, "SILENCE_SECONDS", 0.4)
    # It says its hello, and nothing more.
    guest, _ = visitor(job)
    assert isinstance(soon(inbox), Arrived)
    guest._network.begin(_block())
    gone = soon(inbox)
    assert isinstance(gone, Gone) and re.fullmatch(r"gave no sign of life for 0\.4 s \(on .*\)", gone.reason)
    guest.close()


async def _block() -> None:
    time.sleep(2)


NOTES = [
    Assignment(1, 2, 4, "h:1", "run.1"),
    Stop(1, saved=True),
    Failed(1, 3, "process 1: exit code 3"),
    Ended(1, 0, "done", asked=False),
    Told("a line"),
    Over(75),
]


@pytest.mark.parametrize("note", NOTES, ids=lambda note: type(note).__name__)
def test_notes_arrive_as_they_were_sent(note):
    assert unpacked(packed(note)) == note


@pytest.mark.parametrize(
    "value",
    [
        Value(0, "Shutdown", "{}"),
        Value(0, "Over", "{}"),
        Value(0, "Over", '{"code": 256}'),
        Value(0, "Over", '{"code": true}'),
        Value(0, "Over", '{"code": 1, "more": 2}'),
        Value(0, "Over", "[1]"),
        Value(0, "Told", '{"line": 7}'),
        Value(0, "Told", "[" * 60_000),
        Value(0, "Stop", '{"generation": -1, "saved": false}'),
        Value(0, "Stop", '{"generation": 1, "saved": 0}'),
    ],
    ids=str,
)
def test_strange_notes(value):
    with pytest.raises(Strange):
        unpacked(value)


@given(st.sampled_from([type(note).__name__ for note in NOTES]), st.text(max_size=60))
def test_any_text_is_a_note_or_strange(name, text):
    with contextlib.suppress(Strange):
        note = unpacked(Value(0, name, text))
        assert unpacked(packed(note)) == note


def test_an_inbox_keeps_order_and_waits_no_longer_than_it_should():
    inbox = Inbox()
    assert inbox.next(time.monotonic() - 1) is None
    for number in range(100_000):
        inbox.put(number)
    assert inbox.next(-math.inf) == 0
    assert list(inbox.taken()) == list(range(1, 100_000)) and list(inbox.taken()) == []
    inbox.put("late")
    assert inbox.next() == "late"
    inbox.close()
    # A thread that still says something harms nobody.
    inbox.put("too late")


def test_one_machine_has_no_use_for_a_meeting(tmp_path):
    assert launch(Launch(nodes="1", restarts=3, processes=1, logs=tmp_path), program("")) == 0
    assert not Launch(restarts=3).launchers_meet and not Launch(nodes="2").launchers_meet
    assert Launch(nodes="2", restarts=1).launchers_meet and Launch(nodes="1:2").launchers_meet
