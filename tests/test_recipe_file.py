"""Recipe files: their hooks, the messages for mistakes, and the copy that a run keeps."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from support.data import random_table, write_arrays
from support.recipes import CONFIG, NETWORK, WHOLE
from support.runs import fails

from jaxddp.cli import main
from jaxddp.command_line import parse
from jaxddp.commands.train import Train
from jaxddp.config import Config, load
from jaxddp.core.errors import InputError
from jaxddp.recipe.file import HOOKS, read_recipe
from jaxddp.workdir.claim import Claim, claim


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("data") / "set.npz"
    return str(write_arrays(file, random_table(50), random_table(23, seed=1)))


ONE_DEVICE = ["--parallel.devices", "1"]


def forget(folder: Path) -> None:
    """Remove the modules that were imported from a folder, as if the next import were in a new process."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty working directory. Its modules are removed from `sys.modules` afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget(tmp_path)


def write(folder: Path, name: str = "mine.py", source: str = WHOLE) -> Path:
    (folder / "network.py").write_text(NETWORK)
    (folder / name).write_text(source)
    return folder / name


def lines(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_recipe_provides_all_objects_and_the_run_keeps_a_copy(folder, data, capfd):
    write(folder)
    assert main(["train", "mine.py", "--data.path", data, "--optimizer.learning-rate", "0.02", *ONE_DEVICE]) == 0
    assert "metrics: runs/mine/metrics.jsonl" in capfd.readouterr().out
    run = folder / "runs" / "mine"
    train = [line for line in lines(run) if line["split"] == "train"]
    assert [line["step"] for line in train] == list(range(1, 10))
    assert {"loss", "top1", "sure", "learning_rate", "gradient_norm"} <= train[0].keys()
    assert (run / "steps.txt").read_text().split() == [str(step) for step in range(1, 10)]
    assert sorted(path.name for path in (run / "recipe").iterdir()) == ["mine.py", "network.py"]
    assert max(line["learning_rate"] for line in train) == pytest.approx(0.02)
    # After the files are removed, the run uses its own copy of them.
    (folder / "mine.py").unlink()
    (folder / "network.py").unlink()
    assert main(["eval", "runs/mine/config.json"]) == 0
    shown = dict(line.split(": ") for line in capfd.readouterr().out.splitlines())
    last = [line for line in lines(run) if line["split"] == "val"][-1]
    assert float(shown["loss"]) == pytest.approx(last["loss"], rel=1e-6)
    assert float(shown["sure"]) == pytest.approx(last["sure"], rel=1e-6) and int(shown["count"]) == 23
    assert main(["train", "runs/mine/config.json", "--train.duration", "11 steps"]) == 0
    assert lines(run)[-1]["step"] == 11


@pytest.mark.slow
def test_on_resume_a_changed_recipe_is_rejected_and_a_moved_one_is_accepted(folder, data, capfd):
    write(folder)
    words = ["--data.path", data, "--workdir", "w", *ONE_DEVICE]
    assert main(["train", "mine.py", *words]) == 0
    whole = lines(folder / "w")
    (folder / "mine.py").write_text(WHOLE.replace("momentum=0.9", "momentum=0.8"))
    assert "the recipe file mine.py has changed" in fails(["train", "mine.py", *words], capfd)
    write(folder)
    (folder / "network.py").write_text(NETWORK + "\n# Another line.\n")
    assert "the recipe file network.py has changed" in fails(["train", "mine.py", *words], capfd)
    (folder / "elsewhere").mkdir()
    write(folder / "elsewhere")
    forget(folder)
    assert main(["train", "elsewhere/mine.py", *words]) == 0
    assert lines(folder / "w") == whole


@pytest.mark.slow
def test_a_recipe_loads_another_beside_itself_and_inherits_its_hooks(folder, monkeypatch):
    (folder / "recipes").mkdir()
    write(folder / "recipes", "base.py")
    child = "from jaxddp.config import load\ndef get_config():\n    return load('base.py').replace(seed=7)\n"
    (folder / "recipes" / "child.py").write_text(child + "def get_loss(config):\n    return 'own'\n")
    recipe = read_recipe("recipes/child.py")
    assert recipe.config.seed == 7 and recipe.hooks.keys() == HOOKS.keys()
    assert recipe.hooks["get_loss"](recipe.config) == "own"
    assert recipe.hooks["get_model"].path.name == "base.py"
    assert sorted(recipe.files()) == ["base.py", "child.py", "network.py"]
    (folder / "recipes" / "deep").mkdir()
    (folder / "recipes" / "deep" / "deeper.py").write_text(child.replace("base.py", "../base.py"))
    deeper = read_recipe("recipes/deep/deeper.py")
    assert sorted(deeper.files()) == ["base.py", "deep/deeper.py", "network.py"]
    # In Python, `load` returns only the config.
    assert load("recipes/child.py") == recipe.config


@pytest.mark.slow
def test_the_digest_depends_only_on_the_files(folder):
    path = write(folder)
    first = read_recipe(path)
    first.hooks["get_model"](first.config, 3)
    digest = first.digest()
    assert digest == read_recipe("mine.py").digest() == read_recipe(str(path)).digest()
    path.write_text(WHOLE + "\n# A comment.\n")
    assert read_recipe(path).digest() != digest
    (folder / "plain.py").write_text(CONFIG)
    assert read_recipe("plain.py").digest() is None and read_recipe("digits").digest() is None


def hook(name: str, *body: str, arguments: str | None = None) -> str:
    parameters = HOOKS.get(name, "config") if arguments is None else arguments
    return WHOLE + f"\ndef {name}({parameters}):\n" + "".join(f"    {line}\n" for line in body)


REFERENCES = [
    ("Reference(0.94, 'a paper', runs=3)", {"value": 0.94, "runs": 3, "deviation": None, "at": "2 epochs"}),
    ("Reference(0.94, 'a paper', at='90 epochs')", {"metric": "top1", "at": "90 epochs"}),
    ("Reference(94, 'a paper')", r"mine.py:2: reference.value=94.0: expected 0 to 1"),
    ("Reference(0.94, 'a paper', runs=0)", r"mine.py:2: reference.runs=0: expected 1 to "),
    ("Reference(0.94)", r"mine.py:2: TypeError: .*'source'"),
    ("0.94", r"mine.py: reference is 0.94; give a jaxddp.config.Reference\(value, source\)"),
    ("len", None),
]


@pytest.mark.parametrize(("source", "expected"), REFERENCES)
def test_a_recipe_states_the_published_result(source, expected, folder):
    head = f"from jaxddp.config import Config, Reference, load\nreference = {source}\ndef get_config():\n    return "
    (folder / "mine.py").write_text(head + "Config().replace(train={'duration': '2 epochs'})\n")
    # A recipe that loads another one has other settings.
    (folder / "child.py").write_text(head.replace("reference =", "own =") + "load('mine.py')\n")
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            read_recipe("mine.py")
        return
    directory, place = folder / "run", folder / "run/reference.json"
    directory.mkdir()
    # A run that is continued by its directory keeps the reference.
    for name, is_kept in (("mine.py", bool(expected)), (directory, bool(expected)), ("child.py", False)):
        recipe = read_recipe(name)
        claim(directory, Claim(recipe.config.to_dict(), {}, recipe), resuming=name != "mine.py")
        assert place.exists() == is_kept and (not is_kept or json.loads(place.read_text()).items() >= expected.items())


BAD = [
    (
        CONFIG + "def get_modle(config, num_classes):\n    return 3\n",
        "mine.py: get_modle is not a hook; .* 'get_model'",
    ),
    (
        hook("get_model", "return 3", arguments="config"),
        r"mine.py: get_model\(config\) is called as get_model\(config, num",
    ),
    (WHOLE + "get_metrics = {}\n", r"mine.py: get_metrics is a dict; define get_metrics\(config\)"),
    (hook("get_model", "return 3"), "mine.py: get_model: model is of type int; give a Linen module"),
    (hook("get_loss", "return lambda logits, labels: logits"), "get_loss: loss get_loss.*: returned float32"),
    (
        hook("get_objective", "return 3"),
        r"get_objective: an object of type int was given; give a function of \(objective\)",
    ),
    (hook("get_metrics", "return [3]"), "get_metrics: an object of type list was given; give a dict"),
    (hook("get_metrics", "return {'bad': lambda x: x}"), "get_metrics: bad: fails for .* TypeError"),
    (hook("get_augmentation", "return 3"), "get_augmentation: an object of type int was given; give a function"),
    (
        hook("get_initialize", "return lambda params, model_state: ({}, model_state)"),
        "initialize: params/Dense_0/bias is absent, and the network's is float32.*; keep names",
    ),
    (hook("get_initialize", "return lambda params, state: params['fc']"), "mine.py:.*: get_initialize: KeyError: 'fc'"),
    (hook("get_listeners", "return 3"), "get_listeners: an object of type int was given; give a list"),
    (hook("get_listeners", "return [3]"), "get_listeners: an object of type int has none of a listener's methods"),
    (hook("get_loss", "from no_such_module import x"), "mine.py:[78][0-9]: get_loss: ModuleNotFoundError"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_an_invalid_hook_raises_a_one_line_error(source, message, folder, data, capfd):
    write(folder, source=source)
    line = fails(["train", "mine.py", "--data.path", data], capfd)
    assert re.search(message, line), line
    # Listeners may write to the work directory, so they are made after it; then the network is initialized.
    after_workdir = (
        "get_listeners: an",
        "get_objective: AttributeError",
        "get_initialize: KeyError",
        "initialize: params",
    )
    assert any(phrase in line for phrase in after_workdir) == Path("runs").exists()


@pytest.mark.slow
def test_an_imported_helper_is_not_a_hook(folder):
    (folder / "helpers.py").write_text("def get_numbers():\n    return 3\n")
    write(folder, source=CONFIG + "from helpers import get_numbers\nfrom jaxddp.data.division import GROUPS\n")
    assert read_recipe("mine.py").hooks.keys() == {"GROUPS"}


def test_a_recipe_gets_the_modules_of_its_folder_as_they_are_now(folder):
    for place, seed in (("a", 1), ("b", 2), ("a", 13), ("a", 145)):
        (folder / place / "lib").mkdir(parents=True, exist_ok=True)
        (folder / place / "lib" / "own.py").write_text(f"SEED = {seed}\n")
        get_config = "def get_config():\n    return Config(seed=own.SEED)\n"
        write(folder / place, source=f"from jaxddp.config import Config\nfrom lib import own\n{get_config}")
        assert load(folder / place / "mine.py").seed == seed


@pytest.mark.slow
def test_a_name_without_its_ending_gets_the_file_as_a_suggestion(folder):
    write(folder)
    with pytest.raises(InputError, match="config 'mine' does not exist; did you mean the file 'mine.py'"):
        read_recipe("mine")
    # A recipe that loads a file beside itself without the ending .py gets the suggestion too.
    (folder / "deep").mkdir()
    (folder / "deep" / "base.py").write_text(CONFIG)
    loads = "from jaxddp.config import load\ndef get_config():\n    return load('base')\n"
    (folder / "deep" / "child.py").write_text(loads)
    with pytest.raises(InputError, match="config 'base' does not exist; did you mean the file 'base.py'"):
        read_recipe("deep/child.py")
    with pytest.raises(InputError, match="^deep/config.json: no such file, so this folder is no run; give a run, the"):
        read_recipe("deep")


@pytest.mark.slow
def test_a_built_in_recipe_with_hooks_is_kept_by_its_run_and_inherited(folder):
    """A built-in recipe that a user's recipe loads by name is not copied."""
    built_in = read_recipe("cifar10_fast_sgd")
    assert built_in.hooks.keys() == {"get_initialize", "get_optimizer", "get_parts"}
    assert [*built_in.files()] == ["cifar10_fast_sgd.py"] and built_in.digest() is not None
    child = "from jaxddp.config import load\ndef get_config():\n    return load('cifar10_fast').replace(seed=7)\n"
    (folder / "mine.py").write_text(child)
    recipe = read_recipe("mine.py")
    assert recipe.hooks.keys() == {"get_initialize", "get_optimizer"}
    assert [*recipe.files()] == ["mine.py"] and recipe.root == folder


@pytest.mark.slow
def test_a_missing_copy_of_the_recipe_is_reported(folder, data, capfd):
    write(folder)
    (notes := folder / "runs" / "mine" / "recipe" / "notes").mkdir(parents=True)
    (notes / "own.txt").touch()
    start = ["train", "mine.py", "--data.path", data, "--train.duration", "1 step", *ONE_DEVICE]
    assert main(start) == 2
    assert "runs/mine/recipe/notes/own.txt: belongs to no run; move it, or give another" in capfd.readouterr().err
    (notes / "own.txt").unlink()
    assert main(start) == 0
    saved = json.loads((folder / "runs" / "mine" / "config.json").read_text())
    assert saved["recipe"]["hooks"] == sorted(read_recipe("mine.py").hooks) and "get_model" in saved["recipe"]["hooks"]
    (folder / "runs" / "mine" / "recipe" / "mine.py").unlink()
    assert main(["eval", "runs/mine/config.json"]) == 2
    assert "recipe/mine.py: the run's copy of its recipe is missing; restore it" in capfd.readouterr().err


@pytest.mark.slow
def test_a_changed_copy_of_the_recipe_is_reported(folder):
    (folder / "recipe").mkdir()
    source = CONFIG + "def get_metrics(config):\n    import network\n    return {}\n"
    recipe = read_recipe(write(folder / "recipe", source=source))
    recipe.hooks["get_metrics"](recipe.config)
    (folder / "config.json").write_text(json.dumps(recipe.config.to_dict() | {"recipe": recipe.entry()}))
    assert recipe.files().keys() == {"mine.py", "network.py"}
    (folder / "recipe" / "._mine.py").touch()  # tar on macOS adds such files to an archive.
    # In another process, the hook has not imported its module yet.
    forget(folder)
    read_recipe("config.json")
    (folder / "copy.json").write_text((folder / "config.json").read_text().replace('"mine.py"', '"../mine.py"'))
    with pytest.raises(InputError, match="recipe/../mine.py: the run's copy of its recipe is missing"):
        read_recipe("copy.json")
    (folder / "copy.json").write_text('{"recipe": 5}')
    with pytest.raises(InputError, match="copy.json: its recipe is 5; restore the file"):
        read_recipe("copy.json")
    (folder / "recipe" / "network.py").write_text(NETWORK + "\n# Another line.\n")
    with pytest.raises(InputError, match="recipe: the run's copy of its recipe has changed; restore it"):
        read_recipe("config.json")
    os.mkfifo(folder / "recipe" / "fifo.py")
    with pytest.raises(InputError, match="recipe/fifo.py: cannot be read .a FIFO, not a regular file.; restore it"):
        read_recipe("config.json")


def test_a_recipe_that_changes_the_working_directory_changes_no_path(folder):
    listeners = "def get_listeners(config, workdir):\n    os.chdir('/')\n    return []\n"
    (folder / "mine.py").write_text("import os\nos.chdir('/')\n" + CONFIG + listeners)
    recipe = read_recipe("mine.py")
    assert [*recipe.files()] == ["mine.py"] and recipe.hooks["get_listeners"](recipe.config, folder) == []
    assert Path.cwd() == folder
    (folder / "gone").mkdir()
    os.chdir("gone")
    (folder / "gone").rmdir()
    with pytest.raises(InputError, match="^the current directory: cannot be read .*; go to another one$"):
        read_recipe("digits")
    assert main(["data", "check", "x"]) == 2


def test_recipes_that_load_each_other_raise_a_one_line_error(folder):
    for name, other in ("ab", "ba"):
        source = f"from jaxddp.config import load\ndef get_config():\n    return load('{other}.py')\n"
        (folder / f"{name}.py").write_text(source)
    with pytest.raises(InputError, match=f"{folder}/a.py: loads itself; load the recipe that it is based on"):
        read_recipe("a.py")


def test_reading_a_recipe_is_bounded_by_the_stall_timeout(folder, monkeypatch):
    """tests/test_activity.py tests the message."""
    bounds = list[float]()
    # A real watchdog would outlive the test and end this process.
    monkeypatch.setattr(parse, "watch_alone", bounds.append)
    (folder / "slow.py").write_text(f"import jaxddp.core.phases as phases\nPHASE = phases.progress().phase\n{CONFIG}")
    parse.parse_recipe(Train, "jaxddp train", ["slow.py"])
    assert bounds == [Config().parallel.stall_timeout] and sys.modules["jaxddp_recipe_slow"].PHASE == "start"
