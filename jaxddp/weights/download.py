"""Fetches published weights, torchvision's files and those of the Hugging Face Hub, and uploads to the Hub.

torchvision's files are kept in the cache folder, and verified by their SHA-256. Files of the Hub are in the cache of
`huggingface_hub`, which reads HF_ENDPOINT, HF_TOKEN, HF_HUB_CACHE and HF_HUB_OFFLINE.
"""

import os
import re
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxddp.core.errors import InputError, Key, Unreachable, Words, first_line, requires, show
from jaxddp.core.files import cache_folder, one_at_a_time
from jaxddp.core.phases import doing, moved
from jaxddp.data.storage.objects import IncompleteResponse, TemporaryFailure
from jaxddp.data.storage.web import RETRY_POLICY, fetch_file, is_intact, sha256_of

SCHEME = "hf://"
ENDPOINT_VARIABLE = "HF_ENDPOINT"
URL_VARIABLE = "JAXDDP_TORCHVISION_URL"
"""Environment variable for the address of a mirror of torchvision's files."""
PUBLISHED_AT = "https://download.pytorch.org/models"
LOG_IN = "check the name, or log in with `hf auth login` or set HF_TOKEN if it is private or gated"
# huggingface_hub itself repeats a request five times, in 23 seconds.
_RETRY_POLICY = replace(RETRY_POLICY, tries=1)
_ADVICE = f"check the network, or set {URL_VARIABLE} to the address of a mirror"
_FOLDER = "weights"
_REPO = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<file>[^@]+))?")
_FORBIDDEN = (401, 403)
_WRITES = "log in with `hf auth login`, or set HF_TOKEN to a token that may write to this repository"


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
    if "@" in url:  # Every message would show it, and the server would not get it.
        raise InputError(f"{URL_VARIABLE}: has a user or a password; give the address of a mirror that needs none")
    with host_lock(name):
        if offline and not is_intact(path, digest):
            problem = f"{path}: no such file, or it is damaged, and nothing is fetched offline"
            raise InputError(problem, advice=f"fetch {url} on a machine with a network, and save it there")
        return fetch_file(url, path, digest, _ADVICE)


_SHA256_DIGITS = 64


@dataclass(frozen=True)
class HubFile:
    """A file in a repository of the Hub.

    Attributes:
        repo: owner/name.
        file: the path in the repository; None for the repository itself.
        revision: a branch, a tag or a commit.
    """

    repo: str
    file: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str, where: Words | None = None) -> "HubFile":
        """Parse "hf://owner/name[@revision][/file]".

        Args:
            where: the place of the text in messages; the default is `model.weights`.

        Raises: InputError for another text.
        """
        parts = _REPO.fullmatch(text.removeprefix(SCHEME))
        if parts is None:
            advice = f"write {SCHEME}owner/name, {SCHEME}owner/name/file or {SCHEME}owner/name@revision/file"
            problem = ": not the address of a file of the Hub"
            raise InputError(where or Key("model.weights", text), problem, advice=advice)
        return cls(parts["repo"], parts["file"], parts["revision"])

    def __str__(self) -> str:
        """Return the address."""
        revision, file = self.revision and f"@{self.revision}", self.file and f"/{self.file}"
        return f"{SCHEME}{self.repo}{revision or ''}{file or ''}"


def hub_library(name: str) -> Any:
    """Import and return huggingface_hub. Raises: InputError, about `name`, if it is not installed."""
    with requires(name, "huggingface_hub", "hub"):
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    return huggingface_hub


def endpoint() -> str | None:
    """Return the address of the Hub in HF_ENDPOINT; None for the default. The variable may be set after the import."""
    return os.environ.get(ENDPOINT_VARIABLE) or None


def fetch(place: HubFile, *, offline: bool = False) -> Path:
    """Return the path of a file in the cache of huggingface_hub, after a download if it is not there.

    The SHA-256 of a large file is compared with the hub's. A damaged file is downloaded again.

    Raises:
        InputError: there is no such repository, revision or file, or no permission; or the file is not in the cache and
            `offline` is True.
        FileNotFoundError: the repository has no such file.
        Unreachable: the hub does not answer.
    """
    library = hub_library(str(place))

    def attempt(until: float) -> Path:
        path = _download(library, place, until, offline=offline)
        if _is_damaged(path):
            if offline:
                raise InputError(f"{path}: is damaged, its SHA-256 is not the one of the hub; remove it, or go online")
            path = _download(library, place, until, offline=offline, force_download=True)
            if _is_damaged(path):
                raise IncompleteResponse("damaged: its SHA-256 is not the one that the hub states")
        return path

    with host_lock(place.repo.replace("/", "--")), doing(f"fetching {place}"):
        return _RETRY_POLICY.call(str(place), attempt, LOG_IN)


def _download(library: Any, place: HubFile, until: float, *, offline: bool, **options: Any) -> Path:
    errors = library.errors
    options |= {"revision": place.revision, "local_files_only": offline, "endpoint": endpoint()}
    try:
        return Path(library.hf_hub_download(place.repo, place.file, tqdm_class=_progress_until(until), **options))
    except errors.RemoteEntryNotFoundError:
        raise FileNotFoundError(str(place)) from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{place}: the repository has no revision {place.revision!r}; check its name") from None
    except errors.RepositoryNotFoundError:
        raise InputError(f"{place}: no such repository, or no permission to read it; {LOG_IN}") from None
    except errors.HFValidationError as error:
        raise InputError(f"{place}: {first_line(error)}; check the name") from None
    except errors.LocalEntryNotFoundError as error:
        if offline or library.constants.is_offline_mode():
            cache, url = library.constants.HF_HUB_CACHE, library.hf_hub_url(place.repo, place.file, endpoint=endpoint())
            problem = f"{place}: not in {cache}, and nothing is fetched offline"
            copy = f"run `hf download {place.repo} {place.file}` on a machine with a network and copy this folder"
            raise InputError(problem, advice=f"{copy}, or fetch {url} and give the path of the file") from None
        raise TemporaryFailure(_reason(error.__cause__ or error)) from None
    except errors.HfHubHTTPError as error:
        raise RuntimeError(f"status code: {error.response.status_code} {error.response.reason_phrase}") from None
    except (InputError, TemporaryFailure):
        raise
    except OSError as error:
        if error.errno is None:  # The file has another size than the hub states.
            raise IncompleteResponse(f"cut short: {_reason(error)}") from None
        raise InputError(f"{place}: cannot be kept in {library.constants.HF_HUB_CACHE} ({_reason(error)})") from None
    # The library's HTTP client has errors of its own for a lost connection.
    except Exception as error:
        if "message body" in str(error):
            raise IncompleteResponse(f"cut short: {_reason(error)}") from None
        raise TemporaryFailure(_reason(error)) from None


def _reason(error: BaseException) -> str:
    return show(first_line(error)).strip("'\"")


def _progress_until(until: float) -> type:
    """Return a progress bar that draws nothing, reports progress to the watchdog, and ends a download at a time."""
    from tqdm import tqdm

    class _Bar(tqdm):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            moved()
            if time.monotonic() > until:
                raise IncompleteResponse("the download takes too long")
            return None

    return _Bar


def _is_damaged(path: Path) -> bool:
    """Return whether the SHA-256 of a file differs from its name in the cache. Only large files have such a name."""
    blob = path.resolve()
    return len(blob.name) == _SHA256_DIGITS and sha256_of(blob) != blob.name


def check_token(place: HubFile) -> None:
    """Raise `InputError` if huggingface_hub is not installed, or has no token."""
    if hub_library(str(place)).get_token() is None:
        raise InputError(f"{place}: uploading needs a token; {_WRITES}")


def upload(folder: Path, place: HubFile, *, private: bool, message: str) -> str:
    """Upload the files of a folder as one commit, and return the address of the commit.

    The repository is created if it does not exist, as a private one with `private`.

    Raises:
        InputError: the token may not write, or the hub refuses the files.
        Unreachable: the hub does not answer.
    """
    library = hub_library(str(place))
    api = library.HfApi(endpoint=endpoint())
    library.utils.disable_progress_bars()
    try:
        with doing(f"uploading to {place}"):
            api.create_repo(place.repo, private=private or None, exist_ok=True)
            commit = api.upload_folder(repo_id=place.repo, folder_path=folder, commit_message=message)
        return commit.commit_url
    except library.errors.HfHubHTTPError as error:
        status, reason = error.response.status_code, error.response.reason_phrase
        if status in _FORBIDDEN:
            raise InputError(f"{place}: the hub refuses the token ({status} {reason}); {_WRITES}") from None
        raise InputError(f"{place}: the hub answers {status} {reason}: {first_line(error)}; check the name") from None
    except library.errors.HFValidationError as error:
        raise InputError(f"{place}: {first_line(error)}; check the name") from None
    # The library's HTTP client has errors of its own for a lost connection.
    except Exception as error:
        raise Unreachable(f"{place}: upload failed ({first_line(error)}); check the network, and push again") from error
