"""What is built in, by kind and name: a module of the kind's folder adds its own, and no list names it.

    @LOSSES.add("cross_entropy")
    def cross_entropy_of(config: Config) -> Loss: ...

A file that lies in the folder is found. It must be quick to import: what is heavy is imported where it is used. What an
entry is, its protocol, is said beside each registry below; a recipe file's hooks have the same signatures.
"""

import ast
import importlib
import pkgutil
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from jaxddp.errors import InputError
from jaxddp.wording import choices

Entry = TypeVar("Entry")


class Registry:
    """The entries of one kind, which the modules of `package` add; `key` is the config key of their names."""

    def __init__(self, key: str, package: str):
        self._key, self._package = key, package
        self._entries: dict[str, Any] = {}
        self._complete = False

    def add(self, name: str) -> Callable[[Entry], Entry]:
        """A decorator that keeps what it decorates under a name."""

        def keep(entry: Entry) -> Entry:
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"{self._key}: {name!r} is added twice, by {self._entries[name]} and {entry}")
            return entry

        return keep

    def get(self, name: str) -> Any:
        """The entry of a name. Raises: InputError; there is none, says the nearest name and all of them."""
        if name not in self._entries:
            self._look()
        if name not in self._entries:
            raise self._unknown(name, self._entries)
        return self._entries[name]

    def check(self, name: str) -> None:
        """See that there may be such a name, and import nothing. Raises: as `get`; no module's source has the name."""
        folders = importlib.import_module(self._package).__path__
        sources = [file.read_text("utf-8") for folder in folders for file in sorted(Path(folder).glob("*.py"))]
        if name in self._entries or any(f'"{name}"' in source for source in sources):
            return
        told = [each for source in sources if ".add(" in source for each in _added(ast.parse(source))]
        if None not in told:
            raise self._unknown(name, {each for each in told if each is not None})

    def _unknown(self, name: str, known: Iterable[str]) -> InputError:
        return InputError(f"{self._key}={name!r} is unknown; {choices(str(name), known)}")

    def names(self) -> list[str]:
        """All names, sorted."""
        self._look()
        return sorted(self._entries)

    def _look(self) -> None:
        if self._complete:
            return
        for module in pkgutil.iter_modules(importlib.import_module(self._package).__path__):
            importlib.import_module(f"{self._package}.{module.name}")
        self._complete = True


def _added(module: ast.Module) -> Iterator[Any]:
    """The names that a module adds to a registry, as its source says them: written out, or keys of a dict that a loop
    goes over. None for a name of another form."""
    imports = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == __name__]
    registries = {alias.name for node in imports for alias in node.names}
    dicts, loops = {}, {}
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Dict(keys)):
                dicts[name] = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            case ast.For(target=ast.Name(name), iter=ast.Name(over)):
                loops[name] = over
    for node in ast.walk(module):
        match node:
            case ast.Call(ast.Attribute(ast.Name(registry), "add"), args=[ast.Constant(name)]) if (
                registry in registries
            ):
                yield name
            case ast.Call(ast.Attribute(ast.Name(registry), "add"), args=[ast.Name(name)]) if registry in registries:
                yield from dicts.get(loops.get(name), [None])
            case ast.Call(ast.Attribute(ast.Name(registry), "add")) if registry in registries:
                yield None


MODELS = Registry("model.name", "jaxddp.models")
"""`(config, num_classes) -> model`: whatever `jaxddp.models.adapt.adapt` takes."""
LOSSES = Registry("loss.name", "jaxddp.losses")
"""`(config) -> loss`, or `(config, class_weights) -> loss` of one that takes float[K] weights, or None for none; see
`jaxddp.engine.loss`."""
METRICS = Registry("eval.metrics", "jaxddp.metrics")
"""`(logits float[B, K], labels int32[B]) -> float[B]`, or a metric over a set; see `jaxddp.engine.set_metrics`."""
OPTIMIZERS = Registry("optimizer.name", "jaxddp.optimizers")
"""`(config, learning_rate) -> optax.GradientTransformation`; `learning_rate` is a function of the step. What the config
leaves to the optimizer is None; `config.optimizer.numbers` has a number for it."""
OBJECTIVES = Registry("objective.name", "jaxddp.objectives")
"""`(config, topology) -> (supervised Objective) -> TrainObjective`; see `jaxddp.engine.objective`. The function that
takes the supervised objective may have a method `check(supervised, image, *, unlabelled)`, which is called before
anything is compiled: of the shape and dtype of an image, and whether there is a second source."""
SCHEDULES = Registry("optimizer.schedule", "jaxddp.schedules")
"""`(config, steps) -> optax.Schedule`, for the steps after the warm-up; `steps` is a `schedules.warmup.Steps`."""
AUGMENTATIONS = Registry("data.augment.then", "jaxddp.augment")
"""`(settings: AugmentConfig) -> (key, image) -> image`, of one image; see `jaxddp.augment.preprocess`."""
LOGGERS = Registry("log.to", "jaxddp.training.listeners")
"""`(config, workdir) -> listener`, whose failure ends no run; see `jaxddp.training.events.Listener`."""
FORMATS = Registry("data.path", "jaxddp.data.formats")
"""A `jaxddp.data.format.Format`: whether a place holds such a data set, and how it becomes a source."""


def check_names(config: Any, hooks: Collection[str] = ()) -> None:
    """See that what a config names is there, and how weights begin and what loggers record, before anything is imported
    that takes seconds.

    Args:
        hooks: the hooks of its recipe file, which stand for what they bring.

    Raises:
        InputError: as `Registry.get`, or as these.
    """
    named = (
        ("get_model", MODELS, (config.model.name,)),
        ("get_loss", LOSSES, (config.loss.name,)),
        ("get_optimizer", OPTIMIZERS, (config.optimizer.name,)),
        ("get_objective", OBJECTIVES, (config.objective.name,)),
        ("", SCHEDULES, (config.optimizer.schedule,)),
        ("", METRICS, config.eval.metrics),
        ("", AUGMENTATIONS, config.data.augment.then),
        ("", LOGGERS, config.log.to),
    )
    for hook, registry, names in named:
        for name in names if hook not in hooks else ():
            registry.check(name)
    _ = config.model.initialization, config.log.recorded
