"""How one that joins says who it is, and is let in or not: a process of a job, or a machine's launcher."""

import socket
from collections.abc import Mapping

from jaxddp.core.errors import InputError, error_of
from jaxddp.job.connection import STRANGERS_LONGEST, Connection
from jaxddp.job.environment import KEY, Job
from jaxddp.job.handshake import nonce, proof_of_coordinator, proof_of_process, same
from jaxddp.job.messages import PROTOCOL, Challenge, Hello, Message, Refusal, Strange, Welcome


class Greeting:
    """What is said on a connection before its two sides know each other; how long that may take is the caller's.

    Args:
        job: the place in it of who joins.
        facts: values by name that must be the same on both sides.
        host: who should be there, as a line has it.
        peers: what all those are who join.

    All functions raise `ConnectionResetError` where the other side has gone, and `InputError` where it is none of ours.
    """

    def __init__(self, job: Job, facts: Mapping[str, str], host: str, peers: str):
        self._job, self._facts, self._peers = job, dict(facts), peers
        self._not_ours = f"what answers there is not {host}"

    async def challenged(self, connection: Connection) -> Challenge:
        """The first word of the other side."""
        said = await self._said(connection)
        if not isinstance(said, Challenge) or said.protocol != PROTOCOL:
            raise InputError(self._not_ours)
        return said

    async def admitted(self, connection: Connection, challenge: Challenge) -> str:
        """Say who this is, and wait until it is let in; returns the address of JAX's coordinator, if there is one.

        Raises:
            InputError, Unreachable: it is turned away, and the other side said why.
        """
        job, own = self._job, nonce()
        proof = proof_of_process(job, challenge, own)
        name = socket.gethostname()
        connection.send(Hello(job.process_id, job.num_processes, job.run_id, name, self._facts, own, proof))
        answer = await self._said(connection)
        if isinstance(answer, Refusal):
            raise error_of(answer.code, answer.reason)
        if not isinstance(answer, Welcome):
            raise InputError(self._not_ours)
        if not same(answer.proof, proof_of_coordinator(job.key, own, answer.jax_address)):
            raise InputError(f"{KEY} is another one there; give all {self._peers} of a job the same")
        return answer.jax_address

    async def _said(self, connection: Connection) -> Message:
        try:
            said = await connection.receive(STRANGERS_LONGEST)
        except Strange:
            raise InputError(self._not_ours) from None
        if said is None:
            raise ConnectionResetError("it closed the connection")
        return said
