"""Downloads torchvision's files of weights into the cache folder, and verifies them by their SHA-256."""

import hashlib
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from http.client import HTTPException
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.files import cache_folder, one_at_a_time
from jaxddp.core.phases import doing, moved
from jaxddp.data.storage.objects import IncompleteResponse, RetryPolicy, TemporaryFailure

URL_VARIABLE = "JAXDDP_TORCHVISION_URL"
"""Environment variable for the address of a mirror of torchvision's files."""
PUBLISHED_AT = "https://download.pytorch.org/models"
RETRY_POLICY = RetryPolicy(deadline=3600.0, read_timeout=20.0, tries=5)
"""The bounds of a download. A file may have a gigabyte, and a server 1 MB/s."""
_ADVICE = f"check the network, or set {URL_VARIABLE} to the address of a mirror"
_FOLDER = "weights"
_CHUNK = 1 << 20


def weights_folder() -> Path:
    """Return the folder that keeps torchvision's files, and the locks of downloads."""
    return cache_folder() / _FOLDER


def host_lock(name: str) -> AbstractContextManager[None]:
    """Return a context in which one process of this host at a time fetches a file; the others wait."""
    return one_at_a_time(weights_folder() / f"{name}.lock", RETRY_POLICY.deadline)


def download(name: str, digest: str, *, offline: bool = False) -> Path:
    """Return the path of a file of torchvision's in the cache folder, after a download if it is not there.

    A file whose SHA-256 does not begin with `digest` is downloaded again.

    Raises:
        InputError: there is no such file on the server, the file cannot be written, or it is not in the cache folder
            and `offline` is True.
        Unreachable: the server does not answer, or its file is damaged.
    """
    path, url = weights_folder() / name, f"{os.environ.get(URL_VARIABLE) or PUBLISHED_AT}/{name}"
    with host_lock(name), doing(f"fetching {url}"):
        if path.is_file() and sha256_of(path).startswith(digest):
            return path
        if offline:
            raise InputError(
                f"{path}: no such file, or it is damaged, and nothing is fetched offline; fetch {url} on a machine "
                "with a network, and save it there"
            )
        files.create(path.parent)
        RETRY_POLICY.call(
            url, lambda until: files.replace(path, _chunks(url, digest, until)), RETRY_POLICY.deadline, _ADVICE
        )
    return path


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
        InputError: there is no such file, or it may not be read.
        IncompleteResponse: the download ended early, or the file is not the published one.
        TemporaryFailure: the server did not answer.
    """
    actual, count, length = hashlib.sha256(), 0, -1
    try:
        with urllib.request.urlopen(url, timeout=RETRY_POLICY.read_timeout) as response:
            length = int(response.headers.get("Content-Length") or -1)
            while chunk := response.read(_CHUNK):
                actual.update(chunk)
                count += len(chunk)
                moved()
                if time.monotonic() > until:
                    raise IncompleteResponse(f"only {count:,} of {length:,} bytes arrived in time")
                yield chunk
    except urllib.error.HTTPError as error:
        if error.code < 500 and error.code not in (408, 429):
            raise InputError(f"{url}: {error.code} {error.reason}; {_ADVICE}") from None
        raise TemporaryFailure(f"{error.code} {error.reason}") from None
    except (OSError, HTTPException) as error:
        reason = str(getattr(error, "reason", None) or error)
        if count:
            raise IncompleteResponse(f"cut short: {count:,} of {length:,} bytes arrived ({reason})") from None
        raise TemporaryFailure(reason) from None
    if count < length:
        raise IncompleteResponse(f"cut short: {count:,} of {length:,} bytes arrived")
    if not actual.hexdigest().startswith(digest):
        raise IncompleteResponse(
            f"is not the published file: its SHA-256 begins with {actual.hexdigest()[: len(digest)]}, not {digest}"
        )
