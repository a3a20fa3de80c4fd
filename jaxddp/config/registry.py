"""The kinds of choices that a config names, such as its optimizer, and the choices of each kind by name.

A choice is a function, or a dataclass of settings whose method `make` is that function:

    @OPTIMIZERS.add("lars")
    @dataclass(frozen=True)
    class Lars:
        trust_coefficient: SomeShare = 0.001
        '''At a learning rate of 1, each layer changes by this share.'''

        def make(self, config, learning_rate, kernels=BY_NAME): ...

The fields are keys of the config's section, with their types, ranges, docstrings, and this choice's defaults. In a
config such a key is None until it is set, and stands for the default of the choice. Some keys need another key
(`Requires`). A key that is set and has no effect is an error; inherited keys are reset instead (`reset_unread`).

The signature of the function is documented at each kind below; the hooks of a recipe file have the same signatures.
Below, `hooks` are the names of a recipe's hooks, each of which replaces a choice and may read all keys of its kind.

A kind names its modules, which are imported on first use. The one module of a kind with settings is quick to import, so
that a mistyped name is found without the import of JAX; its choices import heavy libraries in `make`.
"""

import functools
import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any, TypeVar, get_type_hints

from jaxddp.config.values import descriptions, keys_of, nested, notes, observed_like, plain, replaced, unobserved
from jaxddp.core.errors import InputError, Key, Words, choices, joined, some

T = TypeVar("T")


@dataclass(frozen=True)
class Requires:
    """Marks a key of a config that has an effect only with certain values of another key."""

    key: str
    values: tuple[str, ...] = ()
    """A list meets the need by containing one of them. If empty, any value except None, 0 and False does."""

    def is_met(self, value: Any) -> bool:
        """Return whether a value of the other key meets the need."""
        values = value if isinstance(value, list | tuple) else [value]
        return any(each in self.values for each in values) if self.values else bool(value)


SectionOfChoices: Any = object
"""The base of a section that has further keys, the settings of choices; see `Registry.complete`."""


class Registry:
    """The choices of one kind, which the key `key` of a config names. Their settings are keys of the same section.

    `hook` is the hook of a recipe file that replaces a choice. `also_read` are the keys that choices read besides their
    settings, and that nothing else reads.
    """

    def __init__(self, key: str, package: str, modules: dict[str, str], hook: str = "", also_read: Sequence[str] = ()):
        """Create a kind from the module of each choice in a package, or from one module that adds all choices."""
        self.key, self.section, self.hook, self.also_read = key, key.partition(".")[0], hook, also_read
        self._package, self._modules = package, modules
        self._added, self._keys = dict[str, Any](), dict[str, Any]()

    def add(self, *names: str) -> Callable[[T], T]:
        """Return a decorator that adds a choice under these names. Raises: ValueError if a name is taken."""

        def added(choice: T) -> T:
            for field in _settings(choice) if self._keys else ():
                if field.name not in self._keys:
                    key = Key(f"{self.section}.{field.name}")
                    raise InputError(f"{names[0]}: ", key, " is no key of a config", advice="make it a constant")
            for name in names:
                before = self._added.setdefault(name, choice)
                # A recipe file may run several times.
                if _origin(before) != _origin(choice):
                    raise ValueError(f"{self.key}: {name!r} is added twice, by {before} and {choice}")
                self._added[name] = choice
            return choice

        return added

    def names(self) -> list[str]:
        """Return the names of all choices, sorted. Neither this method nor `check` makes slow imports."""
        if not self._modules:
            importlib.import_module(self._package)
        return sorted({*self._added, *self._modules})

    def check(self, name: str) -> None:
        """Raise `InputError` if no choice has this name; the message suggests the nearest."""
        if name not in (known := self.names()):
            raise InputError(Key(self.key, name), " is unknown", advice=choices(str(name), known))

    def choice(self, name: str) -> Any:
        """Return a choice as it was added. Raises: see `check`."""
        self.check(name)
        if name not in self._added:
            importlib.import_module(f"{self._package}.{self._modules[name]}")
        return self._added[name]

    def get(self, name: str) -> Any:
        """Return the function of a choice. It takes the settings of a choice from the config. Raises: see `check`."""
        choice = self.choice(name)
        if not hasattr(choice, "make"):
            return choice

        @functools.wraps(choice.make)
        def make(config: Any, *arguments: Any, **more: Any) -> Any:
            if attrgetter(self.key)(config) != name:
                config = config.replace(**{self.key: name})
            return self.settings(getattr(config, self.section)).make(config, *arguments, **more)

        return make

    def settings(self, section: Any) -> Any:
        """Return the choice that a section names with the section's values, or its own defaults for keys of None."""
        values = unobserved(section)
        choice = self.choice(getattr(values, self.key.rpartition(".")[2]))
        given = {field.name: value for field in fields(choice) if (value := getattr(values, field.name)) is not None}
        return observed_like(section, choice(**given))

    def keys_read(self, name: str) -> dict[str, Field[Any]]:
        """Return the settings of a choice, by dotted key; none for an unknown name."""
        if name not in self._added:
            # It imports the module of a kind with settings, which adds all choices.
            self.names()
        return {f"{self.section}.{field.name}": field for field in _settings(self._added.get(name))}

    def readers(self) -> dict[str, list[str]]:
        """Return the keys that only some choices read, such as "optimizer.beta2", with the names of these choices."""
        readers: dict[str, list[str]] = {}
        for name in self.names():
            for key in sorted(self.keys_read(name)):
                readers.setdefault(key, []).append(name)
        return readers

    def complete(self, section: type[T]) -> type[T]:
        """Add the settings of all choices to the class of a section, below `@dataclass`, with the default None."""
        for name in self.names():
            choice = self._added[name]
            for key, hint in get_type_hints(choice, include_extras=True).items() if is_dataclass(choice) else ():
                if key not in section.__annotations__:
                    section.__annotations__[key] = hint | None
                    setattr(section, key, None)
        self._keys = section.__annotations__
        return section


def _settings(choice: Any) -> tuple[Field[Any], ...]:
    return fields(choice) if is_dataclass(choice) else ()


def _origin(choice: Any) -> tuple[Any, Any]:
    """Return the module and the name of a function or a class, or of an object's class."""
    return choice.__module__, getattr(choice, "__qualname__", type(choice).__qualname__)


MODELS = Registry("model.name", "jaxddp.models.families", {}, "get_model")
"""`(config, num_classes) -> model`; a model is any object that `jaxddp.models.adapt.adapt` accepts."""
LOSSES = Registry("loss.name", "jaxddp.losses", {}, "get_loss", ("loss.class_weights", "train.label_smoothing"))
"""`(config) -> loss`; see `jaxddp.engine.objective`. A loss that supports class weights is made by
`(config, class_weights) -> loss`, where the weights are K floats, or None for no weights."""
OPTIMIZERS = Registry("optimizer.name", "jaxddp.optimizers", {}, "get_optimizer", ("optimizer.weight_decay",))
"""`(config, learning_rate) -> optax.GradientTransformation`; `learning_rate` is a function of the step."""
OBJECTIVES = Registry("objective.name", "jaxddp.objectives.choices", {}, "get_objective")
"""`(config, topology) -> (supervised Objective) -> TrainObjective`; see `jaxddp.engine.objective`. The function
that takes the supervised objective may have a method `check(supervised, image, *, unlabelled)`, which is called before
anything is compiled. `image` is the shape and dtype of an image, and `unlabelled` is whether there is a second,
unlabelled source. An objective without labels has `network(model, image_shape)`, which returns the network as it is
trained, `metrics(labels)`, and `num_references`, the number of training images to which a validation compares."""
_OF_RATE = ("optimizer.learning_rate", "optimizer.reference_batch", "optimizer.scaling")
SCHEDULES = Registry("optimizer.schedule", "jaxddp.schedules", {}, "get_optimizer", _OF_RATE)
"""`(config, steps) -> optax.Schedule`, for the steps after the warm-up; `steps` is a `schedules.Steps`."""
_METRICS = ("top1", "top5", "top10", "exact_match", "mean_class_accuracy", "f1", "map", "ece", "confusion", "mae")
_METRICS += ("r2", "kappa")
METRICS = Registry("eval.metrics", "jaxddp", dict.fromkeys(_METRICS, "metrics"))
"""`(logits float[B, K], labels int32[B]) -> float[B]`, or a metric over a set; see `jaxddp.engine.objective`."""
_AUGMENTATIONS = {"area_crop": "geometry", "grayscale": "operations", "vertical_flip": "geometry"}
AUGMENTATIONS = Registry("data.augment.then", "jaxddp.augment", _AUGMENTATIONS)
"""`(settings: AugmentConfig) -> (key, image) -> image`, a function of the pixels of one image; see
`jaxddp.augment.preprocess`."""
_POLICIES = [f"auto_augment_{name}" for name in ("cifar10", "imagenet", "svhn")]
_POLICIES += ["augmix", "three_augment", "trivial_augment"]
POLICIES = Registry("data.augment.policy", "jaxddp.augment", dict.fromkeys(_POLICIES, "policies"))
"""`(settings: AugmentConfig) -> (key, image) -> image`, a function of the pixels of one image, uint8[H, W, C] with 1 or
3 channels; see `jaxddp.augment.preprocess`."""
_LOGGERS: dict[str, str] = dict.fromkeys(("confusion", "curves", "jsonl", "parameters"), "jsonl")
_LOGGERS |= dict.fromkeys(("mlflow", "tensorboard", "wandb"), "trackers")
LOGGERS = Registry("log.to", "jaxddp.training.listeners", _LOGGERS)
"""`(config, workdir) -> listener`; see `jaxddp.training.events.Listener`. If it fails, the run continues."""
_FORMATS = ("cifar", "csv_listing", "folders", "hugging_face", "idx", "ilsvrc")
_FORMATS += ("numpy_files", "packed_records", "parquet_files", "tfds", "webdataset")
FORMATS = Registry("data.path", "jaxddp.data.formats", {name: name for name in _FORMATS})
"""A `jaxddp.data.format.Format`, which recognizes a data set of this format and opens it as a source."""

CHOICES = (MODELS, LOSSES, OBJECTIVES, OPTIMIZERS, SCHEDULES)
"""The kinds whose choices can have settings."""
NAMES = tuple(kind.key for kind in CHOICES)
"""The keys that name a choice."""
LISTED = {kind.key: kind for kind in (MODELS, OPTIMIZERS, SCHEDULES, METRICS, AUGMENTATIONS, POLICIES)}
"""The kinds by the keys whose choices `--help` lists, because the docstrings of the keys do not."""


def check_names(config: Any, hooks: Collection[str] = ()) -> None:
    """Raise `InputError` if a name of a choice in a config is unknown. No slow imports are made."""
    for kind in (*CHOICES, METRICS, AUGMENTATIONS, POLICIES, LOGGERS):
        names = attrgetter(kind.key)(config)
        # A get_optimizer hook receives the learning rate of the schedule.
        if kind.hook not in hooks or kind is SCHEDULES:
            for name in [names] if isinstance(names, str) else names or []:
                kind.check(name)


@functools.cache
def needs(tree: type) -> Mapping[str, Requires]:
    """Return what each key of a config needs, for the keys that need another key."""
    return {key: need for key, hint in keys_of(tree) for need in notes(hint, Requires)}


def description(key: str, section: type = object) -> str:
    """Return the docstring of a key in its section, or else in the first choice that has one."""
    name = key.rpartition(".")[2]
    readers = [kind.choice(reader) for kind in CHOICES for reader in kind.readers().get(key, ())]
    return next((texts[name] for texts in map(descriptions, (section, *readers)) if name in texts), "")


def keys_of_choices(names: Collection[str] = NAMES) -> set[str]:
    """Return the keys that only some choices read, such as "optimizer.beta2", of the kinds that these keys name."""
    return {key for kind in CHOICES if kind.key in names for key in kind.readers()}


def unmet(tree: type, settings: Mapping[str, Any], hooks: Collection[str] = ()) -> dict[str, Requires]:
    """Return the keys that have no effect with the settings of a config, a result of `resolved`, with what they need.

    A key of choices needs a choice that reads it; an unknown name is taken to read all keys. Keys may be absent.
    """
    found = {key: need for key, need in needs(tree).items() if need.key in settings}
    found = {key: need for key, need in found.items() if not need.is_met(settings[need.key])}
    for kind in CHOICES:
        if (name := settings.get(kind.key)) in kind.names():
            readers = kind.readers().items()
            found |= {key: Requires(kind.key, tuple(names)) for key, names in readers if name not in names}
    by_hooks = keys_of_choices([kind.key for kind in CHOICES if kind.hook in hooks])
    return {key: need for key, need in found.items() if key not in by_hooks}


@functools.cache
def _defaults(tree: type) -> Mapping[str, Any]:
    return tree().flat()


def without_effect(config: Any, hooks: Collection[str] = ()) -> dict[str, Requires]:
    """Return the keys of `unmet` that have another value than the default."""
    values, default = config.flat(), _defaults(type(config))
    lost = unmet(type(config), resolved(values), hooks)
    # Without a default, a False or 0 needs no other key, only a choice that reads it.
    is_set = {key: values[key] or default[key] is not None or need.key in NAMES for key, need in lost.items()}
    return {key: need for key, need in lost.items() if is_set[key] and values[key] != default[key]}


def reset_unread(config: Any, set_keys: Collection[str], hooks: Collection[str] = ()) -> Any:
    """Reset the keys that lose their effect because one of `set_keys`, such as `optimizer.name`, was set.

    `set_keys`, which one file, call or command sets, are not reset.
    """
    lost = [key for key, need in without_effect(config, hooks).items() if key not in set_keys and need.key in set_keys]
    return replaced(config, nested({key: _defaults(type(config))[key] for key in lost}))


def check_read(config: Any, hooks: Collection[str] = (), advise: Callable[[Sequence[str]], str] | None = None) -> None:
    """Check that every key that is set has an effect: its choice reads it, and the key that it needs is set.

    Raises: InputError, which names the other keys, and the keys that decide their effect. `advise` returns the advice.
    """
    problems, values = dict[str, Words](), config.flat()
    for key, need in without_effect(config, hooks).items():
        why: Words = " has no effect without ", f"{' or '.join(need.values)} in " if need.values else "", Key(need.key)
        if need.key in NAMES:
            why = " is read by ", Key(need.key), f"={some(need.values, 8)}, and not by {values[need.key]}"
        problems[key] = Key(key, values[key]), why
    if problems:
        advice = advise([*problems]) if advise else f"leave {'it' if len(problems) == 1 else 'them'} out"
        raise InputError(*joined("; ", problems.values()), advice=advice)


def resolved(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a config, by dotted key, with the defaults of its choices in place of None."""
    values = dict(settings)
    for kind in CHOICES:
        own = kind.keys_read(str(values.get(kind.key))).items()
        values |= {key: plain(field.default) for key, field in own if values.get(key) is None}
    return values


def effective_settings(tree: type, settings: Mapping[str, Any], hooks: Collection[str] = ()) -> dict[str, Any]:
    """Return the result of `resolved` without the keys that have no effect; see `unmet`."""
    values = resolved(settings)
    lost = unmet(tree, values, hooks)
    return {key: value for key, value in values.items() if key not in lost}


def with_defaults(config: Any) -> Any:
    """Return a config with the defaults of the choices that it names in place of None, as hooks receive it."""
    return replaced(config, nested(resolved(config.flat())))
