"""The network of launchers: which ones are admitted, which are lost, and their messages."""

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

import jaxddp.cluster.meeting.network as network
from jaxddp.cluster.event_queue import EventQueue
from jaxddp.cluster.meeting.launcher_messages import (
    CODEC,
    Assignment,
    JobEnded,
    MachineEnded,
    MachineFailed,
    Notice,
    Stop,
)
from jaxddp.cluster.meeting.network import LauncherClient, LauncherServer
from jaxddp.cluster.meeting.transitions import Arrived, Disconnected, Received, Unreached
from jaxddp.core.errors import InputError
from jaxddp.job.control_plane import ControlPlane
from jaxddp.job.environment import Job
from jaxddp.wire.codec import LENGTH, Malformed, encode
from jaxddp.wire.handshake import Challenge, Refusal


@pytest.fixture
def server() -> Iterator[tuple[LauncherServer, EventQueue, Job]]:
    listener = socket.create_server(("127.0.0.1", 0))
    job = Job("{}:{}".format(*listener.getsockname()), 3, 0, run_id="run/launchers", key="secret")
    events = EventQueue()
    opened = LauncherServer(listener, job, {"--nodes": "3"}, events.put)
    yield opened, events, job
    opened.close()
    events.close()


def client(job: Job, machine: int = 1, *, seconds: float = 20, **changes: object) -> tuple[LauncherClient, EventQueue]:
    events = EventQueue()
    facts = changes.pop("facts", {"--nodes": "3"})
    joining = LauncherClient(Job(**{**vars(job), "process_id": machine, **changes}), facts, events.put)
    joining.reach(seconds)
    return joining, events


def soon(events: EventQueue) -> object:
    found = events.next(time.monotonic() + HANGING)
    assert found is not None
    return found


def test_strangers_do_not_disturb_launchers(server):
    opened, events, job = server
    where = ("127.0.0.1", job.port)
    silent = [socket.create_connection(where, timeout=20) for _ in range(100)]
    connections = {}
    for name, said in STRANGERS.items():
        connections[name] = socket.create_connection(where, timeout=20)
        connections[name].sendall(said)
    joined, heard = client(job)
    assert soon(heard) == Arrived(0, "127.0.0.1") and soon(events).machine == 1
    for name, connection in connections.items():
        challenge, *more = answers(connection)
        assert isinstance(challenge, Challenge)
        refused = name == "another run"
        assert [type(each) for each in more] == [Refusal] * refused, name
    joined.send(0, MachineFailed(4, 9, "process 7: exit code 9"))
    assert soon(events) == Received(1, MachineFailed(4, 9, "process 7: exit code 9"))
    opened.send(1, Notice("a line"))
    assert soon(heard) == Received(0, Notice("a line"))
    joined.close(MachineEnded(4, 9, "over", asked=False, quits=False))
    assert soon(events) == Received(1, MachineEnded(4, 9, "over", asked=False, quits=False))
    assert soon(events) == Disconnected(1, "left")
    for connection in silent:
        connection.close()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"key": "guess"}, "JAXDDP_JOB_KEY differs from that of machine 0; give all machines of a job the same"),
        ({"key": ""}, "JAXDDP_JOB_KEY differs from that of machine 0; give all machines of a job the same"),
        ({"run_id": "another/launchers"}, "launchers of another job meet there"),
        ({"facts": {"--nodes": "1:3"}}, "--nodes differs: machine 0 has '3', machine 1 on "),
        ({"facts": {}}, "--nodes differs: machine 0 has '3', machine 1 on "),
        ({"machine": 7}, "--nr 7 on "),
    ],
    ids=str,
)
def test_launchers_that_are_refused(changes, line, server):
    _, events, job = server
    joined, heard = client(job, **changes)
    said = soon(heard)
    assert isinstance(said, Unreached) and f"--coordinator {job.coordinator}: {line}" in str(said.error)
    joined.close()
    assert events.next(time.monotonic()) is None


def test_a_machine_that_comes_again_is_admitted_once_its_earlier_launcher_is_lost(server, monkeypatch):
    _, events, job = server
    old, _ = client(job)
    assert isinstance(soon(events), Arrived)
    monkeypatch.setattr(network, "_TAKEOVER_SECONDS", 0.3)
    twin, heard = client(job)
    said = soon(heard)
    assert isinstance(said, Unreached) and "--nr 1 twice: on " in str(said.error)
    monkeypatch.setattr(network, "_TAKEOVER_SECONDS", 20)
    new, heard = client(job)
    assert heard.next(time.monotonic() + 0.3) is None
    old.close()
    assert (
        isinstance(soon(events), Disconnected)
        and isinstance(soon(events), Arrived)
        and isinstance(soon(heard), Arrived)
    )
    for each in (twin, new):
        each.close()


@pytest.mark.slow
def test_a_silent_machine_is_lost(server, monkeypatch):
    _, events, job = server
    monkeypatch.setattr(network, "SILENCE_SECONDS", 0.4)
    # The launcher joins, and sends nothing more, because `_block` blocks its thread. There is no public way to do this.
    joined, _ = client(job)
    assert isinstance(soon(events), Arrived)
    joined._thread.begin(_block())
    gone = soon(events)
    assert isinstance(gone, Disconnected) and re.fullmatch(r"gave no sign of life for 0\.4 s \(on .*\)", gone.reason)
    joined.close()


async def _block() -> None:
    time.sleep(2)


NOTES = [
    Assignment(1, 2, 4, "h:1", "run.1"),
    Stop(1, saved=True),
    MachineFailed(1, 3, "process 1: exit code 3"),
    MachineEnded(1, 0, "done", asked=False, quits=False),
    Notice("a line"),
    JobEnded(75),
]


@pytest.mark.parametrize("note", NOTES, ids=lambda note: type(note).__name__)
def test_messages_are_decoded_as_they_were_encoded(note):
    assert CODEC.decode(encode(note)[LENGTH:]) == note


@pytest.mark.parametrize(
    "content",
    [
        '{"kind": "Shutdown"}',
        '{"kind": "JobEnded"}',
        '{"kind": "JobEnded", "code": 256}',
        '{"kind": "JobEnded", "code": true}',
        '{"kind": "JobEnded", "code": 1, "more": 2}',
        "[1]",
        '{"kind": "Notice", "line": 7}',
        "[" * 60_000,
        '{"kind": "Stop", "generation": -1, "saved": false}',
        '{"kind": "Stop", "generation": 1, "saved": 0}',
        '{"kind": "Value", "number": 0, "name": "Notice", "text": "x"}',
    ],
    ids=lambda content: content[:70],
)
def test_malformed_messages(content):
    with pytest.raises(Malformed):
        CODEC.decode(content.encode())


@given(st.sampled_from([type(note).__name__ for note in NOTES]), st.text(max_size=60))
def test_any_text_is_a_message_or_malformed(name, text):
    with contextlib.suppress(Malformed):
        note = CODEC.decode(f'{{"kind": "{name}", {text}}}'.encode(errors="replace"))
        assert CODEC.decode(encode(note)[LENGTH:]) == note


def test_a_queue_keeps_the_order_and_its_time_limit():
    events = EventQueue()
    assert events.next(time.monotonic() - 1) is None
    for number in range(100_000):
        events.put(number)
    assert events.next(-math.inf) == 0
    assert list(events.take_all()) == list(range(1, 100_000)) and list(events.take_all()) == []
    events.put("late")
    assert events.next() == "late"
    events.close()
    # A late event of another thread does no harm.
    events.put("too late")


def test_a_late_process_of_an_earlier_start_is_refused():
    """A process of generation 0 may reach the coordinator of generation 1, if both have the same port by chance."""
    job = Job(f"127.0.0.1:{free_port()}", 2, 0, run_id="name.1")
    late = Job(job.coordinator, 2, 1, run_id="name.0")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ControlPlane.join, job, {}, 20, end=print)
        with pytest.raises(InputError, match="it serves another job; give each job its own port"):
            ControlPlane.join(late, {}, 20)
        second = ControlPlane.join(Job(job.coordinator, 2, 1, run_id="name.1"), {}, 20, end=print)
        for link in (second, first.result(20)):
            link.leave()
