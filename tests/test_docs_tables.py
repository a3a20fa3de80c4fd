"""The lists and tables in the pages match the code: keys, names, timeouts, scripts, messages, and generated lists."""

import ast
import os
import re
import subprocess
import sys
import typing
from collections.abc import Iterator

import pytest
from support.pages import PAGES, ROOT, page_block, spans

import jaxddp.config.registry as registry
from jaxddp.command_line.words import format_option
from jaxddp.config import Config, load
from jaxddp.config.registry import (
    AUGMENTATIONS,
    LOGGERS,
    LOSSES,
    METRICS,
    MODELS,
    OBJECTIVES,
    OPTIMIZERS,
    POLICIES,
    SCHEDULES,
    Registry,
)
from jaxddp.config.values import flatten
from jaxddp.core import phases
from jaxddp.recipe.hooks import HOOKS
from jaxddp.training.checkpoints.integrity import MAY_CHANGE

CONFIGS = {file.stem for file in (ROOT / "configs").glob("*.py")}
KEYS = flatten(Config().to_dict())
REGISTRIES = (MODELS, LOSSES, METRICS, OPTIMIZERS, OBJECTIVES, SCHEDULES, AUGMENTATIONS, POLICIES, LOGGERS)
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


@pytest.mark.parametrize("kind", REGISTRIES, ids=[kind.key for kind in REGISTRIES])
def test_a_page_has_every_name_that_a_config_may_choose(kind):
    # Other tests of this pytest worker may have added names. An augmentation may have the name of a key.
    names = [name for name in kind.names() if not getattr(kind.get(name), "__module__", "").startswith("test")]
    assert not [name for name in names if f"`{name}`" not in USER_PAGES and f"data.augment.{name}" not in KEYS]


@pytest.mark.parametrize(
    ("page", "row", "names"),
    [
        ("docs/runs.md", r"^\| `(\w+)` \|", LOGGERS.names()),
        ("configs/README.md", r"^\| `(\w+)` \|", CONFIGS),
        (
            "CONTRIBUTING.md",
            r"`@(\w+)\.add",
            [name for name, kind in vars(registry).items() if isinstance(kind, Registry)],
        ),
    ],
)
def test_a_table_is_complete(page, row, names):
    assert sorted(re.findall(row, (ROOT / page).read_text(), re.MULTILINE)) == sorted(names)


def test_a_resumed_run_may_change_all_of_parallel_except_reproducible():
    parallel = {key for key in KEYS if key.startswith("parallel.")}
    assert parallel - MAY_CHANGE == {"parallel.reproducible"}


def test_the_hooks_of_a_recipe_file_are_in_the_table_with_their_arguments():
    table = dict(re.findall(r"^\| `(get_\w+)\((.*?)\)` \|", (ROOT / "docs/extending.md").read_text(), re.MULTILINE))
    assert table == {"get_config": "", **HOOKS}


def test_the_page_names_the_configs_whose_batch_norm_is_not_local():
    (sentence,) = re.findall(r"every shipped config except.*?\.", (ROOT / "docs/scaling.md").read_text(), re.DOTALL)
    named = {name for name in CONFIGS if f"`{name}`" in sentence}
    assert named == {name for name in CONFIGS if load(name).model.batch_norm not in (None, "local")}


def test_the_tables_of_timeouts_and_phases_match_the_code():
    page = (ROOT / "docs/scaling.md").read_text()
    timeouts = re.findall(r"^\| `(parallel\.\w+)` \| ([\d.]+) s \|", page, re.MULTILINE)
    assert {key: float(seconds) for key, seconds in timeouts} == {
        key: value for key, value in KEYS.items() if key.startswith("parallel.") and key.endswith("_timeout")
    }
    (table,) = re.findall(r"^\| phase \|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    # The limit of "none, unless others wait for it" is that of "once".
    numbers = {"none": 1.0, "once": 1.0, "3": 3.0, "6": 6.0}
    rows = re.findall(r"^\| (`.*?) \|.*\| (\w+)[^|]* \|$", table, re.MULTILINE)
    limits = {phase: numbers[limit] for cell, limit in rows for phase in re.findall(r"`(\w+)`", cell)}
    names = {*typing.get_args(phases.Phase), phases.COMMIT}
    assert limits == {name: phases.Progress(name, 0, 0.0).limit(1.0) for name in names}


def test_the_page_has_every_script_of_launch():
    files = {file.relative_to(ROOT).as_posix() for file in (ROOT / "launch").iterdir() if file.is_file()}
    assert not files.difference(spans((ROOT / "docs/scaling.md").read_text()))


def test_the_tree_of_the_design_has_every_folder_of_the_package():
    tree = page_block("docs/design.md", "command_line/")
    places = {place.stem for place in (ROOT / "jaxddp").iterdir() if place.is_dir() or place.suffix == ".py"}
    assert not [place for place in places if not place.startswith("_") and not re.search(rf"\b{place}\b", tree)]


def texts() -> Iterator[list[str]]:
    """Yield the parts of each string of the package; a formatted value stands between two parts."""
    for file in (ROOT / "jaxddp").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Constant(value=str(text)):
                    yield [text]
                case ast.JoinedStr(values=values):
                    yield "".join(value.value if isinstance(value, ast.Constant) else "\0" for value in values).split(
                        "\0"
                    )


def clauses(page: str) -> Iterator[re.Pattern[str]]:
    """Yield a pattern for each clause of three or more words whose parts are in a page. Any formatted value matches."""
    for parts in texts():
        text = "\0".join(parts)
        for clause in {*re.split(r"[;:(\n]", text), *re.split(r"[;:(\n,]", text)}:
            clause = clause.strip(" .,)'")
            if len(re.findall(r"[a-zA-Z_]+", clause)) > 2 and all(part in page for part in clause.split("\0")):
                yield re.compile(re.escape(clause).replace("\0", ".+?"))


@pytest.mark.slow
def test_the_messages_on_the_page_of_troubleshooting_are_in_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quotes = [quote for cell in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for quote in spans(cell)]
    messages = [quote for quote in quotes if len(quote.split()) > 3]
    known = list(clauses(page))
    assert len(messages) > 30
    assert not [message for message in messages if not any(clause.search(message) for clause in known)]


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
