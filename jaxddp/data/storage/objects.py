"""Files that are objects of a store: `s3://bucket/prefix`, `gs://bucket/prefix`, `https://host/prefix`.

obstore makes each request; what becomes of one that fails is decided here, so that one deadline holds for an object.

Keys and endpoints come from the environment, as obstore reads them:

    s3://    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION; AWS_ENDPOINT_URL for a store that
             is not Amazon's, with AWS_ALLOW_HTTP=true where that is plain http; AWS_SKIP_SIGNATURE=true for a public
             bucket. The files of `aws configure` are not read: `aws configure export-credentials --format env`.
    gs://    GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT, the path of a key file
    https:// none; plain http:// is taken as well

On a cloud's own machines both also ask the machine for its keys.
"""

import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from jaxddp.data.storage.store import Fault
from jaxddp.errors import InputError, Unreachable
from jaxddp.wording import choices, show

_T = TypeVar("_T")

# Listing waits for the server; a training set has a thousand folders of two pages each.
_THREADS = 32
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0
# Of the deadline of an image, for a file of some tens of MB.
_LARGE = 10

_ADVICE = {
    "s3": "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL, or set "
    "AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS, which names a key file",
    "http": "check that the URL can be read without a password",
    "https": "check that the URL can be read without a password",
}
# Where Amazon's and Google's machines are asked for keys: that a request went there means that none were set.
_KEY_SERVICE = re.compile(r"169\.254\.|metadata\.google")


@dataclass(frozen=True)
class Patience:
    """How long one object is waited for.

    Attributes:
        deadline: seconds for all tries and the pauses between them.
        silence: seconds without a byte after which a try is given up. The last one may end this long after the
            deadline.
        tries: how many at most.
    """

    deadline: float = 60.0
    silence: float = 20.0
    tries: int = 10


class _Cut(Exception):
    """A body that is not as long as its header said, or that is still coming at the deadline."""


@dataclass(frozen=True)
class Objects:
    """The objects below a URL, each fetched whole. `open` makes one; threads may share it, and it can be pickled."""

    url: str
    patience: Patience = Patience()

    @classmethod
    def open(cls, url: str, patience: Patience | None = None) -> "Objects":
        """No request is made yet.

        Raises:
            InputError: not such a URL, or obstore is not installed.
        """
        store = cls(url.rstrip("/"), patience or Patience())
        if store._scheme not in _ADVICE:
            raise InputError(f"{url}: no such kind of store, {choices(store._scheme, _ADVICE)}; or give a directory")
        parts = urlsplit(store.url)
        if not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc:
            raise InputError(f"{url}: not the address of a store; write {store._scheme}://NAME/PREFIX and no more")
        if parts.path:
            _key(url, parts.path.removeprefix("/"))
        try:
            store._client  # noqa: B018
        except ImportError:
            raise InputError(f"{url}: obstore is not installed; pip install 'jaxddp[cloud]'") from None
        except Exception as error:
            raise InputError(f"{url}: {_fault(error)[1]}; {_ADVICE[store._scheme]}") from None
        return store

    @property
    def can_list(self) -> bool:
        """Whether the store tells what it holds. Over plain HTTP only reading shows it."""
        return self._scheme in ("s3", "gs")

    def name(self, path: bytes, offset: int = 0) -> str:
        return f"{self.url}/{os.fsdecode(path)}"

    def read(self, path: bytes, offset: int = 0) -> bytes:
        """The encoded image.

        Raises:
            InputError: there is no such object, or the store does not let us have it.
            Unreachable: no whole answer within the deadline.
        """
        try:
            return self._insist(self.name(path), self._download(path), self.patience.deadline)
        except FileNotFoundError:
            raise InputError(f"{self.name(path)}: missing image; upload it or remove its row") from None

    def read_text(self, path: bytes) -> bytes:
        """A file that may be a thousand times as large as an image, and has ten times an image's deadline.

        Raises:
            FileNotFoundError: there is no such object.
            InputError, Unreachable: as `read`.
        """
        return self._insist(self.name(path), self._download(path), _LARGE * self.patience.deadline)

    def sizes(self, folder: bytes) -> dict[bytes, int]:
        """What lies in a folder itself, and not in folders within it: path -> size in bytes. Not over plain HTTP.

        Raises:
            InputError, Unreachable: as `read`.
        """
        name = self.name(folder + b"/") if folder else f"{self.url}/"

        def listed(_: float) -> dict[bytes, int]:
            import obstore

            found = obstore.list_with_delimiter(self._client, os.fsdecode(folder) or None)["objects"]
            return {os.fsencode(one["path"]): one["size"] for one in found}

        return self._insist(name, listed, self.patience.deadline)

    def faults(self, paths: np.ndarray) -> list[Fault]:
        """As every store's, by listing the folders; none over plain HTTP, where a missing image shows when it is read.

        Raises:
            InputError, Unreachable: a folder cannot be listed.
        """
        if not self.can_list:
            return []
        folders: dict[bytes, list[tuple[int, bytes]]] = defaultdict(list)
        for row, path in enumerate(paths.tolist()):
            folders[path.rpartition(b"/")[0]].append((row, path))

        def unusable(folder: bytes) -> list[Fault]:
            sizes = self.sizes(folder)
            absent = "the image is missing" if sizes else "the image's folder is missing"
            return [
                (row, "the image is empty" if path in sizes else absent)
                for row, path in folders[folder]
                if not sizes.get(path)
            ]

        with ThreadPoolExecutor(_THREADS) as pool:
            return sorted(chain.from_iterable(pool.map(unusable, folders)))

    def _download(self, path: bytes) -> Callable[[float], bytes]:
        key = _key(self.name(path), os.fsdecode(path))

        def attempt(until: float) -> bytes:
            import obstore

            answer = obstore.get(self._client, key)
            chunks = []
            for chunk in answer.stream(min_chunk_size=1):
                chunks.append(chunk)
                # A server that drips never falls silent.
                if time.monotonic() > until:
                    raise _Cut(f"{sum(map(len, chunks))} of {answer.meta['size']} bytes had come")
            data = b"".join(chunks)
            if len(data) != answer.meta["size"]:
                raise _Cut(f"{len(data)} of {answer.meta['size']} bytes came")
            return data

        return attempt

    def _insist(self, name: str, attempt: Callable[[float], _T], deadline: float) -> _T:
        """What an attempt, which is told the time of the deadline, returns; tried again where that may help."""
        began, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                return attempt(began + deadline)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise InputError(f"{name}: no such bucket; check the URL") from None
                raise
            except InputError:
                raise
            except Exception as error:
                passing, reason = _fault(error)
            if not passing:
                raise InputError(f"{name}: {reason}; {_ADVICE[self._scheme]}")
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (tries - 1)) * random.uniform(0.5, 1)
            elapsed = time.monotonic() - began
            if tries >= self.patience.tries or elapsed + pause > deadline:
                raise Unreachable(
                    f"{name}: no answer in {elapsed:.0f} s and {tries} {'try' if tries == 1 else 'tries'}, the last: "
                    f"{reason}; see whether the store and the network are up, and start again"
                )
            time.sleep(pause)

    @cached_property
    def _client(self) -> Any:
        from obstore import store

        allow_http = self._scheme == "http" or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
        options: Any = {
            "allow_http": allow_http,
            "connect_timeout": f"{round(1000 * min(5, self.patience.silence))}ms",
            "read_timeout": f"{round(1000 * self.patience.silence)}ms",
            "timeout": f"{round(1000 * _LARGE * self.patience.deadline)}ms",
            "pool_max_idle_per_host": str(_THREADS),
        }
        # Its own retries would multiply with ours, and know nothing of the deadline.
        retries: Any = {"max_retries": 0}
        kind = {"s3": store.S3Store, "gs": store.GCSStore}.get(self._scheme, store.HTTPStore)
        return kind.from_url(self.url, client_options=options, retry_config=retries)

    @property
    def _scheme(self) -> str:
        return self.url.partition("://")[0]

    def __getstate__(self) -> dict[str, Any]:
        # The client holds keys, which have no business in a file, and connections.
        return {"url": self.url, "patience": self.patience}


def _key(name: str, path: str) -> str:
    """The path, where it is one that a store takes and that leads nowhere else."""
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise InputError(
            f"{name}: {show(path)} is no path in a store; write names with single slashes between, and no . or .."
        )
    return path


def _fault(error: Exception) -> tuple[bool, str]:
    """Whether another try may mend it, and what it is in a few words, from the text that obstore gives an error."""
    if isinstance(error, _Cut):
        return True, str(error)
    text, _, detail = str(error).partition("Debug source:")
    keys = "no keys were set, and the machine gave none: " if _KEY_SERVICE.search(text) else ""
    if status := re.search(r"status code: (\d+)( [\w ]+)?", text):
        code = re.search(r"<Code>(\w+)</Code>", text)
        passing = status[1].startswith("5") or status[1] in ("408", "429")
        return passing, keys + status[1] + (status[2] or "") + (f" ({code[1]})" if code else "")
    if "BadScheme" in detail:
        return False, "plain http is not allowed unless AWS_ALLOW_HTTP=true is set"
    if "HTTP error" not in text:
        return False, show(text.strip())
    if "kind: Timeout" in detail:
        return True, f"{keys}no byte came"
    if "IncompleteBody" in detail:
        return True, "the body was cut short"
    said = re.search(r'(?:message|error): "([^"]+)"', detail)
    return True, keys + (said[1] if said else text.strip().rpartition(" - ")[2])
