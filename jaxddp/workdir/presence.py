"""Ends a run if its work directory is removed, moved or replaced, so that it does not save into a wrong directory."""

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxddp.core.errors import InputError
from jaxddp.core.peers import ALONE, Peers
from jaxddp.core.phases import COMMIT, progress
from jaxddp.core.process_exit import end_now
from jaxddp.recipe_files.find_recipe import CONFIG_FILE
from jaxddp.training.checkpoints.integrity import CHECKPOINTS, INDEX
from jaxddp.training.checkpoints.manager import UNFINISHED_SUFFIX
from jaxddp.training.checkpoints.validation_file import VALIDATION_FILE
from jaxddp.training.listeners.jsonl import METRICS, RESULT
from jaxddp.training.listeners.step_seconds import FILE as STEP_SECONDS
from jaxddp.training.listeners.workdir_files import CONFUSION, CURVES

_POLL_SECONDS = 1.0
_EXIT_SECONDS = 10.0
"""Seconds that the training thread has to end before the process exits. It may be waiting for an ended process."""
_REMOVING_SECONDS = 1.0
_REMOVALS, _REMOVAL_INTERVAL = 5, 0.05
"""The number of attempts to remove a directory, which other threads may make again, and the seconds between them."""
_OF_A_RUN = frozenset((METRICS, RESULT, CURVES, CONFUSION, STEP_SECONDS))
_OF_CHECKPOINTS = frozenset((INDEX, VALIDATION_FILE))
"""Files that a run may write again after a removal, and that are useless without its other files."""
_GONE = frozenset((errno.ENOENT, errno.ENOTDIR))


class Presence:
    """The device and inode of a work directory, of its folder of checkpoints and of its config.json.

    Attributes:
        saves: returns the last step that this process saved, and the last one whose checkpoint is complete; None if
            there is none.
    """

    def __init__(self, directory: Path):
        self.saves: Callable[[], tuple[int | None, int | None]] = lambda: (None, None)
        self._complete: int | None = None
        self._paths = (directory, directory / CHECKPOINTS, directory / CONFIG_FILE)
        self._identities: dict[Path, tuple[int, int]] = {}
        self._checked_state: tuple[int, int, int] | None = None
        self._open_directories = contextlib.ExitStack()
        self.fault()

    def check(self) -> None:
        """Raise `InputError` if the directory was removed, moved or replaced.

        It is called after each step, so it must be fast. It does nothing if the directory's inode and modification time
        are unchanged since the last full check. On file systems without modification times of directories, the
        thread of `watch_workdir` finds a change.
        """
        state = None
        with contextlib.suppress(OSError):
            status = os.stat(self._paths[0])
            state = status.st_dev, status.st_ino, status.st_mtime_ns
            if state == self._checked_state:
                _, self._complete = self.saves()
                return
        if (fault := self.fault()) is not None:
            raise InputError(fault)
        self._checked_state = state
        _, self._complete = self.saves()

    def fault(self) -> str | None:
        """Return an error message about a removed or replaced path; None if all paths are unchanged or unreachable."""
        if (fault := self._fault()) is not None:
            self._checked_state = None
        return fault

    def _fault(self) -> str | None:
        for place in self._paths:
            try:
                identity = _identity(place)
            except OSError as error:
                is_gone = error.errno in _GONE and place in self._identities
            else:
                if place not in self._identities:
                    self._keep_open(place)
                is_gone = self._identities.setdefault(place, identity) != identity
            if is_gone:
                directory, *_ = self._paths
                advice = f"bring {directory} back, and the same command resumes there"
                return f"{place}: was removed, moved or replaced while the run wrote there; {advice}"
        return None

    def _keep_open(self, place: Path) -> None:
        """Keep a directory open: file systems such as gcsfuse give it a new inode when no process has it open."""
        with contextlib.suppress(OSError):
            self._open_directories.callback(os.close, os.open(place, os.O_RDONLY | os.O_DIRECTORY))

    def close(self) -> None:
        self._open_directories.close()

    def fault_after(self, error: BaseException) -> str | None:
        """Return the message of `fault` after an error.

        If a file is missing, an `rm -r` may be running. So wait up to a second until the directory is gone, too.
        """
        cause, give_up = error.__cause__ or error, time.monotonic() + _REMOVING_SECONDS
        is_gone = isinstance(cause, OSError) and cause.errno in _GONE
        while (fault := self.fault()) is None and is_gone and time.monotonic() < give_up:
            time.sleep(_REMOVING_SECONDS / 20)
        return fault

    def remove_recreated(self) -> None:
        """Remove directories that a save made again. The next run would take them for a work directory.

        Orbax and TensorStore make the parent folders of each file that they write. Until the next step checks the
        directory, the run itself may write there, too.
        """
        directory, checkpoints, config = self._paths
        for _ in range(_REMOVALS):
            with contextlib.suppress(OSError):
                known: set[str] = {*_OF_CHECKPOINTS}
                saved, _ = self.saves()
                # A checkpoint that was complete before the removal, or one beside a config.json, is a copy of the user.
                if saved != self._complete and self._is_new(directory) and not config.exists():
                    known.add(str(saved))
                names = {name for name in os.listdir(checkpoints) if UNFINISHED_SUFFIX not in name}
                if self._is_new(checkpoints) and names <= known:
                    shutil.rmtree(checkpoints, ignore_errors=True)
            with contextlib.suppress(OSError):
                names = {*os.listdir(directory)}
                if self._is_new(directory) and names <= _OF_A_RUN:
                    for name in names:
                        (directory / name).unlink()
                    directory.rmdir()
            time.sleep(_REMOVAL_INTERVAL)

    def _is_new(self, place: Path) -> bool:
        return _identity(place) != self._identities.get(place)


def _identity(place: Path) -> tuple[int, int]:
    """Return the device and inode of a directory; (0, 0) for config.json, whose inode changes when it is written."""
    status = os.stat(place)
    return (0, 0) if place.name == CONFIG_FILE else (status.st_dev, status.st_ino)


@contextmanager
def watch_workdir(directory: Path, peers: Peers = ALONE) -> Iterator[Presence]:
    """Watch a work directory during the block. The training thread calls `check` of the `Presence` that is yielded.

    After a removal, any error in the block becomes an InputError about the removal. The process exits if the block does
    not end within 10 seconds, because the block may wait for another process.

    Raises:
        InputError: the directory was removed, moved or replaced.
    """
    presence, finished = Presence(directory), threading.Event()
    threading.Thread(target=_watch, args=(presence, finished, peers), name="jaxddp-workdir", daemon=True).start()
    try:
        yield presence
    except Exception as error:
        if (fault := presence.fault_after(error)) is not None:
            presence.remove_recreated()
            raise InputError(fault) from error
        raise
    finally:
        finished.set()
        presence.close()


def _watch(presence: Presence, finished: threading.Event, peers: Peers) -> None:
    """Check the directory until the block is over; exit the process if the block does not end after a change."""
    while not finished.wait(_POLL_SECONDS):
        if presence.fault() is None or finished.wait(_EXIT_SECONDS):
            continue
        # A single process waits for no other process. But the threads of Orbax wait for each other, for up to an hour.
        may_wait = not peers.is_alone or progress().phase in ("save", COMMIT)
        # The check is repeated, because a file server may have shown an older state.
        if may_wait and (fault := presence.fault()) is not None:
            peers.abandon(fault, InputError.exit_code)
            end_now(fault, InputError.exit_code)
