"""Objects of a remote store: `s3://bucket/prefix`, `gs://bucket/prefix`, `https://host/prefix`.

obstore makes each request once. `RetryPolicy` repeats requests, so one deadline applies to all tries.

obstore reads keys and endpoints from the environment; docs/data.md names the variables.
"""

import io
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO, TypeVar

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Unreachable, choices, counted, not_installed, show
from jaxddp.data.storage.store import Fault, faults_by_folder, is_passed_over

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0
# Requests to the key services of Amazon's and Google's machines; obstore makes them only if no keys are set.
_KEY_SERVICE = re.compile("/latest/api/token|/latest/meta-data/|/computeMetadata/")
_NO_KEYS = "no credentials are set, and the machine has none: "
# Permanent failures, by a word in obstore's description of the source.
_PERMANENT = {
    "BadScheme": "plain http is not allowed unless AWS_ALLOW_HTTP=true is set",
    "BareRedirect": "the bucket is in another region",
    "InvalidCertificate": "its certificate is not trusted; let SSL_CERT_FILE name that of its authority",
}
# The deadline of a text file, which may have tens of MB, as a multiple of an image's deadline.
_TEXT_FACTOR = 10
# The least number of bytes that a file requests at a time. The headers of small images come together.
_READ_AHEAD = 1 << 16
_ADVICE = {
    "s3": "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL, or set "
    "AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "check GOOGLE_APPLICATION_CREDENTIALS, which names a key file",
    **dict.fromkeys(("http", "https"), "check that it needs no password and, for shards, answers ranges of bytes"),
}


class TemporaryFailure(Exception):
    """A failure after which a request is repeated, such as a lost connection."""


class IncompleteResponse(TemporaryFailure):
    """The server answered, but the body is cut short, is not complete at the deadline, or is not the expected one."""


@dataclass(frozen=True)
class RetryPolicy:
    """The time and the number of tries after which a request for an object fails."""

    deadline: float = 60.0
    """Seconds for all tries and the pauses between them."""
    read_timeout: float = 20.0
    """Seconds without a byte after which a try ends; the last try may end this long after the deadline."""
    tries: int = 10

    def call(self, name: str, attempt: Callable[[float], T], advice: str, times: int = 1) -> T:
        """Return the result of `attempt`, which is called again after a temporary failure.

        The pauses between tries double. Each pause is shortened by up to a half at random, so many hosts do not retry
        at the same time.

        Args:
            name: the object to fetch, for messages.
            attempt: a function that takes the time, as of time.monotonic(), by which it should return or raise.
            advice: the advice in the message of a permanent failure, and of an incomplete answer.
            times: a factor of the deadline, because text files need more time.

        Raises:
            FileNotFoundError: the attempt raised it.
            InputError: the failure is permanent, or the attempt raised it.
            Unreachable: no tries or no time is left.
        """
        start, tries = time.monotonic(), 0
        while True:
            tries += 1
            try:
                return attempt(start + times * self.deadline)
            except (FileNotFoundError, InputError) as error:
                if "NoSuchBucket" not in str(error):
                    raise
                kind, reason = InputError, "no such bucket"
            except Exception as error:
                kind, reason = classify_error(error)
            if kind is InputError:
                raise InputError(f"{name}: {reason}; {advice}")
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (tries - 1)) * random.uniform(0.5, 1)
            elapsed = time.monotonic() - start
            if tries >= self.tries or elapsed + pause > times * self.deadline:
                spent = f"{elapsed:.0f} s and {counted(tries, 'try')}"
                if kind is IncompleteResponse:
                    raise Unreachable(f"{name}: {reason} (after {spent}); start again, or {advice}")
                if not reason.startswith(_NO_KEYS):
                    advice = "check that the store and the network are up, and start again"
                raise Unreachable(f"{name}: no answer in {spent}, the last: {reason}; {advice}")
            time.sleep(pause)


def classify_error(error: Exception) -> tuple[type[Exception], str]:
    """Return the kind of a failure, and its cause in a few words, from the text of obstore's error.

    The kind is `InputError` for a permanent failure, `IncompleteResponse`, or `TemporaryFailure`.
    """
    if isinstance(error, TemporaryFailure):
        return type(error), str(error)
    text, _, detail = str(error).partition("Debug source:")
    keys = _NO_KEYS if _KEY_SERVICE.search(text) else ""
    if status := re.search(r"status code: (\d+)( [\w ]+)?", text):
        code = re.search(r"<Code>(\w+)</Code>", text)
        is_temporary = status[1].startswith("5") or status[1] in ("408", "429")
        reason = keys + status[1] + (status[2] or "") + (f" ({code[1]})" if code else "")
        return TemporaryFailure if is_temporary else InputError, reason
    if reason := next((reason for sign, reason in _PERMANENT.items() if sign in detail), None):
        return InputError, reason
    if "HTTP error" not in text or "Header missing" in text:
        return InputError, show(re.sub(r"^Generic \w+ error: ", "", text.strip()))
    if "kind: Timeout" in detail:
        return TemporaryFailure, f"{keys}no data arrived"
    if "IncompleteBody" in detail:
        return IncompleteResponse, "the answer was cut short"
    message = re.search(r'(?:message|error): "([^"]+)"', detail)
    return TemporaryFailure, keys + (message[1] if message else text.strip().rpartition(" - ")[2])


_RETRY_POLICY = RetryPolicy()


@dataclass(frozen=True)
class Objects:
    """The objects below a URL: a store of images, and a `Folder`. Create it with `open_url`.

    For `files` and `state`, each folder, or over plain HTTP each file, is requested once. Threads may share the object,
    and it can be pickled.
    """

    url: str
    retry_policy: RetryPolicy
    _listed: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict, compare=False, repr=False)

    root = None

    @classmethod
    def open_url(cls, url: str, retry_policy: RetryPolicy = _RETRY_POLICY) -> "Objects":
        """Return the objects of a URL without a request. Raises: InputError if the URL is wrong or obstore missing."""
        scheme, mark, rest = url.partition("://")
        store = cls(scheme + mark + (rest := rest.rstrip("/")), retry_policy)
        # A secret key in a URL would appear in every message.
        if not rest or any(sign in rest for sign in "?#@"):
            raise InputError(f"{scheme}://: not the address of a store; write {scheme}://NAME/PREFIX only")
        if store._scheme not in _ADVICE:
            raise InputError(f"{url}: no such kind of store, {choices(store._scheme, _ADVICE)}; or give a directory")
        _check_key(url, rest)
        try:
            _ = store._client
        except ImportError:
            raise InputError(f"{url}: {not_installed('obstore', 'cloud')}") from None
        except Exception as error:
            raise InputError(f"{url}: {classify_error(error)[1]}; {_ADVICE[store._scheme]}") from None
        return store

    @property
    def can_list(self) -> bool:
        """Whether the store can list its objects. Over plain HTTP, only reading shows whether an object exists."""
        return self._scheme in ("s3", "gs")

    def name(self, path: bytes | str = "", offset: int = 0) -> str:
        return f"{self.url}/{os.fsdecode(path)}" if path else self.url

    def read(self, path: bytes, offset: int = 0) -> bytes:
        advice = "upload it or leave it out"
        with files.reading(self.name(path), advice, missing=f"missing image; {advice}"):
            return self._call(path, self._download)

    def read_text(self, path: str) -> bytes:
        """Return the bytes of a text file, which may be large, with ten times an image's deadline.

        Raises: FileNotFoundError if there is no such object; otherwise the errors of `read`.
        """
        return self._call(path, self._download, times=_TEXT_FACTOR)

    def read_range(self, path: str, start: int, length: int) -> bytes:
        """Return `length` bytes of an object, or fewer at its end. Raises: see `read_text`."""
        return self._call(path, lambda key, _: bytes(self._client.get_range(key, start=start, length=length)))

    def open(self, path: str) -> BinaryIO:
        return io.BufferedReader(_File(self, path, self.state(path)[0]), _READ_AHEAD)

    def files(self, folder: str = "") -> list[str]:
        listed = sorted(self._listing(folder)) if self.can_list else []
        return [path for path in listed if not is_passed_over(path.rpartition("/")[2])]

    def state(self, path: str) -> tuple[int, str]:
        folder = path.rpartition("/")[0]
        listed = self._listing(folder) if self.can_list else self._listed.setdefault(folder, {})
        if path not in listed:
            listed[path] = self._call(path, lambda key, _: _state(self._client.head(key)))
        return listed[path]

    def states(self, folder: str) -> dict[str, tuple[int, str]]:
        """Return the `state` of each object directly in a folder, by path. Raises: see `read`."""
        name, advice = f"{self.name(folder).rstrip('/')}/", _ADVICE[self._scheme]
        listed = self.retry_policy.call(name, lambda _: self._client.list_with_delimiter(folder or None), advice)
        return {one["path"]: _state(one) for one in listed["objects"]}

    def _listing(self, folder: str) -> dict[str, tuple[int, str]]:
        """Return the `states` of a folder, which are kept."""
        if folder not in self._listed:
            self._listed[folder] = self.states(folder)
        return self._listed[folder]

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list[Fault]:
        """List folders to find the faults of `Store.faults`. Return no fault over plain HTTP, which cannot list.

        Raises: the errors of `read`, for a folder.
        """

        def look(folder: bytes, rows: dict[bytes, int]) -> dict[int, str | None]:
            num_bytes = {os.fsencode(path): size for path, (size, _) in self.states(os.fsdecode(folder)).items()}
            if not num_bytes:
                raise FileNotFoundError
            found = {row: num_bytes.get(bytes(paths[row])) for row in rows.values()}
            return {row: None if size else "the image is empty" for row, size in found.items() if size is not None}

        return faults_by_folder(paths, look) if self.can_list else []

    def _download(self, key: str, until: float) -> bytes:
        answer, chunks = self._client.get(key), list[bytes]()
        for chunk in answer.stream(min_chunk_size=1):
            chunks.append(chunk)
            # A server that sends a few bytes at a time never causes a read timeout, so check the deadline.
            if time.monotonic() > until:
                raise IncompleteResponse(f"only {sum(map(len, chunks))} of {answer.meta['size']} bytes arrived in time")
        data = b"".join(chunks)
        if len(data) != answer.meta["size"]:
            raise IncompleteResponse(f"{len(data)} bytes arrived in place of {answer.meta['size']}")
        return data

    def _call(self, path: bytes | str, attempt: Callable[[str, float], T], times: int = 1) -> T:
        """Return the result of `attempt(key, until)` for an object; see `RetryPolicy.call`."""
        name, key = self.name(path), os.fsdecode(path)
        _check_key(name, key)
        return self.retry_policy.call(name, lambda until: attempt(key, until), _ADVICE[self._scheme], times)

    @cached_property
    def _client(self) -> Any:
        from obstore import store

        is_plain_allowed = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
        client_options = {
            "allow_http": is_plain_allowed or self._scheme == "http",
            "connect_timeout": f"{round(1000 * min(5, self.retry_policy.read_timeout))}ms",
            "read_timeout": f"{round(1000 * self.retry_policy.read_timeout)}ms",
            "timeout": f"{round(1000 * _TEXT_FACTOR * self.retry_policy.deadline)}ms",
        }
        kind = {"s3": store.S3Store, "gs": store.GCSStore}.get(self._scheme, store.HTTPStore)
        # Retries of obstore would multiply with those of `RetryPolicy`, and ignore its deadline.
        options: Any = {"client_options": client_options, "retry_config": {"max_retries": 0}}
        return kind.from_url(self.url, **options)

    @property
    def _scheme(self) -> str:
        return self.url.partition("://")[0]

    def __getstate__(self) -> dict[str, Any]:
        # The client holds connections, and keys, which must not be written to a file.
        return {"url": self.url, "retry_policy": self.retry_policy, "_listed": {}}


class _File(io.RawIOBase):
    """An object, as a file that can be read at any position."""

    def __init__(self, objects: Objects, path: str, size: int):
        self._objects, self._path, self._size, self._position = objects, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._position)
        data = self._objects.read_range(self._path, self._position, length) if length > 0 else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _state(meta: Any) -> tuple[int, str]:
    return meta["size"], f"{meta['e_tag']} {meta['last_modified']}"


def _check_key(name: str, path: str) -> None:
    """Raise an InputError if a path is not valid in a store."""
    if any(part in ("", ".", "..") for part in path.split("/")):
        advice = "write names with single slashes between them, no . or .."
        raise InputError(f"{name}: {show(path)} is not a path in a store; {advice}")
