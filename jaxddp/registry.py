"""Registries of the built-in models, losses, optimizers and so on, by name.

Each kind of entry has a folder. The modules in it register their entries with a decorator:

    @LOSSES.add("cross_entropy")
    def cross_entropy_of(config: Config) -> Loss: ...

There is no other list: every file in the folder is read. A module must be quick to import, so it imports heavy
libraries where it uses them. The signature of the entries is documented at each registry below; the hooks of a recipe
file have the same signatures.

Some keys of a config section are read by some entries only. An entry that reads such keys passes a dataclass of
settings as the decorator's second argument. Its fields are these keys, with the entry's defaults. In a config such a
key is None until it is set; see `jaxddp.choices`.

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

from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import choices

Entry = TypeVar("Entry")


class Registry:
    """The entries of one kind, which the modules of `package` register.

    Attributes:
        key: the config key that names an entry.
        hook: the hook of a recipe file that replaces an entry, and may read any setting of the kind.
        has_settings: whether entries can have settings; then the registry is in `jaxddp.choices.CHOICES`.
    """

    def __init__(self, key: str, package: str, hook: str = "", *, has_settings: bool = False):
        self.key, self.hook, self._package, self.has_settings = key, hook, package, has_settings
        self._entries: dict[str, Any] = {}
        self._settings: dict[str, type | None] = {}
        self._complete = False

    def add(self, name: str, settings: type | None = None) -> Callable[[Entry], Entry]:
        """Return a decorator that registers an entry under a name, with the dataclass of its settings.

        Raises: ValueError if the name is taken, or entries of this kind have no settings.
        """
        if settings and not self.has_settings:
            read = "read the keys of a section of the config"
            raise ValueError(f"{self.key}: {name!r} is given settings, which this kind does not have; {read}")

        def register(entry: Entry) -> Entry:
            if self._entries.setdefault(name, entry) is not entry:
                raise ValueError(f"{self.key}: {name!r} is added twice, by {self._entries[name]} and {entry}")
            self._settings[name] = settings
            return entry

        return register

    def get(self, name: str) -> Any:
        """Return the entry of a name. Raises: InputError if the name is unknown (the message suggests the nearest)."""
        if name not in self._entries:
            self._import_modules(f'"{name}"')
        if name not in self._entries:
            self._import_modules()
        if name not in self._entries:
            raise self._unknown(name, self._entries)
        return self._entries[name]

    def settings(self, name: str) -> type | None:
        """Return the dataclass of an entry's settings, or None. Raises: see `get`."""
        self.get(name)
        return self._settings[name]

    def keys_read(self) -> dict[str, frozenset[str]]:
        """Return the keys that each entry has settings for, by its name, without importing the entries."""
        declared = {name: keys for folder in self._folders() for name, keys in _names_in(folder)}
        of_entries = {name: kind and [field.name for field in fields(kind)] for name, kind in self._settings.items()}
        return declared | {name: frozenset(keys or ()) for name, keys in of_entries.items()}

    def readers(self) -> dict[str, list[str]]:
        """Return the keys that only some entries read, such as "optimizer.beta2", with the names of these entries."""
        readers: dict[str, list[str]] = {}
        for name, keys in sorted(self.keys_read().items()):
            for key in sorted(keys):
                readers.setdefault(f"{self.key.partition('.')[0]}.{key}", []).append(name)
        return readers

    def unread_keys(self, name: Any) -> dict[str, list[str]]:
        """Return the keys of `readers` that an entry does not read. The result is empty for an unknown name."""
        is_known = name in self.keys_read()
        return {key: names for key, names in self.readers().items() if is_known and name not in names}

    def check(self, name: str) -> None:
        """Check a name without importing the modules. Raises: InputError if no module registers the name."""
        declared = {other for folder in self._folders() for other, _ in _names_in(folder)}
        if name not in declared | self._entries.keys():
            raise self._unknown(name, declared)

    def _unknown(self, name: str, known: Iterable[str]) -> InputError:
        return InputError(Key(self.key, name), " is unknown", advice=choices(str(name), known))

    def _folders(self) -> Iterable[str]:
        return importlib.import_module(self._package).__path__

    def names(self) -> list[str]:
        """Return all names, sorted. All modules are imported."""
        self._import_modules()
        return sorted(self._entries)

    def _import_modules(self, text: str = "") -> None:
        """Import the modules whose source contains `text`, which is every module if the text is empty."""
        if self._complete:
            return
        sources = [each for folder in self._folders() for each in _sources(folder).items()]
        for module in (module for module, source in sources if text in source):
            importlib.import_module(f"{self._package}.{module}")
        self._complete = not text


@functools.cache
def _sources(folder: str) -> dict[str, str]:
    """Return the source of each module of a folder, by its name."""
    files = (file for file in sorted(Path(folder).glob("*.py")) if file.stem != "__init__")
    return {file.stem: file.read_text("utf-8") for file in files}


@functools.cache
def _names_in(folder: str) -> list[tuple[str, frozenset[str]]]:
    """Return the names that the modules of a folder register, and the fields of their settings."""
    return [item for source in _sources(folder).values() if ".add(" in source for item in _names_of(ast.parse(source))]


def _names_of(module: ast.Module) -> Iterator[tuple[str, frozenset[str]]]:
    """Find the names that a module registers, with the fields of their settings, in its source.

    A name is a literal, or a literal key of a dict that a loop iterates over. The settings are a class of the same
    module, and so are its bases with fields.

    Raises: ValueError for another expression in place of a name.
    """
    imports = [node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == __name__]
    registries = {alias.name for node in imports for alias in node.names}
    dicts, loops, classes = {}, {}, {}
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(name)], value=ast.Dict(keys)):
                dicts[name] = [getattr(key, "value", None) for key in keys]
            case ast.For(target=ast.Name(name), iter=ast.Name(over)):
                loops[name] = over
            case ast.ClassDef(name, bases, body=body):
                annotated = (each.target for each in body if isinstance(each, ast.AnnAssign))
                own = frozenset(target.id for target in annotated if isinstance(target, ast.Name))
                classes[name] = own.union(*(classes.get(base.id, ()) for base in bases if isinstance(base, ast.Name)))
    for node in ast.walk(module):
        match node:
            case ast.Call(ast.Attribute(ast.Name(registry), "add"), args=[name_node, *more]) if registry in registries:
                of_loop = dicts.get(loops.get(name_node.id), [None]) if isinstance(name_node, ast.Name) else [None]
                names: list[Any] = [name_node.value] if isinstance(name_node, ast.Constant) else of_loop
                if not all(isinstance(name, str) for name in names):
                    raise ValueError(f"line {name_node.lineno}: an entry's name is no literal, and no key of a dict")
                keys = [classes.get(each.id, frozenset()) for each in more if isinstance(each, ast.Name)]
                yield from ((name, frozenset().union(*keys)) for name in names)


MODELS = Registry("model.name", "jaxddp.models", "get_model", has_settings=True)
"""`(config, num_classes) -> model`; a model is any object that `jaxddp.models.adapt.adapt` accepts."""
LOSSES = Registry("loss.name", "jaxddp.losses", "get_loss", has_settings=True)
"""`(config) -> loss`; see `jaxddp.engine.example_loss`. A loss that supports class weights is made by
`(config, class_weights) -> loss`, where the weights are K floats, or None for no weights."""
METRICS = Registry("eval.metrics", "jaxddp.metrics")
"""`(logits float[B, K], labels int32[B]) -> float[B]`, or a metric over a set; see `jaxddp.engine.objective`."""
OPTIMIZERS = Registry("optimizer.name", "jaxddp.optimizers", "get_optimizer", has_settings=True)
"""`(config, learning_rate) -> optax.GradientTransformation`; `learning_rate` is a function of the step."""
OBJECTIVES = Registry("objective.name", "jaxddp.objectives", "get_objective", has_settings=True)
"""`(config, topology) -> (supervised Objective) -> TrainObjective`; see `jaxddp.engine.objective`. The function
that takes the supervised objective may have a method `check(supervised, image, *, unlabelled)`, which is called before
anything is compiled. `image` is the shape and dtype of an image, and `unlabelled` is whether there is a second,
unlabelled source."""
SCHEDULES = Registry("optimizer.schedule", "jaxddp.schedules", "get_optimizer", has_settings=True)
"""`(config, steps) -> optax.Schedule`, for the steps after the warm-up; `steps` is a `schedules.warmup.Steps`."""
AUGMENTATIONS = Registry("data.augment.then", "jaxddp.augment")
"""`(settings: AugmentConfig) -> (key, image) -> image`, a function of the pixels of one image; see
`jaxddp.augment.preprocess`."""
POLICIES = Registry("data.augment.policy", "jaxddp.augment.policies")
"""`(settings: AugmentConfig) -> (key, image) -> image`, a function of the pixels of one image, uint8[H, W, C] with 1 or
3 channels; see `jaxddp.augment.preprocess`."""
LOGGERS = Registry("log.to", "jaxddp.training.listeners")
"""`(config, workdir) -> listener`; see `jaxddp.training.events.Listener`. If it fails, the run continues."""
FORMATS = Registry("data.path", "jaxddp.data.formats")
"""A `jaxddp.data.format.Format`, which recognizes a data set of this format and opens it as a source."""


def check_names(config: Any, hooks: Collection[str] = ()) -> None:
    """Check a config's names of entries, its weight initialization and its loggers, without slow imports.

    Args:
        hooks: names of the recipe's hooks, each of which replaces a named entry.

    Raises:
        InputError: a name is unknown, or a value of `model.weight_init` or `log` is invalid.
    """
    for registry in (MODELS, LOSSES, OPTIMIZERS, OBJECTIVES, SCHEDULES, METRICS, AUGMENTATIONS, POLICIES, LOGGERS):
        names = attrgetter(registry.key)(config)
        # A get_optimizer hook receives the learning rate of the schedule.
        if registry.hook not in hooks or registry is SCHEDULES:
            for name in (names,) if isinstance(names, str) else names or ():
                registry.check(name)
    _ = config.model.initialization
    config.log.check()
