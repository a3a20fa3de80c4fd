"""The pages match the code: links, commands and their options, config keys, modules and files, Python examples.

Each rule is a function of a page's path and text that returns the errors. `BAD` and `GOOD` show that each rule catches
an error and accepts a correct text.
"""

import ast
import builtins
import contextlib
import functools
import inspect
import io
import itertools
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.pages import PAGES, ROOT, blocks, page_block, prose, spans

from jaxddp import cli
from jaxddp.command_line.words import format_option
from jaxddp.config import Config, load
from jaxddp.config.values import flatten
from jaxddp.models.adapt import adapt
from jaxddp.weights.places import is_weights

FOLDERS = ("jaxddp", "launch", "configs", "tests", "benchmarks", "notebooks", "docs", "website", ".ci")
MOST_WORDS = {
    "README.md": 910,
    "BUILD_NOTES.md": 2000,
    "docs/design.md": 6000,
    "docs/scaling.md": 5000,
    "benchmarks/RESULTS.md": 7000,
}
CONFIGS = {file.stem for file in (ROOT / "configs").glob("*.py")}
KEYS = flatten(Config().to_dict())

# The first argument of these commands is a config, on which their options depend.
CONFIG_COMMANDS = (("train",), ("eval",), ("find-lr",), ("doctor",), ("config",), ("data", "show"))
COMMANDS = (
    *CONFIG_COMMANDS,
    ("data", "check"),
    ("data", "pack"),
    ("data", "sample"),
    ("predict",),
    ("features",),
    ("probe",),
    ("checkpoints",),
    ("export",),
    ("push",),
    ("weights",),
    ("report",),
    ("runs",),
    ("sweep",),
    ("completion",),
    ("launch",),
)


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
    if name not in COMMANDS and name != ("data",):
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


def lone_options(path: str, text: str) -> list[str]:
    """Return errors for options alone between backticks that no command and no script has."""
    scripts = [
        file.read_text() for folder in ("launch", "benchmarks", "docs") for file in (ROOT / folder).rglob("*.py")
    ]
    known = frozenset(re.findall(r'"(--[a-z][\w-]*)"', "".join(scripts))).union(
        *(options(*name, "digits") for name in CONFIG_COMMANDS),
        *(options(*name) for name in COMMANDS),
        map(format_option, KEYS),
    )
    named = [word for span in spans(text) if span.startswith("--") for word in span.split() if word.startswith("--")]
    return [f"{path}: there is no option {word}" for word in named if word.partition("=")[0] not in known]


def keys(path: str, text: str) -> list[str]:
    """Return errors for dotted names that begin with a section of the config and are neither a key nor a section."""
    sections = {key.partition(".")[0] for key in KEYS if "." in key}
    named = [span for span in spans(text) if re.fullmatch(rf"({'|'.join(sections)})(\.[a-z_0-9]+|\.\*)+", span)]
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


def undefined(code: ast.Module) -> set[str]:
    """Return the names that a module uses but neither defines nor imports."""
    used, known = set[str](), {*dir(builtins)}
    for node in ast.walk(code):
        match node:
            case ast.Name(name, ast.Load()):
                used.add(name)
            case ast.Name(name) | ast.arg(name) | ast.FunctionDef(name) | ast.ClassDef(name):
                known.add(name)
            case ast.alias(name, other):
                known.add((other or name).partition(".")[0])
    return used - known


def examples(path: str, text: str) -> list[str]:
    """Return errors for unknown names of jaxddp, and for undefined names in examples of whole files."""
    errors = []
    for block in blocks(text):
        if block.language == "toml":
            tomllib.loads(block.text)
        if block.language != "python":
            continue
        code = ast.parse(block.text)
        if block.text.startswith("# jaxddp/") and "import" in block.text:
            errors += [f"{path}: {name} is not defined" for name in undefined(code)]
        for node in ast.walk(code):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jaxddp":
                names = [f"jaxddp.{node.attr}"]
            errors += [f"{path}: there is no {name}" for name in names if not resolves(name)]
    return errors


def targets(path: str, text: str) -> list[str]:
    """Return errors for targets of make that do not exist."""
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for block in blocks(text) for line in block.text.splitlines()]
    calls = [line.split("#")[0].split()[1:] for line in [*lines, *spans(text)] if line.startswith("make ")]
    return [f"{path}: there is no make {word}" for call in calls for word in call if word not in known]


RULES: tuple[Callable[[str, str], list[str]], ...] = (
    links,
    commands,
    lone_options,
    keys,
    files_and_modules,
    examples,
    targets,
)
BAD = [
    (links, "[a](docs/nothing.md)"),
    (links, "[a](README.md#no-such-heading)"),
    (commands, "```\njaxddp trian digits\n```"),
    (commands, "```\njaxddp train digits --data.paht x\n```"),
    (commands, "```\njaxddp train no_such_config\n```"),
    (commands, "```\n.venv/bin/jaxddp eval digits --resume auto\n```"),
    (commands, "`jaxddp data chekc /data`"),
    (commands, "```\njaxddp launch --proceses 2 -- train digits\n```"),
    (commands, "```\njaxddp launch --processes 2 -- train digits --seeed 1\n```"),
    (lone_options, "`--no-such-option 3`"),
    (keys, "`train.batchsize`"),
    (keys, "`parallel.x.*`"),
    (files_and_modules, "`jaxddp/nothing.py`"),
    (files_and_modules, "`python benchmarks/nothing.py DIR`"),
    (files_and_modules, "```\npython docs/nothing.py\n```"),
    (files_and_modules, "`jaxddp.config.Confg`"),
    (files_and_modules, "`jaxddp.core.errors.InputError.nothing`"),
    (examples, "```python\nfrom jaxddp.config import Confg\n```"),
    (examples, "```python\njaxddp.trian(1)\n```"),
    (examples, "```python\n# jaxddp/losses/mine.py\nimport jax\n\nx = settings_of(jax)\n```"),
    (targets, "```\nmake no-such-target    # it\n```"),
]
GOOD = [
    (links, "[a](docs/data.md#augmentation) [b](https://example.org/x)"),
    (commands, "```\njaxddp train digits --data.path=x --seed 1  # --no-such-option\nother --x\n```"),
    (commands, "`jaxddp data show my_recipe.py --step 3` and `jaxddp doctor` and `jaxddp doctor CONFIG …`"),
    (commands, "```\njaxddp launch --gpus 0 -- python my_script.py --anything\n```"),
    (lone_options, "`--model.batch-norm sync` `--nr` `-n`"),
    (keys, "`train.batch_size` `data.augment` `parallel.*` `metrics.jsonl` `data.txt.gz/x`"),
    (
        files_and_modules,
        "`jaxddp/engine/` `launch/main.py` `jaxddp.train(…)` `jaxddp.config.Config.replace` `jaxddp[cuda12]`",
    ),
    (files_and_modules, "`python docs/lists.py --check`"),
    (examples, "```python\nfrom jaxddp.config import Config\njaxddp.train\nimport nothing\n```"),
    (examples, "```python\n# jaxddp/losses/mine.py\nimport jax\n\ndef f(x): return len(jax.y(x))\n```"),
    (targets, "`make demo` and `make lint types`"),
]


def case_name(value: object) -> str | None:
    return getattr(value, "__name__", None) or (str(value)[:40].replace("\n", " ") if isinstance(value, str) else None)


@pytest.mark.parametrize(("rule", "text"), BAD, ids=case_name)
def test_a_rule_catches_an_error_in_a_page(rule, text):
    assert rule("README.md", text)


@pytest.mark.parametrize(("rule", "text"), GOOD, ids=case_name)
def test_a_rule_accepts_a_correct_page(rule, text):
    assert rule("README.md", text) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_matches_the_code(page):
    text = (ROOT / page).read_text()
    errors = [error for rule in RULES for error in rule(page, text)]
    assert not errors, "\n".join(errors)


def test_docstrings_name_objects_that_exist():
    sources = [file for folder in ("jaxddp", "configs") for file in sorted((ROOT / folder).rglob("*.py"))]
    names = {name: file for file in sources for name in re.findall(r"`(jaxddp(?:\.\w+)+)", file.read_text())}
    missing = [f"{file.relative_to(ROOT)}: there is no {name}" for name, file in names.items() if not resolves(name)]
    assert len(names) > 40 and not missing, "\n".join(missing)


def test_the_patterns_of_the_rules_match_text_in_the_pages():
    """A pattern that matches nothing would report no error."""
    text = "\n".join((ROOT / page).read_text() for page in PAGES)
    assert len(list(command_lines(text))) > 30
    assert len(re.findall(r"\]\([^)]+\)", prose(text))) > 60
    assert len([block for block in blocks(text) if block.language == "python"]) > 5


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
    config = load(tmp_path / "my_recipe.py")
    hooks: dict = {}
    exec(compile(source, "my_recipe.py", "exec"), hooks)
    model = adapt(hooks["get_model"](config, 10))
    key, images = jax.random.key(0), jnp.zeros((4, 32, 32, 1))
    params, state = jax.eval_shape(model.init, key, images[:1])
    apply = functools.partial(model.apply, train=True, key=key)
    assert jax.eval_shape(apply, params, state, images)[0].shape == (4, 10)
    logits, labels = jnp.asarray(np.random.default_rng(0).normal(size=(4, 10)), jnp.float32), jnp.arange(4)
    assert hooks["get_loss"](config)(logits, labels).shape == (4,)
    (metric,) = hooks["get_metrics"](config).values()
    assert metric(logits, labels).shape == (4,)
    optimizer = hooks["get_optimizer"](config, lambda step: 0.1)
    weights = {"w": jnp.ones(3)}
    updates, _ = optimizer.update(weights, optimizer.init(weights), weights)
    assert updates["w"].shape == (3,)
    image = hooks["get_augmentation"](config)(key, images[0])
    assert image.shape == images[0].shape and image.dtype == images.dtype
    (listener,) = hooks["get_listeners"](config, tmp_path)
    methods = {name for name, _ in inspect.getmembers(listener, inspect.ismethod)}
    assert methods and methods <= {"start", "step", "evaluation", "end"}
