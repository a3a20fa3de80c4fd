"""A work directory belongs to one recipe: it is claimed by writing config.json, and a resumed run must match it."""

import fcntl
import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import jaxddp.files as files
from jaxddp.config import Config
from jaxddp.errors import InputError
from jaxddp.job.membership import exchange, is_first
from jaxddp.overrides import flatten
from jaxddp.training.checkpoints import Checkpoints

Resume = Literal["auto", "never", "must"]
CONFIG_FILE = "config.json"
LOCK_FILE = ".lock"
_SHARED_SECONDS = 5
_MEND = "restore it, or start in another --workdir"

# What a resumed run may change: how long, how often, on what, what is kept, and how it is measured. All else is the
# recipe.
_MOVED = ("data.path", "data.name")
_FREE = (
    *("train.duration", "eval.every", "checkpoint.every", "log.every", "log.profile", "parallel."),
    *("eval.batch_size", "checkpoint.keep", "log.to"),
    *("data.max_bad_images", "data.local_cache", "data.data_dir", *_MOVED),
)
_log = logging.getLogger("jaxddp.run")


def resume_step(checkpoints: Checkpoints, resume: Resume) -> int | None:
    """The step to go on from; None begins anew.

    Raises:
        InputError: "must" without a checkpoint, or "never" where one would be lost.
    """
    latest = latest_step(checkpoints)
    if resume == "must" and latest is None:
        raise InputError(f"{checkpoints.directory}: no checkpoint to resume from; check --workdir, or --resume auto")
    if resume == "never" and latest is not None:
        raise InputError(
            f"{checkpoints.directory}: holds checkpoints up to step {latest}, which --resume never would lose; "
            "choose another --workdir, remove it, or --resume auto"
        )
    return latest


def latest_step(checkpoints: Checkpoints) -> int | None:
    """The step of the latest checkpoint as process 0 sees it: a network file system may show others an older one."""
    seen = exchange("latest checkpoint", str(checkpoints.latest()))[0]
    return None if seen == str(None) else int(seen)


def check_shared(directory: Path) -> None:
    """Processes of one job save into one directory; a private one would make Orbax wait for what never comes.

    Raises:
        InputError: a process does not see what process 0 has written there; names it.
    """
    name = exchange("work directory", f".shared-{uuid.uuid4().hex}")[0]
    if is_first():
        files.replace(directory / name, b"")
    exchange("work directory written", "")
    # A network file system may show a new file a little late.
    give_up = time.monotonic() + _SHARED_SECONDS
    while not (seen := (directory / name).exists()) and time.monotonic() < give_up:
        time.sleep(0.1)
    blind = [process for process, saw in enumerate(exchange("work directory seen", str(seen))) if saw != str(True)]
    if is_first():
        files.remove(directory / name)
    if blind:
        raise InputError(
            f"{directory}: process {blind[0]} does not see what process 0 writes there; give a --workdir that all "
            "hosts share"
        )


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep a second run out of a work directory: its first act would be to clear away what this one is writing.

    Ends with the process, however it ends. On a file system without locks nothing is held.

    Raises:
        InputError: another run holds it, or its lock cannot be written.
    """
    if not is_first():
        yield
        return
    # Of a file, not of the directory: that lock would never reach the server of a network file system.
    with files.readable_errors(directory / LOCK_FILE):
        lock = (directory / LOCK_FILE).open("a")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            advice = "wait for it, or give another --workdir"
            raise InputError(f"{directory}: another run is at work there; {advice}") from None
        except OSError:
            pass  # A file system without locks.
        yield


def claim(directory: Path, recipe: Mapping[str, Any], fingerprints: Mapping[str, str], *, resuming: bool) -> None:
    """Write config.json: the recipe and the data's fingerprints. On resume, compare with what stands there.

    Data may have been moved. Of files, a fingerprint knows names and labels, and no image: a line says so.

    Args:
        recipe: what is known of a run's config, as `Config.to_dict` gives it.

    Raises:
        InputError: a key of the recipe differs; names it and both values. Or the file cannot be read or written.
    """
    path = directory / CONFIG_FILE
    content = {**recipe, "fingerprint": dict(fingerprints)}
    # As it will be read again, NumPy's numbers too.
    content = json.loads(json.dumps(content, default=lambda value: value.tolist()))
    if resuming:
        _compare(path, _read(path), content)
    if is_first():
        files.replace(path, (json.dumps(content, indent=2) + "\n").encode())


def _compare(path: Path, saved: dict[str, Any], content: dict[str, Any]) -> None:
    # A key that has come since is held to have been what it is where nobody sets it.
    known, here = flatten(saved), flatten(content)
    there = flatten(Config().to_dict()) | known
    for key in sorted(known.keys() | here.keys()):
        if there.get(key) != here.get(key) and not key.startswith(_FREE):
            raise InputError(
                f"{path}: {key} was {there.get(key)!r} and is now {here.get(key)!r}; a resumed run keeps its recipe: "
                "set it back, or start in another --workdir"
            )
    for key in _MOVED:
        if there.get(key) != here.get(key) and is_first():
            _log.warning(
                f"{key} was {there.get(key)!r} and is now {here.get(key)!r}: the same data by their fingerprints, for "
                "which no image file is opened"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: is missing beside the checkpoints; {_MEND}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); {_MEND}") from None
