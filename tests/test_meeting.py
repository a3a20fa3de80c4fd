"""How launchers meet: who is let in, who is lost, and what they say to each other."""

import contextlib
import math
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launches import HANGING, free_port
from support.strangers import STRANGERS, answers

import jaxddp.cluster.meeting.conversation as conversation
from jaxddp.cluster.inbox import Inbox
from jaxddp.cluster.meeting.conversation import Arrived, Gone, Heard
from jaxddp.cluster.meeting.door import Door
from jaxddp.cluster.meeting.notes import Assignment, Ended, Failed, Over, Stop, Told, packed, unpacked
from jaxddp.cluster.meeting.visitor import Unreached, Visitor
from jaxddp.core.errors import InputError
from jaxddp.job.environment import Job
from jaxddp.job.link import Link
from jaxddp.job.messages import Challenge, Refusal, Strange, Value


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


@pytest.mark.slow
def test_a_silent_machine_is_lost(door, monkeypatch):
    _, inbox, job = door
    monkeypatch.setattr(conversation, "SILENCE_SECONDS", 0.4)
    # It says its hello, and nothing more: a silence that no public way brings about.
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
