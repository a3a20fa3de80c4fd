"""The documentation site: MkDocs builds it strictly, and a real browser shows its pages and searches them."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import environment

pytestmark = pytest.mark.ci

WIDE, PHONE = (1400, 1000), (390, 844)
PAGES = {
    "index.html": "image classifiers in JAX",
    "commands/train.html": "--resume {auto,never,must}",
    "python/index.html": "batch_size_per_device",
}


def build(folder: Path, *statements: str) -> subprocess.CompletedProcess[str]:
    """Build the site into a folder, after some Python statements."""
    program = [
        "import sys",
        "from pathlib import Path",
        "from website import build, documents",
        *statements,
        "sys.exit(build.main(Path(sys.argv[1])))",
    ]
    command = [sys.executable, "-c", "\n".join(program), str(folder)]
    environ = environment(JAX_PLATFORMS="cpu")
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site of this checkout."""
    folder = tmp_path_factory.mktemp("build")
    done = build(folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder / "site"


def test_a_dead_link_ends_the_build(tmp_path):
    """Build without the pages made from the code, which take most of the time."""
    few = [
        "build.recipe_pages = build.command_pages = build.python_pages = dict",
        "documents.documents = lambda: {'docs/data.md': 'index.md'}",
        "text = '# A\\n\\n[a](nothing.md) [b](#no-such-heading)\\n'",
        "build.copied_documents = lambda: {'index.md': text}",
    ]
    done = build(tmp_path, *few)
    assert done.returncode == 1
    assert "nothing.md" in done.stderr and "no-such-heading" in done.stderr and "2 warnings" in done.stderr


@pytest.mark.parametrize("size", [WIDE, PHONE])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_shown_without_errors_and_fits_the_screen(browser, site, page, size):
    browser.open(site / page, *size)
    assert PAGES[page] in browser.run("document.querySelector('article').innerText")
    assert browser.run("document.scrollingElement.scrollWidth") <= size[0]
    assert browser.errors == []
    assert [address for address in browser.requests if not address.startswith(site.as_uri())] == []
    images = "[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
    assert browser.run(images) == []


def test_the_search_finds_a_message(browser, site):
    """The page is opened as a file, where browsers start no workers."""
    browser.open(site / "index.html", *WIDE)
    typed = "box.focus(); box.value = 'JAXDDP_JOB_KEY'; box.dispatchEvent(new Event('keyup'))"
    browser.run(f"const box = document.querySelector('.md-search__input'); __search.click(); {typed}")
    links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.getAttribute('href'))"
    look = f"const found = {links}; found.length ? done(found) : setTimeout(look, 100)"
    found = browser.run(f"new Promise(done => {{ const look = () => {{ {look} }}; look() }})")
    assert any("troubleshooting.html#" in link for link in found)
    assert browser.errors == []
