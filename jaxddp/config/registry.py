"""The kinds of choices that a config names, such as its optimizer, and the choices of each kind by name.

A choice is a function, or a dataclass of settings whose method `make` is that function:

    @OPTIMIZERS.add("lars")
    @dataclass(frozen=True)
    class Lars:
        trust_coefficient: Annotated[SomeShare, "At a learning rate of 1, each layer changes by this share."] = 0.001

        def make(self, config, learning_rate, kernels=BY_NAME): ...

The fields are keys of the config's section, with their types, ranges, descriptions, and this choice's defaults. In a
config such a key is None until a file or a command sets it; see `jaxddp.config.choices`. The signature of the function
is documented at each kind below; the hooks of a recipe file have the same signatures.

A kind names its modules, which are imported on first use. The one module of a kind with settings is quick to import, so
that a mistyped name is found without the import of JAX; its choices import heavy libraries in `make`.
"""

import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any, TypeVar, get_type_hints

from jaxddp.config.values import observed_like, unobserved
from jaxddp.core.errors import InputError, Key, Words
from jaxddp.core.wording import choices

T = TypeVar("T")


@dataclass(frozen=True)
class Requires:
    """Marks a key of a config that has an effect only with certain values of another key.

    Attributes:
        key: the other key.
        values: the values that it needs; a list meets the need by containing one of them. If empty, any value except
            None, 0 and False does.
    """

    key: str
    values: tuple[str, ...] = ()

    def is_met(self, value: Any) -> bool:
        """Return whether a value of the other key meets the need."""
        if isinstance(value, list | tuple):
            return bool({*self.values} & {*value})
        return value in self.values if self.values else bool(value)

    def reason_unmet(self, value: Any) -> Words:
        """Return the text that follows the dependent key in a message, for this value of the other key."""
        if isinstance(value, list | tuple):
            return " has no effect without ", " or ".join(self.values), " in ", Key(self.key)
        if self.values:
            return " has no effect with ", Key.plain(self.key, value)
        return " has no effect without ", Key(self.key)


class Registry:
    """The choices of one kind.

    Attributes:
        key: the config key that names a choice, or several.
        section: the section of the config that has the settings of the choices.
        hook: the hook of a recipe file that replaces a choice, and may read any setting of the kind.
        also_read: the keys that choices read besides their settings, and that nothing else reads.
    """

    def __init__(self, key: str, modules: str | Mapping[str, str], hook: str = "", also_read: Collection[str] = ()):
        """Create a kind.

        Args:
            modules: the module that adds all choices, or the module that adds each choice, by the name of the choice.
        """
        self.key, self.section, self.hook, self.also_read = key, key.partition(".")[0], hook, also_read
        self._light, self._modules = (modules, {}) if isinstance(modules, str) else ("", dict(modules))
        self._added: dict[str, Any] = {}

    def add(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds a choice under a name. Raises: ValueError if the name is taken."""

        def added(choice: T) -> T:
            if self._added.setdefault(name, choice) is not choice:
                raise ValueError(f"{self.key}: {name!r} is added twice, by {self._added[name]} and {choice}")
            return choice

        return added

    def names(self) -> list[str]:
        """Return the names of all choices, sorted, without slow imports."""
        if self._light:
            importlib.import_module(self._light)
        return sorted({*self._added, *self._modules})

    def check(self, name: str) -> None:
        """Raise `InputError` if no choice has this name; the message suggests the nearest. No slow imports are made."""
        if name not in (known := self.names()):
            raise InputError(Key(self.key, name), " is unknown", advice=choices(str(name), known))

    def choice(self, name: str) -> Any:
        """Return a choice as it was added. Raises: see `check`."""
        self.check(name)
        if name not in self._added:
            importlib.import_module(self._modules[name])
        return self._added[name]

    def get(self, name: str) -> Any:
        """Return the function of a choice. It takes the settings of a choice from the config. Raises: see `check`."""
        choice = self.choice(name)
        if not hasattr(choice, "make"):
            return choice

        @functools.wraps(choice.make)
        def make(config: Any, *arguments: Any, **more: Any) -> Any:
            if attrgetter(self.key)(config) != name:
                config = config.replace(**{self.section: {self.key.rpartition(".")[2]: name}})
            return self.settings(getattr(config, self.section), choice).make(config, *arguments, **more)

        return make

    def settings(self, section: Any, choice: Any = None) -> Any:
        """Return a choice with the values of a section, and with its own defaults for keys that are None.

        Args:
            choice: the choice; None for the one that the section names.
        """
        values = unobserved(section)
        if choice is None:
            choice = self.choice(getattr(values, self.key.rpartition(".")[2]))
        given = {field.name: value for field in fields(choice) if (value := getattr(values, field.name)) is not None}
        return observed_like(section, choice(**given))

    def keys_read(self, name: str) -> dict[str, Field[Any]]:
        """Return the settings of a choice, by dotted key; none for an unknown name."""
        choice = self._added.get(name) if name in self.names() else None
        return {f"{self.section}.{field.name}": field for field in fields(choice)} if is_dataclass(choice) else {}

    def readers(self) -> dict[str, list[str]]:
        """Return the keys that only some choices read, such as "optimizer.beta2", with the names of these choices."""
        readers: dict[str, list[str]] = {}
        for name in self.names():
            for key in sorted(self.keys_read(name)):
                readers.setdefault(key, []).append(name)
        return readers

    def unread_keys(self, name: str) -> dict[str, list[str]]:
        """Return the keys of `readers` that a choice does not read; none for an unknown name."""
        if name not in self.names():
            return {}
        return {key: names for key, names in self.readers().items() if name not in names}

    def complete(self, section: type[T]) -> type[T]:
        """Add the settings of all choices to the class of a section, with the default None.

        This is a decorator below `@dataclass`.
        """
        for name in self.names():
            choice = self._added[name]
            for key, hint in get_type_hints(choice, include_extras=True).items() if is_dataclass(choice) else ():
                if key not in section.__annotations__:
                    section.__annotations__[key] = hint | None
                    setattr(section, key, None)
        return section


MODELS = Registry("model.name", "jaxddp.models.families", "get_model")
"""`(config, num_classes) -> model`; a model is any object that `jaxddp.models.adapt.adapt` accepts."""
LOSSES = Registry("loss.name", "jaxddp.losses", "get_loss", ("loss.class_weights", "train.label_smoothing"))
"""`(config) -> loss`; see `jaxddp.engine.example_loss`. A loss that supports class weights is made by
`(config, class_weights) -> loss`, where the weights are K floats, or None for no weights."""
OPTIMIZERS = Registry("optimizer.name", "jaxddp.optimizers", "get_optimizer", ("optimizer.weight_decay",))
"""`(config, learning_rate) -> optax.GradientTransformation`; `learning_rate` is a function of the step."""
OBJECTIVES = Registry("objective.name", "jaxddp.objectives.choices", "get_objective")
"""`(config, topology) -> (supervised Objective) -> TrainObjective`; see `jaxddp.engine.objective`. The function
that takes the supervised objective may have a method `check(supervised, image, *, unlabelled)`, which is called before
anything is compiled. `image` is the shape and dtype of an image, and `unlabelled` is whether there is a second,
unlabelled source."""
SCHEDULES = Registry(
    "optimizer.schedule",
    "jaxddp.schedules",
    "get_optimizer",
    ("optimizer.learning_rate", "optimizer.reference_batch", "optimizer.scaling"),
)
"""`(config, steps) -> optax.Schedule`, for the steps after the warm-up; `steps` is a `schedules.Steps`."""
METRICS = Registry(
    "eval.metrics",
    dict.fromkeys(
        ("top1", "top5", "top10", "exact_match", "mean_class_accuracy", "f1", "map", "ece", "confusion"),
        "jaxddp.metrics",
    ),
)
"""`(logits float[B, K], labels int32[B]) -> float[B]`, or a metric over a set; see `jaxddp.engine.objective`."""
AUGMENTATIONS = Registry(
    "data.augment.then", {"grayscale": "jaxddp.augment.color", "vertical_flip": "jaxddp.augment.geometry"}
)
"""`(settings: AugmentConfig) -> (key, image) -> image`, a function of the pixels of one image; see
`jaxddp.augment.preprocess`."""
POLICIES = Registry(
    "data.augment.policy",
    {
        "augmix": "jaxddp.augment.policies",
        "auto_augment_cifar10": "jaxddp.augment.policies",
        "auto_augment_imagenet": "jaxddp.augment.policies",
        "auto_augment_svhn": "jaxddp.augment.policies",
        "three_augment": "jaxddp.augment.policies",
        "trivial_augment": "jaxddp.augment.policies",
    },
)
"""`(settings: AugmentConfig) -> (key, image) -> image`, a function of the pixels of one image, uint8[H, W, C] with 1 or
3 channels; see `jaxddp.augment.preprocess`."""
LOGGERS = Registry(
    "log.to",
    {
        "confusion": "jaxddp.training.listeners.workdir_files",
        "curves": "jaxddp.training.listeners.workdir_files",
        "jsonl": "jaxddp.training.listeners.jsonl",
        "mlflow": "jaxddp.training.listeners.trackers",
        "parameters": "jaxddp.training.listeners.workdir_files",
        "tensorboard": "jaxddp.training.listeners.trackers",
        "wandb": "jaxddp.training.listeners.trackers",
    },
)
"""`(config, workdir) -> listener`; see `jaxddp.training.events.Listener`. If it fails, the run continues."""
FORMATS = Registry(
    "data.path",
    {
        "cifar": "jaxddp.data.formats.cifar",
        "csv listing": "jaxddp.data.formats.csv_listing",
        "folders": "jaxddp.data.formats.folders",
        "hugging face": "jaxddp.data.formats.hugging_face",
        "idx": "jaxddp.data.formats.idx",
        "numpy": "jaxddp.data.formats.numpy_files",
        "packed": "jaxddp.data.formats.packed_records",
        "parquet": "jaxddp.data.formats.parquet_files",
        "solution files": "jaxddp.data.formats.ilsvrc",
        "tfds": "jaxddp.data.formats.tfds",
        "webdataset": "jaxddp.data.formats.webdataset",
    },
)
"""A `jaxddp.data.format.Format`, which recognizes a data set of this format and opens it as a source."""


def check_names(config: Any, hooks: Collection[str] = ()) -> None:
    """Check a config's names of choices, its weight initialization and its loggers, without slow imports.

    Args:
        hooks: names of the recipe's hooks, each of which replaces a choice.

    Raises:
        InputError: a name is unknown, or a value of `model.weight_init` or `log` is invalid.
    """
    for kind in (MODELS, LOSSES, OPTIMIZERS, OBJECTIVES, SCHEDULES, METRICS, AUGMENTATIONS, POLICIES, LOGGERS):
        names = attrgetter(kind.key)(config)
        # A get_optimizer hook receives the learning rate of the schedule.
        if kind.hook not in hooks or kind is SCHEDULES:
            for name in (names,) if isinstance(names, str) else names or ():
                kind.check(name)
    _ = config.model.initialization
    config.log.check()
