"""A work directory that stays where it is: a run that went on after its end would save nowhere, or into another one."""

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
from jaxddp.job.membership import abandon
from jaxddp.job.process_exit import end_now
from jaxddp.recipe_file import CONFIG_FILE
from jaxddp.training.checkpoints.integrity import CHECKPOINTS
from jaxddp.training.checkpoints.orbax_errors import UNFINISHED
from jaxddp.training.listeners.jsonl import RESULT

_LOOK_SECONDS = 1.0
_FAILING_SECONDS = 10.0
"""How long the thread that trains may take to end by itself: it may wait for another process that will not come."""
_REMOVING_SECONDS = 1.0
_CLEARINGS, _CLEARING_SECONDS = 5, 0.05
"""How often what threads still make is removed, and how long after each other."""
_GONE = frozenset((errno.ENOENT, errno.ENOTDIR))


class Presence:
    """Knows a work directory again, and what a run has made in it."""

    def __init__(self, directory: Path):
        self._places = (directory, directory / CHECKPOINTS, directory / CONFIG_FILE)
        self._known: dict[Path, tuple[int, int]] = {}
        self._unchanged: tuple[int, int, int] | None = None
        self._held = contextlib.ExitStack()
        self.fault()

    def check(self) -> None:
        """Raises `InputError` where it has gone, or another one is in its place.

        It comes after each step, so it looks at the directory alone while that is as the last whole look found it: its
        time of modification changes with the entries in it. Where file systems keep no such time, `_look` finds out.
        """
        state = None
        with contextlib.suppress(OSError):
            found = os.stat(self._places[0])
            state = found.st_dev, found.st_ino, found.st_mtime_ns
            if state == self._unchanged:
                return
        if (fault := self.fault()) is not None:
            raise InputError(fault)
        self._unchanged = state

    def fault(self) -> str | None:
        """What became of it; None where all is well, or where the server of files does not say."""
        if (fault := self._fault()) is not None:
            self._unchanged = None
        return fault

    def _fault(self) -> str | None:
        for place in self._places:
            try:
                found = _identity(place)
            except OSError as error:
                is_gone = error.errno in _GONE and place in self._known
            else:
                if place not in self._known:
                    self._hold(place)
                is_gone = self._known.setdefault(place, found) != found
            if is_gone:
                directory, *_ = self._places
                advice = f"bring {directory} back, and the same command resumes there"
                return f"{place}: was removed, moved or replaced while the run wrote there; {advice}"
        return None

    def _hold(self, place: Path) -> None:
        """Keep a directory open: file systems such as gcsfuse number one anew once nobody has it open."""
        with contextlib.suppress(OSError):
            self._held.callback(os.close, os.open(place, os.O_RDONLY | os.O_DIRECTORY))

    def close(self) -> None:
        self._held.close()

    def fault_after(self, error: BaseException) -> str | None:
        """The same, of what has failed; where a file has gone, `rm -r` may be at the first of many."""
        cause, give_up = error.__cause__ or error, time.monotonic() + _REMOVING_SECONDS
        is_gone = isinstance(cause, OSError) and cause.errno in _GONE
        while (fault := self.fault()) is None and is_gone and time.monotonic() < give_up:
            time.sleep(_REMOVING_SECONDS / 20)
        return fault

    def clear_away(self) -> None:
        """Remove what Orbax made there once more, of a save that had begun: the next run would find a work directory.

        Orbax and TensorStore make the folders of each file that they write.
        """
        directory, checkpoints, _ = self._places
        for _ in range(_CLEARINGS):
            with contextlib.suppress(OSError):
                is_new = _identity(checkpoints) != self._known.get(checkpoints)
                if is_new and all(UNFINISHED in name for name in os.listdir(checkpoints)):
                    shutil.rmtree(checkpoints, ignore_errors=True)
            with contextlib.suppress(OSError):
                if _identity(directory) != self._known[directory]:
                    # Of the end of the run, which nobody misses without the rest.
                    if os.listdir(directory) == [RESULT]:
                        (directory / RESULT).unlink()
                    directory.rmdir()
            time.sleep(_CLEARING_SECONDS)


def _identity(place: Path) -> tuple[int, int]:
    """By which a directory is known again. A config.json is another file each time that it is written."""
    found = os.stat(place)
    return (0, 0) if place.name == CONFIG_FILE else (found.st_dev, found.st_ino)


@contextmanager
def staying(directory: Path, peers: Peers = ALONE) -> Iterator[Callable[[], None]]:
    """Look after a work directory during the block. Yields a function for the thread that trains, as `Presence.check`.

    Whatever fails in the block once the directory has gone, fails because of it. Where this process may wait for what
    will not come, it ends some seconds later.

    Raises:
        InputError: it has gone, or another one is in its place.
    """
    presence, over = Presence(directory), threading.Event()
    threading.Thread(target=_look, args=(presence, over, peers), name="jaxddp-workdir", daemon=True).start()
    try:
        yield presence.check
    except Exception as error:
        if (fault := presence.fault_after(error)) is not None:
            presence.clear_away()
            raise InputError(fault) from error
        raise
    finally:
        over.set()
        presence.close()


def _look(presence: Presence, over: threading.Event, peers: Peers) -> None:
    """Until it is over, or the directory has gone and this process did not end by itself."""
    while not over.wait(_LOOK_SECONDS):
        if presence.fault() is None or over.wait(_FAILING_SECONDS):
            continue
        # Alone it waits for nobody; but Orbax, whose threads wait for each other, may do so for an hour.
        may_wait = not peers.is_alone or progress().phase in ("save", COMMIT)
        # A server of files may have shown an older state.
        if may_wait and (fault := presence.fault()) is not None:
            abandon(fault, InputError.exit_code)
            end_now(fault, InputError.exit_code)
