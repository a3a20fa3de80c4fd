"""Recipe files in YAML and JSON: their values, their base, their errors, and the files that `jaxddp config` writes."""

import dataclasses
import json
import re

import pytest
from support.errors import error_line
from support.recipes import CONFIG

from jaxddp.cli import main
from jaxddp.config import Config, load
from jaxddp.recipe.file import read_recipe
from jaxddp.recipe.sources import config_names
from jaxddp.recipe.text import written

HOOKS = CONFIG + "\ndef get_metrics(config):\n    return {'half': lambda logits, labels: 0.5}\n"


def config_of(text: str, folder, name: str = "recipe.yaml") -> Config:
    (folder / name).write_text(text)
    return load(folder / name)


def message_of(text: str, folder, name: str = "recipe.yaml") -> str:
    """Return the message for a file, without the folder in its path."""
    return error_line(config_of, text, folder, name).removeprefix(f"{folder}/")


@pytest.mark.parametrize("form", ["yaml", pytest.param("json", marks=pytest.mark.ci)])
def test_a_written_config_is_read_as_the_same_config(form, tmp_path):
    for name in config_names():
        config = load(name)
        assert config_of(written(config, None, form), tmp_path, f"a.{form}") == config, name


def test_sections_and_dotted_keys_set_the_same_keys(tmp_path):
    nested = "train: {batch_size: 8, duration: 3 epochs}\ndata:\n  augment:\n    flip: TRUE\n    pad: 2\n"
    dotted = "train.batch_size: 8\ntrain.duration: 3 epochs\ndata: {augment.flip: true}\ndata.augment.pad: 2\n"
    expected = Config().replace(
        train={"batch_size": 8, "duration": "3 epochs"}, data={"augment": {"flip": True, "pad": 2}}
    )
    assert config_of(nested, tmp_path) == config_of(dotted, tmp_path) == expected


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        # YAML reads these as text, a number of the base 60, false and a float.
        ("optimizer.learning_rate: 1e-3", "optimizer.learning_rate", 0.001),
        ("data.path: 12:30:45", "data.path", "12:30:45"),
        ("data.classes: 1.10", "data.classes", "1.10"),
        ('optimizer.learning_rate: "1e-3"', "optimizer.learning_rate", 0.001),
        ("data.path: 'null'", "data.path", "null"),
        ("optimizer.groups: []", "optimizer.groups", []),
        ("data.channels: 4", "data.channels", 4),
        ("log.to: [jsonl, curves]", "log.to", ["jsonl", "curves"]),
        ("model.width:", "model.width", None),
        ("data.mean: [1e-1, .5, 0]", "data.mean", [0.1, 0.5, 0.0]),
        ("data.mean: .5", "data.mean", [0.5]),
    ],
)
def test_values_are_read_like_words_of_the_command_line(line, key, value, tmp_path):
    assert config_of(line, tmp_path).flat()[key] == value


TEXTS = (
    "null",
    " 1e3 ",
    "no",
    "é 😀",
    "\x85",
    "\u2028",
    "a\n b: c",
    "\t'\"#",
    "\x1b[0m",
    "-",
    "[a]",
    "&a *b !c",
    "\ufeff",
)


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_texts_survive_both_forms(form, tmp_path):
    keys = ("path", "name", "classes", "train", "val", "data_dir", "local_cache", "manifest", "unlabelled")
    for texts in (TEXTS[: len(keys)], TEXTS[-len(keys) :]):
        config = Config().replace(data=dict(zip(keys, texts, strict=True)))
        assert config_of(written(config, None, form), tmp_path, f"a.{form}") == config
        if form == "json":
            # Two escapes stand for the emoji.
            assert config_of(json.dumps(config.to_dict()), tmp_path, "a.json") == config


def test_a_base_is_loaded_from_the_folder_of_its_file_with_its_hooks(tmp_path, monkeypatch):
    (tmp_path / "base.py").write_text(HOOKS)
    (tmp_path / "middle.json").write_text('{\n\t"base": "base.py",\n\t"seed": 3\n}')
    (tmp_path / "recipe.yaml").write_text("base: middle.json\noptimizer.learning_rate: 2e-3\n")
    monkeypatch.chdir(tmp_path)
    file = read_recipe("recipe.yaml")
    assert (file.config.seed, file.config.train.batch_size, file.config.optimizer.learning_rate) == (3, 8, 0.002)
    assert [*file.hooks] == ["get_metrics"]
    assert [*file.files()] == ["base.py", "middle.json", "recipe.yaml"]


@pytest.mark.ci
def test_a_written_recipe_keeps_the_hooks_of_its_recipe(tmp_path, monkeypatch, capsys):
    (tmp_path / "my.py").write_text(HOOKS)
    monkeypatch.chdir(tmp_path)
    assert main(["config", "my.py", "--seed", "7", "--format", "yaml"]) == 0
    (tmp_path / "all.yaml").write_text(capsys.readouterr().out)
    file = read_recipe("all.yaml")
    assert file.config == dataclasses.replace(load("my.py"), seed=7) and [*file.hooks] == ["get_metrics"]


def test_the_table_of_a_config_names_lines_and_options(tmp_path, monkeypatch, capsys):
    (tmp_path / "my.yaml").write_text("base: digits\n\nmodel:\n  width: 4\nseed: 2\n")
    monkeypatch.chdir(tmp_path)
    assert main(["config", "my.yaml", "--lr", "1e-2", "--eval.batch-size=7"]) == 0
    rows = dict(re.findall(r"^ *(\S+) .* (\S+) *$", capsys.readouterr().out, re.MULTILINE))
    assert rows["model.width"] == "my.yaml:4" and rows["seed"] == "my.yaml:5" and rows["model.name"] == "my.yaml"
    assert rows["optimizer.learning_rate"] == "--lr" and rows["eval.batch_size"] == "--eval.batch-size"
    assert rows["train.accumulate"] == "default"


def test_the_config_of_a_run_is_a_config_under_any_name(tmp_path):
    content = load("digits").to_dict() | {"run_id": "a", "fingerprint": {"train": "b"}}
    for name in ("config.json", "copy.json"):
        assert config_of(json.dumps(content), tmp_path, name) == load("digits")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "train:\n  batch_sise: 4",
            "recipe.yaml:2: unknown config key 'train.batch_sise'; did you mean 'train.batch_size'?",
        ),
        ("seed: 1\nlr: 3", "recipe.yaml:2: unknown config key 'lr'; did you mean 'optimizer.learning_rate'?"),
        ("train:\n  batch_size: x", "recipe.yaml:2: train.batch_size='x': expected a whole number, 1 to 16,777,216"),
        ("data:\n  augment:\n    flip: no", "recipe.yaml:3: data.augment.flip='no': expected True or False"),
        ("train.duration: 12:30", "recipe.yaml:1: train.duration: '12:30' is not a duration"),
        ("seed: 1\n\nseed: 2", "recipe.yaml:3: seed is set in line 1, too; remove one of the two"),
        ("train:\n\tbatch_size: 1", "recipe.yaml:2: is not YAML (found character '\\t' that cannot start any token)"),
        ("- a\n- b", "recipe.yaml: is a sequence and not a mapping"),
        ("", "recipe.yaml: is empty; write keys and values"),
        ("train:\nseed: 5", "recipe.yaml:1: train is a section; give its keys"),
        ("model: &m\n  name: a\nloss: *m", "recipe.yaml:3: loss is an alias; write its value"),
        ("seed: !!python/name:os.system x", "recipe.yaml:1: seed: the tag 'tag:yaml.org"),
        ("log.to: [[jsonl]]", "recipe.yaml:1: log.to: a sequence in a list"),
        ("seed: {}", "recipe.yaml:1: seed has no keys; leave it out"),
        ("base: [digits]", "recipe.yaml:1: base: give the name of a config or the path of a recipe file"),
        ("checkpoint:\n  best: val/top1", "recipe.yaml:2: checkpoint.best='val/top1': give a split and a metric"),
        ("# " + "x" * 1_000_000, "recipe.yaml: has 1,000,002 bytes; a recipe file has at most 1,000,000"),
    ],
)
def test_an_error_names_the_file_the_line_and_the_key(text, message, tmp_path):
    assert message_of(text, tmp_path).startswith(message)


def test_a_recipe_that_is_its_own_base_is_an_error(tmp_path):
    assert "recipe.yaml: loads itself" in message_of("base: recipe.yaml", tmp_path)


def test_errors_of_json_name_the_line(tmp_path):
    assert message_of('{"a": 1,\nx}', tmp_path, "a.json").startswith("a.json:2: is not JSON (Expecting property name")
    assert message_of('{"seed": 1,\n "seed": 2}', tmp_path, "a.json").startswith("a.json:2: seed is set in line 1, too")
    assert message_of('{\n\t"train": {\n\t\t"batch_size": 0}}', tmp_path, "a.json").startswith(
        "a.json:3: train.batch_size=0: expected 1 to"
    )


def test_a_later_error_about_a_key_names_its_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "my.yaml").write_text("base: digits\n\noptimizer:\n  trust_coefficient: 1e-3\n")
    monkeypatch.chdir(tmp_path)
    assert main(["config", "my.yaml"]) == 2
    assert capsys.readouterr().err.startswith("jaxddp: my.yaml:4: optimizer.trust_coefficient=0.001 is read by")
