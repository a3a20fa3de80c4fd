"""Process 0's list of the processes that have joined.

All processes join before `jax.distributed.initialize`. So a conflict, which would hang or crash JAX, raises a one-line
error.
"""

from itertools import islice

from jaxddp.core.errors import Key, Unreachable
from jaxddp.core.wording import plural
from jaxddp.wire.handshake import KEY, Hello

_MOST_NAMED = 8


class Roster:
    """The processes that have joined.

    Args:
        count: the number of processes of the job.
        host: the name of process 0's host.

    Attributes:
        hosts: the name of each process's host.
    """

    def __init__(self, count: int, host: str):
        self._count, self.hosts = count, {0: host}

    @property
    def is_complete(self) -> bool:
        """Whether all processes of the job have joined."""
        return len(self.hosts) == self._count

    def conflict(self, hello: Hello) -> str | None:
        """Return the reason why the sender of a hello cannot join; None if it can."""
        host, count, process = hello.host, self._count, hello.process
        if hello.count != count:
            return (
                f"JAX_NUM_PROCESSES differs: process 0 has {count}, process {process} on {host} has {hello.count}; "
                "start every process with the same number"
            )
        if process >= count:
            return f"JAX_PROCESS_ID={process} on {host}: expected 0 to {count - 1}; give each process its own id"
        if process in self.hosts:
            return (
                f"JAX_PROCESS_ID={process} twice: on {self.hosts[process]} and on {host}; give each process its "
                f"own id, 0 to {count - 1}"
            )
        return None

    def absence_error(self, timeout: float, listening: str, num_strangers: int = 0) -> Unreachable:
        """Return the error that names the processes that did not join in time.

        Args:
            timeout: seconds.
            listening: the address where process 0 listens.
            num_strangers: the number of clients that were refused because of another run id or key.
        """
        num_absent = self._count - len(self.hosts)
        first = (str(process) for process in range(self._count) if process not in self.hosts)
        names = f"{plural(num_absent, 'process')} {', '.join(islice(first, _MOST_NAMED))}"
        more = f" and {num_absent - _MOST_NAMED:,} more" if num_absent > _MOST_NAMED else ""
        others = f"; refused {num_strangers}, of another job or with another {KEY}" if num_strangers else ""
        return Unreachable(
            f"{names}{more} of {self._count} did not join in {timeout:g} s",
            advice=(
                *("start all of them, or raise ", Key("parallel.start_timeout")),
                f" (process 0 listens on {listening}{others})",
            ),
        )
