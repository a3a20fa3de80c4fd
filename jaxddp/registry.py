"""What is built in, by kind and name: a module of the kind's folder adds its own, and no list names it.

    @LOSSES.add("cross_entropy")
    def cross_entropy_of(config: Config) -> Loss: ...

A file that lies in the folder is found. It must be quick to import: what is heavy is imported where it is used. What an
entry is, its protocol, is said beside each registry below; a recipe file's hooks have the same signatures.

An entry that reads keys which others of its kind do not has a dataclass of settings, its second argument: the keys of
their section, with its own defaults. In a config such a key is None until somebody says it; see `jaxddp.choices`.

    @OPTIMIZERS.add("lars", LarsSettings)
    def lars(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation: ...
"""

import ast
import functools
import importlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.wording import choices

Entry = TypeVar("Entry")


class Registry:
    """The entries of one kind, which the modules of `package` add.

    Attributes:
        key: the config key that names an entry.
        hook: the hook of a recipe file that stands for an entry, and may read any setting of the kind.
        has_settings: whether entries may have settings; then the kind is one of `jaxddp.choices.CHOICES`.
    """

    def __init__(self, key: str, package: str, hook: str = "", *, has_settings: bool = False):
        self.key, self.hook, self._package, self.has_settings = key, hook, package, has_settings
        self._entries: dict[str, Any] = {}
        self._settings: dict[str, type | None] = {}
        self._complete = False

    def add(self, name: str, settings: type | None = None) -> Callable[[Entry], Entry]:
        """A decorator that keeps what it decorates under a name, with the dataclass of its settings.

        Raises: ValueError; the name is taken, or entries of this kind have no settings.
        """
        if settings and not self.has_settings:
            read = "read the keys of a section of the config"
            raise ValueError(f"{self.key}: {name!r} is given settings, which this kind does not have; {read}")

        def keep(entry: Entry) -> Entry:
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"{self.key}: {name!r} is added twice, by {self._entries[name]} and {entry}")
            self._settings[name] = settings
            return entry

        return keep

    def get(self, name: str) -> Any:
        """The entry of a name. Raises: InputError; there is none, says the nearest name and all of them."""
        if name not in self._entries:
            self._look(f'"{name}"')
        if name not in self._entries:
            self._look()
        if name not in self._entries:
            raise self._unknown(name, self._entries)
        return self._entries[name]

    def settings(self, name: str) -> type | None:
        """The dataclass of an entry's settings; None where it has none. Raises: as `get`."""
        self.get(name)
        return self._settings[name]

    def keys_read(self) -> dict[str, frozenset[str]]:
        """The keys that each entry has settings for, by its name, and nothing is imported for it."""
        told = {name: keys for folder in self._folders() for name, keys in _added_in(folder) if name is not None}
        of_entries = {name: kind and [field.name for field in fields(kind)] for name, kind in self._settings.items()}
        return told | {name: frozenset(keys or ()) for name, keys in of_entries.items()}

    def readers(self) -> dict[str, list[str]]:
        """The keys that only some entries read, such as "optimizer.beta2", and the names of these entries."""
        found: dict[str, list[str]] = {}
        for name, keys in sorted(self.keys_read().items()):
            for key in sorted(keys):
                found.setdefault(f"{self.key.partition('.')[0]}.{key}", []).append(name)
        return found

    def unread(self, name: Any) -> dict[str, list[str]]:
        """Those of `readers` that an entry does not read; empty for an unknown name."""
        known = name in self.keys_read()
        return {key: names for key, names in self.readers().items() if known and name not in names}

    def check(self, name: str) -> None:
        """See that there may be such a name, and import nothing. Raises: as `get`; no module's source has the name."""
        sources = [source for folder in self._folders() for source in _sources(folder).values()]
        if name in self._entries or any(f'"{name}"' in source for source in sources):
            return
        told = [each for folder in self._folders() for each, _ in _added_in(folder)]
        if None not in told:
            raise self._unknown(name, {each for each in told if each is not None})

    def _unknown(self, name: str, known: Iterable[str]) -> InputError:
        return InputError(Key(self.key, name), " is unknown", advice=choices(str(name), known))

    def _folders(self) -> Iterable[str]:
        return importlib.import_module(self._package).__path__

    def names(self) -> list[str]:
        """All names, sorted."""
        self._look()
        return sorted(self._entries)

    def _look(self, written: str = "") -> None:
        """Import the modules in whose source something is written, or all."""
        if self._complete:
            return
        sources = [each for folder in self._folders() for each in _sources(folder).items()]
        for module in (module for module, text in sources if written in text):
            importlib.import_module(f"{self._package}.{module}")
        self._complete = not written


@functools.cache
def _sources(folder: str) -> dict[str, str]:
    """By module."""
    files = (file for file in sorted(Path(folder).glob("*.py")) if file.stem != "__init__")
    return {file.stem: file.read_text("utf-8") for file in files}


@functools.cache
def _added_in(folder: str) -> list[tuple[str | None, frozenset[str]]]:
    """As `_added`, of the modules of a folder."""
    return [each for source in _sources(folder).values() if ".add(" in source for each in _added(ast.parse(source))]


def _added(module: ast.Module) -> Iterator[tuple[str | None, frozenset[str]]]:
    """The names that a module adds to a registry, as its source says them: written out, or keys of a dict that a loop
    goes over; None for a name of another form. With each the fields of its settings, a class of the module."""
    imports = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == __name__]
    registries = {alias.name for node in imports for alias in node.names}
    dicts, loops, classes = {}, {}, {}
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Dict(keys)):
                dicts[name] = [key.value if isinstance(key, ast.Constant) else None for key in keys]
            case ast.For(target=ast.Name(name), iter=ast.Name(over)):
                loops[name] = over
            case ast.ClassDef(name, body=body):
                annotated = (each.target for each in body if isinstance(each, ast.AnnAssign))
                classes[name] = frozenset(target.id for target in annotated if isinstance(target, ast.Name))
    for node in ast.walk(module):
        match node:
            case ast.Call(ast.Attribute(ast.Name(registry), "add"), args=[named, *more]) if registry in registries:
                names: list[Any] = [None]
                if isinstance(named, ast.Constant):
                    names = [named.value]
                elif isinstance(named, ast.Name):
                    names = dicts.get(loops.get(named.id), names)
                keys = [classes.get(each.id, frozenset()) for each in more if isinstance(each, ast.Name)]
                yield from ((name, frozenset().union(*keys)) for name in names)


MODELS = Registry("model.name", "jaxddp.models", "get_model", has_settings=True)
"""`(config, num_classes) -> model`: whatever `jaxddp.models.adapt.adapt` takes."""
LOSSES = Registry("loss.name", "jaxddp.losses", "get_loss", has_settings=True)
"""`(config) -> loss`, or `(config, class_weights) -> loss` of one that takes float[K] weights, or None for none; see
`jaxddp.engine.example_loss`."""
METRICS = Registry("eval.metrics", "jaxddp.metrics")
"""`(logits float[B, K], labels int32[B]) -> float[B]`, or a metric over a set; see `jaxddp.engine.set_metrics`."""
OPTIMIZERS = Registry("optimizer.name", "jaxddp.optimizers", "get_optimizer", has_settings=True)
"""`(config, learning_rate) -> optax.GradientTransformation`; `learning_rate` is a function of the step."""
OBJECTIVES = Registry("objective.name", "jaxddp.objectives", "get_objective", has_settings=True)
"""`(config, topology) -> (supervised Objective) -> TrainObjective`; see `jaxddp.engine.step_objective`. The function
that takes the supervised objective may have a method `check(supervised, image, *, unlabelled)`, which is called before
anything is compiled: of the shape and dtype of an image, and whether there is a second source."""
SCHEDULES = Registry("optimizer.schedule", "jaxddp.schedules", "get_optimizer", has_settings=True)
"""`(config, steps) -> optax.Schedule`, for the steps after the warm-up; `steps` is a `schedules.warmup.Steps`."""
AUGMENTATIONS = Registry("data.augment.then", "jaxddp.augment")
"""`(settings: AugmentConfig) -> (key, image) -> image`, of one image; see `jaxddp.augment.preprocess`."""
LOGGERS = Registry("log.to", "jaxddp.training.listeners")
"""`(config, workdir) -> listener`, whose failure ends no run; see `jaxddp.training.events.Listener`."""
FORMATS = Registry("data.path", "jaxddp.data.formats")
"""A `jaxddp.data.format.Format`: whether a place holds such a data set, and how it becomes a source."""


def check_names(config: Any, hooks: Collection[str] = ()) -> None:
    """See that what a config names is there, how weights begin and what its loggers are told, before anything is
    imported that takes seconds.

    Args:
        hooks: the hooks of its recipe file, which stand for what they bring.

    Raises:
        InputError: as `Registry.get`, or as these.
    """
    for registry in (MODELS, LOSSES, OPTIMIZERS, OBJECTIVES, SCHEDULES, METRICS, AUGMENTATIONS, LOGGERS):
        names = attrgetter(registry.key)(config)
        # A get_optimizer is given the learning rate of the schedule.
        if registry.hook not in hooks or registry is SCHEDULES:
            for name in (names,) if isinstance(names, str) else names:
                registry.check(name)
    _ = config.model.initialization
    config.log.check()
