"""The documentation site's pages, before MkDocs reads them: docstrings, options, links and messages."""

import importlib
from inspect import isclass, isroutine

import pytest

from jaxddp.cli import main
from website import command_line
from website.documents import linked, with_entries
from website.navigation import navigation
from website.python_reference import documented


def test_every_public_class_and_function_has_a_docstring():
    names = [*dict.fromkeys(documented())]
    assert len(names) > 80 and ("jaxddp.data.source", "Source") in names
    things = [(f"{module}.{name}", getattr(importlib.import_module(module), name)) for module, name in names]
    missing = [path for path, thing in things if (isroutine(thing) or isclass(thing)) and not thing.__doc__]
    # Python sets the docstring of a dataclass without one to its signature.
    assert missing + [path for path, thing in things if str(thing.__doc__).startswith(f"{path.split('.')[-1]}(")] == []


@pytest.mark.slow
def test_the_pages_of_the_commands_have_their_options():
    pages = command_line.command_pages()
    usage = command_line.printed(lambda: main(["--help"]))
    for name in command_line.COMMANDS:
        assert f"jaxddp {name} " in usage and "## Options" in pages[f"commands/{name.replace(' ', '-')}.md"]
    train = pages["commands/train.md"]
    assert "--resume {auto,never,must}" in train and "Default: `auto`." in train


def test_links_lead_to_pages():
    text = "[a](docs/data.md#x) [b](https://example.org) ![c](docs/curves.png) [d](#e)\n```\n[f](docs/data.md)\n```\n"
    changed = "[a](data.md#x) [b](https://example.org) ![c](curves.png) [d](#e)\n```\n[f](docs/data.md)\n```\n"
    assert linked("README.md", text) == changed
    assert linked("configs/README.md", "[a](../docs/recipes.md) [b](digits.py)") == "[a](../recipes.md) b"
    assert linked("docs/data.md", "[a](../CONTRIBUTING.md#b)") == "[a](contributing.md#b)"


def test_each_message_has_a_heading():
    text = "# T\n\n| what | what to do |\n|---|---|\n| `a \\| b: c` | do [x](y.md) |\n| d | e |\n\nmore\n"
    assert with_entries(text) == "# T\n\n### `a \\| b: c`\n\nDo [x](y.md)\n\n### D\n\nE\n\n\nmore\n"


def test_the_navigation_holds_every_page():
    pages = {"index.md": "# jaxddp", "data.md": "# Data", "new.md": "# New `x`"}
    pages |= {"recipes/index.md": "# R", "recipes/a.md": "# a"}
    sections = {title: part for section in navigation(pages) for title, part in section.items()}
    assert sections["Guides"] == [{"Data": "data.md"}, {"New x": "new.md"}]
    assert sections["Recipes"] == ["recipes/index.md", {"a": "recipes/a.md"}]
