"""Recipe files: Python files that define `get_config()`, and optionally hooks that return the user's objects.

    def get_config():
        return load("cifar10").replace(train={"duration": "10 epochs"})

    def get_model(config, num_classes):
        return MyNetwork(num_classes)

A recipe that loads another one (`load("base.py")`) looks for it in its own folder and inherits its hooks. A recipe can
import modules from its folder. A run keeps a copy of all these files, so that its work directory is enough to restore
the recipe. A recipe that is loaded by name (`load("cifar10")`) comes from the installed package and is not copied.

A recipe file can also be YAML or JSON (`jaxddp.recipe.text`). Its `base` is loaded like a recipe by `load`.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jaxddp.core.files as files
from jaxddp.config.registry import keys_of_choices, replaced_hooks, with_defaults
from jaxddp.config.tree import Config
from jaxddp.config.values import flatten, observed
from jaxddp.core.errors import InputError, about, choices, show, with_keys_of_file
from jaxddp.core.user_code import is_ctrl_c, place_of
from jaxddp.recipe.sources import (
    CONFIG_FILE,
    TEXT_FILES,
    RecipeSources,
    is_built_in,
    is_name,
    modules_in,
    recipe_path,
    run_as_module,
)
from jaxddp.recipe.text import TextRecipe

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


@dataclass(frozen=True)
class RecipeFile:
    """The result of executing a recipe file, or of reading the config.json of a run and the run's copy of its recipe.

    Attributes:
        path: the recipe file, or the config.json.
        hooks: the hooks that the recipe defines or inherits, by name.
        is_run: whether `path` is a config.json of a run.
        has_network: whether the network can be made from the config and the hooks; false for a run whose model is a
            Python object.
        stored_digest: the digest in config.json of the run's copy of the recipe's files; None if there is no copy.
        taken: the keys that a command takes from the run that provides the initial weights.
        notice: a log line about the source of settings that are not from the recipe file; empty for none.
        origins: for a recipe file in YAML or JSON, the file and line, or the base, that sets a key.
        set_keys: the keys that must have an effect: the keys that the last layer with hooks sets, and the keys that
            later layers set. A layer is a recipe file, or the command line; it is later than the recipe that it loads.
        replaced: names of the hooks of the recipe that a command replaced by naming another choice.
    """

    config: Config
    path: Path
    sources: RecipeSources
    hooks: Mapping[str, Hook] = field(default_factory=dict)
    is_run: bool = False
    has_network: bool = True
    stored_digest: str | None = None
    taken: frozenset[str] = frozenset()
    notice: str = ""
    origins: Mapping[str, str] = field(default_factory=dict)
    set_keys: frozenset[str] = frozenset()
    replaced: tuple[str, ...] = ()

    def set_by_command(self, keys: Collection[str]) -> "RecipeFile":
        """Return the recipe for a command that sets keys. A key such as `optimizer.name` replaces the recipe's hook."""
        replaced = replaced_hooks(self.hooks, keys)
        set_keys = frozenset() if replaced else self.set_keys - keys_of_choices(keys)
        return replace(self.without(replaced), set_keys=set_keys | frozenset(keys))

    def without(self, names: Collection[str]) -> "RecipeFile":
        """Return the recipe without the hooks of these names."""
        hooks = {name: hook for name, hook in self.hooks.items() if name not in names}
        return replace(self, hooks=hooks, replaced=tuple(sorted({*self.replaced, *names})))

    def check_network(self, advice: str) -> None:
        """Raise `InputError` with this advice if the network cannot be made from the config and the hooks."""
        if not self.has_network:
            problem = "the run came from Python and its config does not name the network"
            raise InputError(f"{self.path}: {problem}", advice=advice)

    def files(self) -> dict[str, bytes]:
        """Return the content of every Python file of the recipe, by its path below `sources.root`.

        Files that the recipe loads by name are left out. Without hooks the result is empty, because the config is the
        whole recipe.
        """
        return self.sources.read() if self.hooks else {}

    def entry(self) -> dict[str, Any] | None:
        """Return the entry of config.json that describes the hooks; None without hooks."""
        digest = self.digest()
        return {"file": self.sources.main, "digest": digest, "hooks": sorted(self.hooks)} if digest else None

    def check_copy(self) -> None:
        """Raise `InputError` if a run's copy of its recipe differs from the digest in its config.json."""
        if self.stored_digest not in (None, self.digest()):
            raise InputError(f"{self.sources.root}: the run's copy of its recipe has changed; restore it")

    def digest(self) -> str | None:
        """Return the SHA-256 of `files`, as hex; None if there are no files."""
        digest, files = hashlib.sha256(), self.files()
        for name, content in files.items():
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.hexdigest() if files else None


@dataclass
class _Reading:
    """A recipe file that is running, and what it has loaded so far."""

    path: Path
    config: Config = field(default_factory=Config)
    hooks: dict[str, Hook] = field(default_factory=dict)
    set_keys: frozenset[str] = frozenset()
    recipes: list[Path] = field(default_factory=list)
    modules: set[Path] = field(default_factory=set)

    def record_modules(self) -> None:
        """Record the modules from the file's folder that are imported so far."""
        self.modules |= {file for _, file in modules_in(self.path.parent)}

    def finished(
        self, path: Path, config: Config, keys: Collection[str], own_hooks: Mapping[str, Hook], **fields: Any
    ) -> RecipeFile:
        """Return the recipe of the file, which sets keys of what it has loaded.

        Its own hooks replace inherited hooks, and so does a name, such as `optimizer.name`, that it sets.
        """
        named = replaced_hooks(self.hooks, keys)
        hooks = {name: hook for name, hook in self.hooks.items() if name not in named} | dict(own_hooks)
        set_keys = frozenset(keys) | (frozenset() if named or own_hooks else self.set_keys - keys_of_choices(keys))
        # A recipe that loads this one begins with none of its keys set.
        config = replace(config)
        return RecipeFile(config, path, self.sources(), hooks, set_keys=set_keys, **fields)

    def sources(self) -> RecipeSources:
        """Return the files of the recipe."""
        recipes = tuple(dict.fromkeys([self.path, *self.recipes]))
        root = Path(os.path.commonpath([file.parent for file in recipes]))
        return RecipeSources(root, recipes, frozenset(self.modules))


_readings: ContextVar[tuple[_Reading, ...]] = ContextVar("readings", default=())
"""The stack of running recipe files. Each file was loaded by the file before it."""


def load(name_or_path: str | Path) -> Config:
    """Load the config of a recipe or of a run.

    Args:
        name_or_path: the name of a built-in config (`"imagenet_resnet50"`), the path of a recipe file, or the work
            directory of a run or its config.json. In a recipe file, a relative path starts in the folder of that file,
            and the hooks of the loaded recipe are inherited.

    Returns:
        The result of the recipe's `get_config()`, or the config that the run stored.

    Raises:
        InputError: see `read_recipe`.
    """
    return read_recipe(name_or_path).config


def read_recipe(name_or_path: str | Path) -> RecipeFile:
    """Run a recipe file, or read the recipe that a run stored.

    Args:
        name_or_path: see `jaxddp.config.load`.

    Raises:
        InputError: the file does not exist or raises an error, `get_config()` returns no `Config`, a hook has the wrong
            signature, or a `get_…` function is no hook.
    """
    outer = next(reversed(_readings.get()), None)
    path = recipe_path(name_or_path, Path() if outer is None else outer.path.parent)
    by_name = is_name(name_or_path) and path.suffix == ".py"
    if outer is not None:
        # Record the modules now, because the other recipe may replace them by its modules of the same names.
        outer.record_modules()
    recipe = _read_run(path) if _is_of_run(path) else _read_file(path)
    if outer is not None:
        outer.config, outer.set_keys = recipe.config, outer.set_keys | recipe.set_keys
        outer.hooks |= recipe.hooks
        if not by_name:
            outer.recipes += recipe.sources.recipes
            outer.modules |= recipe.sources.modules
    return recipe


def read_config(path: Path) -> tuple[Config, dict[str, Any]]:
    """Return the config in a config.json, and the whole content of the file. The copy of the recipe is not read.

    Raises: InputError if the file cannot be read or is no config.
    """
    with about(path), with_keys_of_file():
        try:
            content = files.parse_json(files.read(path))
            config = {key: value for key, value in content.items() if key not in BESIDE_CONFIG}
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"cannot be read as a run's config ({error})", advice="give a run's config.json") from None
        return Config().replace(**config), content


def _is_of_run(path: Path) -> bool:
    """Return whether a file is the config.json of a run, or a copy of one under another name."""
    if path.suffix != ".json" or path.name == CONFIG_FILE:
        return path.name == CONFIG_FILE
    try:
        content = files.parse_json(files.read(path))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and not content.keys().isdisjoint(BESIDE_CONFIG)


def _read_run(path: Path) -> RecipeFile:
    """Return the recipe of a run: the config in its config.json, and the hooks in its copy of the recipe."""
    config, content = read_config(path)
    of_run: dict[str, Any] = {"config": config, "path": path, "is_run": True, "has_network": "model" in content}
    match content.get("recipe") or {}:
        case {"file": str(file), "digest": str(digest), "hooks": [*names]}:
            root = path.parent / COPY_FOLDER
        case {**entry} if not entry:
            return RecipeFile(**of_run, sources=RecipeSources(path.parent))
        case entry:
            raise InputError(f"{path}: its recipe is {show(entry)}; restore the file, or give the recipe file itself")
    if not (root / file).is_file():
        missing = f"{root / file}: the run's copy of its recipe is missing"
        raise InputError(f"{missing}; restore it, or give the recipe file itself")
    recipe = _read_file(root / file)
    # A command may have replaced other hooks by naming a choice.
    recipe = recipe.without(recipe.hooks.keys() - {*names})
    sources = replace(recipe.sources, root=root.absolute())
    return replace(recipe, **of_run, sources=sources, stored_digest=digest)


def _read_file(path: Path) -> RecipeFile:
    with _running(path) as reading:
        if path.suffix in TEXT_FILES:
            return _read_text(path, reading)
        with errors_name_line(path, ""), with_keys_of_file():
            module = run_as_module(path, add_folder=not is_built_in(path))
            if not callable(getattr(module, "get_config", None)):
                raise InputError("defines no get_config(); define one that returns a jaxddp.config.Config")
            config = module.get_config()
            reading.record_modules()
    if not isinstance(config, Config):
        raise InputError(f"{path}: get_config() returned a {type(config).__name__}; return a jaxddp.config.Config")
    before, after = flatten(reading.config.to_dict()), flatten(config.to_dict())
    set_keys = config.replaced_keys | {key for key in after if after[key] != before[key]}
    return reading.finished(path, config, set_keys, hooks_of(path, module))


def _read_text(path: Path, reading: _Reading) -> RecipeFile:
    """Return the recipe of a file in YAML or JSON, with the hooks of its base."""
    with with_keys_of_file():
        text, default = TextRecipe.read(path), Config()
        config, origins = default, dict[str, str]()
        if text.base is not None:
            with about(f"{path}:{text.base.line}: base"):
                base = read_recipe(str(text.base.content))
            config, values = base.config, flatten(base.config.to_dict())
            unchanged = flatten(default.to_dict())
            origins = {key: str(text.base.content) for key, value in values.items() if value != unchanged[key]}
            origins |= base.origins
        config = text.applied_to(config)
    # The path of a base is absolute here, because the base was loaded from the folder of another file.
    shown = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else path
    origins |= {key: f"{shown}:{entry.line}" for key, entry in text.entries.items()}
    return reading.finished(path, config, text.entries.keys(), {}, origins=origins)


@contextmanager
def _running(path: Path) -> Iterator[_Reading]:
    """Put a recipe file on the stack during the block. Raises: InputError if it is there already."""
    reading, readings = _Reading(path.absolute()), _readings.get()
    if any(other.path == reading.path for other in readings):
        raise InputError(f"{reading.path}: loads itself; load the recipe that it is based on")
    token = _readings.set((*readings, reading))
    try:
        yield reading
    finally:
        _readings.reset(token)
