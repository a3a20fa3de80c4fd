"""Makes the pages about the Python API. mkdocstrings inserts the signatures and docstrings."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from types import ModuleType
from typing import TypeVar

import jaxddp
import jaxddp.config.data_section as data_section
import jaxddp.config.tree as tree
from website.documents import ROOT

GROUPS = {
    "Train": ("prepare_training", "train", "RunSetup", "History", "Listener", "StopTraining"),
    "Data": (
        *("open_data", "train_solutions", "val_solutions", "test_listing", "write_sample"),
        *("ArrayTable", "ExampleTable", "tf_dataset"),
    ),
    "Models, losses, objectives": ("resnet", "adapt", "softmax_cross_entropy", "sigmoid_cross_entropy", "distillation"),
    "Results": (
        *("load_run", "TrainedRun", "evaluate", "evaluate_run", "topk_accuracy", "show_inputs", "show_predictions"),
        *("export_weights", "export_program"),
    ),
    "Settings and errors": ("Config", "DataConfig", "AugmentConfig", "InputError"),
}
"""The public names of `jaxddp`, by purpose."""
FILES_WITH_NAMES = ("docs/extending.md", "docs/troubleshooting.md", "jaxddp/config/registry.py")
"""Files in which every dotted name is part of the API."""
NAME = re.compile(r"(?<![\w.\"])jaxddp(?:\.\w+)+")
IMPORT = re.compile(r"^from (jaxddp[\w.]*) import ([\w, ]+)", re.MULTILINE)


def python_pages() -> dict[str, str]:
    """Return the Markdown texts by path. Raises: ValueError if a name of the package has no group."""
    registries = directive("jaxddp.config.registry", show_root_heading=False, heading_level=2)
    return {
        "python/index.md": package_page(),
        "python/config.md": config_page(),
        "python/extending.md": extending_page(),
        "python/registry.md": "# Registries\n\n" + registries,
    }


def package_page() -> str:
    """Return the page of the names of `jaxddp` itself."""
    grouped = {name for names in GROUPS.values() for name in names}
    if differing := grouped ^ {*dir(jaxddp)}:
        raise ValueError(f"GROUPS of website/python_reference.py and the names of jaxddp differ: {sorted(differing)}")
    lines = ["# Python API", "", "These are names of the package: `jaxddp.train`, `jaxddp.open_data`.", ""]
    for title, names in GROUPS.items():
        lines += [f"## {title}", "", *(directive(f"jaxddp.api.{name}") for name in names)]
    return "\n".join(lines)


def config_page() -> str:
    """Return the page of the names of `jaxddp.config` that are not names of `jaxddp`."""
    names = [name for name in names_of_config() if name not in dir(jaxddp)]
    return "\n".join(
        [
            "# Configs",
            "",
            "A recipe file takes these from `jaxddp.config`. [Every key](../keys.md) has the keys.",
            "",
            *(directive(f"jaxddp.config.{name}", heading_level=2) for name in sorted(names, key="load".__ne__)),
        ]
    )


def names_of_config() -> list[str]:
    """Return the names of `jaxddp.config`, which it imports from its modules on first use."""
    kinds = vars(tree) | vars(data_section)
    sections = [name for name, kind in kinds.items() if name.endswith("Config") and dataclasses.is_dataclass(kind)]
    return [*sections, "Reference", "load"]


def directive(name: str, **options: object) -> str:
    """Return the directive that mkdocstrings replaces with the documentation of a name."""
    lines = [f"    options: {json.dumps(options)}"] if options else []
    return "\n".join([f"::: {name}", *lines, ""])


def extending_page() -> str:
    """Return the page of the names in the guide about extending and in the registries, by module."""
    lines = ["# Protocols", "", "Names of [Extending](../extending.md) and of the [registries](registry.md).", ""]
    for module, names in names_in_files().items():
        lines += [f"## {module}", ""]
        lines += [directive(f"{module}.{name}") for name in names]
        if not names:
            lines.append(directive(module, show_root_heading=False))
    return "\n".join(lines)


def documented() -> Iterator[tuple[str, str]]:
    """Yield the module and the name of every object on these pages."""
    yield from (("jaxddp.api", name) for name in dir(jaxddp))
    yield from (("jaxddp.config", name) for name in names_of_config())
    for module, names in (*names_in_files().items(), ("jaxddp.config.registry", [])):
        yield from ((module, name) for name in names or public_names(module))


def public_names(module: str) -> list[str]:
    """Return the public names that a module defines, without its type variables."""
    loaded = importlib.import_module(module)
    names = [name for node in ast.parse(inspect.getsource(loaded)).body for name in defined(node)]
    return [name for name in names if name[0] != "_" and not isinstance(getattr(loaded, name), TypeVar)]


def defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    match node:
        case ast.FunctionDef(name) | ast.ClassDef(name) | ast.AnnAssign(ast.Name(name)):
            return [name]
        case ast.Assign(targets):
            parts = [
                part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
            return [part.id for part in parts if isinstance(part, ast.Name)]
    return []


def names_in_files() -> dict[str, list[str]]:
    """Return the names in `FILES_WITH_NAMES` by module. An empty list means all public names of the module."""
    on_other_pages = {"jaxddp", "jaxddp.api", "jaxddp.config", "jaxddp.config.registry"}
    names_by_module: dict[str, list[str]] = {}
    for name in sorted({*dotted_names()}):
        module, attribute = split(name)
        if module not in on_other_pages:
            names_by_module.setdefault(module, [])
            if attribute and attribute not in names_by_module[module]:
                names_by_module[module].append(attribute)
    return names_by_module


def dotted_names() -> Iterator[str]:
    for file in FILES_WITH_NAMES:
        text = (ROOT / file).read_text("utf-8")
        yield from NAME.findall(IMPORT.sub("", text))
        yield from (f"{module}.{name.strip()}" for module, names in IMPORT.findall(text) for name in names.split(","))


def split(name: str) -> tuple[str, str]:
    """Split a dotted name into a module and an attribute; "" for no attribute. Raises: ModuleNotFoundError."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if is_module(module):
            return module, "".join(parts[length : length + 1])
    raise ModuleNotFoundError(name)


def is_module(name: str) -> bool:
    try:
        return isinstance(importlib.import_module(name), ModuleType)
    except ModuleNotFoundError:
        return False
