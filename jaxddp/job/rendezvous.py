"""The processes of a job meet before JAX starts, so that what would hang or crash JAX becomes one line.

Process 0 listens at the coordinator's address. Each process sends one JSON line that identifies it. When all have
joined, and agree, process 0 answers each with the address of JAX's own coordinator. If a process does not fit, it and
all others are told why. The connections stay open, for `jaxddp.job.watch`. Every wait is bounded.
"""

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from jaxddp.errors import InputError, about
from jaxddp.job.connection import Peer
from jaxddp.job.environment import Job
from jaxddp.job.ports import listen
from jaxddp.wording import show

INHERITED_SOCKET = "JAXDDP_COORDINATOR_FD"
"""The variable with which a launcher passes on a listening socket, so that no other program takes its port."""

_PROTOCOL = "jaxddp-1"
_RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class Meeting:
    """The result of the rendezvous."""

    job: Job
    jax_address: str
    """`host:port` for JAX's own coordinator, which process 0 is to start."""
    peers: dict[int, Peer]
    """On process 0 the connections to all others, elsewhere the one to process 0."""
    hosts: dict[int, str]
    """The names of the peers' hosts."""
    server: socket.socket | None = None
    """On process 0, still listening, to turn away processes that arrive too late."""


def meet(job: Job, facts: dict[str, str], timeout: float) -> Meeting:
    """Wait until all processes have joined, and compare their facts.

    Args:
        facts: values by name that must be the same in all processes (versions).
        timeout: seconds.

    Raises:
        InputError: the address is taken, wrong or out of reach; a process is missing, joins twice, has another number
            of processes, belongs to another job, or has other facts.
    """
    hello = {
        "protocol": _PROTOCOL,
        "process": job.process_id,
        "count": job.num_processes,
        "run_id": job.run_id,
        "host": socket.gethostname(),
        "facts": facts,
    }
    give_up = time.monotonic() + timeout
    with about(f"coordinator {job.coordinator}"):
        if job.process_id:
            return _report(job, hello, give_up, timeout)
        server = _listen(job)
        try:
            return _gather(job, hello, server, give_up, timeout)
        except BaseException:
            server.close()
            raise


def _listen(job: Job) -> socket.socket:
    inherited = os.environ.pop(INHERITED_SOCKET, None)
    if inherited is not None:
        return socket.socket(fileno=int(inherited))
    return listen(job.host, job.port)


def _gather(job: Job, hello: dict[str, Any], server: socket.socket, give_up: float, timeout: float) -> Meeting:
    """Process 0: wait for the others, then let all start, or tell all why not."""
    peers: dict[int, Peer] = {}
    hellos = {0: hello}
    problem = None
    while problem is None and len(hellos) < job.num_processes:
        server.settimeout(max(give_up - time.monotonic(), 0.001))
        try:
            peer = Peer(server.accept()[0])
            said = peer.receive(min(5, max(give_up - time.monotonic(), 0.001)))
        except TimeoutError:
            if time.monotonic() >= give_up:
                problem = _absent(job, hellos, timeout, server.getsockname()[0])
            continue
        except ValueError:
            continue  # A port scanner or a browser, not a process of this job.
        if said is None or said.get("protocol") != _PROTOCOL:
            continue
        if said["run_id"] != job.run_id:
            # A process of another job, which must not end this job.
            _refuse(peer, "it serves another job; give each job a port of its own")
            continue
        problem = _mismatch(hello, said, hellos)
        if problem is None:
            peers[said["process"]], hellos[said["process"]] = peer, said
        else:
            _refuse(peer, problem)
    if problem is not None:
        for peer in peers.values():
            _refuse(peer, problem)
        raise InputError(problem)
    jax_address = _free_address(server)
    for peer in peers.values():
        with contextlib.suppress(OSError):  # The watch finds a process that has ended since.
            peer.send(jax_address=jax_address)
    return Meeting(job, jax_address, peers, {process: said["host"] for process, said in hellos.items()}, server)


def turn_away(job: Job, server: socket.socket, timeout: float) -> None:
    """Turn away one process that arrives late, if any does in time. Raises OSError when the server is closed."""
    server.settimeout(timeout)
    try:
        peer = Peer(server.accept()[0])
        said = peer.receive(1)
    except (TimeoutError, ValueError):
        return
    if said is not None:
        _refuse(
            peer,
            f"all {job.num_processes} processes of the job there have joined already; is "
            f"JAX_PROCESS_ID={said.get('process')} given twice, or is this another job's address?",
        )


def _report(job: Job, hello: dict[str, Any], give_up: float, timeout: float) -> Meeting:
    """Every other process: connect to process 0, identify this process, wait for the answer."""
    peer = _connect(job, give_up, timeout)
    try:
        peer.send(**hello)
        # Process 0 has the same timeout, and its reason says more than a timeout here.
        answer = peer.receive(max(give_up - time.monotonic(), 0) + 5)
    except TimeoutError:
        raise InputError(f"no answer in {timeout:g} s; is it process 0 of this job?") from None
    except (OSError, ValueError):
        answer = {}
    if answer is None:
        raise InputError("process 0 ended before all processes had joined")
    if "error" in answer:
        raise InputError(answer["error"])
    if "jax_address" not in answer:
        raise InputError("what answers there is not process 0 of a jaxddp job; give another port")
    return Meeting(job, answer["jax_address"], {0: peer}, {0: job.host})


def _connect(job: Job, give_up: float, timeout: float) -> Peer:
    last = "no answer"
    while True:
        remaining = give_up - time.monotonic()
        if remaining <= 0:
            raise InputError(
                f"process {job.process_id} could not reach it in {timeout:g} s ({last}); is the address right, "
                "process 0 started, and the port open?"
            )
        try:
            return Peer(socket.create_connection((job.host, job.port), timeout=min(remaining, 5)))
        except socket.gaierror as error:
            last = f"its name cannot be resolved: {error.strerror}"
        except OSError as error:
            last = error.strerror or str(error)
        time.sleep(min(_RETRY_SECONDS, remaining))


def _mismatch(mine: dict[str, Any], said: dict[str, Any], hellos: dict[int, dict[str, Any]]) -> str | None:
    process = said["process"]
    if said["count"] != mine["count"]:
        return (
            f"JAX_NUM_PROCESSES differs: process 0 has {mine['count']}, process {process} on {said['host']} has "
            f"{said['count']}; start every process with the same"
        )
    if process in hellos:
        return (
            f"JAX_PROCESS_ID={process} twice: on {hellos[process]['host']} and on {said['host']}; "
            f"give each process its own, 0 to {mine['count'] - 1}"
        )
    for name, value in mine["facts"].items():
        other = said["facts"].get(name)
        if other != value:
            return (
                f"{name} differs: process 0 has {show(value)}, process {process} on {said['host']} has {show(other)}; "
                "install the same on every host"
            )
    return None


def _absent(job: Job, hellos: dict[int, Any], timeout: float, listening: str) -> str:
    missing = [str(process) for process in range(job.num_processes) if process not in hellos]
    who = f"process{'es' * (len(missing) > 1)} {', '.join(missing[:8])}"
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return (
        f"{who}{more} of {job.num_processes} did not join in {timeout:g} s; start all of them, or raise "
        f"parallel.start_timeout (process 0 listens on {listening})"
    )


def _refuse(peer: Peer, reason: str) -> None:
    with contextlib.suppress(OSError):
        peer.send(error=reason)
    peer.close()


def _free_address(server: socket.socket) -> str:
    """An address for JAX's coordinator: a free port of the same interface."""
    host = server.getsockname()[0]
    with socket.socket(server.family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return f"[{host}]:{probe.getsockname()[1]}" if ":" in host else f"{host}:{probe.getsockname()[1]}"
