"""Fetches a published file from a web server, and verifies it by its SHA-256."""

import hashlib
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.phases import BYTES, doing, moved, reached
from jaxddp.data.storage.objects import IncompleteResponse, RetryPolicy, TemporaryFailure

RETRY_POLICY = RetryPolicy(deadline=3600.0, read_timeout=20.0, tries=5)
"""The bounds of a download. A file may have a gigabyte, and a server 1 MB/s."""
_CHUNK = 1 << 20


def fetch_file(url: str, path: Path, digest: str, advice: str) -> Path:
    """Write the file of a URL to a path, and return the path. A file there that is intact stays.

    Args:
        digest: the first hex digits of the file's SHA-256, or all.
        advice: the end of the message if the server has no such file, or another one.

    Raises:
        InputError: there is no such file on the server, or the path cannot be written.
        Unreachable: the server does not answer, or its file is damaged.
    """
    with doing(f"fetching {url}"):
        if not is_intact(path, digest):
            files.create(path.parent)
            RETRY_POLICY.call(url, lambda until: files.replace(path, _chunks(url, digest, until)), advice)
    return path


def is_intact(path: Path, digest: str) -> bool:
    """Return whether there is a file whose SHA-256 begins with `digest`."""
    return path.is_file() and sha256_of(path).startswith(digest)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hex. Raises: InputError if the file cannot be read."""
    digest = hashlib.sha256()
    with files.reading(path, "make it readable, or remove it"), files.open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            moved()
    return digest.hexdigest()


def _chunks(url: str, digest: str, until: float) -> Iterator[bytes]:
    """Yield the content of a URL.

    Args:
        until: the time, as of time.monotonic(), at which the download ends.

    Raises:
        RuntimeError: the status of the answer, from which `RetryPolicy` decides.
        IncompleteResponse: the download ended early, or the file is not the published one.
        TemporaryFailure: the server did not answer.
    """
    actual, count, length = hashlib.sha256(), 0, -1
    try:
        with urllib.request.urlopen(url, timeout=RETRY_POLICY.read_timeout) as response:
            length = int(response.headers.get("Content-Length") or -1)
            with doing(f"fetching {url}", max(length, 0), BYTES):
                while chunk := response.read(_CHUNK):
                    actual.update(chunk)
                    count += len(chunk)
                    reached(count)
                    if time.monotonic() > until:
                        raise IncompleteResponse(f"only {count:,} of {length:,} bytes arrived in time")
                    yield chunk
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"status code: {error.code} {error.reason}") from None
    except (OSError, HTTPException) as error:
        reason = str(getattr(error, "reason", None) or error)
        if count:
            raise IncompleteResponse(f"cut short: {count:,} of {length:,} bytes arrived ({reason})") from None
        raise TemporaryFailure(reason) from None
    if count < length:
        raise IncompleteResponse(f"cut short: {count:,} of {length:,} bytes arrived")
    if (begins := actual.hexdigest()[: len(digest)]) != digest:
        raise IncompleteResponse(f"is not the published file: its SHA-256 begins with {begins}, not {digest}")
