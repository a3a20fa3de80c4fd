"""Recipe files: a Python file with `get_config()`, and beside it any of the hooks that bring objects of its own.

    def get_config():
        return load("cifar10").replace(train={"duration": "10 epochs"})

    def get_model(config, num_classes):
        return MyNetwork(num_classes)

A recipe that loads another (`load("base.py")`) finds it beside itself and inherits its hooks. Modules that lie beside a
recipe can be imported. A run keeps a copy of all these files, so that its config.json alone brings the recipe back.
What a recipe loads by name (`load("cifar10")`) is the installed package's.
"""

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jaxddp.core.files as files
from jaxddp.choices import NAMES, given_way
from jaxddp.core.errors import InputError, about, as_written
from jaxddp.core.wording import choices, show
from jaxddp.hooks import Hook, hooks_of, one_line
from jaxddp.sections.config import Config

CONFIG_FILE = "config.json"
"""What a run writes into its work directory: its config, and what it was compared by."""
COPY_FOLDER = "recipe"
"""Where a work directory keeps the recipe's files."""
RUN_ID = "run_id"
"""The key of config.json that names the run."""
BESIDE_CONFIG = (RUN_ID, "fingerprint", "recipe", "objects")
"""The keys of config.json that are not the config's."""


@dataclass(frozen=True)
class RecipeFile:
    """What a recipe file says, or the config.json of a run.

    Attributes:
        root: the folder that `files` are relative to.
        loaded: the recipe files that were read: this one, and those that it loaded by path.
        seen: modules beside them that were imported meanwhile.
        kept_digest: of a run's copy, the digest that config.json says of it.
        says_network: not of a run whose objects came from Python.
        taken: the keys whose values another run gave, from which this one starts.
        said: what a command says of where its settings come from, once it has joined its job.
    """

    config: Config
    path: Path
    root: Path
    hooks: Mapping[str, Hook] = field(default_factory=dict)
    loaded: tuple[Path, ...] = ()
    seen: frozenset[Path] = frozenset()
    kept_digest: str | None = None
    says_network: bool = True
    taken: frozenset[str] = frozenset()
    said: str = ""

    @property
    def is_of_run(self) -> bool:
        """Whether a run wrote the config."""
        return self.path.suffix == ".json"

    def files(self) -> dict[str, bytes]:
        """Every Python file of the recipe so far, by its path below `root`; none of what it loads by name.

        Empty where there is no hook: then the config says it all. Modules are found once they are imported.
        """
        if not self.hooks:
            return {}
        folders = {path.parent for path in self.loaded}
        imported = {file for folder in folders for _, file in _modules(folder)}
        found = {*self.loaded, *self.seen, *imported}
        return {os.path.relpath(path, self.root): path.read_bytes() for path in sorted(found)}

    def check_kept(self) -> None:
        """Raises `InputError` where a run's copy is not what its config.json says."""
        if self.kept_digest is not None and self.kept_digest != self.digest():
            raise InputError(f"{self.root}: the run's copy of its recipe was changed since; restore it")

    def digest(self) -> str | None:
        """SHA-256, as hex, of `files`; None where there is none."""
        files = self.files()
        if not files:
            return None
        digest = hashlib.sha256()
        for name, content in files.items():
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.hexdigest()


@dataclass
class _Reading:
    """A recipe file while it runs: what it loads is noted here."""

    path: Path
    hooks: dict[str, Hook] = field(default_factory=dict)
    loaded: list[Path] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)

    def look(self) -> None:
        """Note the modules beside the file that were imported so far."""
        self.seen |= {file for _, file in _modules(self.path.parent)}


_folders: set[Path] = set()
"""Whose modules can be imported because a recipe lies there."""
_readings: ContextVar[tuple[_Reading, ...]] = ContextVar("readings", default=())
"""The recipe file that runs, as the last, and before it those that load it."""


def read_recipe(name_or_path: str | Path) -> RecipeFile:
    """Run a recipe file, or read what a run was; the argument is that of `jaxddp.config.load`.

    Raises:
        InputError: no such file, one that does not run, a `get_config()` that returns something else, a hook with
            another signature, or a `get_…` function that is no hook.
    """
    within = next(reversed(_readings.get()), None)
    path = recipe_path(name_or_path, Path() if within is None else within.path.parent)
    by_name = _is_name(name_or_path) and path.suffix == ".py"
    if within is not None:
        # What the other recipe imports may take the place of modules of the same name.
        within.look()
    recipe = _of_run(path) if path.suffix == ".json" else _of_file(path)
    if within is not None:
        within.hooks |= recipe.hooks
        if not by_name:
            within.loaded += recipe.loaded
            within.seen |= recipe.seen
    return recipe


def recipe_path(name_or_path: str | Path, folder: Path = Path()) -> Path:
    """The file of a config's name, or of a path, relative to a folder; of a run's work directory its config.json.

    Where a directory has the name of a config, it is the config. Raises: InputError; there is no such file.
    """
    name, path = str(name_or_path), Path(os.path.normpath(folder / os.path.expanduser(name_or_path)))
    named = configs_folder() / f"{name}.py"
    if _is_name(name) and (os.path.isfile(named) or not os.path.isdir(path)):
        path = named
    elif os.path.isfile(path / CONFIG_FILE):
        path /= CONFIG_FILE
    try:
        files.open_regular(path).close()
    except FileNotFoundError:
        raise InputError(f"config {show(name)} does not exist; {_nearest(name, folder)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"config {show(name)}: cannot be read ({reason}); give a Python file with get_config()"
        ) from None
    return path


def config_names() -> list[str]:
    """The names that `read_recipe` finds in the project's configs/."""
    return sorted(path.stem for path in configs_folder().glob("*.py"))


def configs_folder() -> Path:
    """In an installed wheel configs/ lies inside the package, in a checkout beside it."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def _is_name(name_or_path: str | Path) -> bool:
    return Path(name_or_path).suffix not in (".py", ".json") and "/" not in str(name_or_path)


def is_built_in(path: Path) -> bool:
    """Whether a recipe file is one of the project's configs/."""
    return path.absolute().parent == configs_folder().absolute()


def _nearest(name: str, folder: Path) -> str:
    if (folder / f"{name}.py").is_file():
        return f"did you mean the file {name + '.py'!r}?"
    return choices(Path(name).stem, config_names())


def read_config(path: Path) -> tuple[Config, dict[str, Any]]:
    """The config that a run wrote down, and all that its file holds; the run's copy of its recipe is not looked at.

    Raises: InputError; it cannot be read.
    """
    with about(path), as_written():
        try:
            content = json.loads(files.read(path))
            config = {key: value for key, value in content.items() if key not in BESIDE_CONFIG}
            return Config().replace(**config), content
        except InputError:
            raise
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise InputError(f"cannot be read as a run's config ({error})", advice="give a run's config.json") from None


def _of_run(path: Path) -> RecipeFile:
    """The config that a run wrote down, and the hooks of its copy of the recipe.

    Of older releases it names keys that its choices do not read.
    """
    config, content = read_config(path)
    kept, says_network = content.get("recipe") or {}, "model" in content
    file, digest = (kept.get("file"), kept.get("digest")) if isinstance(kept, dict) else (kept, None)
    if file is None:
        return RecipeFile(given_way(config, NAMES), path, path.parent, says_network=says_network)
    if not isinstance(file, str) or not isinstance(digest, str):
        raise InputError(f"{path}: its recipe is {show(kept)}; restore the file, or give the recipe file itself")
    root = path.parent / COPY_FOLDER
    copy = root / file
    if not copy.is_file():
        raise InputError(f"{copy}: the run's copy of its recipe is missing; restore it, or give the recipe file itself")
    kept = {"kept_digest": digest, "says_network": says_network}
    recipe = _of_file(copy)
    config = given_way(config, NAMES, recipe.hooks)
    return replace(recipe, config=config, path=path, root=root.absolute(), **kept)


def _of_file(path: Path) -> RecipeFile:
    reading, outer = _Reading(path.absolute()), _readings.get()
    if any(other.path == reading.path for other in outer):
        raise InputError(f"{reading.path}: loads itself; load the recipe that it begins with")
    token = _readings.set((*outer, reading))
    try:
        with one_line(path, ""), as_written():
            module = _run(path)
            if not callable(getattr(module, "get_config", None)):
                raise InputError("defines no get_config(); define one that returns a jaxddp.config.Config")
            config = module.get_config()
            reading.look()
    finally:
        _readings.reset(token)
    if not isinstance(config, Config):
        raise InputError(f"{path}: get_config() returned a {type(config).__name__}; return a jaxddp.config.Config")
    hooks = reading.hooks | hooks_of(path, module)
    loaded = tuple(dict.fromkeys([path.absolute(), *reading.loaded]))
    root = Path(os.path.commonpath([file.parent for file in loaded]))
    return RecipeFile(config, path, root, hooks, loaded, frozenset(reading.seen))


def _run(path: Path) -> ModuleType:
    """Execute a file as a module; what lies beside it can be imported, as from a script, now and from its hooks."""
    name = f"jaxddp_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError("is no Python file; give one whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    if not is_built_in(path):
        _import_from(path.absolute().parent)
    # A dataclass, such as a Flax module, looks for its own module there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _import_from(folder: Path) -> None:
    """Have imports look into a recipe's folder first, and forget what they found in other recipes' folders."""
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    for other in _folders - {folder}:
        for name in [name for name, file in _modules(other) if (folder / file.relative_to(other)).is_file()]:
            del sys.modules[name]
    _folders.add(folder)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """The imported modules that lie in a folder as an import finds them there, and their files."""
    found, beginning = [], os.path.join(folder, "")
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Thousands are imported, and paths are slow.
        if not file or not file.startswith(beginning) or name.partition(".")[0] == "jaxddp":
            continue
        place = folder.joinpath(*name.split("."))
        if Path(file) in (place.with_suffix(".py"), place / "__init__.py"):
            found.append((name, Path(file)))
    return found
