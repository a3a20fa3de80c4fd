"""Recipe files in YAML or JSON: the keys of a config that they change, with the line of each key.

    base: imagenet_resnet50
    train:
      batch_size: 512
      duration: 30 epochs
    optimizer.learning_rate: 1e-3

`base` names the config that is changed, as `load` does in a Python file; without it, the defaults are changed. A
section is a mapping of its keys, or its keys are written with dots. PyYAML composes the nodes of the file, and
constructs no objects. `jaxddp.config.values.checked` converts the values.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jaxddp.core.files as files
from jaxddp.config.tree import Config
from jaxddp.config.values import Text, nested
from jaxddp.core.errors import InputError, show
from jaxddp.recipe.sources import CONFIG_FILE, TEXT_FILES, is_built_in

BASE = "base"
"""The key that names the config which the file changes."""
_LARGEST = 1_000_000
"""Bytes of the largest recipe file. Composing a megabyte takes seconds."""
_NULLS = ("", "~", "null", "Null", "NULL", "None")


class Entry(NamedTuple):
    """The value of a key: its text, its texts, or None; and its line, from 1."""

    content: str | list[str] | None
    line: int


def entries_of(path: Path) -> dict[str, Entry]:
    """Return the keys that a file changes, by dotted key, with its `BASE`. Raises: InputError, with the line."""
    entries = dict[str, Entry]()
    for key, entry in _entries(_composed(path), path, set()):
        if key in entries:
            first = f"{key} is set in line {entries[key].line}, too; remove one of the two"
            raise InputError(f"{path}:{entry.line}: {first}")
        if key == BASE and not (isinstance(entry.content, str) and entry.content):
            raise InputError(f"{path}:{entry.line}: {BASE}: give the name of a config or the path of a recipe file")
        entries[key] = entry
    return entries


def with_entries(config: Config, entries: Mapping[str, Entry], path: Path) -> Config:
    """Return a copy of a config with the keys of a file changed. Raises: InputError, with the line."""
    try:
        return config.replace(**{key: each.content for key, each in entries.items()})
    except InputError as error:
        line = entries.get(error.key or "")
        raise error.within(str(path) if line is None else f"{path}:{line.line}") from error


def written(config: Config, base: tuple[str, Mapping[str, Any]] | None, form: str) -> str:
    """Return the text of a recipe file with the settings of a config, in the form "yaml" or "json".

    Args:
        base: the recipe whose hooks are inherited, and its settings by dotted key; None for none. With a base, the
            settings that differ are written, because a key that is set must have an effect beside the hooks. Without a
            base, all settings that are not None are written.
    """
    import yaml

    # No key that may be None has another default.
    name, before = base or ("", {})
    changed = nested({key: value for key, value in config.flat().items() if value != before.get(key)})
    content = {BASE: name, **changed} if name else changed
    if form == "json":
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    # PyYAML writes the line break U+0085 as a space, unless it escapes all characters outside ASCII.
    is_plain = json.dumps(content, ensure_ascii=False).isprintable()
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=is_plain, default_flow_style=None, width=100)


def _composed(path: Path) -> Any:
    """Return the node of PyYAML for a file. Raises: InputError if it is not valid YAML or JSON."""
    import yaml

    content = files.content_of(path, "make it readable")
    if len(content) > _LARGEST:
        raise InputError(f"{path}: has {len(content):,} bytes; a recipe file has at most {_LARGEST:,}")
    kind = path.suffix[1:].upper().replace("YML", "YAML")
    try:
        text = content.decode("utf-8-sig")
        if kind == "JSON":
            json.loads(text, parse_int=str, parse_float=str)
            text = _as_yaml(text)
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: is not JSON ({error.msg})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise InputError(f"{where}: is not {kind} ({getattr(error, 'problem', None) or error})") from None
    if not isinstance(node, yaml.MappingNode):
        what = "is empty" if node is None else f"is a {node.id} and not a mapping"
        raise InputError(f"{path}: {what}; write keys and values, such as {BASE}: digits")
    return node


def _as_yaml(text: str) -> str:
    """Return valid JSON as valid YAML, which does not allow tabs between tokens, and folds characters in strings."""
    return "".join(c if c.isprintable() or c in "\n\r" else f"\\U{ord(c):08x}" for c in text.replace("\t", " "))


def _entries(node: Any, path: Path, seen: set[int], prefix: str = "") -> Iterator[tuple[str, Entry]]:
    """Yield the dotted keys of a mapping node and their values. `seen` collects the ids of the nodes."""
    for name, value in node.value:
        line, key = name.start_mark.line + 1, f"{prefix}{name.value}"
        if name.id != "scalar" or not name.value:
            raise InputError(f"{path}:{line}: a key is a {name.id}; give the name of a key")
        # A few aliases of aliases stand for a billion values.
        if id(value) in seen:
            raise InputError(f"{path}:{line}: {key} is an alias; write its value")
        seen.add(id(value))
        if value.id == "mapping":
            if not value.value:
                raise InputError(f"{path}:{line}: {key} has no keys; leave it out")
            yield from _entries(value, path, seen, f"{key}.")
        elif value.id == "sequence":
            yield key, Entry([Text(_text(part, path, key)) for part in value.value], line)
        else:
            yield key, Entry(_text(value, path, key), line)


def _text(node: Any, path: Path, key: str) -> str | None:
    """Return the text of a scalar; None for an empty value without quotes."""
    line = node.start_mark.line + 1
    if node.id != "scalar":
        raise InputError(f"{path}:{line}: {key}: a {node.id} in a list; give a list of values")
    if node.tag != "tag:yaml.org,2002:str":
        raise InputError(f"{path}:{line}: {key}: the tag {show(node.tag)} is not allowed; write the value without it")
    if node.style is None and node.value in _NULLS:
        return None
    # JSON writes characters outside the Basic Multilingual Plane as two escapes.
    return Text(node.value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def line_of(path: Path, key: str) -> int | None:
    """Return the last line of a user's recipe file that sets a key, from 1; None for another file, or without one."""
    if path.name == CONFIG_FILE or is_built_in(path):
        return None
    try:
        if path.suffix in TEXT_FILES:
            return entries_of(path)[key].line
        lines = [*_lines(ast.parse(files.read(path)), key.split("."))]
    except (InputError, KeyError, OSError, SyntaxError, ValueError, RecursionError):
        return None
    return lines[-1] if lines else None


def _lines(tree: ast.AST, names: Sequence[str]) -> Iterator[int]:
    """Yield the lines that set a key, in a dict or in the dataclass of a section."""
    for node in ast.walk(tree):
        pairs: list[tuple[Any, ast.expr]] = []
        if isinstance(node, ast.Call):
            pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
        elif isinstance(node, ast.Dict):
            pairs = [(getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True)]
        for name, value in pairs:
            if name == names[0] and len(names) == 1:
                yield value.lineno
            elif name == names[0]:
                yield from _lines(value, names[1:])
