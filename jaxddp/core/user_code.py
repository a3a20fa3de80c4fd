"""What a user's own code raises, told by file, line and object; where it would end the process, it ends the run."""

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


class OwnCodeExit(JaxddpError):
    """The user's code would have ended the process, as `sys.exit` does: to a scheduler the run would seem done."""


class CodePlace(NamedTuple):
    """Where in a user's code something was raised: a file, a line of it, and the function, empty in a module's body."""

    file: Path
    line: int
    name: str

    def __str__(self) -> str:
        """As a message begins: `my.py:14: Net.__call__: `."""
        file = self.file
        # The current directory may have been removed.
        with contextlib.suppress(OSError, ValueError):
            file = file.relative_to(Path.cwd())
        return f"{file}:{self.line}: " + (f"{self.name}: " if self.name else "")


def place_of(error: BaseException) -> CodePlace | None:
    """The innermost frame, of the user's code, of what an error or its cause comes from; None where there is none."""
    for each in _chain(error):
        # XLA tells of what it calls in text alone.
        written = [found for found in _FRAME.findall(str(each)) if _is_own(found[0])]
        if written:
            file, line, name = written[-1]
            return CodePlace(Path(file), int(line), _name_of(name))
        frames = traceback.walk_tb(each.__traceback__)
        if own := [(frame, line) for frame, line in frames if _is_own(frame.f_code.co_filename)]:
            frame, line = own[-1]
            return CodePlace(Path(frame.f_code.co_filename).absolute(), line, _name_of(frame.f_code.co_qualname))
    return None


def told(error: BaseException, advice: str = "") -> str:
    """`my.py:14: Net.__call__: TypeError: …`, on one line."""
    if isinstance(error, JaxddpError):
        return with_notes(str(error), error)
    text = str(error).rstrip()
    if _FRAME.search(text):
        said = text.splitlines()[-1]
    else:
        said = f"{type(error).__name__}: {' '.join(text.split())}".removesuffix(": ")
    return with_notes(f"{place_of(error) or ''}{said[:_LONGEST]}{advice}", error)


def is_ctrl_c(error: BaseException) -> bool:
    """Whether somebody pressed Ctrl-C, where the user's code did not raise KeyboardInterrupt by itself."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not _is_own(trace.tb_frame.f_code.co_filename):
        return True
    # A signal comes between two instructions, of which none is a raise.
    by_itself = dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    # It may raise another one because of the first.
    return not by_itself or (error.__context__ is not None and is_ctrl_c(error.__context__))


@contextlib.contextmanager
def telling(*, all_errors: bool = False) -> Iterator[None]:
    """The traceback of what the user's code raises in the block ends with a line that says where.

    Args:
        all_errors: of what else is raised, too, the line is the last.

    Raises:
        OwnCodeExit: it would have ended the process, or what called it, as if nothing were wrong.
    """
    try:
        yield
    except (JaxddpError, Answered):
        raise
    except (SystemExit, GeneratorExit, KeyboardInterrupt) as error:
        if is_ctrl_c(error):
            raise
        raise OwnCodeExit(told(error, "; to end a run, raise an error")) from error
    except BaseException as error:
        # JAX adds a remark of its own.
        if all_errors or place_of(error) or getattr(error, "__notes__", ()):
            tell(error)
        raise


def tell(error: BaseException) -> None:
    """Have the traceback of an error end with the line that says where it was raised."""
    forget(error)
    error.add_note(f"{_MARK}{told(error)}")


def forget(error: BaseException) -> None:
    """Take the line off again, where another way shows it."""
    if any(note.startswith(_MARK) for note in getattr(error, "__notes__", ())):
        error.__notes__ = [note for note in error.__notes__ if not note.startswith(_MARK)]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, and those before it that led to it."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _is_own(file: str) -> bool:
    path = Path(file).absolute()
    return not (
        # Such as <frozen runpy>.
        file.startswith("<") or _LIBRARIES & {*path.parts} or any(path.is_relative_to(place) for place in _NOT_OWN)
    )


def _name_of(function: str) -> str:
    name = function.replace("<locals>.", "")
    return "" if name == "<module>" else name
