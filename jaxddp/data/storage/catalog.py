"""Names of data sets: the file `datasets.toml` maps each name to a path or URL, for one machine or a group of users.

configs/datasets.toml is an example.
"""

import os
import re
import tomllib
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Option, about
from jaxddp.core.wording import nearest, show
from jaxddp.data.faults import check_distinct
from jaxddp.data.storage.data_root import is_address

CATALOG_VARIABLE = "JAXDDP_DATASETS"
CATALOG_FILE = "datasets.toml"


@dataclass(frozen=True)
class DatasetEntry:
    """One data set of the catalog. Its path is absolute, or an unchanged address such as a URL."""

    path: str
    train: str | None = None
    val: str | None = None
    classes: str | None = None


def resolve(name: str) -> DatasetEntry:
    """Return the entry of a data set in the file that JAXDDP_DATASETS names, or in ./datasets.toml.

    Raises:
        InputError: the catalog is missing or not TOML, two headings look alike, the name or a key is unknown, or a
            value is not a string.
    """
    catalog = _catalog_path()
    text = _read(catalog)
    tables = _parse(catalog, text)
    check_distinct(tables, lambda name: f"{catalog}:{_heading_line(text, name)}")
    if name not in tables:
        names = ", ".join(tables) or "none"
        raise InputError(f"{catalog}: no data set {show(name)}{nearest(name, tables)}; it has: {names}")
    table = tables[name]
    if not isinstance(table, dict):
        raise InputError(f'{catalog}: {name} is {show(table)}; write a heading [{name}] and below it path = "..."')
    _check_keys(table, f"{catalog}: {name}")
    path = table["path"]
    if not is_address(path):
        path = str(catalog.parent / files.expanded(path))
    return DatasetEntry(**table | {"path": path})


def find_dataset(place: str | os.PathLike[str]) -> DatasetEntry:
    """Return the entry of a data set, from an existing path, an address, or a name in the catalog.

    Raises:
        InputError: there is a catalog, and the argument is a name that `resolve` rejects.
    """
    text = os.fspath(place)
    is_path = not isinstance(place, str) or "/" in text or text.startswith("~") or os.path.exists(text)
    if is_path or is_address(text) or not os.path.isfile(_catalog_path()):
        return DatasetEntry(text)
    with about(f"{show(text)} is not a path"):
        return resolve(text)


def _catalog_path() -> Path:
    return files.expanded(os.environ.get(CATALOG_VARIABLE) or CATALOG_FILE).absolute()


def _read(catalog: Path) -> str:
    missing = (
        *(f"no such file; create it, set {CATALOG_VARIABLE} to another catalog, or give ", Option("data.path")),
        " a path instead of a data set's name",
    )
    try:
        with files.reading(catalog, "give a readable TOML file", missing=missing):
            return files.read(catalog).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{catalog}: not UTF-8; save the file as UTF-8") from None


def _parse(catalog: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        where = f"{catalog}:{line[1]}" if line else f"{catalog}"
        raise InputError(f"{where}: not TOML: {error}; correct it") from None


def _heading_line(text: str, name: str) -> int:
    """Return the number of the line with a data set's heading."""
    for number, line in enumerate(text.splitlines(), 1):
        with suppress(tomllib.TOMLDecodeError):
            if line.lstrip().startswith("[") and name in tomllib.loads(line):
                return number
    return 1


def _check_keys(table: dict[str, Any], where: str) -> None:
    keys = [field.name for field in fields(DatasetEntry)]
    for key, value in table.items():
        if key not in keys:
            raise InputError(f"{where}.{key}: unknown key{nearest(key, keys)}; the keys are {', '.join(keys)}")
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{where}.{key}: is {show(value)}; give a string that is not empty")
    if "path" not in table:
        raise InputError(f'{where}: no path; add path = "DIRECTORY"')
