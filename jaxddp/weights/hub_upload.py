"""Uploads a folder to a repository of the Hugging Face Hub through `huggingface_hub`."""

from pathlib import Path

from jaxddp.core.errors import InputError, Unreachable
from jaxddp.core.phases import doing
from jaxddp.core.wording import first_line
from jaxddp.weights.hub_files import HubFile, endpoint, hub_library

_FORBIDDEN = (401, 403)
_WRITES = "log in with `hf auth login`, or set HF_TOKEN to a token that may write to this repository"


def check_token(place: HubFile) -> None:
    """Raise `InputError` if huggingface_hub is not installed, or has no token."""
    if hub_library(str(place)).get_token() is None:
        raise InputError(f"{place}: uploading needs a token; {_WRITES}")


def upload(folder: Path, place: HubFile, *, private: bool, message: str) -> str:
    """Upload the files of a folder as one commit, and return the address of the commit.

    The repository is created if it does not exist.

    Args:
        private: whether a new repository is private.
        message: the message of the commit.

    Raises:
        InputError: there is no token, the token may not write, or the hub refuses the files.
        Unreachable: the hub does not answer.
    """
    check_token(place)
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
        reason = first_line(error) or type(error).__name__
        raise Unreachable(f"{place}: the upload failed ({reason}); check the network, and push again") from error
