"""Write the lists and tables that are generated from the code into the pages.

    python docs/lists.py            # write the lists
    python docs/lists.py --check    # exit with code 1 if a list is not up to date

A list is between the markers `<!-- list NAME -->` and `<!-- end -->` of a page. `LISTS` has the function for each NAME.
"""

import dataclasses
import itertools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jaxddp.config.registry as registry
from jaxddp.config import Config
from jaxddp.config.registry import CHOICES
from jaxddp.config.values import SHORT, notes, plain
from jaxddp.core.duration import Duration
from jaxddp.core.errors import format_option
from jaxddp.core.ranges import Range
from jaxddp.training.checkpoints.integrity import MAY_CHANGE

ROOT = Path(__file__).parents[1]
PAGES = ("docs/keys.md", "docs/recipes.md", "docs/runs.md")
MARKED_LIST = re.compile(r"(<!-- list (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
REGISTRIES = (
    "MODELS",
    "LOSSES",
    "OBJECTIVES",
    "METRICS",
    "OPTIMIZERS",
    "SCHEDULES",
    "AUGMENTATIONS",
    "POLICIES",
    "LOGGERS",
)
"""The registries whose entries a config chooses by name."""
_MOST_NAMES = 40
"""The largest number of names that a page lists."""


def key_lists() -> str:
    """Return a list for each section of a config: key, values, default, description."""
    sections = {"": {}} | {
        field.name: {} for field in dataclasses.fields(Config) if _is_tree(_hints(Config)[field.name])
    }
    for key, hint, default, description in _fields(Config, Config()):
        section = key.partition(".")[0] if "." in key else ""
        # `--help` has the whole text. The sentences of a key with few values explain one value each.
        text = description if typing.get_origin(hint) is Literal else re.split(r"(?<=\.)\s", description)[0]
        sections[section][key] = (_accepted_values(hint), _default(key, default), text)
    return "\n".join(_section(name, rows) for name, rows in sections.items())


def _section(name: str, rows: dict[str, tuple[str, str, str]]) -> str:
    lines = [
        f"- `{key}` ({values}{f'; {default}' if default else ''}): {description}"
        for key, (values, default, description) in rows.items()
    ]
    return "\n".join([*([f"## {name}", ""] if name else []), *lines, ""])


def _fields(tree: type, values: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """Yield (dotted key, type, default, description) for every key."""
    hints = _hints(tree)
    for field in dataclasses.fields(tree):
        value = getattr(values, field.name)
        if _is_tree(hints[field.name]):
            yield from _fields(hints[field.name], value, f"{prefix}{field.name}.")
        else:
            key = prefix + field.name
            yield key, hints[field.name], value, registry.description(key, tree)


def _hints(tree: type) -> dict[str, Any]:
    return typing.get_type_hints(tree, include_extras=True)


def _is_tree(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) and hint is not Duration


def _accepted_values(hint: Any) -> str:
    """Return a description of the values that a key of this type accepts."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return ", ".join([_accepted_values(arguments[0]), *map(str, notes(hint, Range))])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        element = _accepted_values(arguments[0])
        return f"several: {element}" if arguments[-1] is Ellipsis else f"{len(arguments)}: {element}"
    if origin in (typing.Union, types.UnionType):
        return "; ".join(_accepted_values(each) for each in arguments if each is not type(None))
    names = {int: "whole number", float: "number", str: "text", bool: "on or off", Duration: "duration"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _default(key: str, value: Any) -> str:
    """Return the default of a key as text, or its defaults for the choices (such as optimizers) that read it."""
    by_value: dict[str, list[str]] = {}
    for kind in CHOICES:
        for name in kind.readers().get(key, ()):
            text = _as_text(kind.keys_read(name)[key].default) or "none"
            by_value.setdefault(text, []).append(f"`{name}`")
    if by_value:
        return "; ".join(f"{text} for {_few(names)}" for text, names in by_value.items())
    return _as_text(value)


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 8 else f"{names[0]} and {len(names) - 1} others"


def _as_text(value: Any) -> str:
    value = plain(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(_as_text(each) for each in value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def choice_table() -> str:
    """Return a table of the names that each key accepts."""
    kinds = [getattr(registry, name) for name in REGISTRIES]
    rows = [f"| `{kind.key}` | {', '.join(_listed(kind.names()))} |" for kind in kinds]
    return "\n".join(["| key | names |", "|---|---|", *rows, ""])


def _listed(names: Sequence[str]) -> list[str]:
    """Return the names for a page. Of many names, those that begin with the same letters become one entry."""
    if len(names) <= _MOST_NAMES:
        return [f"`{name}`" for name in names]
    # Numbers are compared as numbers: resnet50 comes before resnet101.
    names = sorted(names, key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(6), name))
    families = [list(family) for _, family in itertools.groupby(names, lambda name: re.split("[^a-z]", name)[0])]
    return [f"`{first}`" + (f" to `{rest[-1]}`" if rest else "") for first, *rest in families]


def changeable_keys() -> str:
    """Return the list of keys that a resumed run may change. `parallel` is one entry with exceptions."""
    keys = Config().flat().keys()
    free, fixed = sorted(MAY_CHANGE & keys), [key for key in keys - MAY_CHANGE if key.startswith("parallel.")]
    listed = [f"`{key}`" for key in free if not key.startswith("parallel.")]
    text = ", ".join([*listed, f"and `parallel.*` except {', '.join(f'`{key}`' for key in sorted(fixed))}."])
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def short_form_table() -> str:
    """Return a table of the short forms of options."""
    rows = [f"| `{format_option(short)}` | `{key}` |" for short, key in sorted(SHORT.items())]
    return "\n".join(["| short form | key |", "|---|---|", *rows, ""])


LISTS: dict[str, Callable[[], str]] = {
    "keys": key_lists,
    "choices": choice_table,
    "short_forms": short_form_table,
    "resume": changeable_keys,
}


def with_current_lists(text: str) -> str:
    """Return the text of a page with its lists generated from the code."""
    return MARKED_LIST.sub(lambda match: f"{match[1]}\n{LISTS[match[2]]()}\n{match[3]}", text)


def main(arguments: list[str]) -> int:
    """Write the lists into the pages. With `--check`, print stale pages, and return 1 if there are any."""
    stale, names = [], set()
    for page in PAGES:
        text = (ROOT / page).read_text()
        names |= {name for _, name, _ in MARKED_LIST.findall(text)}
        if (new := with_current_lists(text)) != text:
            stale.append(page)
            if "--check" not in arguments:
                (ROOT / page).write_text(new)
    for page in stale:
        print(f"{page}: {'not up to date; run python docs/lists.py' if '--check' in arguments else 'updated'}")
    for name in LISTS.keys() - names:
        print(f"no page has the list {name}")
    return int(bool(LISTS.keys() - names) or ("--check" in arguments and bool(stale)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
