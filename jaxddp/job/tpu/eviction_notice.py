"""Watches the metadata server for the eviction of this TPU machine, and then sends SIGTERM to this process.

A spot machine that Google takes back, or a machine that goes into maintenance, shuts down soon after the notice. A
program in a session of ssh may receive no signal before its machine is off.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from jaxddp.core.errors import Unreachable
from jaxddp.job.env_variables import Environ
from jaxddp.job.tpu import metadata_server
from jaxddp.job.tpu.slices import may_ask

PERIOD = 5.0
"""The seconds between two questions. Google announces a preemption 30 s, and maintenance 60 s or more in advance."""
_PREEMPTED, _MAINTENANCE = "preempted", "maintenance-event"
_STOPS = {_PREEMPTED: "TRUE", _MAINTENANCE: "TERMINATE_ON_HOST_MAINTENANCE"}

_log = logging.getLogger("jaxddp.job")


@contextlib.contextmanager
def sigterm_on_eviction(
    environ: Environ = os.environ, root: Path = Path("/"), period: float | None = None
) -> Iterator[None]:
    """Send SIGTERM to this process in the block, once, when Google evicts this TPU machine.

    On other machines, nothing is asked. A server that does not answer is asked again in the next period.

    Args:
        environ: the environment, which may override the server's address.
        root: the folder that holds `dev` and `sys`, which show the TPU chips.
        period: the seconds between two questions; None for `PERIOD`.
    """
    if not may_ask(environ, root):
        yield
        return
    address, ended = metadata_server.server(environ).value, threading.Event()
    wait = PERIOD if period is None else period
    thread = threading.Thread(target=_watch, args=(address, ended, wait), daemon=True, name="eviction notice")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(metadata_server.SECONDS + 1)


def _watch(address: str, ended: threading.Event, period: float) -> None:
    while not ended.wait(period):
        with contextlib.suppress(Unreachable):
            answers = metadata_server.ask(address, list(_STOPS))
            reason = next((path for path, value in _STOPS.items() if answers.get(path) == value), None)
            if reason is not None and not ended.is_set():
                _log.warning("Google evicts this machine (%s): the run saves and stops", reason)
                os.kill(os.getpid(), signal.SIGTERM)
                return
