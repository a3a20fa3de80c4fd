"""Asks Google's metadata server, which tells a machine about itself. Each question has a bound, and uses no proxy."""

import contextlib
import functools
import http.client
import threading
import time
from collections.abc import Sequence

from jaxddp.core.errors import Unreachable
from jaxddp.job.env_variables import Environ, EnvValue, lookup

SECONDS = 2.0
"""The seconds for a list of questions, with the look-up of the server's name."""
_ATTEMPTS, _PAUSE = 3, 0.1
_LARGEST_ANSWER, _LONGEST_PROBLEM = 2**16, 200
_HEADERS = {"Metadata-Flavor": "Google"}


def server(environ: Environ) -> EnvValue:
    """Return the server's `host` or `host:port`, and the variable that overrides it, as in Google's libraries."""
    overridden = lookup(environ, "GCE_METADATA_HOST") or lookup(environ, "GCE_METADATA_IP")
    return overridden or EnvValue("metadata.google.internal", "metadata.google.internal")


def ask(address: str, paths: Sequence[str], seconds: float | None = None) -> dict[str, str]:
    """Return the texts of some paths below `instance/`. A path that the server does not have is left out.

    Args:
        address: the server's `host` or `host:port`.
        paths: the paths, such as "attributes/accelerator-type".
        seconds: the maximum time of all questions together; None for `SECONDS`.

    Raises:
        Unreachable: the server does not answer in time, or its answer is not that of a metadata server.
    """
    answers: dict[str, str] = {}
    problems: list[Exception] = []
    deadline = time.monotonic() + (SECONDS if seconds is None else seconds)

    def questions() -> None:
        try:
            for path in paths:
                text = _answer(address, path, deadline)
                if text is not None:
                    answers[path] = text
        except Exception as error:
            problems.append(error)

    # Neither the look-up of a name nor a server that sends byte after byte heeds a socket's time limit.
    thread = threading.Thread(target=questions, daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - time.monotonic()))
    if problems:
        raise Unreachable(f"the metadata server at {address}: {_described(problems[0])}") from problems[0]
    if thread.is_alive():
        raise Unreachable(f"the metadata server at {address}: no answer in time")
    return answers


@functools.cache
def attributes(address: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return some attributes of this machine, which do not change while it runs. See `ask` for errors."""
    answers = ask(address, [f"attributes/{name}" for name in names])
    return {path.removeprefix("attributes/"): text for path, text in answers.items()}


def _answer(address: str, path: str, deadline: float) -> str | None:
    """Return the text of a path; None if the server does not have it. Retry after a failure until the deadline."""
    for attempt in range(_ATTEMPTS):
        try:
            return _single_answer(address, path, deadline)
        except (OSError, http.client.HTTPException):
            if attempt + 1 == _ATTEMPTS or time.monotonic() + _PAUSE >= deadline:
                raise
            time.sleep(_PAUSE)
    return None


def _single_answer(address: str, path: str, deadline: float) -> str | None:
    connection = http.client.HTTPConnection(address, timeout=max(0.01, deadline - time.monotonic()))
    with contextlib.closing(connection):
        connection.request("GET", f"/computeMetadata/v1/instance/{path}", headers=_HEADERS)
        response = connection.getresponse()
        if response.status == http.client.NOT_FOUND:
            return None
        content = response.read(_LARGEST_ANSWER)
    if response.status != http.client.OK:
        raise OSError(f"status {response.status} for {path}")
    if response.headers.get("Metadata-Flavor") != "Google":
        raise OSError(f"the answer for {path} has no header Metadata-Flavor: Google")
    return content.decode().strip()


def _described(error: Exception) -> str:
    return str(error)[:_LONGEST_PROBLEM] or type(error).__name__
