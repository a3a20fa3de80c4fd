"""Where the launcher of machine 0 lets those of the other machines in."""

import asyncio
import socket
from collections.abc import Mapping
from typing import NamedTuple

from jaxddp.cluster.inbox import Inbox
from jaxddp.cluster.meeting.conversation import SILENCE_SECONDS, Arrived, Gone, converse, leave
from jaxddp.cluster.meeting.notes import Note, packed
from jaxddp.core.wording import show
from jaxddp.job.connection import Connection, serving
from jaxddp.job.environment import KEY, Job
from jaxddp.job.handshake import expected_proof, proof_of_coordinator, same
from jaxddp.job.messages import Challenge, Hello, Refusal, Welcome
from jaxddp.job.network_thread import NetworkThread
from jaxddp.job.ports import WAITING
from jaxddp.job.strangers import Strangers


class _Guest(NamedTuple):
    connection: Connection
    host: str
    gone: asyncio.Event


class Door:
    """Lets launchers in, and puts what becomes of them into an inbox: `Arrived`, `Heard`, `Gone`.

    Args:
        listener: a socket at the coordinator's address, which this closes in the end.
        job: of the launchers: a process is a machine's launcher.
        facts: values by name that must be the same for all launchers.
    """

    def __init__(self, listener: socket.socket, job: Job, facts: Mapping[str, str], inbox: Inbox):
        self._job, self._facts, self._inbox = job, dict(facts), inbox
        self._guests = dict[int, _Guest]()
        self._strangers = Strangers()
        self._network = NetworkThread("jaxddp-launchers")
        self._network.result(self._open(listener))

    def send(self, machine: int, note: Note) -> None:
        """Send a note; where that machine has gone, nothing happens: the inbox says so."""
        self._network.call(self._send, machine, note)

    def remind(self, seconds: float, thing: object) -> None:
        """Put something into the inbox later."""
        self._network.later(seconds, self._inbox.put, thing)

    def close(self, *notes: Note) -> None:
        """Send everyone these last notes, and close."""
        self._network.result(self._close(*notes))
        self._network.close()

    async def _open(self, listener: socket.socket) -> None:
        self._server = await asyncio.start_server(serving(self._serve), sock=listener, backlog=WAITING)

    async def _close(self, *notes: Note) -> None:
        self._server.close()
        await asyncio.gather(*(leave(guest.connection, *notes) for guest in self._guests.values()))

    def _send(self, machine: int, note: Note) -> None:
        if machine in self._guests:
            self._guests[machine].connection.send(packed(note))

    async def _serve(self, connection: Connection) -> None:
        """Of a launcher, or of a stranger, who ends nothing."""
        greeted = await self._strangers.greeted(connection)
        if greeted is None:
            return
        challenge, hello = greeted
        reason = self._stranger(challenge, hello) or await self._misfit(hello)
        if reason is not None:
            connection.send(Refusal(reason))
            return
        machine = hello.process
        self._guests[machine] = guest = _Guest(connection, hello.host, asyncio.Event())
        connection.send(Welcome("", proof_of_coordinator(self._job.key, hello.nonce, "")))
        self._inbox.put(Arrived(machine, hello.host))
        reason = "was lost"
        try:
            reason = await converse(connection, 0, machine, hello.host, self._inbox.put)
        finally:
            del self._guests[machine]
            guest.gone.set()
            self._inbox.put(Gone(machine, reason))

    def _stranger(self, challenge: Challenge, hello: Hello) -> str | None:
        if hello.run_id != self._job.run_id:
            return (
                "launchers of another job meet there; give each job a port of its own, and all machines of a job "
                "--restarts or --nodes MIN:MAX alike"
            )
        if self._job.key and not same(hello.proof, expected_proof(self._job.key, challenge, hello)):
            return f"{KEY} is another one there; give all machines of a job the same"
        if hello.proof and not self._job.key:
            return f"{KEY} is set on machine {hello.process} ({hello.host}), and not on machine 0; give all the same"
        return None

    async def _misfit(self, hello: Hello) -> str | None:
        """Why a launcher of this job is turned away; the others go on without it."""
        machine, there = hello.process, hello.host
        for name, value in self._facts.items():
            if hello.facts.get(name) != value:
                other = show(hello.facts.get(name))
                return f"{name} differs: machine 0 has {show(value)}, machine {machine} ({there}) has {other}"
        if machine in self._guests:
            # One that vanished and comes again may be sooner than the silence by which it is missed.
            guest = self._guests[machine]
            try:
                async with asyncio.timeout(SILENCE_SECONDS + 1):
                    await guest.gone.wait()
            except TimeoutError:
                return f"--nr {machine} twice: on {guest.host} and on {there}; give each machine its own"
        if not 0 < machine < self._job.num_processes or machine in self._guests:
            return f"--nr {machine} on {there}: give each machine its own, 1 to {self._job.num_processes - 1}"
        return None
