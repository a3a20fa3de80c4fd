"""A work directory that stays where it is: a run that went on after its end would save nowhere, or into another one."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jaxddp.job.progress as progress
from jaxddp.errors import InputError
from jaxddp.job.membership import abandon, is_alone
from jaxddp.job.watch import end_now
from jaxddp.recipe_file import CONFIG_FILE
from jaxddp.training.manifest import CHECKPOINTS

_LOOK_SECONDS = 1.0
_FAILING_SECONDS = 10.0
"""How long the thread that trains may take to end by itself: it may wait for another process that will not come."""
_REMOVING_SECONDS = 1.0
_GONE = frozenset((errno.ENOENT, errno.ENOTDIR))


class Presence:
    """Knows a work directory again, and what a run has made in it."""

    def __init__(self, directory: Path):
        self._places = (directory, directory / CHECKPOINTS, directory / CONFIG_FILE)
        self._known: dict[Path, tuple[int, int]] = {}
        self.fault()

    def check(self) -> None:
        """Raises `InputError` where it has gone, or another one is in its place."""
        if (fault := self.fault()) is not None:
            raise InputError(fault)

    def fault(self) -> str | None:
        """What became of it; None where all is well, or where the server of files does not say."""
        for place in self._places:
            try:
                found = os.stat(place)
            except OSError as error:
                if error.errno in _GONE and place in self._known:
                    return f"{place}: is no longer there; {self._advice}"
                continue
            # A config.json is another file each time that it is written.
            identity = (0, 0) if place.name == CONFIG_FILE else (found.st_dev, found.st_ino)
            if self._known.setdefault(place, identity) != identity:
                return f"{place}: is another one now; {self._advice}"
        return None

    def fault_after(self, error: BaseException) -> str | None:
        """The same, of what has failed; where a file has gone, `rm -r` may be at the first of many."""
        cause, give_up = error.__cause__ or error, time.monotonic() + _REMOVING_SECONDS
        is_gone = isinstance(cause, OSError) and cause.errno in _GONE
        while (fault := self.fault()) is None and is_gone and time.monotonic() < give_up:
            time.sleep(_REMOVING_SECONDS / 20)
        return fault

    @property
    def _advice(self) -> str:
        directory, *_ = self._places
        return f"the run cannot save any more; bring {directory} back, and the same command resumes there"


@contextmanager
def staying(directory: Path) -> Iterator[Callable[[], None]]:
    """Look after a work directory during the block. Yields a function for the thread that trains, as `Presence.check`.

    Whatever fails in the block once the directory has gone, fails because of it. Where this process may wait for what
    will not come, it ends some seconds later.

    Raises:
        InputError: it has gone, or another one is in its place.
    """
    presence, over = Presence(directory), threading.Event()
    threading.Thread(target=_look, args=(presence, over), name="jaxddp-workdir", daemon=True).start()
    try:
        yield presence.check
    except Exception as error:
        if (fault := presence.fault_after(error)) is not None:
            raise InputError(fault) from error
        raise
    finally:
        over.set()


def _look(presence: Presence, over: threading.Event) -> None:
    """Until it is over, or the directory has gone and this process did not end by itself."""
    while not over.wait(_LOOK_SECONDS):
        if presence.fault() is None or over.wait(_FAILING_SECONDS):
            continue
        # Alone it waits for nobody; but Orbax, whose threads wait for each other, may do so for an hour.
        may_wait = not is_alone() or progress.standing().phase in ("save", progress.COMMIT)
        # A server of files may have shown an older state.
        if may_wait and (fault := presence.fault()) is not None:
            abandon(fault, InputError.exit_code)
            end_now(fault, InputError.exit_code)
