"""What a process says to the launcher that started it: when it is at work, and when that has ended.

The launcher sees by it that a process ended in the midst of its work though its exit code is 0, which `os._exit(0)` in
a user's code, or a library's, makes it.
"""

import contextlib
import functools
import os
import stat
from collections.abc import Iterator

from jaxddp.job.variables import HANDLES, look, number

WORDS_FD = "JAXDDP_WORDS_FD"
"""The variable that says into which pipe: the number of its end that the launcher reads the other one of."""
BEGUN, ENDED, QUIT = b"+", b"-", b"!"
"""The last one says that the user's code ended the process: started again, it would do so again."""


@contextlib.contextmanager
def at_work() -> Iterator[None]:
    """This process is at work in the block; blocks may lie within each other."""
    _say(BEGUN)
    try:
        yield
    except (SystemExit, GeneratorExit):
        _say(QUIT)
        raise
    finally:
        _say(ENDED)


def _say(word: bytes) -> None:
    if (pipe := _pipe()) is not None:
        # A launcher that has gone, or does not read, must not keep it from its work.
        with contextlib.suppress(OSError):
            os.write(pipe, word)


@functools.cache
def _pipe() -> int | None:
    found = look(os.environ, WORDS_FD)
    # What this process starts has words of its own, or none.
    os.environ.pop(WORDS_FD, None)
    if found is None:
        return None
    pipe = number(found, HANDLES)
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(pipe).st_mode):
            os.set_blocking(pipe, False)
            return pipe
    return None
