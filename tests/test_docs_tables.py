"""The lists and tables in the pages match the code: keys, names, timeouts, scripts, messages, and generated lists."""

import os
import re
import subprocess
import sys

import pytest
from support.pages import PAGES, ROOT

import jaxddp.config.registry as registry
from jaxddp.command_line.words import format_option
from jaxddp.config import Config
from jaxddp.config.registry import LOGGERS, Registry
from jaxddp.recipe.file import HOOKS, read_recipe
from jaxddp.training.checkpoints.integrity import MAY_CHANGE

CONFIGS = {file.stem for file in (ROOT / "configs").glob("*.py")}
KEYS = Config().flat()
REGISTRIES = {name: kind for name, kind in vars(registry).items() if isinstance(kind, Registry)}
# Pages for developers, and the generated list that has every key.
NOT_FOR_USERS = (
    "CONTRIBUTING.md",
    "BUILD_NOTES.md",
    "CHANGELOG.md",
    "benchmarks/RESULTS.md",
    "docs/design.md",
    "docs/keys.md",
)
USER_PAGES = "\n".join((ROOT / page).read_text() for page in PAGES if page not in NOT_FOR_USERS)


def test_a_page_explains_every_key_of_a_config():
    words = {word.strip(".") for word in re.findall(r"[\w.-]+", USER_PAGES)}
    assert not [key for key in KEYS if key not in words and format_option(key) not in words]


# A config does not choose a format.
@pytest.mark.parametrize("name", sorted(REGISTRIES.keys() - {"FORMATS"}))
def test_a_page_has_every_name_that_a_config_may_choose(name):
    kind = REGISTRIES[name]
    # Other tests of this pytest worker may have added names. An augmentation may have the name of a key.
    names = [name for name in kind.names() if not getattr(kind.get(name), "__module__", "").startswith("test")]
    # "`a` to `b`" stands for the names between them, with numbers in their order.
    ordered = sorted(names, key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(6), name))
    for first, last in re.findall(r"`(\w+)` to `(\w+)`", USER_PAGES):
        if {first, last} <= {*ordered}:
            names = [name for name in names if not ordered.index(first) <= ordered.index(name) <= ordered.index(last)]
    assert not [name for name in names if f"`{name}`" not in USER_PAGES and f"data.augment.{name}" not in KEYS]


@pytest.mark.parametrize(
    ("page", "row", "names"),
    [
        ("docs/runs.md", r"^\| `(\w+)` \|", LOGGERS.names()),
        ("configs/README.md", r"^\| `(\w+)` \|", CONFIGS),
        ("CONTRIBUTING.md", r"`@(\w+)\.add", REGISTRIES),
    ],
)
def test_a_table_is_complete(page, row, names):
    assert sorted(re.findall(row, (ROOT / page).read_text(), re.MULTILINE)) == sorted(names)


def test_the_published_results_are_the_references_of_the_configs():
    rows = re.findall(r"^\| `(\w+)` \|.*?\|.*?\| (.*?) \|", (ROOT / "configs/README.md").read_text(), re.MULTILINE)
    published = {name: str(reference) for name in CONFIGS if (reference := read_recipe(name).reference)}
    assert {name: text.partition(" on ")[0] for name, text in rows if name in published} == published
    # Its source has a range for several durations.
    assert {text for name, text in rows if name not in published} == {"none", "75 to 78.1% for 16 to 60 epochs"}


def test_a_resumed_run_may_change_all_of_parallel_except_reproducible():
    parallel = {key for key in KEYS if key.startswith("parallel.")}
    assert parallel - MAY_CHANGE == {"parallel.reproducible"}


def test_the_hooks_of_a_recipe_file_are_in_the_table_with_their_arguments():
    table = dict(re.findall(r"^\| `(get_\w+)\((.*?)\)` \|", (ROOT / "docs/extending.md").read_text(), re.MULTILINE))
    assert table == {"get_config": "", **HOOKS}


@pytest.mark.ci
def test_the_lists_in_the_pages_are_up_to_date():
    # A new process, because other tests of this process may have added names to the registries.
    completed = subprocess.run(
        [sys.executable, ROOT / "docs/lists.py", "--check"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
