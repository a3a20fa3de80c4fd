"""The place of a data set: a name in the catalog, a directory or a URL; its text files, and the store of its images.

The catalog `datasets.toml` maps each name to a path or URL, for one machine or a group of users. configs/datasets.toml
is an example.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path

import jaxddp.core.files as files
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, JaxddpError, Option, about, nearest, show
from jaxddp.data.faults import check_distinct
from jaxddp.data.storage.objects import Objects
from jaxddp.data.storage.store import CachedStore, LocalFiles, Store

CATALOG_VARIABLE = "JAXDDP_DATASETS"
CATALOG_FILE = "datasets.toml"
HEAD = 1 << 16
"""The number of bytes of a text file that show what it holds."""


Folder = LocalFiles | Objects
"""A folder on this machine, or the objects below a URL. Paths are relative to it, with forward slashes.

Both have these members: `root`, None for a URL; `can_list`, false for a plain web server, which cannot list its files;
`name(path)`, readable; `files(folder)`, sorted; `state(path)`, the size in bytes and a text that changes with the file;
`read_text(path)`; `read_range(path, start, length)`; and `open(path)`. A missing file raises a FileNotFoundError.
"""


@dataclass(frozen=True)
class FolderFile:
    """A file of a folder; `str(file)` is its readable name."""

    folder: Folder
    path: str
    """The path in the folder."""

    def __str__(self) -> str:
        return self.folder.name(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    def text(self, limit: int | None = None) -> str:
        """Return the text of UTF-8, with or without a byte order mark, or of UTF-16, as Excel writes it.

        In UTF-8, wrong bytes become lone surrogates. With a limit, only that many bytes are read.

        Raises: InputError.
        """
        try:
            content = self.folder.read_range(self.path, 0, limit) if limit else self.folder.read_text(self.path)
            encoding = json.detect_encoding(content)
            strict = "replace" if limit else "strict"
            return content.decode(encoding, "surrogateescape" if encoding.startswith("utf-8") else strict)
        except FileNotFoundError:
            raise InputError(f"{self}: no such file{_hint(self)}") from None
        except UnicodeDecodeError as error:
            raise InputError(f"{self}: damaged UTF-16 ({error.reason}); save the file as UTF-8") from None
        except OSError as error:
            raise InputError(f"{self}: cannot be read ({error.strerror}); give a readable text file") from None


def is_url(root: str) -> bool:
    """Return whether a root is a URL of any kind, and not a path of this machine."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", root) is not None


def is_address(path: str) -> bool:
    """Return whether a place is a URL, or NAME:REST such as tfds:cifar10, and not a path of this machine."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", path) is not None


def absolute(place: str) -> str:
    """Return the absolute path of a file without resolving links; a URL or tfds:NAME is unchanged."""
    if is_address(place):
        return place
    path = str(files.expanded(place).absolute())
    # After a link, ".." leads to the parent of its target.
    plain = os.path.normpath(path)
    return plain if os.path.realpath(plain) == os.path.realpath(path) else path


@contextmanager
def convert_os_errors() -> Iterator[None]:
    """Turn an OSError in the block into an InputError. Even `Path.exists` may raise an OSError.

    Raises: Unreachable if the error comes from a file server.
    """
    try:
        yield
    except OSError as error:
        files.check_server(error.filename, error)
        advice = "ask its owner for permission" if isinstance(error, PermissionError) else "check the path"
        raise InputError(f"{error.filename}: may not be read ({error.strerror}); {advice}") from None


@convert_os_errors()
def open_root(root: str | PathLike[str], file_name: str) -> Folder:
    """Return a directory, or the objects of a URL. A path becomes absolute, with links not resolved.

    Args:
        file_name: the name of a file in the root, for messages.

    Raises: InputError if the directory is missing or cannot be entered, or the URL is not valid.
    """
    folder = folder_of(os.fspath(root))
    if (path := folder.root) is not None and not path.is_dir():
        state = "is not a directory" if path.exists() else "no such directory"
        raise InputError(f"{path}: {state}; give the directory that holds {file_name}{files.nearest_beside(path)}")
    return folder


def with_cache(store: Store, folder: Folder, cache: str | PathLike[str] | None) -> Store:
    """Return a store that keeps the images of a URL in the folder `cache`; the same store if `cache` is None.

    Files of this machine are read in place.
    """
    return store if cache is None or folder.root is not None else CachedStore(store, cache)


def folder_of(address: str) -> Folder:
    """Return the folder of a path or URL, without a request. Raises: InputError; see `Objects.open_url`."""
    return Objects.open_url(address) if is_url(address) else LocalFiles(files.expanded(address).absolute())


def _hint(missing: FolderFile) -> str:
    """Return a hint about a missing file, for the end of an error message."""
    beside: list[str] = []
    # Permission to read an object does not include permission to list. A file of this name is a broken link.
    with suppress(JaxddpError):
        beside = [path for path in missing.folder.files(missing.path.rpartition("/")[0]) if path != missing.path]
    url = " (a URL may hold Kaggle's archive, Parquet or .tar files)" if missing.folder.root is None else ""
    return nearest(missing.name, [path.rpartition("/")[2] for path in beside]) or f"; check the path{url}"


@dataclass(frozen=True)
class DatasetEntry:
    """One data set of the catalog. Its path is absolute, or an unchanged address such as a URL."""

    path: str
    train: str | None = None
    val: str | None = None
    classes: str | None = None

    def completed(self, data: DataConfig) -> DataConfig:
        """Return a config of the data with this entry's splits and classes, where the config names none."""
        return replace(data, **{key: getattr(data, key) or getattr(self, key) for key in ("train", "val", "classes")})


def resolve(name: str) -> DatasetEntry:
    """Return the entry of a data set in the file that JAXDDP_DATASETS names, or in ./datasets.toml.

    Raises:
        InputError: the catalog is missing or not TOML, two headings look alike, the name or a key is unknown, or a
            value is not a string.
    """
    catalog = _catalog_path()
    advice = (f"create it, name another by {CATALOG_VARIABLE}, or give ", Option("data.path"))
    content = files.content_of(catalog, advice)
    try:
        tables = tomllib.loads(content.decode("utf-8-sig"))
    # The errors of tomllib and of bytes that are not UTF-8.
    except (ValueError, RecursionError) as error:
        raise InputError(f"{catalog}: not TOML in UTF-8: {error}; correct it") from None
    check_distinct(tables, lambda name: str(catalog))
    if name not in tables:
        names = ", ".join(tables) or "none"
        raise InputError(f"{catalog}: no data set {show(name)}{nearest(name, tables)}; it has: {names}")
    table, keys = tables[name], [field.name for field in fields(DatasetEntry)]
    is_entry = isinstance(table, dict) and all(isinstance(value, str) and value.strip() for value in table.values())
    if not is_entry or "path" not in table or not {*table} <= {*keys}:
        advice = f'write [{name}], below it path = "..." and, if needed, {", ".join(keys[1:])}, all of them texts'
        raise InputError(f"{catalog}: {name} is {show(table)}; {advice}")
    path = table["path"]
    return DatasetEntry(**table | {"path": path if is_address(path) else str(catalog.parent / files.expanded(path))})


def find_dataset(place: str | os.PathLike[str]) -> DatasetEntry:
    """Return the entry of a data set, from an existing path, an address, or a name in the catalog.

    Raises:
        InputError: there is a catalog, and the argument is a name that `resolve` rejects.
    """
    text = os.fspath(place)
    is_path = not isinstance(place, str) or "/" in text or text.startswith("~") or os.path.exists(text)
    if is_path or is_address(text) or not os.path.exists(_catalog_path()):
        return DatasetEntry(text)
    with about(f"{show(text)} is not a path"):
        return resolve(text)


def _catalog_path() -> Path:
    return files.expanded(os.environ.get(CATALOG_VARIABLE) or CATALOG_FILE).absolute()
