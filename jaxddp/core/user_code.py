"""A user's code: checks of its signatures, errors by file, line and function, and exits, which become errors."""

import contextlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jaxddp.core.files as files
from jaxddp.core.errors import HelpPrinted, InputError, JaxddpError, chain, is_user_code, with_notes

_LONGEST = 500
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_MARK = "jaxddp: "


class UserCodeExit(JaxddpError):
    """The user's code tried to end the process, for example by `sys.exit`. The run would seem complete."""


class CodePlace(NamedTuple):
    """A place in a user's code: file, line, and function. The function is empty in the body of a module."""

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
    for cause in chain(error):
        # XLA puts the traceback of a callback into the message of its error.
        frames_in_text = [frame for frame in _FRAME.findall(str(cause)) if is_user_code(frame[0])]
        if frames_in_text:
            file, line, name = frames_in_text[-1]
            return CodePlace(Path(file), int(line), _name_of(name))
        frames = traceback.walk_tb(cause.__traceback__)
        if of_user := [(frame, line) for frame, line in frames if is_user_code(frame.f_code.co_filename)]:
            frame, line = of_user[-1]
            return CodePlace(Path(frame.f_code.co_filename).absolute(), line, _name_of(frame.f_code.co_qualname))
    return None


def describe_error(error: BaseException, advice: str = "") -> str:
    """Return an error as one line: `my.py:14: Net.__call__: TypeError: …`."""
    if isinstance(error, JaxddpError):
        return with_notes(str(error), error)
    text = str(error).rstrip()
    if _FRAME.search(text):
        description = text.splitlines()[-1]
    else:
        description = f"{type(error).__name__}: {' '.join(text.split())}".removesuffix(": ")
    return with_notes(f"{place_of(error) or ''}{description[:_LONGEST]}{advice}", error)


@contextlib.contextmanager
def describing_errors(*, all_errors: bool = False) -> Iterator[None]:
    """Add a last line to the traceback of errors in the user's code, with file, line and function.

    Args:
        all_errors: whether errors in other code also get the line.

    Raises: UserCodeExit if the user's code raised SystemExit or GeneratorExit.
    """
    try:
        yield
    except (JaxddpError, HelpPrinted, KeyboardInterrupt):
        raise
    except (SystemExit, GeneratorExit) as error:
        raise UserCodeExit(describe_error(error, "; to end a run, raise an error")) from error
    except BaseException as error:
        # Notes, such as those of JAX, follow the message in the traceback, so the last line repeats the message.
        if all_errors or place_of(error) or getattr(error, "__notes__", ()):
            remove_description(error)
            error.add_note(f"{_MARK}{describe_error(error)}")
        raise


def check_parameters(function: Callable[..., Any], where: str, name: str, arguments: str, more: bool = False) -> None:
    """Check that a function accepts positional arguments, such as "config, num_classes", and `more` by keyword.

    Raises: InputError, which begins with `where`.
    """
    if inspect.iscoroutinefunction(function):
        raise InputError(f"{where}: {name} is an async function; define a plain one, def {name}({arguments})")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # Some built-in functions have no signature.
    try:
        (signature.bind_partial if more else signature.bind)(*arguments.split(", "))
    except TypeError as error:
        raise InputError(f"{where}: {name}{signature} is called as {name}({arguments}): {error}") from None


@contextlib.contextmanager
def errors_name_line(path: Path, subject: str) -> Iterator[None]:
    """Turn an error of a recipe file into an `InputError` that names the file, the line and a subject: "get_model: ".

    A change of the working directory is undone, so that relative paths of the command line stay valid.
    """
    here = files.current_directory()
    try:
        with contextlib.chdir(here):
            yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).absolute() == path.absolute()]
        if isinstance(error, SyntaxError) and Path(error.filename or "").absolute() == path.absolute():
            lines = [error.lineno]
        where = f"{path}:{lines[-1]}" if lines else f"{path}"
        if isinstance(error, InputError):
            raise error.within(f"{where}: {subject}".removesuffix(": ")) from error
        origin = place_of(error)
        # If another module raised the error, name its line, too.
        further = f" (in {str(origin).removesuffix(': ')})" if origin and origin.file != path.absolute() else ""
        raise InputError(f"{where}: {subject}{type(error).__name__}: {error}{further}") from error


@contextlib.contextmanager
def errors_name_call(name: str, arguments: str) -> Iterator[None]:
    """Turn an error of a user's function into an `InputError` with these arguments and the line of the user's code."""
    try:
        yield
    except Exception as error:
        raise InputError(f"{name}: fails for {arguments}: {describe_error(error)}") from error


def remove_description(error: BaseException) -> None:
    """Remove the line that `describing_errors` added."""
    notes = getattr(error, "__notes__", [])
    notes[:] = [note for note in notes if not note.startswith(_MARK)]


def _name_of(function: str) -> str:
    return "" if function == "<module>" else function.replace("<locals>.", "")
