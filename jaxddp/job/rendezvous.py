"""Who joins a job: the processes meet before JAX starts, so that what would hang or crash JAX becomes one line."""

from collections.abc import Mapping
from itertools import islice

from jaxddp.core.errors import Unreachable
from jaxddp.core.message import Key
from jaxddp.core.wording import plural, show
from jaxddp.job.environment import KEY, Job
from jaxddp.job.handshake import expected_proof, same
from jaxddp.job.messages import Challenge, Hello, Refusal

_MOST_NAMED = 8


class Roll:
    """Process 0's list of those who have joined.

    Args:
        facts: values by name that must be the same in all processes (versions).
        host: the name of this process's own.
    """

    def __init__(self, job: Job, facts: Mapping[str, str], host: str):
        self._job, self._facts = job, facts
        self.hosts = {0: host}
        self._turned_away = 0

    @property
    def is_complete(self) -> bool:
        return len(self.hosts) == self._job.num_processes

    def stranger(self, challenge: Challenge, hello: Hello) -> Refusal | None:
        """Why a process that says this to a challenge is none of this job, which goes on without it; None if it is."""
        reason = None
        if hello.run_id != self._job.run_id:
            reason = "it serves another job; give each job a port of its own"
        elif self._job.key and not same(hello.proof, expected_proof(self._job.key, challenge, hello)):
            reason = f"{KEY} is another one there; give all processes of a job the same"
        self._turned_away += reason is not None
        return None if reason is None else Refusal(reason)

    def mismatch(self, hello: Hello) -> Refusal | None:
        """Why no job can come of this, if a process of it says so; None where it fits."""
        reason = self._difference(hello)
        return None if reason is None else Refusal(reason)

    def _difference(self, hello: Hello) -> str | None:
        there, count, process = hello.host, self._job.num_processes, hello.process
        if hello.proof and not self._job.key:
            return f"{KEY} is set in process {process} on {there}, and not in process 0; give all the same"
        if hello.count != count:
            return (
                f"JAX_NUM_PROCESSES differs: process 0 has {count}, process {process} on {there} has {hello.count}; "
                "start every process with the same"
            )
        if process >= count:
            return f"JAX_PROCESS_ID={process} on {there}: expected 0 to {count - 1}; give each process its own"
        if process in self.hosts:
            return (
                f"JAX_PROCESS_ID={process} twice: on {self.hosts[process]} and on {there}; give each process its own, "
                f"0 to {count - 1}"
            )
        for name, value in self._facts.items():
            other = hello.facts.get(name)
            if other != value:
                return (
                    f"{name} differs: process 0 has {show(value)}, process {process} on {there} has {show(other)}; "
                    "install the same on every host"
                )
        return None

    def late(self, process: int) -> Refusal:
        """What a process is told that comes when all have joined."""
        return Refusal(
            f"all {self._job.num_processes} processes of the job there have joined already; is "
            f"JAX_PROCESS_ID={process} given twice, or is this another job's address?"
        )

    def ending(self, process: int) -> Refusal:
        """What a process is told that comes while the job ends because one of it was lost."""
        return Refusal(
            f"process {process} came again while the job there ends; start it once more", Unreachable.exit_code
        )

    def absent(self, timeout: float, listening: str) -> Unreachable:
        """Who did not join in time."""
        absent = self._job.num_processes - len(self.hosts)
        first = (str(process) for process in range(self._job.num_processes) if process not in self.hosts)
        who = f"{plural(absent, 'process')} {', '.join(islice(first, _MOST_NAMED))}"
        more = f" and {absent - _MOST_NAMED:,} more" if absent > _MOST_NAMED else ""
        others = f"; turned away {self._turned_away}, of another job or with another {KEY}" if self._turned_away else ""
        return Unreachable(
            f"{who}{more} of {self._job.num_processes} did not join in {timeout:g} s",
            advice=(
                *("start all of them, or raise ", Key("parallel.start_timeout")),
                f" (process 0 listens on {listening}{others})",
            ),
        )
