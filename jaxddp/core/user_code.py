"""Errors in a user's code: they name its file, line and function, and an exit of the process becomes an error."""

import contextlib
import dis
import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxddp.core.errors import Answered, JaxddpError, with_notes

_PACKAGE = Path(__file__).parent.parent
_NOT_OWN = (_PACKAGE, _PACKAGE.parent / "configs", Path(sysconfig.get_path("stdlib")))
_LIBRARIES = frozenset({"site-packages", "dist-packages"})
_LONGEST = 500
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_MARK = "jaxddp: "


class UserCodeExit(JaxddpError):
    """The user's code tried to end the process, for example by `sys.exit`. The run would then seem finished."""


class CodePlace(NamedTuple):
    """A place in a user's code: file, line, and function, which is empty in the body of a module."""

    file: Path
    line: int
    name: str

    def __str__(self) -> str:
        """Return the beginning of a message: `my.py:14: Net.__call__: `."""
        file = self.file
        # The working directory may have been removed.
        with contextlib.suppress(OSError, ValueError):
            file = file.relative_to(Path.cwd())
        return f"{file}:{self.line}: " + (f"{self.name}: " if self.name else "")


def place_of(error: BaseException) -> CodePlace | None:
    """Return the innermost frame of the user's code in the traceback of an error or its causes, if any."""
    for each in _chain(error):
        # XLA reports the traceback of callbacks as text.
        written = [found for found in _FRAME.findall(str(each)) if _is_own(found[0])]
        if written:
            file, line, name = written[-1]
            return CodePlace(Path(file), int(line), _name_of(name))
        frames = traceback.walk_tb(each.__traceback__)
        if own := [(frame, line) for frame, line in frames if _is_own(frame.f_code.co_filename)]:
            frame, line = own[-1]
            return CodePlace(Path(frame.f_code.co_filename).absolute(), line, _name_of(frame.f_code.co_qualname))
    return None


def describe_error(error: BaseException, advice: str = "") -> str:
    """Return an error as one line: `my.py:14: Net.__call__: TypeError: …`."""
    if isinstance(error, JaxddpError):
        return with_notes(str(error), error)
    text = str(error).rstrip()
    if _FRAME.search(text):
        said = text.splitlines()[-1]
    else:
        said = f"{type(error).__name__}: {' '.join(text.split())}".removesuffix(": ")
    return with_notes(f"{place_of(error) or ''}{said[:_LONGEST]}{advice}", error)


def is_ctrl_c(error: BaseException) -> bool:
    """Return whether an error comes from Ctrl-C, and not from a KeyboardInterrupt that the user's code raised."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not _is_own(trace.tb_frame.f_code.co_filename):
        return True
    # If the last instruction is a raise, the code raised the error itself. A signal interrupts other instructions.
    by_itself = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    # After Ctrl-C, the user's code may raise a second KeyboardInterrupt while it handles the first.
    return not by_itself or (error.__context__ is not None and is_ctrl_c(error.__context__))


@contextlib.contextmanager
def describing_errors(*, all_errors: bool = False) -> Iterator[None]:
    """Add a last line to the traceback of errors in the user's code, with file, line and function.

    Args:
        all_errors: whether all other errors get such a line, too.

    Raises:
        UserCodeExit: the user's code raised SystemExit, GeneratorExit or KeyboardInterrupt.
    """
    try:
        yield
    except (JaxddpError, Answered):
        raise
    except (SystemExit, GeneratorExit, KeyboardInterrupt) as error:
        if is_ctrl_c(error):
            raise
        raise UserCodeExit(describe_error(error, "; to end a run, raise an error")) from error
    except BaseException as error:
        # Notes, such as those of JAX, follow the message in the traceback, so the last line repeats the message.
        if all_errors or place_of(error) or getattr(error, "__notes__", ()):
            add_description(error)
        raise


def add_description(error: BaseException) -> None:
    """Add a last line to the traceback of an error, with the place where it was raised."""
    remove_description(error)
    error.add_note(f"{_MARK}{describe_error(error)}")


def remove_description(error: BaseException) -> None:
    """Remove the line that `add_description` added."""
    if any(note.startswith(_MARK) for note in getattr(error, "__notes__", ())):
        error.__notes__ = [note for note in error.__notes__ if not note.startswith(_MARK)]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Iterate over an error and the errors that caused it."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _is_own(file: str) -> bool:
    path = Path(file).absolute()
    return not (
        # For example <frozen runpy>.
        file.startswith("<") or _LIBRARIES & {*path.parts} or any(path.is_relative_to(place) for place in _NOT_OWN)
    )


def _name_of(function: str) -> str:
    name = function.replace("<locals>.", "")
    return "" if name == "<module>" else name
