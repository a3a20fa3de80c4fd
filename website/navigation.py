"""The navigation of the site, made from its pages."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

GUIDES = (
    "features.md",
    "data.md",
    "recipes.md",
    "fine-tuning.md",
    "runs.md",
    "scaling.md",
    "serving.md",
    "extending.md",
)
"""The first guides, in reading order; other documents follow them."""
BEHIND = ("limits.md", "results.md", "design.md", "build-notes.md", "contributing.md", "changelog.md")
"""Pages about jaxddp itself, at the end."""


def navigation(pages: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the sections of links as the `nav` of MkDocs."""
    folders = ("recipes/", "commands/", "python/")
    apart = {"index.md", "troubleshooting.md", "keys.md", *BEHIND}
    others = [path for path in sorted(pages) if path not in {*GUIDES, *apart} and not path.startswith(folders)]
    sections: dict[str, list[Any]] = {
        "Guides": entries(pages, (*GUIDES, *others, "troubleshooting.md")),
        "Recipes": entries(pages, folder(pages, "recipes/")),
        "Commands": [*entries(pages, folder(pages, "commands/")), *entries(pages, ("keys.md",))],
        "Python": entries(pages, folder(pages, "python/")),
        "About": entries(pages, BEHIND),
    }
    return [{"Home": "index.md"}, *({title: part} for title, part in sections.items() if part)]


def folder(pages: Iterable[str], name: str) -> list[str]:
    """Return the pages of a folder, its index first."""
    return sorted((path for path in pages if path.startswith(name)), key=lambda path: (path != f"{name}index.md", path))


def entries(pages: Mapping[str, str], paths: Iterable[str]) -> list[Any]:
    """Return links to the pages that exist. An index is the page of its section and has no title."""
    known = [path for path in paths if path in pages]
    return [path if path.endswith("/index.md") else {title(pages[path]): path} for path in known]


def title(text: str) -> str:
    """Return the first heading of a page."""
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    return "" if heading is None else heading[1].replace("`", "")
