"""Nested dataclasses such as a config: change keys, check values, record which keys are read, convert to JSON."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import numbers
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, Key, about, nearest, plural
from jaxddp.core.files import NO_TEXT, check_path
from jaxddp.core.ranges import Range, real_number, whole_number

T = TypeVar("T")


def _names_of(words: Any) -> Any:
    """Split a text, or each text of a list, at commas: `--log.to jsonl,tensorboard` passes one word."""
    texts = (words,) if isinstance(words, str) else words
    if not (isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)):
        return words
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


Names = Annotated[tuple[str, ...], _names_of]
"""Words that are split at commas. A function in the type of a key converts a value before it is checked."""
_LONGEST_TEXT = 4096  # The maximum length of a path.
TRUTHS = {"true": True, "false": False}
_NUMBERS: dict[Any, type] = {int: numbers.Integral, float: numbers.Real}
_READERS: dict[Any, Callable[[str], Any]] = {int: whole_number, float: real_number}
_NOUNS: dict[Any, str] = {int: "whole number", float: "number", str: "text"}


def plain(value: Any) -> Any:
    """Convert a value to JSON types: dataclasses to dicts, tuples to lists, durations to text."""
    if isinstance(value, Duration):
        return str(value)
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value


def replaced(node: Any, changes: dict[str, Any], prefix: str = "", root: Any = None) -> Any:
    """Return a copy of nested dataclasses with some keys changed. The whole tree checks its values when it is created.

    `prefix` begins the names of the keys of a node within `root`, such as "train.". Raises: InputError if a key is
    unknown (the message suggests the nearest one of the whole tree), or a value is invalid.
    """
    hints, root, values = _hints(type(node)), root or node, {}
    for key, value in changes.items():
        if key not in hints:
            similar = "" if prefix else nearest(key, hints)
            if not similar and (keys := similar_keys(prefix + key, dict(keys_of(type(root))))):
                similar = f"did you mean {' or '.join(map(repr, keys))}?"
            unknown = Key(prefix + key, rendered=repr(prefix + key))
            names = f"{similar} there are: {', '.join(sorted(hints))}".lstrip(", ")
            raise InputError("unknown config key ", unknown, advice=names)
        if is_tree(hints[key]) and not isinstance(value, dict):
            raise InputError(Key(prefix + key), " is a section", advice="give its keys")
        values[key] = replaced(getattr(node, key), value, f"{prefix}{key}.", root) if is_tree(hints[key]) else value
    return dataclasses.replace(node, **values)


def check_values(node: Any, prefix: str = "") -> None:
    """Check every value of nested dataclasses, and convert it to its field's type, in frozen dataclasses, too.

    Keys' names begin with `prefix`. Raises: InputError about the first invalid value; see `checked`.
    """
    for key, hint in _hints(type(node)).items():
        value = getattr(node, key)
        if dataclasses.is_dataclass(value) and not isinstance(value, Duration):
            check_values(value, f"{prefix}{key}.")
        else:
            object.__setattr__(node, key, checked(value, hint, prefix + key))


def keys_of(tree: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of nested dataclasses, such as "train.batch_size", with its type."""
    for name, hint in _hints(tree).items():
        node = bare(hint)
        if is_tree(node):
            yield from keys_of(node, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def is_tree(hint: Any) -> bool:
    """Return whether a type is a dataclass of keys, and not a single value."""
    return dataclasses.is_dataclass(hint) and hint is not Duration


def notes(hint: Any, kind: type[T]) -> list[T]:
    """Return the annotations of one kind in the type of a key: `Range` or `Requires`."""
    if get_origin(hint) not in (Annotated, Union, types.UnionType):
        return []
    first, *more = get_args(hint)
    return [*(note for note in more if isinstance(note, kind)), *notes(first, kind)]


@functools.cache
def descriptions(tree: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and of its bases, in one line."""
    found: dict[str, str] = {}
    for kind in reversed(tree.__mro__[:-1]):
        with contextlib.suppress(OSError, TypeError):  # `make_dataclass` leaves no source.
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
            for field, following in itertools.pairwise(cast(ast.ClassDef, definition).body):
                match field, following:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = " ".join(text.split())
    return found


def bare(hint: Any) -> Any:
    """Return the type of a key without annotations and without None."""
    return bare(get_args(hint)[0]) if get_origin(hint) in (Annotated, Union, types.UnionType) else hint


@functools.cache
def _hints(node: type) -> dict[str, Any]:
    return get_type_hints(node, include_extras=True)


def checked(value: Any, hint: Any, key: str, whole_hint: Any = None) -> Any:
    """Convert a value to the type of `hint`, if the conversion is exact, and check that it is in the type's range.

    Raises: InputError, which names the key, the value, and what is expected: `whole_hint`, if `hint` is a part of it.
    """
    origin, args, whole_hint = get_origin(hint), get_args(hint), whole_hint or hint
    if origin is Annotated:
        for convert in filter(callable, args[1:]):
            value = convert(value)
        value = checked(value, args[0], key, whole_hint)
        for bounds in args[1:]:
            if isinstance(bounds, Range) and value not in bounds:
                raise InputError(Key(key, value), f": expected {bounds}")
        return value
    if origin in (types.UnionType, Union):
        return None if value is None else checked(value, args[0], key)
    value = _read(value, hint) if isinstance(value, Text) else value
    if origin is Literal and value in args:
        return value
    if origin is tuple and isinstance(value, list | tuple) and (args[-1] is ... or len(value) == len(args)):
        return tuple(checked(item, args[0], key) for item in value)
    # NumPy's numbers are accepted, too.
    if hint in _NUMBERS and isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return hint(value)
    if hint is Duration and isinstance(value, str):
        with about(Key(key)):
            return Duration.parse(value)
    if hint is Path and isinstance(value, str | Path):
        return Path(check_path(value, key, in_utf8=True))
    if hint is str and isinstance(value, str | Path):
        value = str(value)
        if not 0 < len(value) <= _LONGEST_TEXT or NO_TEXT.search(value):
            raise InputError(Key(key, value), f": expected text of 1 to {_LONGEST_TEXT:,} characters")
    if origin is None and hint not in _NUMBERS and isinstance(value, hint):
        return value
    suggestion = nearest(value, map(str, args)) if origin is Literal and isinstance(value, str) else ""
    raise InputError(Key(key, value), f": expected {_description(whole_hint)}{suggestion}")


class Text(str):
    """A text of a file or a command line, which stands for a value of any type; see `checked`."""


def _read(text: Text, hint: Any) -> Any:
    """Return the value that a text stands for. A text that is no value of the type stays, and `checked` refuses it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return next((choice for choice in args if str(choice) == text), text)
    if origin is tuple and args[-1] is ...:
        return (text,)  # A list can be a single value: `to: jsonl`, `mean: 0.5`.
    with contextlib.suppress(ValueError):
        return TRUTHS.get(text.lower(), text) if hint is bool else _READERS.get(hint, str)(text)
    return text


def _description(hint: Any, *, several: bool = False) -> str:
    """Describe a type with its range for a message: `a whole number, 1 to 4,096`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bounds = [f", {each}" for each in args[1:] if isinstance(each, Range)]
        return "".join([_description(args[0], several=several), *bounds])
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        return f"{'a list of' if args[-1] is ... else len(args)} {_description(args[0], several=True)}"
    if hint is Duration:
        return f"a duration, such as {'90 epochs'!r}"
    if hint is bool:
        return "True or False"
    noun: Any = _NOUNS.get(hint, hint.__name__)
    return plural(2, noun) if several else f"a {noun}"


class _Observed:
    """A dataclass with the keys of another node. `_observed` has the arguments of `observed`."""

    def __getattribute__(self, name: str) -> Any:
        node, read, prefix = object.__getattribute__(self, "__dict__")["_observed"]
        if name not in _hints(type(node)):
            return object.__getattribute__(self, name)
        value = getattr(node, name)
        if is_tree(type(value)):
            return observed(value, read, f"{prefix}{name}.")
        read.add(prefix + name)
        return value

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # `dataclasses.replace` creates an object of this class.
        return type(unobserved(self))

    def replace(self, **changes: Any) -> Any:
        """Return a changed copy, which is observed, too."""
        return observed_like(self, unobserved(self).replace(**changes))

    def __eq__(self, other: object) -> bool:
        return unobserved(self) == unobserved(other)

    def __hash__(self) -> int:
        return hash(unobserved(self))

    def __repr__(self) -> str:
        return repr(unobserved(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return unobserved, (unobserved(self),)


@functools.cache
def _observed_type(kind: type) -> type:
    return type(kind.__name__, (_Observed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def observed(node: T, read: set[str], prefix: str = "") -> T:
    """Return a copy of nested dataclasses that adds the name of each key that is read to `read`, after `prefix`.

    A comparison, a text of the copy, and `Config.replace` read no keys; `dataclasses.replace` and `plain` read all.
    """
    copy = object.__new__(_observed_type(type(node)))
    object.__getattribute__(copy, "__dict__")["_observed"] = node, read, prefix
    return copy


def observed_like(section: Any, node: T) -> T:
    """Return a node with some keys of a section, observed if the section is."""
    return observed(node, *vars(section)["_observed"][1:]) if isinstance(section, _Observed) else node


def unobserved(node: Any) -> Any:
    """Return the node of an observed copy. Other objects are returned unchanged."""
    return vars(node)["_observed"][0] if isinstance(node, _Observed) else node


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict: `{"train": {"batch_size": 8}}` becomes `{"train.batch_size": 8}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def differing(before: Any, after: Any) -> frozenset[str]:
    """Return the keys, with dots, whose values differ in two configs."""
    old, new = before.flat(), after.flat()
    return frozenset(key for key in new if new[key] != old[key])


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Return nested dicts for dotted keys, the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


HELP = ("-h", "--help")
SHORT = {"lr": "optimizer.learning_rate", "epochs": "train.duration", "batch_size": "train.batch_size"}
SHORT |= {"model": "model.name", "data": "data.path", "offline": "model.offline"}
SHORT |= {"metrics": "eval.metrics", "precision": "train.precision"}
"""Short forms that the command line accepts; `--seed` is a key already."""
OTHER_NAMES = Path(__file__).with_name("other_names.json")
"""The file with the names that timm, Lightning, Composer, Hugging Face and others have for a key, by key."""
_MAX_KEYS, _MAX_LENGTH, _MIN_SIMILARITY, _MAX_IGNORED = 3, 80, 0.78, 2
"""Last parts up to `_MAX_IGNORED` are not compared, because every word of three letters is similar to them."""


def similar_keys(name: str, known: Iterable[str]) -> list[str]:
    """Return the known keys that a mistyped name may mean, several only if they have the last part of the name.

    A key is found by its short form ("train.lr"), by its last part ("weight_decay"), or despite a typo
    ("train.duratoin").
    """
    # Matching takes quadratic time, and no key is this long.
    keys, name = list(known), name.replace("-", "_")[:_MAX_LENGTH]
    last, last_parts = name.rpartition(".")[2], {key: key.rpartition(".")[2] for key in keys}
    elsewhere = [key for key, names in json.loads(OTHER_NAMES.read_text()).items() if last in names]
    for key in (SHORT.get(last), *elsewhere, f"{name}.name"):
        if key in keys:
            return [key]
    exact = [key for key in keys if f".{key}".endswith(f".{name}")]
    exact = exact or [key for key, part in last_parts.items() if part == last]
    close = exact[:_MAX_KEYS] or get_close_matches(name, keys, n=1, cutoff=_MIN_SIMILARITY)
    if close:
        return close
    parts = [short for short, key in SHORT.items() if key in keys]
    parts += (part for part in last_parts.values() if len(part) > _MAX_IGNORED)
    similar = get_close_matches(last, parts, n=1, cutoff=_MIN_SIMILARITY)
    return similar_keys(similar[0], keys) if similar else []
