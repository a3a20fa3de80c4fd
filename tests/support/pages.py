"""Blocks of code in Markdown pages."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Block(NamedTuple):
    """A fenced block: its info word and its lines."""

    language: str
    text: str


def blocks(text: str) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def page_block(page: str, word: str) -> str:
    return next(block.text for block in blocks((ROOT / page).read_text()) if word in block.text)
