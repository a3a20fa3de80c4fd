"""Asks Google's metadata server, which tells a machine about itself. Each question has a bound, and uses no proxy."""

import contextlib
import functools
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


def ask(address: str, paths: Sequence[str]) -> dict[str, str]:
    """Return the texts of some paths below `instance/`. A path that the server does not have is left out.

    All questions together take at most `SECONDS`.

    Args:
        address: the server's `host` or `host:port`.
        paths: the paths, such as "attributes/accelerator-type".

    Raises:
        Unreachable: the server does not answer in time, or its answer is not that of a metadata server.
    """
    answers: dict[str, str] = {}
    problems: list[Exception] = []
    deadline = time.monotonic() + SECONDS

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
    if not thread.is_alive() and not problems:
        return answers
    # The time limit of the socket may end the thread just before the deadline.
    problem = problems[0] if problems and not isinstance(problems[0], TimeoutError) else None
    described = "no answer in time" if problem is None else str(problem)[:_LONGEST_PROBLEM] or type(problem).__name__
    raise Unreachable(f"the metadata server at {address}: {described}") from problem


def attributes(address: str, names: tuple[str, ...]) -> dict[str, str]:
    """Return some attributes of this machine, which do not change while it runs. See `ask` for errors.

    The same question is asked once in a process. Its error is raised again without another wait.
    """
    answers = _attributes_or_problem(address, names)
    if isinstance(answers, str):
        raise Unreachable(answers)
    return answers


@functools.cache
def _attributes_or_problem(address: str, names: tuple[str, ...]) -> dict[str, str] | str:
    try:
        answers = ask(address, [f"attributes/{name}" for name in names])
    except Unreachable as error:
        return str(error)
    return {path.removeprefix("attributes/"): text for path, text in answers.items()}


def _answer(address: str, path: str, deadline: float) -> str | None:
    """Return the text of a path; None if the server does not have it. Retry after a failure until the deadline."""
    from http.client import HTTPException

    for attempt in range(_ATTEMPTS):
        try:
            return _single_answer(address, path, deadline)
        except (OSError, HTTPException):
            if attempt + 1 == _ATTEMPTS or time.monotonic() + _PAUSE >= deadline:
                raise
            time.sleep(_PAUSE)
    return None


def _single_answer(address: str, path: str, deadline: float) -> str | None:
    # Only TPU machines ask, and the import would delay every start.
    from http.client import NOT_FOUND, OK, HTTPConnection

    connection = HTTPConnection(address, timeout=max(0.01, deadline - time.monotonic()))
    with contextlib.closing(connection):
        connection.request("GET", f"/computeMetadata/v1/instance/{path}", headers=_HEADERS)
        response = connection.getresponse()
        if response.status == NOT_FOUND:
            return None
        content = response.read(_LARGEST_ANSWER)
    if response.status != OK:
        raise OSError(f"status {response.status} for {path}")
    if response.headers.get("Metadata-Flavor") != "Google":
        raise OSError(f"the answer for {path} has no header Metadata-Flavor: Google")
    return content.decode().strip()
