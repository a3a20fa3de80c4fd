"""The documentation site's pages, before MkDocs reads them: docstrings, options, links and messages."""

import ast
import functools
import importlib
import inspect
from importlib.metadata import version

import pytest

import jaxddp
from jaxddp.cli import main
from jaxddp.data.source import Source, Table
from jaxddp.engine.objective import ExamplesMetric, SumsMetric
from jaxddp.training.events import Listener
from website import command_line
from website.documents import linked, with_entries
from website.navigation import navigation
from website.python_reference import defined, documented

PROTOCOLS = (Source, Table, SumsMetric, ExamplesMetric, Listener)
PROPERTIES = (property, functools.cached_property)
HELP = """usage: jaxddp thing [-h] [OPTIONS] RUN

Do a thing.

Example: jaxddp thing runs/first, or jaxddp thing runs/second

 positional arguments
 --------------------
  RUN         The work directory. (required)

 data options
 ------------
  Which examples.
  ------------
  --data.path {None}|STR
              Where `the_data` are,
              and more. (default: None)
  --flag, --no-flag  On. (default: a (b))
"""


@functools.cache
def body(module: str) -> list[ast.stmt]:
    statements = ast.parse(inspect.getsource(importlib.import_module(module))).body
    return [each for one in statements for each in (one.body if isinstance(one, ast.If) else [one])]


def undocumented(module: str, name: str) -> list[str]:
    """Return the undocumented names: a name of a module and, if it is a class, its public methods and properties.

    Methods of a protocol have their docstrings in the protocol.
    """
    thing = getattr(importlib.import_module(module), name)
    if not inspect.isclass(thing):
        return (
            [] if (inspect.isroutine(thing) and thing.__doc__) or is_described(module, name) else [f"{module}.{name}"]
        )
    bases = [base for base in thing.__mro__ if base.__module__.startswith("jaxddp")]
    parts = {part: value for base in bases for part, value in vars(base).items() if not part.startswith("_")}
    methods = [part for part, value in parts.items() if inspect.isroutine(value) or isinstance(value, PROPERTIES)]
    of_protocols = {part for protocol in PROTOCOLS if thing is not protocol for part in dir(protocol)}
    missing = [part for part in methods if not inspect.getdoc(getattr(thing, part)) and part not in of_protocols]
    # Python sets the docstring of a dataclass without one to its signature.
    has_docstring = thing.__doc__ and not thing.__doc__.startswith(f"{name}(")
    return [f"{module}.{name}.{part}" for part in missing] + [f"{module}.{name}"] * (not has_docstring)


def is_described(module: str, name: str) -> bool:
    """Return whether a string follows the assignment of a name in a module or in the module that defines the name."""
    statements = body(module)
    for node, following in zip(statements, [*statements[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom) and node.module and name in {alias.name for alias in node.names}:
            return is_described(node.module, name)
        if name in defined(node):
            return isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
    return False


def test_every_public_name_has_a_docstring():
    names = [*dict.fromkeys(documented())]
    assert len(names) > 80 and ("jaxddp.data.source", "Source") in names
    missing = [undocumented_name for module, name in names for undocumented_name in undocumented(module, name)]
    assert missing == []


def test_a_missing_docstring_is_found():
    assert undocumented("jaxddp.command_line.parse", "ConfigOfRecipe") == []
    assert undocumented("jaxddp.command_line.parse", "Command") == ["jaxddp.command_line.parse.Command"]
    assert undocumented("tests.support.runs", "fails") == []


def test_a_help_text_is_split_into_usage_text_and_options():
    shown = command_line.read(HELP)
    assert shown.usage == "usage: jaxddp thing [-h] [OPTIONS] RUN" and shown.text.startswith("Do a thing.")
    assert shown.boxes == {
        "positional arguments": [("RUN", "The work directory.", "required")],
        "data options": [
            ("--data.path {None}|STR", "Where `the_data` are, and more.", "None"),
            ("--flag, --no-flag", "On.", "a (b)"),
        ],
    }
    *_, path, flag = command_line.table(shown.boxes["data options"])
    assert path == "| <code>--data.path {None}&#124;STR</code> | Where `the_data` are, and more. Default: `None`. |"
    assert flag == "| <code>--flag, --no-flag</code> | On. Default: `a (b)`. |"
    assert "```text\njaxddp thing runs/first\njaxddp thing runs/second\n```" in command_line.example_as_code(shown.text)
    with pytest.raises(ValueError, match="no options"):
        command_line.read("usage: jaxddp")


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
    pages = {
        "index.md": "# jaxddp",
        "data.md": "# Data",
        "new.md": "# New `x`",
        "recipes/index.md": "# R",
        "recipes/a.md": "# a",
    }
    sections = {title: part for section in navigation(pages) for title, part in section.items()}
    assert sections["Guides"] == [{"Data": "data.md"}, {"New x": "new.md"}]
    assert sections["Recipes"] == ["recipes/index.md", {"a": "recipes/a.md"}]


def test_the_version_is_that_of_the_package(capsys):
    assert jaxddp.__version__ == version("jaxddp")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"jaxddp {jaxddp.__version__} (")
