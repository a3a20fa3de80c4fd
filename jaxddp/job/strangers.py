"""Who connects, and has not said yet who it is."""

import asyncio

from jaxddp.job.connection import STRANGERS_LONGEST, Connection
from jaxddp.job.handshake import nonce
from jaxddp.job.messages import Challenge, Hello, Strange

_HELLO_SECONDS = 5.0
_MOST = 64


class Strangers:
    """Connections that have not said who they are: each has 5 s, and the oldest of too many is closed.

    Args:
        expected: how many may come at once, beside 64 others.
    """

    def __init__(self, expected: int = 0):
        self._most, self._waiting = _MOST + expected, dict[asyncio.Task[None], None]()

    async def greeted(self, connection: Connection) -> tuple[Challenge, Hello] | None:
        """What it was asked, and what it says; None where it says nothing that belongs to a job."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = None
        if len(self._waiting) > self._most:
            next(iter(self._waiting)).cancel()
        challenge = Challenge(nonce())
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                connection.send(challenge)
                said = await connection.receive(STRANGERS_LONGEST)
        except (Strange, TimeoutError):
            return None
        finally:
            self._waiting.pop(task, None)
        return (challenge, said) if isinstance(said, Hello) else None
