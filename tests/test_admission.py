"""Messages from sockets are checked before use. A stranger, a connection from outside, cannot end a job."""

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launches import free_port
from support.strangers import FACTS, STRANGERS, answers, changed

from jaxddp.core.errors import InputError, Unreachable
from jaxddp.core.peers import result_of
from jaxddp.job.control_plane import ControlPlane, Follower, Value
from jaxddp.job.environment import Job
from jaxddp.job.messages import LENGTH, Challenge, Hello, Malformed, Refusal, Welcome, decode, encode
from jaxddp.job.watchdog import Lost, Timeouts


class TwoProcesses:
    """A job of two processes: process 0 in a thread, and `second`, which a test starts. Both append to `losses`."""

    def __init__(self, key: str = "", timeout: float = 30, count: int = 2):
        self.address, self.count, self.rest = ("127.0.0.1", free_port()), count, list[ControlPlane]()
        self.key, self.timeout, self.losses = key, timeout, list[Lost]()
        self.pool = ThreadPoolExecutor(8)
        self.first = self.pool.submit(self.plane, 0)
        deadline = time.monotonic() + 10
        while not self.is_listening():
            assert time.monotonic() < deadline

    def is_listening(self) -> bool:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(self.address, timeout=20).close()
            return True
        return False

    def plane(self, process: int, **changes: object) -> ControlPlane:
        job = Job("{}:{}".format(*self.address), self.count, process, run_id="run", key=self.key)
        job = Job(**{**vars(job), **changes})
        return ControlPlane(job, FACTS, Timeouts(self.timeout), end=self.losses.append)

    def connect_stranger(self, content: bytes = b"") -> socket.socket:
        """Connect to process 0 and send it bytes."""
        connection = socket.create_connection(self.address, timeout=20)
        connection.sendall(content)
        return connection

    def agree(self) -> None:
        """Let both processes exchange a value."""
        planes = [self.first.result(20), self.second, *self.rest]
        values = [self.pool.submit(plane.decide, "name", str(n), ",".join) for n, plane in enumerate(planes)]
        assert {future.result(20) for future in values} == {",".join(map(str, range(self.count)))}

    def close(self) -> None:
        planes = [*self.rest, self.second, self.first.result(20)]
        assert all(self.pool.map(ControlPlane.finish, planes))
        for plane in planes:
            plane.leave()
        assert self.losses == []


@pytest.mark.parametrize("key", ["", "secret"])
def test_unknown_clients_cannot_end_a_job_before_or_after_its_start(key, monkeypatch):
    # Connections are served concurrently, so a silent connection does not delay the start. The time limit for a silent
    # connection is private, because users have no reason to change it.
    monkeypatch.setattr("jaxddp.job.connection._HELLO_SECONDS", 600.0)
    job = TwoProcesses(key)
    connections_before = [job.connect_stranger(content) for content in STRANGERS.values()]
    job.second = job.plane(1)
    job.agree()
    connections_after = [job.connect_stranger(content) for content in STRANGERS.values()]
    job.agree()
    for name, connection in [
        *zip(STRANGERS, connections_before, strict=True),
        *zip(STRANGERS, connections_after, strict=True),
    ]:
        challenge, *replies = answers(connection)
        assert isinstance(challenge, Challenge)
        assert [type(reply) for reply in replies] == [Refusal] * (name == "another run"), name
    job.agree()
    job.close()


def test_a_process_without_the_key_is_refused():
    job = TwoProcesses("secret")
    message = r"coordinator .*: JAXDDP_JOB_KEY differs from that of process 0; give all machines of"
    with pytest.raises(InputError, match=message):
        job.plane(1, key="guess")
    with pytest.raises(InputError, match="JAXDDP_JOB_KEY differs from that of process 0"):
        job.plane(1, key="")
    # A proof is valid for one challenge only.
    assert isinstance(answers(job.connect_stranger(changed(proof="0" * 64)))[1], Refusal)
    job.second = job.plane(1)
    job.agree()
    job.close()


def test_an_error_names_the_process_that_has_no_key():
    job = TwoProcesses("", timeout=20)
    message = "JAXDDP_JOB_KEY is set in process 1 on .*, and not in process 0; set it in all"
    with pytest.raises(InputError, match=message):
        job.plane(1, key="secret")
    with pytest.raises(InputError, match=message):
        job.first.result(20)


def test_a_coordinator_without_the_key_is_detected():
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer_without_the_key() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(encode(Challenge("0")))
                connection.recv(1000)
                connection.sendall(encode(Welcome("127.0.0.1:1", "0" * 64)))
                connection.recv(1000)

        pool.submit(answer_without_the_key)
        job = Job("{}:{}".format(*server.getsockname()), 2, 1, key="secret")
        with pytest.raises(InputError, match="JAXDDP_JOB_KEY differs from that of process 0"):
            ControlPlane(job, FACTS, Timeouts(10))


def test_a_flood_of_silent_connections_delays_no_process():
    job = TwoProcesses()
    threads_before = len([thread for thread in threading.enumerate() if thread.name == "jaxddp-job"])
    silent = [job.connect_stranger() for _ in range(200)]
    job.second = job.plane(1)
    job.agree()
    threads_after = len([thread for thread in threading.enumerate() if thread.name == "jaxddp-job"])
    # Only the connection of process 1 may add a thread.
    assert threads_after <= threads_before + 1
    for connection in silent:
        connection.close()
    job.close()


def test_a_process_that_ended_before_the_start_can_join_again():
    job = TwoProcesses(count=3)
    hello = encode(Hello(1, 3, "run", "there", FACTS, "nonce", ""))
    for _ in range(2):
        # Process 0 reads the hello and the end of the stream, removes the process, and closes the connection.
        assert [type(message) for message in answers(job.connect_stranger(hello))] == [Challenge]
    third = job.pool.submit(job.plane, 2)
    job.second, job.rest = job.plane(1), [third.result(20)]
    job.agree()
    job.close()


def test_all_processes_get_the_value_or_the_error_of_process_0():
    job = TwoProcesses()
    job.second = job.plane(1)
    first = job.first.result(20)

    assert first.from_first("a number", lambda: "7") == "7"
    assert job.second.from_first("a number", lambda: "8") == "7"
    for error in (InputError("step 4 is damaged"), Unreachable("the server of files is away")):

        def fails(error: Exception = error) -> str:
            raise error

        for plane in (first, job.second):
            with pytest.raises(type(error), match=f"^{error}$"):
                plane.from_first("a checkpoint", fails)
    job.close()


def test_a_process_that_rejoins_while_the_job_ends_is_rejected_with_exit_code_1():
    job = TwoProcesses()
    job.second = job.plane(1)
    first = job.first.result(20)
    job.second.fail("ended: disk on fire", 1)
    assert first.watchdog.loss(20) is not None
    with pytest.raises(Unreachable, match="process 1 joined again while the job is ending; start it again"):
        job.plane(1)
    for plane in (job.second, first):
        plane.leave()


def test_a_process_waits_for_the_others_at_its_end_in_bounded_time():
    job = TwoProcesses()
    job.second = job.plane(1)
    job.second.timeouts = Timeouts(shutdown=0.2)
    assert not job.second.finish()
    for plane in (job.second, job.first.result(20)):
        plane.leave()


def test_an_error_names_processes_at_different_exchanges():
    job = TwoProcesses()
    job.second = job.plane(1)
    first = job.pool.submit(job.first.result(20).decide, "seed", "0", ",".join)
    message = "seed: process 1 is at 'the steps' instead; does it run the same program"
    with pytest.raises(InputError, match="the steps: process 0 is at 'seed' instead; does it run the same program"):
        job.second.decide("the steps", "1", ",".join)
    with pytest.raises(InputError, match=message):
        first.result(20)
    job.first.result(20).longest_wait = 0.2
    unanswered = job.pool.submit(job.first.result(20).decide, "seed", "0", ",".join)
    with pytest.raises(Unreachable, match=r"seed: process 1 gave no value in 0.2 s; does it run the same program\?"):
        unanswered.result(20)
    job.close()


def test_one_thread_serves_a_hundred_processes_that_meet_and_exchange_and_loses_one():
    """`benchmarks/processes/meeting.py` runs thousands of processes."""
    coordinator, lost_processes, count = f"127.0.0.1:{free_port()}", list[int](), 100

    async def run_other_processes() -> None:
        loss_events = [asyncio.Event() for _ in range(count - 2)]
        followers = [Follower(Job(coordinator, count, process, key="k"), FACTS) for process in range(1, count)]
        ends = [lambda loss, event=event: (lost_processes.append(loss.process), event.set()) for event in loss_events]
        watchdogs = await asyncio.gather(
            *(follower.meet(Timeouts(30), end) for follower, end in zip(followers, [*ends, print], strict=True))
        )
        for process, follower in enumerate(followers, 1):
            follower.send(Value(0, "name", str(process)))
        replies = await asyncio.gather(*(follower.values(0, "name", 20) for follower in followers))
        assert {result_of(value.text) for values in replies for value in values} == {str(sum(range(count)))}
        watchdogs[-1].close()
        followers[-1].connections[0].writer.transport.abort()
        async with asyncio.timeout(20):
            await asyncio.gather(*(event.wait() for event in loss_events))

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(asyncio.run, run_other_processes())
        threads_before = set(threading.enumerate())
        plane = ControlPlane(
            Job(coordinator, count, 0, key="k"), FACTS, Timeouts(30), lambda loss: lost_processes.append(loss.process)
        )
        assert [thread.name for thread in set(threading.enumerate()) - threads_before] == ["jaxddp-job"]
        assert plane.decide("name", "0", lambda texts: str(sum(map(int, texts)))) == str(sum(range(count)))
        first.result(60)
    assert lost_processes == [count - 1] * (count - 1)


@given(st.binary(max_size=200))
def test_any_bytes_decode_to_a_message_or_raise_malformed(content):
    with contextlib.suppress(Malformed):
        assert decode(encode(decode(content))[LENGTH:]) == decode(content)
