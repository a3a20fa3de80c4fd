"""The coordinator's address, HOST:PORT, and the socket that listens there.

A port is bound before its number is sent to other processes. Otherwise another program could take the port in the
meantime. JAX's coordinator is an exception, because it takes an address instead of a socket (`free_address`).
"""

import errno
import os
import re
import socket

from jaxddp.core.errors import InputError
from jaxddp.core.ranges import Range, whole
from jaxddp.wire.messages import BACKLOG

LOOPBACK = "127.0.0.1"
_PORTS = Range(1, 65535)
_RESOLVE_SECONDS = 0.2


class NotResolved(InputError):
    """The name of a host has no address, or no address of this machine. A name server may give it one later."""


def split_address(address: str) -> tuple[str, int]:
    """Return ("host0", 1234) for `host0:1234`. Raises InputError if invalid. An IPv6 address must be in brackets."""
    host, colon, port = address.rpartition(":")
    number = whole(port, _PORTS)
    if not (colon and host.strip() and host.isprintable()) or number is None:
        raise InputError("expected HOST:PORT with a port from 1 to 65535, as in host0:1234")
    return host.removeprefix("[").removesuffix("]"), number


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at a host's port (0 for a free port), only on the interface of the host's address.

    Raises:
        NotResolved: there is no host of this name, or it is another machine.
        InputError: the port is taken or not permitted, or the host is invalid or is the address of another machine.
    """
    may_change = _is_name(host)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (socket.gaierror, UnicodeError) as error:
        kind = NotResolved if may_change and isinstance(error, socket.gaierror) else InputError
        raise kind(f"there is no host {host!r}; give its name or address") from error
    except OSError as error:
        kind = NotResolved if may_change and error.errno == errno.EADDRNOTAVAIL else InputError
        raise kind(_advice(error, port)) from error


def address_of(socket_: socket.socket) -> str:
    """Return the address of a socket as HOST:PORT. An IPv6 address is in brackets."""
    host, port = socket_.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_address(listener: socket.socket) -> str:
    """Return HOST:PORT for a free port on the interface of a listening socket."""
    with socket.socket(listener.family, socket.SOCK_STREAM) as probe:
        probe.bind((listener.getsockname()[0], 0))
        return address_of(probe)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback address."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _is_name(host: str) -> bool:
    """Return whether this is a host name, whose address may change. The last part of an IP address is a number."""
    last = host.removesuffix(".").rpartition(".")[2]
    return re.fullmatch(r"[\w.-]+", host) is not None and not last.isdecimal()


def _advice(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken; choose another, the same on every machine"
    if error.errno == errno.EADDRNOTAVAIL:
        return "not an address of this machine; start process 0 (with a launcher: --nr 0) on the coordinator's machine"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"cannot listen there ({reason}); choose a port above 1023, the same on every machine"
