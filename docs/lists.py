"""Write the lists that the code knows into the pages, each between its two markers.

    python docs/lists.py            # write
    python docs/lists.py --check    # exit code 1 where a list is not up to date

A list stands between `<!-- list NAME -->` and `<!-- end -->`; `LISTS` has the function that makes each one.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jaxddp.registry as registry
from jaxddp.choices import CHOICES
from jaxddp.config import Config
from jaxddp.core.duration import Duration
from jaxddp.core.message import format_option
from jaxddp.core.ranges import Range
from jaxddp.keys import SHORT
from jaxddp.overrides import flatten, plain
from jaxddp.training.checkpoints.run_identity import FREE

ROOT = Path(__file__).parents[1]
PAGES = ("docs/keys.md", "docs/recipes.md", "docs/runs.md", "docs/design.md")
MARKED = re.compile(r"(<!-- list (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NAMED = (*("MODELS", "LOSSES", "OBJECTIVES", "METRICS", "OPTIMIZERS", "SCHEDULES", "AUGMENTATIONS", "LOGGERS"),)
"""The registries whose names a config may say."""


def keys() -> str:
    """A table for each section of a config: key, values, default, description."""
    sections = {"": {}} | {
        field.name: {} for field in dataclasses.fields(Config) if _is_tree(_hints(Config)[field.name])
    }
    for key, hint, default, description in _fields(Config, Config()):
        section = key.partition(".")[0] if "." in key else ""
        sections[section][key] = (_values(hint), _default(key, default), description)
    return "\n".join(_section(name, rows) for name, rows in sections.items())


def _section(name: str, rows: dict[str, tuple[str, str, str]]) -> str:
    lines = [
        f"| `{key}` | {values} | {default} | {description} |" for key, (values, default, description) in rows.items()
    ]
    heading = [f"## {name}", ""] if name else []
    return "\n".join([*heading, "| key | values | default | what |", "|---|---|---|---|", *lines, ""])


def _fields(tree: type, values: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """(dotted key, type, default, description) of every key."""
    descriptions, hints = _descriptions(tree), _hints(tree)
    for field in dataclasses.fields(tree):
        value = getattr(values, field.name)
        if _is_tree(hints[field.name]):
            yield from _fields(hints[field.name], value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, hints[field.name], value, descriptions.get(field.name, "")


def _hints(tree: type) -> dict[str, Any]:
    return typing.get_type_hints(tree, include_extras=True)


def _is_tree(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint) and hint is not Duration


def _descriptions(tree: type) -> dict[str, str]:
    """The docstring below each field, in one line."""
    (body,) = (
        node.body
        for node in ast.parse(inspect.cleandoc(inspect.getsource(tree))).body
        if isinstance(node, ast.ClassDef)
    )
    found = {}
    for field, below in itertools.pairwise(body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split()).replace("|", "\\|")
    return found


def _values(hint: Any) -> str:
    """What a key may hold."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        (bounds,) = (each for each in hint.__metadata__ if isinstance(each, Range))
        return f"{_values(arguments[0])}, {bounds}"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        one = _values(arguments[0])
        return f"several: {one}" if arguments[-1] is Ellipsis else f"{len(arguments)}: {one}"
    if origin in (typing.Union, types.UnionType):
        return "; ".join(_values(each) for each in arguments if each is not type(None))
    names = {int: "whole number", float: "number", str: "text", bool: "on or off", Duration: "duration"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def _default(key: str, value: Any) -> str:
    """The default as it is written, and that of each choice that reads the key."""
    by_value: dict[str, list[str]] = {}
    for kind in CHOICES:
        for name in kind.readers().get(key, ()):
            settings = kind.settings(name)
            assert settings is not None
            (field,) = (field for field in dataclasses.fields(settings) if field.name == key.rpartition(".")[2])
            shown = "none" if field.default is dataclasses.MISSING else _shown(field.default) or "none"
            by_value.setdefault(shown, []).append(f"`{name}`")
    if by_value:
        return "; ".join(f"{shown} for {', '.join(names)}" for shown, names in by_value.items())
    return _shown(value)


def _shown(value: Any) -> str:
    value = plain(value)
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(_shown(each) for each in value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def choices() -> str:
    """The names that each key takes."""
    kinds = [getattr(registry, name) for name in NAMED]
    rows = [f"| `{kind.key}` | {', '.join(f'`{name}`' for name in kind.names())} |" for kind in kinds]
    return "\n".join(["| key | names |", "|---|---|", *rows, ""])


def resume() -> str:
    """The keys that a resumed run may change; a section is one entry where most of it is free."""
    every = flatten(Config().to_dict()).keys()
    free, kept = sorted(FREE & every), [key for key in every - FREE if key.startswith("parallel.")]
    shown = [f"`{key}`" for key in free if not key.startswith("parallel.")]
    text = ", ".join([*shown, f"and `parallel.*` except {', '.join(f'`{key}`' for key in sorted(kept))}."])
    return textwrap.fill(text, 120, break_on_hyphens=False) + "\n"


def private_names() -> str:
    """The private names of libraries by file, from the list that their test checks."""
    source = ast.parse((ROOT / "tests/test_private_names.py").read_text())
    (used,) = (
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "USED"
    )
    rows = [f"| `{file}` | {', '.join(f'`{name}`' for name in names.split())} |" for file, names in used.items()]
    return "\n".join(["| file | private names |", "|---|---|", *rows, ""])


def packages() -> str:
    """Every folder and module of the package with its first sentence, by its floor in tests/test_architecture.py."""
    rows = []
    for floor, place in sorted(_floors(), reverse=True):
        folders = sorted(ROOT.glob(f"jaxddp/{place}/**/__init__.py"))
        for file in folders or [*ROOT.glob(f"jaxddp/{place}.py")]:
            path = file.parent if folders else file
            docstring = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0]
            shown = f"{path.relative_to(ROOT)}{'/' if folders else ''}"
            rows.append(f"| {floor} | `{shown}` | {' '.join(docstring.split())} |")
    return "\n".join(["| floor | place | what it is for |", "|---|---|---|", *rows, ""])


def _floors() -> Iterator[tuple[int, str]]:
    """(floor, place) of each folder and module."""
    for node in ast.walk(ast.parse((ROOT / "tests/test_architecture.py").read_text())):
        match node:
            case ast.Call(
                func=ast.Name(id="Room"), args=[ast.Constant(value=int(floor)), ast.Constant(value=str(places)), *_]
            ):
                yield from ((floor, place) for place in places.split() if place not in ("configs", "__init__"))


def short_forms() -> str:
    """The short forms of options."""
    rows = [f"| `{format_option(short)}` | `{key}` |" for short, key in sorted(SHORT.items())]
    return "\n".join(["| short form | key |", "|---|---|", *rows, ""])


LISTS: dict[str, Callable[[], str]] = {
    "packages": packages,
    "keys": keys,
    "choices": choices,
    "short_forms": short_forms,
    "resume": resume,
    "private_names": private_names,
}


def rewritten(text: str) -> str:
    """A page with its lists as the code has them."""
    return MARKED.sub(lambda found: f"{found[1]}\n{LISTS[found[2]]()}\n{found[3]}", text)


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` name the lists that are not up to date or in no page."""
    stale, seen = [], set()
    for page in PAGES:
        text = (ROOT / page).read_text()
        seen |= {name for _, name, _ in MARKED.findall(text)}
        if (new := rewritten(text)) != text:
            stale.append(page)
            if "--check" not in arguments:
                (ROOT / page).write_text(new)
    for page in stale:
        print(f"{page}: {'not up to date; run python docs/lists.py' if '--check' in arguments else 'written'}")
    for name in LISTS.keys() - seen:
        print(f"the list {name} is in no page")
    return int(bool(LISTS.keys() - seen) or ("--check" in arguments and bool(stale)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
