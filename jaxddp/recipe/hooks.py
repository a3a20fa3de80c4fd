"""Hooks: the functions of a recipe file that return the user's objects, such as a model or a loss."""

import contextlib
import functools
import inspect
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxddp.config.registry import with_defaults
from jaxddp.config.values import observed
from jaxddp.core.errors import InputError, choices
from jaxddp.core.user_code import is_ctrl_c, place_of

HOOKS = {
    "get_model": "config, num_classes",
    "get_loss": "config",
    "get_objective": "config, topology",
    "get_metrics": "config",
    "get_optimizer": "config, learning_rate",
    "get_augmentation": "config",
    "get_initialize": "config, images",
    "get_parts": "config, steps",
    "get_listeners": "config, workdir",
}
"""The hooks that a recipe file can define in addition to `get_config()`, and their arguments."""
CALLED = "called"
"""The entry of `Hook.read` for a call of the function among a hook's arguments."""


@dataclass(frozen=True)
class Hook:
    """A hook of a recipe file. An error in it becomes an `InputError` that names the file and the line.

    In the config that the hook receives, a key that is None has the default of the choice that the config names.

    Attributes:
        read: the keys of the config that the hook and the functions that it returned have read so far, and `CALLED` if
            they called the function among the hook's arguments, such as the schedule of `get_optimizer`.
    """

    path: Path
    function: Callable[..., Any]
    read: set[str] = field(default_factory=set, compare=False, repr=False)

    def __call__(self, config: Any, *arguments: Any) -> Any:
        observed_config = observed(with_defaults(config), self.read)
        return self.guarded(self.function)(observed_config, *(self._noted(argument) for argument in arguments))

    def _noted(self, argument: Any) -> Any:
        """Return an argument of the hook; a function is wrapped, so that its calls are recorded."""
        if not callable(argument):
            return argument

        @functools.wraps(argument)
        def noted(*arguments: Any) -> Any:
            self.read.add(CALLED)
            return argument(*arguments)

        return noted

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that the hook returned, so that its errors name the file and the line, too."""
        return errors_name_line(self.path, f"{self.function.__name__}: ")(function)

    @property
    def name(self) -> str:
        """The file and the name of the function, for messages."""
        return f"{self.path}: {self.function.__name__}"


def hooks_of(path: Path, module: ModuleType) -> dict[str, Hook]:
    """Return the hooks that a recipe file defines or imports.

    Raises: InputError if a hook has the wrong signature, or a `get_…` function is no hook.
    """
    hooks = {}
    for name, value in vars(module).items():
        if name in HOOKS:
            if not callable(value):
                kind = type(value).__name__
                raise InputError(f"{path}: {name} is a {kind}; define the function {name}({HOOKS[name]})")
            check_parameters(value, str(path), name, HOOKS[name])
            hooks[name] = Hook(path, value)
        elif name.startswith("get_") and name != "get_config" and getattr(value, "__module__", "") == module.__name__:
            raise InputError(f"{path}: {name} is not a hook; {choices(name, [*HOOKS, 'get_config'])}")
    return hooks


def check_parameters(
    function: Callable[..., Any], where: str, name: str, arguments: str, *, more: bool = False
) -> None:
    """Check that a function accepts positional arguments, such as "config, num_classes".

    Args:
        where: the beginning of messages.
        name: the name of the function.
        more: whether the function may have further parameters without a default, which are passed by keyword.

    Raises:
        InputError: the function has other parameters, or is an async function.
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
    """Turn an error of a recipe file into an `InputError` that names the file and the line.

    A change of the working directory is undone, so that relative paths of the command line stay valid.

    Args:
        path: the path of the recipe file.
        subject: the text after the line number in the message, such as "get_model: ".
    """
    try:
        with contextlib.chdir(Path.cwd()):
            yield
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).absolute() == path.absolute()]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines = [error.lineno]
        where = f"{path}:{lines[-1]}" if lines else f"{path}"
        if isinstance(error, InputError):
            raise error.within(f"{where}: {subject}".removesuffix(": ")) from error
        origin = place_of(error)
        # If another module raised the error, name its line, too.
        further = f" (in {str(origin).removesuffix(': ')})" if origin and origin.file != path.absolute() else ""
        raise InputError(f"{where}: {subject}{type(error).__name__}: {error}{further}") from error
