"""The Markdown pages, and the parts of their texts."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_DOCS = (f"docs/{file.name}" for file in ROOT.glob("docs/*.md"))
PAGES = (
    *("README.md", "CONTRIBUTING.md", "BUILD_NOTES.md", "CHANGELOG.md", "configs/README.md", "benchmarks/RESULTS.md"),
    *_DOCS,
)


class Block(NamedTuple):
    """A fenced block: its info word and its lines."""

    language: str
    text: str


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def page_block(page: str, word: str) -> str:
    return next(block.text for block in blocks((ROOT / page).read_text()) if word in block.text)


def prose(text: str) -> str:
    """Return the text without its fenced blocks."""
    return re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """Return the texts between backticks, outside fenced blocks."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]
