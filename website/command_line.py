"""Makes the pages about the commands from the output of `--help`."""

import contextlib
import html
import io
import itertools
import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

from jaxddp import cli

COMMANDS = (
    *("train", "sweep", "eval", "find-lr", "predict", "features", "probe", "checkpoints", "export", "push", "weights"),
    *("report", "runs", "doctor", "config", "data check", "data show", "data pack"),
    *("data split", "data get", "data sample", "completion", "launch"),
)
COLUMNS = "110"
"""The width of a terminal in which all options are in one column."""


class Option(NamedTuple):
    """An option in a help text. `usage` is its name with the names of its values."""

    usage: str
    description: str
    default: str


class Help(NamedTuple):
    """The parts of a help text: the usage line, the description, and the options by the title of their box."""

    usage: str
    text: str
    boxes: dict[str, list[Option]]


def command_pages() -> dict[str, str]:
    """Return the Markdown texts of the commands' pages and of their overview, by path."""
    pages = {f"commands/{name.replace(' ', '-')}.md": page_of(name) for name in COMMANDS}
    return {"commands/index.md": index()} | pages


def index() -> str:
    """Return the overview: a link to each command's page, and the output of `jaxddp --help`."""
    links = [f"- [`jaxddp {name}`]({name.replace(' ', '-')}.md): {first_sentence(name)}" for name in COMMANDS]
    usage = printed(lambda: cli.main(["--help"]))
    return "\n".join(["# Command line", "", *links, "", "```text", usage.rstrip(), "```", ""])


def first_sentence(name: str) -> str:
    return re.split(r"(?<=[.:;])\s", help_of(name).text)[0].rstrip(".:;") + "."


def page_of(name: str) -> str:
    """Return the page of a command."""
    shown = help_of(name)
    lines = [f"# jaxddp {name}", "", "```text", shown.usage, "```", "", example_as_code(shown.text), ""]
    for title, options in shown.boxes.items():
        lines += [f"## {title.capitalize()}", "", *table(options), ""]
    return "\n".join(lines)


def help_of(name: str) -> Help:
    """Return the help of a command. Raises: ValueError if its output cannot be parsed."""
    return read(printed(lambda: cli.main([*name.split(), "--help"])))


def printed(show: Callable[[], object]) -> str:
    """Return the output of a function that returns or exits, as on a terminal without colors and box characters."""
    output = io.StringIO()
    plain = {"COLUMNS": COLUMNS, "TERM": "dumb", "NO_COLOR": "1"}
    with mock.patch.dict(os.environ, plain), contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        show()
    return output.getvalue()


def read(text: str) -> Help:
    """Parse a help text. Raises: ValueError if it contains no options."""
    usage, _, rest = text.strip().partition("\n")
    description: list[str] = []
    boxes: dict[str, list[list[str]]] = {}
    title = ""
    for line, following in itertools.pairwise([*map(str.rstrip, rest.splitlines()), ""]):
        if is_rule(line):
            # The first rule follows the title. A second rule follows the description of the box.
            boxes[title] = []
        elif is_rule(following) and line[:2].strip():
            title = line.strip()
        elif not title:
            description.append(line)
        elif line.startswith("   "):
            boxes[title][-1].append(line.strip())
        elif line:
            # The description is beside a short option, and below a long option.
            boxes[title].append(re.split(r"\s{2,}", line.strip(), maxsplit=1))
    if not boxes:
        raise ValueError(f"no options in {text[:500]!r}")
    return Help(usage, "\n".join(description).strip(), {title: [*map(option, part)] for title, part in boxes.items()})


def is_rule(line: str) -> bool:
    return len(line) > 3 and not line.strip(" -")


def option(lines: list[str]) -> Option:
    """Parse the lines of an option."""
    usage, text = lines[0], " ".join(lines[1:])
    default = re.search(r" ?\((?:default: (.*)|(required))\)$", text)
    if default is None:
        return Option(usage, text, "")
    return Option(usage, text[: default.start()], default[2] or default[1])


def table(options: list[Option]) -> Iterator[str]:
    """Yield the lines of a Markdown table of options."""
    yield from ("| option | meaning |", "|---|---|")
    for usage, description, default in options:
        ending = "Required." if default == "required" else f"Default: `{default}`." if default else ""
        yield f"| {code_cell(usage)} | {text_cell(f'{description} {ending}'.strip())} |"


def code_cell(text: str) -> str:
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def text_cell(text: str) -> str:
    """Return prose for a cell of a table, with its markup escaped outside backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_<\[|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def example_as_code(text: str) -> str:
    """Return the description in a help text, with its examples as blocks of code."""

    def block(match: re.Match[str]) -> str:
        return "\n".join(["```text", *match[1].split(", or "), "```"])

    return re.sub(r"^Example: (jaxddp .*)$", block, text, flags=re.MULTILINE)
