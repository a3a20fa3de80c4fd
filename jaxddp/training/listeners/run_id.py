"""The id by which a logger's service knows a run, in a small file of the work directory."""

import json
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.training.events import RunStart


def kept_id(path: Path, run: RunStart) -> str | None:
    """The id under which a run goes on; None for a run from step 0, and where the file at `path` is missing.

    Raises: InputError; the file holds something else.
    """
    if run.start_step == 0 or not path.exists():
        return None
    advice = "remove it, and the logger begins another run"
    with files.reading(path, advice):
        content = files.read(path)
    try:
        return str(json.loads(content)["id"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InputError(f"{path}: does not say the id of a run; {advice}") from None


def keep_id(path: Path, own: str) -> None:
    """Keep the id of a run for when it is resumed. Raises: InputError; the file cannot be written."""
    files.create(path.parent)
    files.replace(path, (json.dumps({"id": own}) + "\n").encode())
