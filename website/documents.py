"""Makes pages from the Markdown files of the repository, with links to other pages."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\(([^()\s]+)\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^()\s]+)\)")
PAGE_OF = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "BUILD_NOTES.md": "build-notes.md",
    "configs/README.md": "recipes/index.md",
    "benchmarks/RESULTS.md": "results.md",
}
"""Paths of pages, by the path of their file outside docs/."""
TROUBLESHOOTING, RECIPES = "troubleshooting.md", PAGE_OF["configs/README.md"]


def documents() -> dict[str, str]:
    """Return the path of each page that is a Markdown file, by the path of the file."""
    outside = {file: page for file, page in PAGE_OF.items() if (ROOT / file).is_file()}
    return outside | {f"docs/{file.name}": file.name for file in sorted(ROOT.glob("docs/*.md"))}


def copied_documents() -> dict[str, str]:
    """Return the Markdown text of each page that is a file of the repository, by the path of the page."""
    pages = {page: linked(file, (ROOT / file).read_text("utf-8")) for file, page in documents().items()}
    return pages | {
        TROUBLESHOOTING: with_entries(pages[TROUBLESHOOTING]),
        RECIPES: re.sub(r"^\| `(\w+)` ", r"| [`\1`](\1.md) ", pages[RECIPES], flags=re.MULTILINE),
    }


def linked(file: str, text: str) -> str:
    """Return the text of a file with its relative links changed to links between pages.

    A link to a file without a page is replaced by its text.
    """
    page = documents()[file]

    def changed(target: str) -> str | None:
        path, hash_sign, anchor = target.partition("#")
        if "://" in target or not path:
            return target
        source = os.path.normpath(os.path.join(os.path.dirname(file), path))
        other = documents().get(source)
        if other is None and source.startswith("docs/") and (ROOT / source).is_file():
            other = source.removeprefix("docs/")
        return None if other is None else os.path.relpath(other, os.path.dirname(page)) + hash_sign + anchor

    def link(match: re.Match[str]) -> str:
        target = changed(match[2])
        return match[1] if target is None else f"[{match[1]}]({target})"

    def image(match: re.Match[str]) -> str:
        return f"![{match[1]}]({changed(match[2]) or match[2]})"

    parts = FENCED.split(text)
    parts[::2] = [LINK.sub(link, IMAGE.sub(image, part)) for part in parts[::2]]
    return "".join(parts)


def with_entries(text: str) -> str:
    """Return the troubleshooting page with a heading for each message instead of the rows of its tables.

    So each message has its own address, and the search finds it.
    """
    lines, rows = [], 0
    for line in text.splitlines():
        if line.startswith("|"):
            rows += 1
            # The first two rows are the header and the rule below it.
            if rows > 2:
                message, answer = re.split(r"(?<!\\)\|", line.strip().strip("|"), maxsplit=1)
                lines += [f"### {sentence(message)}", "", sentence(answer).replace("\\|", "|"), ""]
        else:
            rows = 0
            lines.append(line)
    return "\n".join(lines) + "\n"


def sentence(text: str) -> str:
    """Return a text with a capital first letter."""
    text = text.strip()
    return text[:1].upper() + text[1:]
