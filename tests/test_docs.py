"""The pages match the code: links, commands and their options, config keys, modules and files, Python examples.

Each rule is a function of a page's path and text that returns the errors.
"""

import ast
import contextlib
import functools
import io
import itertools
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.pages import PAGES, ROOT, blocks, page_block, prose, spans

from jaxddp import cli
from jaxddp.config import Config, load
from jaxddp.models.adapt import adapt
from jaxddp.weights.places import is_weights

FOLDERS = ("jaxddp", "launch", "configs", "tests", "benchmarks", "notebooks", "docs", "website", ".ci")
MOST_WORDS = {
    "README.md": 900,
    "BUILD_NOTES.md": 2000,
    "docs/design.md": 6000,
    "docs/scaling.md": 5000,
    "benchmarks/RESULTS.md": 7000,
}
CONFIGS = {file.stem for file in (ROOT / "configs").glob("*.py")}
KEYS = Config().flat()

# The first argument of these commands is a config, on which their options depend.
CONFIG_COMMANDS = (("train",), ("eval",), ("find-lr",), ("doctor",), ("config",), ("data", "show"))
COMMANDS = {(name,) for name in cli.COMMANDS}
COMMANDS |= {("data", name) for name in ("check", "show", "pack", "split", "get", "sample")}


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(path: str, text: str) -> list[str]:
    """Return errors for relative links without a file, or with an anchor that no heading of the file has."""
    errors = []
    for target in re.findall(r"\]\(([^)]+)\)", prose(text)):
        file, _, anchor = target.partition("#")
        page = (ROOT / path).parent / file if file else ROOT / path
        if "://" in target:
            continue
        if not page.exists():
            errors.append(f"{path}: {target} leads nowhere")
        elif anchor and anchor not in anchors(page):
            errors.append(f"{path}: {target}: no such heading")
    return errors


@functools.cache
def options(*words: str) -> frozenset[str]:
    """Return the options in a command's `--help`."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        cli.main([*words, "--help"])
    return frozenset(re.findall(r"--[a-z][\w.-]*", output.getvalue()))


def command_lines(text: str) -> Iterator[list[str]]:
    """Yield the words of each jaxddp command, in a fenced block or between backticks."""
    lines = [line for block in blocks(text) for line in block.text.replace("\\\n", " ").splitlines()]
    for line in [*lines, *spans(text)]:
        words = line.strip().removeprefix(".venv/bin/")
        if words.startswith("jaxddp "):
            yield shlex.split(words, comments=True)[1:]


def commands(path: str, text: str) -> list[str]:
    """Return errors for commands, options and configs that do not exist."""
    return [f"{path}: jaxddp {' '.join(line)}: {error}" for line in command_lines(text) for error in command(line)]


def command(words: list[str]) -> list[str]:
    """Return the errors of one command line."""
    if words[0] == "launch" and "--" in words:
        separator = words.index("--")
        launched = words[separator + 1 :]
        return command(words[:separator]) + (command(launched) if launched[0] != "python" else [])
    length = 2 if words[0] == "data" else 1
    name, rest = tuple(words[:length]), words[length:]
    if name not in COMMANDS:
        return [f"there is no command {' '.join(name)}"]
    errors = []
    if rest and name in CONFIG_COMMANDS and not rest[0].startswith("-"):
        config = rest[0]
        exists = config in CONFIGS or config.startswith("runs/") or config.endswith((".py", ".yaml", "config.json"))
        exists |= name == ("eval",) and is_weights(config)
        if not (exists or config.isupper() or config == "…"):
            errors.append(f"there is no config {config}")
        # The `--help` of a config omits keys that its network, optimizer and other choices do not read.
        pairs = itertools.pairwise(rest)
        name = (*name, "digits", *(word for pair in pairs if pair[0].endswith((".name", ".schedule")) for word in pair))
    # Every option of `jaxddp train` is one of `jaxddp sweep`.
    known = options(*name) | (options("train", "digits") if name == ("sweep",) else frozenset())
    named = [word.partition("=")[0] for word in rest if word.startswith("--")]
    return errors + [f"there is no option {word}" for word in named if word not in known]


def keys(path: str, text: str) -> list[str]:
    """Return errors for dotted names that begin with a section of the config and are neither a key nor a section."""
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    pattern = rf"({'|'.join(sections)})(\.(?!csv|txt)[a-z_0-9]+|\.\*)+"
    named = [span for span in spans(text) if re.fullmatch(pattern, span)]
    prefixes = {key[: dot.start()] for key in KEYS for dot in re.finditer(r"\.", key)}
    return [f"{path}: there is no key {key}" for key in named if key.removesuffix(".*") not in KEYS.keys() | prefixes]


def files_and_modules(path: str, text: str) -> list[str]:
    """Return errors for files, modules and scripts that do not exist."""
    errors = []
    script_lines = [line for block in blocks(text) for line in block.text.splitlines() if line.startswith("python ")]
    for span in [*spans(text), *script_lines]:
        name = span.removeprefix("python ").split("(")[0].split(" ")[0]
        if re.fullmatch(rf"({'|'.join(map(re.escape, FOLDERS))})/[\w./-]*", name):
            if not (ROOT / name).exists():
                errors.append(f"{path}: there is no {name}")
        elif re.fullmatch(r"jaxddp(\.\w+)+", name) and not resolves(name):
            errors.append(f"{path}: there is no {name}")
    return errors


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module, or an attribute of one."""
    try:
        return pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError):
        return False


def examples(path: str, text: str) -> list[str]:
    """Return errors for unknown names of jaxddp in examples."""
    errors = []
    for block in blocks(text):
        if block.language == "toml":
            tomllib.loads(block.text)
        if block.language != "python":
            continue
        code = ast.parse(block.text)
        for node in ast.walk(code):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jaxddp":
                names = [f"jaxddp.{node.attr}"]
            errors += [f"{path}: there is no {name}" for name in names if not resolves(name)]
    return errors


RULES: tuple[Callable[[str, str], list[str]], ...] = (links, commands, keys, files_and_modules, examples)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_matches_the_code(page):
    text = (ROOT / page).read_text()
    errors = [error for rule in RULES for error in rule(page, text)]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (links, "[a](README.md#no-such-heading)"),
        (commands, "```\njaxddp train digits --data.paht x\n```"),
        (commands, "```\njaxddp launch --processes 2 -- train digits --seeed 1\n```"),
        (keys, "`train.batchsize`"),
        (files_and_modules, "`python benchmarks/nothing.py DIR`"),
        (files_and_modules, "`jaxddp.config.Confg`"),
        (examples, "```python\nfrom jaxddp.config import Confg\n```"),
    ],
)
def test_a_rule_catches_an_error_in_a_page(rule, text):
    assert rule("README.md", text)


def test_docstrings_name_objects_that_exist():
    sources = [file for folder in ("jaxddp", "configs") for file in sorted((ROOT / folder).rglob("*.py"))]
    names = {name: file for file in sources for name in re.findall(r"`(jaxddp(?:\.\w+)+)", file.read_text())}
    missing = [f"{file.relative_to(ROOT)}: there is no {name}" for name, file in names.items() if not resolves(name)]
    assert len(names) > 40 and not missing, "\n".join(missing)


@pytest.mark.parametrize(("page", "most"), MOST_WORDS.items())
def test_a_page_stays_short(page, most):
    assert len((ROOT / page).read_text().split()) <= most, "move details to another page, or leave them out"


def test_all_pages_together_stay_short():
    assert sum(len((ROOT / page).read_text().split()) for page in PAGES) <= 55_000


def test_the_recipe_of_the_readme_runs(tmp_path):
    (tmp_path / "my_recipe.py").write_text(page_block("README.md", "get_config"))
    config = load(tmp_path / "my_recipe.py")
    assert (config.model.name, config.model.width, str(config.train.duration)) == ("resnet50", 128, "120 epochs")


@pytest.mark.slow
def test_the_hooks_of_the_complete_recipe_return_valid_objects(tmp_path):
    """Call each hook by itself. The tests of recipe files show that a run uses the hooks."""
    source = page_block("docs/extending.md", "get_listeners(config")
    (tmp_path / "my_recipe.py").write_text(source)
    config, hooks = load(tmp_path / "my_recipe.py"), dict[str, Any]()
    exec(compile(source, "my_recipe.py", "exec"), hooks)
    model, key, images = adapt(hooks["get_model"](config, 10)), jax.random.key(0), jnp.zeros((4, 32, 32, 1))
    params, state = jax.eval_shape(model.init, key, images[:1])
    apply = functools.partial(model.apply, train=True, key=key)
    assert jax.eval_shape(apply, params, state, images)[0].shape == (4, 10)
    logits, labels, weights = jnp.ones((4, 10)), jnp.arange(4), {"w": jnp.ones(3)}
    assert hooks["get_loss"](config)(logits, labels).shape == (4,)
    assert [metric(logits, labels).shape for metric in hooks["get_metrics"](config).values()] == [(4,)]
    optimizer = hooks["get_optimizer"](config, lambda step: 0.1)
    assert optimizer.update(weights, optimizer.init(weights), weights)[0]["w"].shape == (3,)
    assert hooks["get_augmentation"](config)(key, images[0]).shape == images[0].shape
    (listener,) = hooks["get_listeners"](config, tmp_path)
    assert any(callable(getattr(listener, name, None)) for name in ("start", "step", "evaluation", "end"))
