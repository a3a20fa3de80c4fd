"""Makes the navigation of the site from its pages."""

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
    "large-jobs.md",
    "serving.md",
    "extending.md",
)
"""The first guides, in reading order. Other documents follow them."""
ABOUT = ("limits.md", "results.md", "design.md", "build-notes.md", "contributing.md", "changelog.md")
"""Pages about jaxddp itself, at the end."""


def navigation(pages: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return sections with links, in the format of the setting `nav` of MkDocs."""
    folders = ("recipes/", "commands/", "python/")
    not_guides = {"index.md", "troubleshooting.md", "keys.md", *ABOUT}
    known = {*GUIDES, *not_guides}
    other_guides = [path for path in sorted(pages) if path not in known and not path.startswith(folders)]
    sections: dict[str, list[Any]] = {
        "Guides": entries(pages, (*GUIDES, *other_guides, "troubleshooting.md")),
        "Recipes": entries(pages, folder(pages, "recipes/")),
        "Commands": [*entries(pages, folder(pages, "commands/")), *entries(pages, ("keys.md",))],
        "Python": entries(pages, folder(pages, "python/")),
        "About": entries(pages, ABOUT),
    }
    return [{"Home": "index.md"}, *({title: part} for title, part in sections.items() if part)]


def folder(pages: Iterable[str], name: str) -> list[str]:
    """Return the pages of a folder, its index first."""
    return sorted((path for path in pages if path.startswith(name)), key=lambda path: (path != f"{name}index.md", path))


def entries(pages: Mapping[str, str], paths: Iterable[str]) -> list[Any]:
    """Return links to those pages that exist. An index is the page of its section and has no title."""
    known = [path for path in paths if path in pages]
    return [path if path.endswith("/index.md") else {title(pages[path]): path} for path in known]


def title(text: str) -> str:
    """Return the first heading of a page."""
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    return "" if heading is None else heading[1].replace("`", "")
