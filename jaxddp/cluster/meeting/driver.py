"""Starts the part of this machine's launcher in a job, with connections to the launchers of other machines."""

import hashlib
import os
import secrets
import socket
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

from jaxddp.cluster.meeting.network import LauncherClient, LauncherServer
from jaxddp.cluster.meeting.states import Agent, Coordinator
from jaxddp.cluster.options import Launch
from jaxddp.core.errors import about
from jaxddp.core.log import say
from jaxddp.job.environment import KEY, Job
from jaxddp.wire.addresses import LOOPBACK, address_of, is_loopback, listen, split_address


def driver(options: Launch, processes: int, sizes: Sequence[int], events: SimpleQueue[Any]) -> Coordinator | Agent:
    """Return the part of this machine's launcher in the job, with connections if the launchers must meet.

    Args:
        processes: the number of processes on each machine.
        sizes: the numbers of machines that the job may have.

    Raises:
        InputError: the coordinator's address is invalid, or its port is taken.
    """
    # All machines of the job must compute the same name.
    name = options.run_id or hashlib.sha256(str(options.coordinator).encode()).hexdigest()[:16]
    if options.machines.most == 1:
        name = options.run_id or secrets.token_hex(8)
    if not options.launchers_meet:
        return Coordinator(options, events, None, processes, sizes, name, lambda: _listen_alone(options))
    assert options.coordinator is not None and options.nr is not None
    # The run id of the launchers' own job differs from the run id of the workers.
    ids, key = f"{name}/launchers", os.environ.get(KEY, "")
    job = Job(options.coordinator, options.machines.most, options.nr, run_id=ids, sources=(KEY,), key=key)
    facts = {"--nodes": options.nodes, "the number of processes (--processes or --gpus)": str(processes)}
    if options.nr:
        return Agent(options, events, LauncherClient(job, facts, events.put))
    listener = _listen_at(options)
    host = listener.getsockname()[0]
    # A launcher that the user starts again numbers its generations from 0 again. A random suffix makes the run ids
    # unique.
    name, network = f"{name}.{secrets.token_hex(4)}", LauncherServer(listener, job, facts, events.put)
    return Coordinator(options, events, network, processes, sizes, name, lambda: _with_address(listen(host, 0)))


def _listen_alone(options: Launch) -> tuple[socket.socket | None, str]:
    if options.nr:
        return None, options.coordinator or ""
    listener, address = _with_address(_listen_at(options))
    return listener, options.coordinator or address


def _with_address(listener: socket.socket) -> tuple[socket.socket, str]:
    return listener, address_of(listener)


def _listen_at(options: Launch) -> socket.socket:
    """Listen at the coordinator's address, or at a free port of the loopback. Raises InputError if this fails."""
    host, port = split_address(options.coordinator) if options.coordinator else (LOOPBACK, 0)
    with about(f"--coordinator {options.coordinator or LOOPBACK}"):
        listener = listen(host, port)
    if options.machines.most > 1 and is_loopback(listener.getsockname()[0]) and not is_loopback(host):
        # Debian's /etc/hosts maps a machine's own name to a loopback address.
        address = listener.getsockname()[0]
        say(f"jaxddp launch: {host} resolves to {address} here, which no other machine can reach; give its IP address")
    return listener
