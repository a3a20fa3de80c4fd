"""Finds the file of a config: a built-in config, a recipe file, or the config.json of a run."""

import os
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.wording import choices, show

CONFIG_FILE = "config.json"
"""The file in a work directory that stores the run's config, and the fingerprints that a resumed run must match."""
TEXT_FILES = (".yaml", ".yml", ".json")
"""The extensions of recipe files in YAML and JSON."""


def recipe_path(name_or_path: str | Path, folder: Path = Path()) -> Path:
    """Return the file of a built-in config, a recipe file, or the config.json of a work directory.

    A relative path starts in `folder`. A built-in name takes precedence over a directory of the same name. Raises:
    InputError if there is no such file.
    """
    name, path = str(name_or_path), Path(os.path.normpath(folder / os.path.expanduser(name_or_path)))
    built_in = configs_folder() / f"{name}.py"
    if is_name(name) and (os.path.isfile(built_in) or not os.path.isdir(path)):
        path = built_in
    elif os.path.isfile(path / CONFIG_FILE):
        path /= CONFIG_FILE
    try:
        files.open_regular(path).close()
    except FileNotFoundError:
        raise InputError(f"config {show(name)} does not exist; {_suggestion(name, folder)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"config {show(name)}: cannot be read ({reason}); give a Python file with get_config()"
        ) from None
    return path


def config_names() -> list[str]:
    """Return the names of the built-in configs."""
    return sorted(path.stem for path in configs_folder().glob("*.py"))


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


def _suggestion(name: str, folder: Path) -> str:
    if (folder / f"{name}.py").is_file():
        return f"did you mean the file {name + '.py'!r}?"
    return choices(Path(name).stem, config_names())
