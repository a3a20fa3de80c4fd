"""Recipe files: Python files that define `get_config()`, and optionally hooks that return the user's objects.

    def get_config():
        return load("cifar10").replace(train={"duration": "10 epochs"})

    def get_model(config, num_classes):
        return MyNetwork(num_classes)

A recipe inherits the hooks of a recipe that it loads, and can import modules from its folder. A run keeps a copy of all
these files, except of recipes that are loaded by name (`load("cifar10")`), so that its work directory is enough to
restore the recipe. A recipe file can also be YAML or JSON (`jaxddp.recipe.text`). Its `base` is loaded as by `load`.
"""

import functools
import hashlib
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jaxddp.core.files as files
import jaxddp.recipe.text as text
from jaxddp.config.registry import CHOICES, SCHEDULES, Registry, keys_of_choices, with_defaults
from jaxddp.config.tree import Config
from jaxddp.config.values import check_values, differing, observed
from jaxddp.core.errors import InputError, about, choices, show, with_keys_of_file
from jaxddp.core.ranges import Count, Share
from jaxddp.core.user_code import check_parameters, errors_name_line
from jaxddp.recipe.sources import CONFIG_FILE, TEXT_FILES, is_built_in, is_name, modules_in, recipe_path, run_as_module

COPY_FOLDER = "recipe"
"""The folder in a work directory that holds a copy of the recipe's files."""
RUN_ID = "run_id"
"""The key of config.json that holds the random id of the run."""
BESIDE_CONFIG = (RUN_ID, "fingerprint", "recipe", "objects")
"""The keys of config.json that are not keys of the config."""
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
RENAME = "rename"
"""The name of a recipe's function or table for the names in a file of weights; see `jaxddp.weights.foreign`."""
REFERENCE = "reference"
REFERENCE_FILE = f"{REFERENCE}.json"
"""The file in a work directory that holds the recipe's reference."""
CALLED = "called"
"""The entry of `Hook.read` for a call of the function among a hook's arguments."""


@dataclass(frozen=True)
class Hook:
    """A hook of a recipe file. An error in it becomes an `InputError` that names the file and the line.

    In the config that the hook receives, a key that is None has the default of the choice that the config names.
    """

    path: Path
    function: Callable[..., Any]
    read: set[str] = field(default_factory=set, compare=False, repr=False)
    """The keys of the config that the hook and the functions that it returned have read so far, and `CALLED` if they
    called the function among the hook's arguments, such as the schedule of `get_optimizer`."""

    def __call__(self, config: Any, *arguments: Any) -> Any:
        return self.guarded(self.function)(observed(with_defaults(config), self.read), *map(self._noted, arguments))

    def _noted(self, argument: Any) -> Any:
        """Return an argument of the hook; the calls of a function are recorded."""
        return functools.wraps(argument)(functools.partial(self._called, argument)) if callable(argument) else argument

    def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.read.add(CALLED)
        return function(*arguments)

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the hook, whose errors then name the file and the line."""
        return errors_name_line(self.path, f"{self.function.__name__}: ")(function)


def hooks_of(path: Path, module: ModuleType) -> dict[str, Hook]:
    """Return the hooks that a recipe file defines or imports.

    Raises: InputError if a hook has the wrong signature, or a `get_…` function is no hook.
    """
    hooks = {}
    for name, value in vars(module).items():
        # A copy is also kept of a module that may add a choice, or a function of `GROUPS`.
        if isinstance(value, Registry):
            hooks[name] = Hook(path, value.get)
        # A module may import another function of this name, such as os.rename.
        elif name in (RENAME, "GROUPS") and (isinstance(value, Mapping) or inspect.isfunction(value)):
            hooks[name] = Hook(path, _by_table(value) if isinstance(value, Mapping) else value)
            check_parameters(hooks[name].function, str(path), name, "name")
        elif name in HOOKS:
            if not callable(value):
                raise InputError(f"{path}: {name} is a {type(value).__name__}; define {name}({HOOKS[name]})")
            check_parameters(value, str(path), name, HOOKS[name])
            hooks[name] = Hook(path, value)
        elif name.startswith("get_") and name != "get_config" and getattr(value, "__module__", "") == module.__name__:
            raise InputError(f"{path}: {name} is not a hook; {choices(name, [*HOOKS, 'get_config'])}")
    return hooks


def _by_table(table: Mapping[str, str | None]) -> Callable[[str], str | None]:
    """Return the function that replaces the regular expressions of a table in turn, as `re.sub`; None drops a name."""

    def rename(name: str) -> str | None:
        for pattern, replacement in table.items():
            if replacement is None and re.search(pattern, name):
                return None
            name = re.sub(pattern, replacement or "", name)
        return name

    return rename


@dataclass(frozen=True)
class Reference:
    """The published result of a recipe: an accuracy, or another share. A recipe file sets `reference` to it.

    It is not inherited: a recipe that loads another one has other settings. Raises: InputError if a value is invalid.
    """

    value: Share
    """The value at the end of training: 0.9401 for 94.01%. It is a mean if `runs` is more than 1."""
    source: str
    """Where it is published."""
    runs: Count | None = None
    """The number of runs; None if the source does not state it."""
    deviation: Share | None = None
    """The standard deviation over the runs; None if the source does not state it."""
    metric: str = "top1"
    """The name of the metric in metrics.jsonl."""
    at: str | None = None
    """The length of the training; by default `train.duration` of the recipe file."""

    def __post_init__(self) -> None:
        check_values(self, f"{REFERENCE}.")

    def __str__(self) -> str:
        """Return "76.26% (n = 5, deviation 0.09%)", with what the source states."""
        runs = [] if self.runs is None else [f"n = {self.runs:,}"]
        stated = runs + ([] if self.deviation is None else [f"deviation {100 * self.deviation:.4g}%"])
        return f"{100 * self.value:.4g}%" + (f" ({', '.join(stated)})" if stated else "")


@dataclass(frozen=True)
class RecipeFile:
    """The result of executing a recipe file, or of reading a run's config.json and its copy of the recipe."""

    config: Config
    path: Path
    """The recipe file, or the config.json."""
    hooks: Mapping[str, Hook] = field(default_factory=dict)
    """The hooks that the recipe defines or inherits, by name."""
    recipes: tuple[Path, ...] = ()
    """The recipe file itself, then the recipe files that it loaded by path."""
    modules: frozenset[Path] = frozenset()
    """The modules in the folders of these files that were imported while the files ran."""
    is_run: bool = False
    """Whether `path` is a config.json of a run."""
    has_network: bool = True
    """Whether the config and the hooks determine the network; false for a run whose model is a Python object."""
    taken: frozenset[str] = frozenset()
    """The keys that a command takes from the run that provides the initial weights."""
    notice: str = ""
    """A log line about the source of settings that are not from the recipe file; empty for none."""
    set_keys: frozenset[str] = frozenset()
    """The keys that must have an effect: those that the last layer with hooks sets, and those of later layers. A layer
    is a recipe file, or the command line; it is later than the recipe that it loads."""
    reference: Reference | None = None

    def layered(self, keys: Collection[str], hooks: Mapping[str, Hook]) -> "RecipeFile":
        """Return the recipe with a layer that sets keys and has hooks.

        Its hooks replace inherited hooks, and so does a name, such as `optimizer.name`, that it sets.
        """
        # A schedule replaces no hook: `get_optimizer` receives it.
        named = {kind.hook for kind in CHOICES if kind.key in keys and kind is not SCHEDULES} & self.hooks.keys()
        inherited = frozenset() if named or hooks else self.set_keys - keys_of_choices(keys)
        kept = {name: hook for name, hook in self.hooks.items() if name not in named}
        return replace(self, hooks={**kept, **hooks}, set_keys=inherited | frozenset(keys))

    @property
    def rename(self) -> Callable[[str], str | None] | None:
        """The recipe's function from the names in a file of weights to those of the network; None if it has none."""
        hook = self.hooks.get(RENAME)
        return None if hook is None else hook.guarded(hook.function)

    def check_network(self, advice: str) -> None:
        """Raise `InputError` with this advice if the network cannot be made from the config and the hooks."""
        if not self.has_network:
            problem = "the run came from Python and its config does not name the network"
            raise InputError(f"{self.path}: {problem}", advice=advice)

    @property
    def root(self) -> Path:
        """The folder that the names of the recipe's files are relative to."""
        return Path(os.path.commonpath([file.parent for file in self.recipes]))

    def files(self) -> dict[str, bytes]:
        """Return the content of every Python file of the recipe, by its path below `root`; none without hooks.

        Files that the recipe loads by name are left out. Modules that were imported after it ran are included.
        """
        if not self.hooks:
            return {}
        imported = {file for _, file in modules_in(*(path.parent for path in self.recipes)).values()}
        paths = sorted({*self.recipes, *self.modules, *imported})
        return {os.path.relpath(path, self.root): path.read_bytes() for path in paths}

    def entry(self) -> dict[str, Any] | None:
        """Return the entry of config.json that describes the hooks; None without hooks."""
        if (digest := self.digest()) is None:
            return None
        return {"file": os.path.relpath(self.recipes[0], self.root), "digest": digest, "hooks": sorted(self.hooks)}

    def digest(self) -> str | None:
        """Return the digest of `files`; None if there are no files."""
        return _digest(contents) if (contents := self.files()) else None


_readings: ContextVar[Sequence[RecipeFile]] = ContextVar("readings", default=())
"""The stack of running recipe files, each with what it has loaded so far. Each was loaded by the file before it."""


def load(name_or_path: str | Path) -> Config:
    """Return the config of a built-in name, a recipe file, or a run's work directory or config.json.

    In a recipe file, a relative path starts in the folder of that file, and the hooks of the loaded recipe are
    inherited. Raises: see `read_recipe`.
    """
    return read_recipe(name_or_path).config


def read_recipe(name_or_path: str | Path) -> RecipeFile:
    """Run a recipe file, or read the recipe that a run stored; see `jaxddp.config.load`.

    Raises: InputError if the file does not exist or raises an error, `get_config()` returns no `Config`, a hook has the
    wrong signature, or a `get_…` function is no hook.
    """
    readings: Any = _readings.get()
    path = recipe_path(name_or_path, readings[-1].path.parent if readings else Path())
    if readings:
        # Record the modules now, because the other recipe may replace them by its modules of the same names.
        readings[-1] = _with_modules(readings[-1])
    recipe = _read_run(path) if _is_of_run(path) else _read_file(path)
    # A recipe that loads this one begins with none of its keys set.
    recipe = replace(recipe, config=replace(recipe.config))
    if readings:
        outer = readings[-1]
        loaded = {"set_keys": outer.set_keys | recipe.set_keys, "hooks": {**outer.hooks, **recipe.hooks}}
        if not is_name(name_or_path) or path.suffix != ".py":
            loaded["recipes"] = tuple(dict.fromkeys([*outer.recipes, *recipe.recipes]))
            loaded["modules"] = outer.modules | recipe.modules
        readings[-1] = replace(outer, config=recipe.config, **loaded)
    return recipe


def _with_modules(recipe: RecipeFile) -> RecipeFile:
    """Return a running recipe with the modules of its folder that are imported so far."""
    modules = {} if is_built_in(recipe.path) else modules_in(recipe.path.parent)
    return replace(recipe, modules=recipe.modules.union(file for _, file in modules.values()))


def read_config(path: Path) -> tuple[Config, dict[str, Any]]:
    """Return the config in a config.json, and the content of the file. Raises: InputError if it is no config."""
    with about(path), with_keys_of_file():
        try:
            content = files.parse_json(files.read(path), dict)
            config = {key: value for key, value in content.items() if key not in BESIDE_CONFIG}
        except (OSError, ValueError) as error:
            raise InputError(f"cannot be read as a run's config ({error})", advice="give a run's config.json") from None
        match content.setdefault("recipe"):
            case None | {"file": str(), "digest": str(), "hooks": [*_]}:
                return Config().replace(**config), content
            case entry:
                raise InputError(f"its recipe is {show(entry)}; restore the file, or give the recipe file itself")


def _is_of_run(path: Path) -> bool:
    """Return whether a file is the config.json of a run, or a copy of one under another name."""
    content: Any = None
    if path.suffix == ".json":
        with suppress(OSError, ValueError):
            content = files.parse_json(files.read(path))
    return path.name == CONFIG_FILE or (isinstance(content, dict) and not content.keys().isdisjoint(BESIDE_CONFIG))


def _read_run(path: Path) -> RecipeFile:
    """Return the recipe of a run: the config in its config.json, and the hooks in its copy of the recipe."""
    config, content = read_config(path)
    of_run = {"config": config, "path": path, "is_run": True, "has_network": "model" in content}
    if (entry := content["recipe"]) is None:
        return RecipeFile(**of_run)
    folder, digest, hooks = path.parent / COPY_FOLDER, entry["digest"], entry["hooks"]
    # Which modules a recipe imports is known only after its hooks have run, so all copied files are compared.
    copied = sorted(each for suffix in (".py", *TEXT_FILES) for each in folder.rglob(f"[!.]*{suffix}"))
    if (file := folder / entry["file"]) not in copied:
        raise InputError(f"{file}: the run's copy of its recipe is missing; restore it, or give the recipe file itself")
    if _digest({os.path.relpath(each, folder): files.content_of(each, "restore it") for each in copied}) != digest:
        raise InputError(f"{folder}: the run's copy of its recipe has changed; restore it")
    recipe = _read_file(file)
    # A command may have replaced other hooks by naming a choice.
    return replace(recipe, **of_run, hooks={name: hook for name, hook in recipe.hooks.items() if name in hooks})


def _digest(contents: Mapping[str, bytes]) -> str:
    """Return the SHA-256, in hex, of files by their names."""
    each = (f"{name} {len(content)}\n".encode() + content for name, content in contents.items())
    return hashlib.sha256(b"".join(each)).hexdigest()


def _read_file(path: Path) -> RecipeFile:
    """Run or read a recipe file, which is on the stack meanwhile. Raises: InputError if it is there already."""
    absolute, readings = path.absolute(), _readings.get()
    if any(other.path == absolute for other in readings):
        raise InputError(f"{absolute}: loads itself; load the recipe that it is based on")
    readings = [*readings, RecipeFile(Config(), absolute, recipes=(absolute,))]
    token = _readings.set(readings)
    try:
        return (_read_text if path.suffix in TEXT_FILES else _run_python)(path, readings)
    finally:
        _readings.reset(token)


def _run_python(path: Path, readings: list[RecipeFile]) -> RecipeFile:
    """Return the recipe of a Python file."""
    with errors_name_line(path, ""), with_keys_of_file():
        module = run_as_module(path, add_folder=not is_built_in(path))
        if not callable(getattr(module, "get_config", None)):
            raise InputError("defines no get_config(); define one that returns a jaxddp.config.Config")
        config, recipe = module.get_config(), _with_modules(readings[-1])
    if not isinstance(config, Config):
        raise InputError(f"{path}: get_config() returned a {type(config).__name__}; return a jaxddp.config.Config")
    set_keys = config.replaced_keys | differing(recipe.config, config)
    reference: Any = getattr(module, REFERENCE, None)
    if isinstance(reference, float | int | str | Mapping):
        raise InputError(f"{path}: {REFERENCE} is {show(reference)}; give a jaxddp.config.Reference(value, source)")
    # The name may be a function or a module of the recipe.
    if isinstance(reference, Reference):
        recipe = replace(recipe, reference=replace(reference, at=reference.at or str(config.train.duration)))
    return replace(recipe.layered(set_keys, hooks_of(path, module)), path=path, config=config)


def _read_text(path: Path, readings: list[RecipeFile]) -> RecipeFile:
    """Return the recipe of a file in YAML or JSON, with the hooks of its base."""
    with with_keys_of_file():
        entries = text.entries_of(path)
        if (base := entries.pop(text.BASE, None)) is not None:
            with about(f"{path}:{base.line}: base"):
                read_recipe(str(base.content))
        config = text.with_entries(readings[-1].config, entries, path)
    return replace(readings[-1].layered(entries.keys(), {}), path=path, config=config)
