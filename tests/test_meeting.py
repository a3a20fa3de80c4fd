"""The network of launchers: its server admits or rejects launchers, detects lost launchers, and relays messages."""

import contextlib
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launches import HANGING, free_port
from support.strangers import STRANGERS, answers

import jaxddp.cluster.network as network
from jaxddp.cluster.network import Arrived, Disconnected, Event, LauncherClient, LauncherServer
from jaxddp.cluster.states import Assignment, JobEnded, Notice, Stop
from jaxddp.cluster.worker import End, Failure
from jaxddp.core.errors import InputError
from jaxddp.job.control_plane import ControlPlane
from jaxddp.job.environment import Job
from jaxddp.job.messages import LENGTH, Challenge, Malformed, Refusal, decode, encode
from jaxddp.job.watchdog import Timeouts


@pytest.fixture
def server() -> Iterator[tuple[LauncherServer, SimpleQueue[Event], Job]]:
    listener = socket.create_server(("127.0.0.1", 0))
    job = Job("{}:{}".format(*listener.getsockname()), 3, 0, run_id="run/launchers", key="secret")
    events = SimpleQueue[Event]()
    launcher_server = LauncherServer(listener, job, {"--nodes": "3"}, events.put)
    yield launcher_server, events, job
    launcher_server.close()


def client(job: Job, machine: int = 1, **changes: object) -> tuple[LauncherClient, SimpleQueue[Event]]:
    events = SimpleQueue[Event]()
    facts = changes.pop("facts", {"--nodes": "3"})
    launcher = LauncherClient(Job(**{**vars(job), "process_id": machine, **changes}), facts, events.put)
    launcher.reach(20)
    return launcher, events


def next_event(events: SimpleQueue[Event]) -> Event:
    return events.get(timeout=HANGING)


def test_connections_of_other_programs_do_not_disturb_launchers(server):
    launcher_server, events, job = server
    address = ("127.0.0.1", job.port)
    silent = [socket.create_connection(address, timeout=20) for _ in range(100)]
    connections = {}
    for name, request in STRANGERS.items():
        connections[name] = socket.create_connection(address, timeout=20)
        connections[name].sendall(request)
    launcher, received_events = client(job)
    assert next_event(received_events) == Event(0, Arrived("127.0.0.1")) and next_event(events).machine == 1
    for name, connection in connections.items():
        challenge, *replies = answers(connection)
        assert isinstance(challenge, Challenge)
        is_refused = name == "another run"
        assert [type(reply) for reply in replies] == [Refusal] * is_refused, name
    failure, end = Failure(9, "process 7: exit code 9", generation=4), End(9, "over", user_exit=True)
    launcher.send(0, failure)
    assert next_event(events) == (1, failure)
    launcher_server.send(1, Notice("a line"))
    assert next_event(received_events) == (0, Notice("a line"))
    launcher.close(end)
    assert next_event(events) == (1, end) and next_event(events) == (1, Disconnected("left"))
    for connection in silent:
        connection.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": "guess"}, "JAXDDP_JOB_KEY differs from that of machine 0; give all machines of a job the same"),
        ({"run_id": "another/launchers"}, "it serves another job"),
        ({"facts": {}}, "--nodes differs: machine 0 has '3', machine 1 on "),
        ({"machine": 7}, "--nr 7 on "),
    ],
    ids=str,
)
def test_a_launcher_with_another_key_run_or_option_is_rejected(changes, message, server, capsys):
    _, events, job = server
    launcher, received_events = client(job, **changes)
    event = next_event(received_events).content
    assert isinstance(event, InputError) and f"--coordinator {job.coordinator}: {message}" in str(event)
    launcher.close()
    assert events.empty()
    # Machine 0 prints why a machine of its own job is missing.
    assert (f"refused: {message}" in capsys.readouterr().err) == (changes.keys() <= {"facts", "machine"})


def test_a_restarted_machine_is_admitted_once_its_earlier_launcher_is_lost(server, monkeypatch):
    _, events, job = server
    earlier, _ = client(job)
    assert isinstance(next_event(events).content, Arrived)
    monkeypatch.setattr(network, "_TAKEOVER_SECONDS", 0.3)
    rejected, received_events = client(job)
    event = next_event(received_events).content
    assert isinstance(event, InputError) and "--nr 1 twice: on " in str(event)
    monkeypatch.setattr(network, "_TAKEOVER_SECONDS", 20)
    restarted, received_events = client(job)
    with pytest.raises(Empty):
        received_events.get(timeout=0.3)
    earlier.close()
    happened = [next_event(queue).content for queue in (events, events, received_events)]
    assert [*map(type, happened)] == [Disconnected, Arrived, Arrived]
    for launcher in (rejected, restarted):
        launcher.close()


@pytest.mark.slow
def test_a_silent_machine_is_lost(server, monkeypatch):
    _, events, job = server
    monkeypatch.setattr(network, "SILENCE_SECONDS", 0.4)
    # The launcher joins and then sends nothing, because `_block` blocks its thread. The public API cannot block it.
    launcher, _ = client(job)
    assert isinstance(next_event(events).content, Arrived)
    launcher._thread.begin(_block())
    event = next_event(events).content
    assert isinstance(event, Disconnected) and re.fullmatch(r"gave no sign of life for 0\.4 s \(on .*\)", event.reason)
    launcher.close()


async def _block() -> None:
    time.sleep(2)


MESSAGES = [
    Assignment(1, 2, 4, "h:1", "run.1"),
    Stop(1, saved=True),
    Failure(3, "process 1: exit code 3", generation=1),
    End(0, "done", stop_requested=True),
    Notice("a line"),
    JobEnded(75),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_are_decoded_as_they_were_encoded(message):
    assert decode(encode(message)[LENGTH:]) == message


@pytest.mark.parametrize(
    "content",
    [
        '{"kind": "JobEnded"}',
        '{"kind": "JobEnded", "code": 256}',
        '{"kind": "JobEnded", "code": true}',
        '{"kind": "JobEnded", "code": 1, "more": 2}',
        "[1]",
        '{"kind": "Notice", "line": 7}',
        "[" * 60_000,
        '{"kind": "Stop", "generation": -1, "saved": false}',
        '{"kind": "Stop", "generation": 1, "saved": 0}',
    ],
    ids=lambda content: content[:70],
)
def test_malformed_messages_are_rejected(content):
    with pytest.raises(Malformed):
        decode(content.encode())


@given(st.sampled_from([type(message).__name__ for message in MESSAGES]), st.text(max_size=60))
def test_any_text_is_decoded_or_raises_malformed(name, text):
    with contextlib.suppress(Malformed):
        message = decode(f'{{"kind": "{name}", {text}}}'.encode(errors="replace"))
        assert decode(encode(message)[LENGTH:]) == message


def test_a_late_process_of_an_earlier_start_is_refused():
    """A process of generation 0 may reach the coordinator of generation 1, if both have the same port by chance."""
    job = Job(f"127.0.0.1:{free_port()}", 2, 0, run_id="name.1")
    late_job = Job(job.coordinator, 2, 1, run_id="name.0")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ControlPlane, job, {}, Timeouts(20), end=print)
        with pytest.raises(InputError, match="it serves another job; give each job its own port"):
            ControlPlane(late_job, {}, Timeouts(20))
        second = ControlPlane(Job(job.coordinator, 2, 1, run_id="name.1"), {}, Timeouts(20), end=print)
        for plane in (second, first.result(20)):
            plane.leave()
