"""The place of a process in a job on TPUs, from the variables of GKE or Google's metadata server.

The chips of a slice are wired to each other, and the slices of a job are connected by the network. Each host of a slice
runs one process with all chips of the host. libtpu numbers the processes slice by slice, and in a slice by the worker
id, so a job must use the same ids.

The metadata server also announces the eviction of a TPU VM: a spot machine that Google takes back, or a machine that
goes into maintenance, shuts down soon afterwards. A program in a session of ssh may receive no signal before that.

Sources: the documentation of Cloud TPU and of TPUs in GKE, and the clusters that JAX detects.
"""

import contextlib
import functools
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxddp.core.errors import InputError, Unreachable, counted, show
from jaxddp.core.threads import in_daemon
from jaxddp.core.tpu import local_chips
from jaxddp.job.env_variables import COUNT, Environ, EnvValue, index_below, lookup, number

HOSTNAMES, WORKER = "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"
_OF_SLICES = ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS")
_ALONE = "local"
"""The value of TPU_PROCESS_ADDRESSES, on Kaggle for example, with which libtpu connects to no other host."""
_NAME = r"\[[^\[\]\s]+\]|[^\[\]\s:]+"
"""The name or address of a host. An address with colons (IPv6) is in brackets."""
_HOST = re.compile(rf"(?:[^\[\]\s:]+:[^\[\]\s:]+:)?({_NAME})")
"""The metadata server lists addresses, or triples of a name, an id and an address."""
_PREFIX = "metadata/"
"""The prefix of a value that comes from the metadata server. No variable of the environment has such a name."""
_ENDPOINTS, _NUMBER, _ENV = "worker-network-endpoints", "agent-worker-number", "tpu-env"

METADATA_SECONDS = 2.0
"""The seconds for a list of questions, with the look-up of the server's name."""
_PAUSE = 0.1
_LARGEST_ANSWER = 2**16
_LONGEST_PROBLEM = 200
PERIOD = 5.0
"""The seconds between two questions. Google announces a preemption 30 s, and maintenance 60 s or more in advance."""
_STOPS = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
_log = logging.getLogger("jaxddp.job")


class Place(NamedTuple):
    """The place of a host in a job on TPUs. A value is None if the host is alone, or if no variable determines it.

    Attributes:
        process: the id of this process.
        num_hosts: the number of hosts of all slices.
        first: the first host of slice 0.
    """

    process: EnvValue | None
    num_hosts: EnvValue | None
    first: EnvValue | None


def with_metadata(environ: Environ, root: Path = Path("/")) -> Environ:
    """Return an environment with the values of the metadata server, if this machine is evidently a TPU VM.

    The server is not asked if the environment has the names of the hosts, if libtpu is told to use this host alone, if
    JAX_PLATFORMS excludes TPUs, if TPU_SKIP_MDS_QUERY is set, or if the machine has no TPU chips.

    Args:
        root: the folder that holds `dev` and `sys`.

    Raises:
        Unreachable: the server does not answer in time. A process must not train alone by mistake.
    """
    is_decided = _value(environ, HOSTNAMES) is not None or environ.get("TPU_PROCESS_ADDRESSES") == _ALONE
    if is_decided or not may_ask(environ, root):
        return environ
    attributes = _attributes(metadata_server(environ))
    if isinstance(attributes, Unreachable):
        advice = f"set {HOSTNAMES} and {WORKER}, or JAX_NUM_PROCESSES=1 for a single process"
        line = f"{attributes}, so the place of this machine in its TPU slice is not known"
        raise Unreachable(line, advice=advice) from attributes
    # The lines of the attribute `tpu-env` are `NAME: 'value'`. Those about several slices are used.
    pairs = (line.partition(":") for line in attributes.get(_ENV, "").splitlines())
    slices = {name.strip(): text.strip(" '\"") for name, _, text in pairs if name.strip() in _OF_SLICES}
    return {**environ, **{_PREFIX + name: value for name, value in (attributes | slices).items()}}


@functools.cache
def _attributes(address: str) -> dict[str, str] | Unreachable:
    """Return the attributes of this machine, which do not change while it runs, or the error of the server.

    All are asked for at once, and once in a process, so that a server that is missing costs one wait.
    """
    try:
        answers = ask_metadata(address, [f"attributes/{name}" for name in (_NUMBER, _ENDPOINTS, _ENV)])
    except Unreachable as error:
        return error
    return {path.removeprefix("attributes/"): text for path, text in answers.items()}


def place(environ: Environ) -> Place:
    """Return the place of this host. Raises InputError if a value is invalid, or the values contradict each other."""
    num_slices, slice_index, coordinator, variables = _slices(environ)
    worker = _value(environ, WORKER) or _value(environ, _NUMBER)
    hosts = _value(environ, HOSTNAMES) or _value(environ, _ENDPOINTS)
    if hosts is None:
        # Programs outside of a slice of several hosts may set the id 0.
        return Place(worker if worker and worker.value != "0" else None, None, coordinator)
    entries = [_HOST.fullmatch(entry.strip()) for entry in hosts.value.split(",")]
    names = [entry[1] for entry in entries if entry]
    if len(names) < len(entries):
        raise InputError(f"{hosts.variable}={show(hosts.value)}: expected the names of hosts, separated by commas")
    size, process = len(names), None
    if worker is not None:
        index = index_below(worker, size, f"because {hosts.variable} has {counted(size, 'host')}")
        if size * num_slices > 1:
            process = EnvValue(str(slice_index * size + index), ", ".join([worker.variable, *variables]))
    count = EnvValue(str(size * num_slices), ", ".join([hosts.variable, *variables]))
    return Place(process, count, coordinator or (hosts._replace(value=names[0]) if size > 1 else None))


def may_ask(environ: Environ, root: Path) -> bool:
    """Return whether this machine has TPU chips that JAX may use, and nothing forbids to ask the metadata server."""
    return lookup(environ, "TPU_SKIP_MDS_QUERY") is None and bool(local_chips(environ, root))


def _value(environ: Environ, name: str) -> EnvValue | None:
    """Return a value of the environment, otherwise that of the metadata server.

    If Google's environments cannot determine a value, they set a warning in its place.
    """
    variable = lookup(environ, name)
    return lookup(environ, _PREFIX + name) if variable is None or variable.value.startswith("WARNING") else variable


def _slices(environ: Environ) -> tuple[int, int, EnvValue | None, list[str]]:
    """Return the number of slices, the index of this one, the first host of slice 0, and the variables of the numbers.

    A job of one slice may have no such host, because the first host of the slice is process 0.
    """
    settings = {name: _value(environ, name) for name in _OF_SLICES}
    count, index, coordinator = settings.values()
    num_slices = number(count, COUNT) if count else 1
    present = [setting.variable for setting in settings.values() if setting]
    if not present or (count and num_slices == 1):
        return 1, 0, None, []
    if count is None or index is None or coordinator is None:
        missing = [name for name, setting in settings.items() if setting is None]
        problem = f"environment: {', '.join(present)} set but not {' and '.join(missing)}"
        raise InputError(problem, advice="several slices need all of them, and one slice needs none")
    slice_index = index_below(index, num_slices, f"for {count.variable}={num_slices}")
    # libtpu's own coordinator listens at the port in this value.
    match = re.fullmatch(rf"({_NAME})(:\d+)?", coordinator.value)
    if match is None:
        value = f"{coordinator.variable}={show(coordinator.value)}"
        raise InputError(f"{value}: expected HOST or HOST:PORT, the first host of slice 0")
    return num_slices, slice_index, coordinator._replace(value=match[1]), [count.variable, index.variable]


def metadata_server(environ: Environ) -> str:
    """Return the server's `host` or `host:port`. The variables that override it are those of Google's libraries."""
    overridden = lookup(environ, "GCE_METADATA_HOST") or lookup(environ, "GCE_METADATA_IP")
    return overridden.value if overridden else "metadata.google.internal"


def ask_metadata(address: str, paths: Sequence[str]) -> dict[str, str]:
    """Return the texts of some paths below `instance/`. A path that the server does not have is left out.

    All questions together take at most `METADATA_SECONDS`.

    Args:
        address: the server's `host` or `host:port`.
        paths: the paths, such as "attributes/accelerator-type".

    Raises: Unreachable if the server does not answer in time, or its answer is not that of a metadata server.
    """
    deadline = time.monotonic() + METADATA_SECONDS

    def ask() -> dict[str, str]:
        texts = {path: _answer(address, path, deadline) for path in paths}
        return {path: text for path, text in texts.items() if text is not None}

    try:
        # Neither the look-up of a name nor a server that sends byte after byte heeds a socket's time limit.
        return in_daemon(ask).result(METADATA_SECONDS)
    except Exception as error:
        # The time limit of the socket may end the thread just before the deadline.
        is_late = isinstance(error, TimeoutError)
        problem = "no answer in time" if is_late else str(error)[:_LONGEST_PROBLEM] or type(error).__name__
        raise Unreachable(f"the metadata server at {address}: {problem}") from error


def _answer(address: str, path: str, deadline: float) -> str | None:
    """Return the text of a path; None if the server does not have it. Retry after a failure until the deadline."""
    # Only TPU machines ask, and the import would delay every start.
    from http.client import NOT_FOUND, OK, HTTPConnection, HTTPException

    while True:
        try:
            with contextlib.closing(HTTPConnection(address, timeout=max(0.01, deadline - time.monotonic()))) as server:
                server.request("GET", f"/computeMetadata/v1/instance/{path}", headers={"Metadata-Flavor": "Google"})
                response = server.getresponse()
                content = response.read(_LARGEST_ANSWER)
            if response.status == NOT_FOUND:
                return None
            if response.status != OK:
                raise OSError(f"status {response.status} for {path}")
            if response.headers.get("Metadata-Flavor") != "Google":
                raise OSError(f"the answer for {path} has no header Metadata-Flavor: Google")
            return content.decode().strip()
        except (OSError, HTTPException):
            if time.monotonic() + _PAUSE >= deadline:
                raise
        time.sleep(_PAUSE)


@contextlib.contextmanager
def sigterm_on_eviction(
    environ: Environ = os.environ, root: Path = Path("/"), period: float = PERIOD
) -> Iterator[None]:
    """Send SIGTERM to this process in the block, once, when Google evicts this TPU machine.

    On other machines, nothing is asked. A server that does not answer is asked again in the next period.

    Args:
        environ: the environment, which may override the server's address.
        root: the folder that holds `dev` and `sys`, which show the TPU chips.
        period: the seconds between two questions.
    """
    if not may_ask(environ, root):
        yield
        return
    address, ended = metadata_server(environ), threading.Event()
    thread = threading.Thread(target=_watch, args=(address, ended, period), daemon=True, name="eviction notice")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(METADATA_SECONDS + 1)


def _watch(address: str, ended: threading.Event, period: float) -> None:
    while not ended.wait(period):
        with contextlib.suppress(Unreachable):
            stops = _STOPS.items() & ask_metadata(address, [*_STOPS]).items()
            if stops and not ended.is_set():
                reason, _ = min(stops)
                _log.warning("Google evicts this machine (%s): the run saves and stops", reason)
                os.kill(os.getpid(), signal.SIGTERM)
                return
