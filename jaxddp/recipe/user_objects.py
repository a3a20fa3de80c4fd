"""Objects that a user provides, by hooks of a recipe file or by arguments of the Python API."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxddp.core.errors import InputError, about, refused
from jaxddp.core.wording import kind_of
from jaxddp.hooks import Hook, check_parameters


@dataclass(frozen=True)
class UserObject:
    """An object that a user provides.

    Attributes:
        where: the beginning of messages about the object: "my.py: get_loss", or "loss".
        hook: the hook that returned it; None for an argument.
    """

    value: Any
    where: str
    hook: Hook | None = None

    def refused(self, advice: str) -> InputError:
        """Return the error for an object of the wrong type."""
        if self.hook is None:
            return refused(self.where, self.value, advice)
        return InputError(f"{self.where}: {kind_of(self.value)} was given; {advice}")

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Begin the errors of the block with the name of the hook. Errors about arguments name the argument already."""
        if self.hook is None:
            yield
            return
        with about(self.where):
            yield

    def function(self, description: str, arguments: str) -> Callable[..., Any]:
        """Return the object as a function. An error in the function of a hook names the file and the line.

        Args:
            description: the description of the function's arguments in messages.
            arguments: the names of its positional arguments.

        Raises: InputError if the object is not a function, or takes other arguments.
        """
        if isinstance(self.value, type) or not callable(self.value):
            raise self.refused(f"give a function of {description}")
        check_parameters(self.value, self.where, getattr(self.value, "__name__", type(self.value).__name__), arguments)
        return self.value if self.hook is None else self.hook.guarded(self.value)


_OPTIONAL = frozenset({"augmentation", "initialize", "metrics"})
"""The arguments that may be None, for no object."""
ObjectSource = Callable[..., UserObject | None]
"""(kind, such as "loss", and the arguments of its hook) -> the user's object of that kind, or None."""


def objects_of_hooks(hooks: Mapping[str, Hook]) -> ObjectSource:
    """Return the source of the objects that hooks return. A hook is called when its object is requested."""

    def user_object(kind: str, *arguments: Any) -> UserObject | None:
        hook = hooks.get(f"get_{kind}")
        return None if hook is None else UserObject(hook(*arguments), hook.name, hook)

    return user_object


def objects_of_arguments(**objects: Any) -> ObjectSource:
    """Return the source of the objects that are arguments of a call, by name."""
    provided = {kind: value for kind, value in objects.items() if value is not None or kind not in _OPTIONAL}

    def user_object(kind: str, *_: Any) -> UserObject | None:
        return UserObject(provided[kind], kind) if kind in provided else None

    return user_object
