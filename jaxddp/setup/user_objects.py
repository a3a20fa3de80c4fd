"""Objects that a user provides, by hooks of a recipe file or by arguments of the Python API."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import optax

from jaxddp.config import Config, ShownImages
from jaxddp.config.values import checked
from jaxddp.core.errors import InputError, Key, about, refused
from jaxddp.core.wording import kind_of
from jaxddp.engine.parts.guard import GradientNorm
from jaxddp.engine.parts.part import Part
from jaxddp.recipe.hooks import Hook, check_parameters
from jaxddp.training.events import METHODS


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


_ABSENT = object()


def check_optimizer(optimizer: Any, where: str, config: Config) -> optax.GradientTransformation:
    """Check that an object has the two functions of an optax optimizer, and return it.

    Raises: InputError if a function is missing, or the config sets weight decays of layers, which an optimizer object
    does not use.
    """
    functions = (getattr(optimizer, name, None) for name in ("init", "update"))
    if isinstance(optimizer, type) or not all(map(callable, functions)):
        raise InputError(f"{where}: {kind_of(optimizer)} was given; give an optax optimizer, such as optax.sgd(0.1)")
    check_parameters(optimizer.init, where, "init", "params")
    check_parameters(optimizer.update, where, "update", "updates, state, params", more=True)
    for layer, decay in config.optimizer.layer_settings.decays.items():
        raise InputError(
            Key("optimizer.groups"),
            f": {layer}:decay={decay:g}: {where} gives an object, which has its own decay",
            advice="leave it out",
        )
    return optimizer


def check_parts(parts: Any, where: str, configured: tuple[Part, ...] = ()) -> tuple[Part, ...]:
    """Return the user's parts of the step together with the config's parts, in the order in which they run.

    Gradient clipping comes first. Parts that decide whether a step is skipped, such as `LossScale`, come last, because
    the guard of a skipped step restores the arrays of the parts that run before it.

    Raises: InputError if an object is no part, or two parts have the same name.
    """
    user_parts = list(parts) if isinstance(parts, list | tuple) else [parts]
    if wrong := [part for part in user_parts if not isinstance(part, Part)]:
        raise InputError(f"{where}: {kind_of(wrong[0])} was given; give a list of jaxddp.engine.parts.part.Part")
    names = [part.name for part in (*user_parts, *configured)]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{where}: two parts are called {duplicates[0]!r}; give each another name")
    ordinary, judging = ([part for part in user_parts if part.judges is judges] for judges in (False, True))
    first, others = ([part for part in configured if isinstance(part, GradientNorm) is norm] for norm in (True, False))
    return (*first, *ordinary, *others, *judging)


def check_listeners(listeners: Any, where: str) -> list[Any]:
    """Check that each object has a listener's method, and return the objects. Raises: InputError."""
    if not isinstance(listeners, Sequence) or isinstance(listeners, str):
        raise InputError(f"{where}: {kind_of(listeners)} was given; give a list of listeners")
    for listener in listeners:
        if isinstance(listener, type) or not any(callable(getattr(listener, moment, None)) for moment in METHODS):
            raise InputError(f"{where}: {kind_of(listener)} has none of a listener's methods ({', '.join(METHODS)})")
        for moment, arguments in METHODS.items():
            name, method = f"{type(listener).__name__}.{moment}", getattr(listener, moment, _ABSENT)
            if method is _ABSENT:
                continue
            if not callable(method):
                raise InputError(f"{where}: {name} is {kind_of(method)}; define a method {name}(self, {arguments})")
            check_parameters(method, where, name, arguments)
        checked(getattr(listener, "wants_predictions", 0), ShownImages, f"{where}: wants_predictions")
    return list(listeners)
