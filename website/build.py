"""Build the documentation site: `make docs`.

Writes the pages into build/pages, runs MkDocs on them, and leaves the site in build/site. A dead link, a page without a
place in the navigation or a name without a docstring ends it with exit code 1.
"""

import logging
import os
import shutil
import sys
from pathlib import Path

# Set before JAX is imported. JAX only evaluates schedules.
os.environ["JAX_PLATFORMS"] = "cpu"
# Silences a notice that the theme prints at each build.
os.environ["NO_MKDOCS_2_WARNING"] = "1"

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from website.command_line import command_pages
from website.documents import copied_documents
from website.navigation import navigation
from website.python_reference import python_pages
from website.recipe_pages import recipe_pages

ROOT = Path(__file__).parents[1]


def write_pages(folder: Path) -> dict[str, str]:
    """Write every page of the site. Returns the Markdown texts by path."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = copied_documents() | recipe_pages() | command_pages() | python_pages()
    for path, text in pages.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, "utf-8")
    (folder / "assets").mkdir()
    for file in [*ROOT.glob("docs/*.png"), *ROOT.glob("docs/*.svg")]:
        shutil.copy(file, folder)
    for file in (Path(__file__).parent / "assets").iterdir():
        shutil.copy(file, folder / "assets")
    return pages


def main(folder: Path = ROOT / "build") -> int:
    """Build the site in a folder: its pages in pages/, itself in site/. Returns the exit code."""
    os.chdir(ROOT)
    logging.basicConfig(level=logging.WARNING, format="docs: %(message)s")
    pages = write_pages(folder / "pages")
    places = {"docs_dir": str(folder / "pages"), "site_dir": str(folder / "site")}
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True, nav=navigation(pages), **places)
    try:
        build(config)
    except Abort as error:
        print(f"docs: {error}", file=sys.stderr)
        return 1
    print(f"{config.site_dir}/index.html: {len(pages)} pages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
