"""The files of a recipe: finds them, runs them as modules, and reads them for the copy that a run keeps."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, choices

CONFIG_FILE = "config.json"
"""The file in a work directory that stores the run's config, and the fingerprints that a resumed run must match."""
TEXT_FILES = (".yaml", ".yml", ".json")
"""The extensions of recipe files in YAML and JSON."""


def recipe_path(name_or_path: str | Path, folder: Path = Path()) -> Path:
    """Return the file of a built-in config, a recipe file, or the config.json of a work directory, within `folder`.

    A built-in name takes precedence over a directory of the same name. Raises: InputError if there is no such file.
    """
    name, path = str(name_or_path), Path(os.path.normpath(folder / os.path.expanduser(name_or_path)))
    built_in = configs_folder() / f"{name}.py"
    if is_name(name) and (os.path.isfile(built_in) or not os.path.isdir(path)):
        path = built_in
    elif os.path.isdir(path):
        path /= CONFIG_FILE
    if not os.path.exists(path):
        is_folder = path.name == CONFIG_FILE and os.path.isdir(path.parent)
        advice = choices(Path(name).stem, config_names())
        if os.path.isfile(folder / f"{name}.py"):
            advice = f"did you mean the file {name + '.py'!r}?"
        elif is_folder or ("/" in name and path.suffix not in (".py", *TEXT_FILES)):
            beside = "" if is_folder else files.nearest_beside(path).removeprefix(", ")
            advice = f"{beside} give a run, the name of a config or a recipe file".lstrip()
        problem = f"{path}: no such file, so this folder is no run" if is_folder else None
        raise InputError(f"{problem or f'config {name!r} does not exist'}; {advice}")
    with files.reading(f"config {name!r}", "give a Python file with get_config()"):
        files.open_regular(path).close()
    return path


def config_names() -> list[str]:
    """Return the names of the built-in configs."""
    return sorted(path.stem for path in configs_folder().glob("[!.]*.py"))


def configs_folder() -> Path:
    """Return the folder of the built-in configs: in a wheel it is inside the package, in a checkout beside it."""
    package = Path(__file__).parent.parent
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def is_name(name_or_path: str | Path) -> bool:
    """Return whether a text is the name of a config or of a folder, and not the path of a file."""
    return Path(name_or_path).suffix not in (".py", *TEXT_FILES) and "/" not in str(name_or_path)


def is_built_in(path: Path) -> bool:
    """Return whether a recipe file is a built-in config."""
    return path.absolute().parent == configs_folder().absolute()


_folders: set[Path] = set()
"""The folders of recipes, which imports search for modules."""
_contents: dict[Path, bytes] = {}
"""The content of each module of a recipe's folder when it was imported."""


def run_as_module(path: Path, *, add_folder: bool) -> ModuleType:
    """Run a file as a module and return the module. Raises: InputError if the file is no Python file.

    With `add_folder`, the file, and its hooks later, can import modules from its folder, as a script can.
    """
    name = f"jaxddp_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError("is no Python file; give one whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    if add_folder:
        _import_from(path.absolute().parent)
    # A dataclass, such as a Flax module, looks up its module in `sys.modules`.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def modules_in(*folders: Path) -> dict[str, tuple[Path, Path]]:
    """Return the folder and file of each module that an import finds in these folders; record the files' contents."""
    modules, beginnings = dict[str, tuple[Path, Path]](), tuple(os.path.join(folder, "") for folder in folders)
    for name, module in list(sys.modules.items()):
        # Compare text: thousands of modules are imported, and `Path` objects are slow.
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.startswith(beginnings) and name.partition(".")[0] != "jaxddp":
            stem = name.replace(".", os.sep)
            for end in (f"{stem}.py", os.path.join(stem, "__init__.py")):
                if (beginning := file.removesuffix(end)) in beginnings:
                    modules[name] = Path(beginning), (path := Path(file))
                    if path not in _contents and path.is_file():
                        _contents[path] = path.read_bytes()
    return modules


def _import_from(folder: Path) -> None:
    """Make imports search a recipe's folder first. Modules of other folders and changed ones are imported again."""
    sys.path[:] = [str(folder), *(each for each in sys.path if each != str(folder))]
    for name, (other, file) in modules_in(*_folders | {folder}).items():
        copy = folder / file.relative_to(other)
        if copy.is_file() and (other != folder or copy.read_bytes() != _contents[file]):
            _contents.pop(file, None)
            # A package without a file would keep the module as an attribute.
            for each in [each for each in sys.modules if each.partition(".")[0] == name.partition(".")[0]]:
                del sys.modules[each]
    _folders.add(folder)
