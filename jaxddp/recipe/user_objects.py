"""Objects that a user brings, by the hooks of a recipe file or as arguments of Python: the same to all that follows."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxddp.core.errors import InputError, about, refused
from jaxddp.core.wording import kind_of
from jaxddp.hooks import Hook, check_called


@dataclass(frozen=True)
class UserObject:
    """An object, and who gives it.

    Attributes:
        where: as a message begins: "my.py: get_loss", or "loss".
        hook: that returned it of what it was told, if one did.
    """

    value: Any
    where: str
    hook: Hook | None = None

    def refused(self, advice: str) -> InputError:
        """That it is of another kind."""
        if self.hook is None:
            return refused(self.where, self.value, advice)
        return InputError(f"{self.where}: {kind_of(self.value)} was given; {advice}")

    @contextmanager
    def told(self) -> Iterator[None]:
        """What the block says of the object begins with the hook that gave it; it names an argument by itself."""
        if self.hook is None:
            yield
            return
        with about(self.where):
            yield

    def function(self, of: str, arguments: str) -> Callable[..., Any]:
        """It, where it is a function `of` something that takes these arguments; what that of a hook raises, whenever it
        is called, names the line of its file. Raises: InputError."""
        if isinstance(self.value, type) or not callable(self.value):
            raise self.refused(f"give a function of {of}")
        check_called(self.value, self.where, getattr(self.value, "__name__", type(self.value).__name__), arguments)
        return self.value if self.hook is None else self.hook.guarded(self.value)


_OPTIONAL = frozenset({"augmentation", "initialize", "metrics"})
"""Arguments of which None is nothing."""
ObjectSource = Callable[..., UserObject | None]
"""Of a kind, such as "loss", and of what the hook of that kind is told: what the user gives, None where nothing."""


def objects_of_hooks(hooks: Mapping[str, Hook]) -> ObjectSource:
    """What the hooks of a recipe file return; each is called when its kind is asked for."""

    def give(kind: str, *told: Any) -> UserObject | None:
        hook = hooks.get(f"get_{kind}")
        return None if hook is None else UserObject(hook(*told), hook.name, hook)

    return give


def objects_of_arguments(**objects: Any) -> ObjectSource:
    """What a call in Python gives, by the names of its arguments."""
    given = {kind: value for kind, value in objects.items() if value is not None or kind not in _OPTIONAL}

    def give(kind: str, *_: Any) -> UserObject | None:
        return UserObject(given[kind], kind) if kind in given else None

    return give
