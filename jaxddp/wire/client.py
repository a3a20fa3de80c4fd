"""The client's side of the handshake. It connects to the server, which may start later, and joins the job."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from jaxddp.core.errors import InputError, error_of
from jaxddp.wire.admission import other_key
from jaxddp.wire.codec import Codec, Malformed
from jaxddp.wire.connection import LONGEST_OF_STRANGER, Connection
from jaxddp.wire.handshake import PROTOCOL, Challenge, Identity, Refusal, Welcome, is_from_server, make_hello

T = TypeVar("T")

_RETRY_SECONDS, _CONNECT_SECONDS = 0.2, 5.0


class NotReached(Exception):
    """The server was not reached in time. The text is the error of the last attempt."""


class Client:
    """Joins a job.

    Args:
        facts: values by name, which must be equal in the client and the server.
        noun: the noun for a client in messages: "process" or "machine".
        server: the server's description in the error about another program at its address, followed by advice.
    """

    def __init__(self, identity: Identity, facts: Mapping[str, str], codec: Codec, *, noun: str, server: str):
        self._identity, self._facts, self._codec, self._noun = identity, facts, codec, noun
        self._wrong_server = f"the program at this address is not {server}"

    async def connect(self, host: str, port: int, deadline: float, greet: Callable[[Connection], Awaitable[T]]) -> T:
        """Connect to a server, and return the result of `greet` for the connection.

        After an OSError of the connection or of `greet`, this method tries again. Any error of `greet` closes the
        connection.

        Args:
            deadline: when to stop trying, a time of the monotonic clock.

        Raises:
            NotReached: no server was reached before `deadline`.
            InputError: the host's name is invalid.
        """
        reason = "no answer"
        while (remaining := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(remaining, _CONNECT_SECONDS)):
                    connection = Connection(*await _open(host, port), self._codec)
                try:
                    return await greet(connection)
                except BaseException:
                    await connection.close()
                    raise
            except socket.gaierror as error:
                reason = f"its name cannot be resolved: {error.strerror}"
            except OSError as error:
                reason = error.strerror or str(error) or reason
            await asyncio.sleep(min(_RETRY_SECONDS, remaining))
        raise NotReached(reason)

    async def challenge(self, connection: Connection) -> Challenge:
        """Return the server's first message.

        Raises:
            ConnectionResetError: the server closed the connection.
            InputError: the server uses another protocol.
        """
        challenge = await self._receive(connection)
        if not isinstance(challenge, Challenge) or challenge.protocol != PROTOCOL:
            raise InputError(self._wrong_server)
        return challenge

    async def join(self, connection: Connection, challenge: Challenge) -> str:
        """Answer the challenge, and return the address of JAX's coordinator once this client has joined.

        Raises:
            ConnectionResetError: the server closed the connection.
            InputError, Unreachable: the server refused this client, for the reason in the message.
            InputError: the server has another key.
        """
        own_hello = make_hello(self._identity, challenge, self._facts)
        connection.send(own_hello)
        answer = await self._receive(connection)
        if isinstance(answer, Refusal):
            raise error_of(answer.code, answer.reason)
        if not isinstance(answer, Welcome):
            raise InputError(self._wrong_server)
        if not is_from_server(answer, own_hello, self._identity.key):
            raise InputError(other_key(self._noun))
        return answer.jax_address

    async def _receive(self, connection: Connection) -> Any:
        try:
            message = await connection.receive(LONGEST_OF_STRANGER)
        except Malformed:
            raise InputError(self._wrong_server) from None
        if message is None:
            raise ConnectionResetError("it closed the connection")
        return message


async def _open(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_connection(host, port)
    except UnicodeError:
        raise InputError(f"there is no host {host!r}; give its name or address") from None
