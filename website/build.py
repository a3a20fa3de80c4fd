"""Build the documentation site: `make docs`.

The script writes the pages into build/pages, and MkDocs builds the site in build/site. The exit code is 1 if there is a
dead link, a page that the navigation lacks, or a name without a docstring.
"""

import logging
import os
import shutil
import sys
from pathlib import Path

# This must be set before JAX is imported. JAX computes only schedules here, which needs no accelerator.
os.environ["JAX_PLATFORMS"] = "cpu"
# This variable hides a notice that the theme prints at each build.
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
    """Write every page of the site, and return the Markdown texts by path."""
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
    """Write the pages into pages/ and the site into site/ in a folder, and return the exit code."""
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
