"""Commands read the settings of a run, and settings that a new run inherits, from the run's work directory."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.data import random_table, write_arrays
from support.runs import fails, metrics

import jaxddp
from jaxddp.cli import main
from jaxddp.command_line.parse import parse_recipe
from jaxddp.commands.doctor import DoctorOfConfig
from jaxddp.commands.eval import Eval
from jaxddp.commands.find_lr import FindLr
from jaxddp.commands.train import Train
from jaxddp.config import Config, LossConfig, load
from jaxddp.core.errors import InputError
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.storage.root import CATALOG_VARIABLE, absolute
from jaxddp.recipe.sources import recipe_path
from jaxddp.workdir.claim import EVALUATION_KEYS, check_evaluation, with_absolute_paths

LEAN = ["--parallel.devices", "1", "--log.to", "jsonl"]
RECIPE = """
import flax.linen as nn
from jaxddp.config import Config

class Network(nn.Module):
    classes: int
    width: int

    @nn.compact
    def __call__(self, images):
        return nn.Dense(self.classes)(nn.Dense(self.width)(images.reshape(len(images), -1)))

def get_config():
    return Config().replace(
        data={"path": "set.npz", "image_size": 6, "crop": "whole"},
        train={"batch_size": 8, "duration": "1 epoch", "ema": 0.5},
        eval={"batch_size": 8},
        loss={"class_weights": "balanced"},
    )

def get_model(config, num_classes):
    return Network(num_classes, config.model.width)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a data set, a recipe that names it, and a run of the recipe with another width."""
    root = tmp_path_factory.mktemp("runs")
    write_arrays(root / "set.npz", random_table(20), random_table(9, seed=1))
    (root / "mine.py").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        assert main(["train", "mine.py", "--model.width", "3", "--workdir", "run", *LEAN]) == 0
    return root


@pytest.fixture
def run(folder, tmp_path, monkeypatch) -> Path:
    """A copy of the run in another folder than its data and recipe."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(folder / "run", tmp_path / "copy")


def evaluate(words: list[str], capfd) -> dict[str, float]:
    """Return the metrics that `eval` prints."""
    capfd.readouterr()
    assert main(words) == 0
    *metrics, summary = capfd.readouterr().out.splitlines()
    assert " loss " in summary
    return {name: float(value) for name, value in (line.split(": ") for line in metrics)}


def last_validation(run: Path) -> dict[str, float]:
    """Return the losses of the last validation of the run."""
    splits = {line["split"]: line for line in metrics(run)}
    return {"loss": splits["val"]["loss"], "val_ema loss": splits["val_ema"]["loss"]}


def parse_command(config: str, *words: str, command: Any = Train, measures: bool = False):
    """Return the options and the recipe that a command parses."""
    return parse_recipe(command, "jaxddp", [config, *words], measures=measures)


@pytest.mark.ci
def test_eval_takes_the_directory_of_a_run_from_anywhere(folder, run, capfd, caplog):
    expected = {name: pytest.approx(value, rel=1e-6) for name, value in last_validation(run).items()} | {"count": 9}
    assert evaluate(["eval", str(run)], capfd).items() >= expected.items()
    # The options of the run need not be repeated, and keys of training are ignored.
    training_options = ["--train.batch-size", "4096", "--train.accumulate", "7", "--optimizer.warmup", "900 epochs"]
    words = ["eval", str(folder / "mine.py"), "--workdir", str(run), "--eval.batch-size", "3", *training_options]
    assert evaluate(words, capfd).items() >= expected.items()
    assert f"{run}/config.json: the run's own settings are used instead of those of {folder}/mine.py" in caplog.text
    measured = jaxddp.evaluate_run(run, batch_size=8)
    assert {name: measured[name] for name in last_validation(run)} == pytest.approx(last_validation(run), rel=1e-6)
    with pytest.raises(InputError, match="^batch_size=0: expected 1 to"):
        jaxddp.evaluate_run(run, batch_size=0)


@pytest.mark.slow
def test_train_resumes_a_run_by_its_directory_with_data_at_a_new_path(folder, run, tmp_path, capfd):
    new_path = str(shutil.copy(folder / "set.npz", tmp_path / "moved.npz"))
    content = json.loads((run / "config.json").read_text())
    assert content["data"]["path"] == str(folder / "set.npz")
    content["data"]["path"] = str(folder / "gone.npz")
    (run / "config.json").write_text(json.dumps(content))
    for command in (["eval", str(run)], ["train", str(run), "--train.duration", "2 epochs"]):
        line = fails(command, capfd)
        assert f"{folder}/gone.npz: no such directory or file" in line and line.endswith("; check --data.path")
    assert main(["train", str(run), "--data.path", new_path, "--train.duration", "2 epochs"]) == 0
    assert json.loads((run / "result.json").read_text())["step"] == 5
    shorter = fails(["train", str(run), "--data.path", new_path, "--train.duration", "1 epoch"], capfd)
    assert f"--train.duration '1 epoch': ends at step 3, and {run} was trained for 5 steps; give more" in shorter
    content = json.loads((run / "config.json").read_text())
    assert content["data"]["path"] == new_path and content["train"]["duration"] == "2 epochs"
    line = fails(["train", str(run), "--data.path", new_path, "--seed", "1"], capfd)
    assert "seed was 0 and is now 1" in line and line.endswith(f"jaxddp train {run} continues with its own settings")
    other = write_arrays(tmp_path / "other.npz", random_table(20, seed=5), random_table(9, seed=1))
    line = fails(["train", str(run), "--data.path", str(other), "--train.duration", "3 epochs"], capfd)
    assert "fingerprint.train was" in line and line.endswith("; the images, labels or classes of the data have changed")


def test_eval_rejects_a_network_data_or_loss_that_differs_from_the_runs(run):
    config = load(run)
    other = config.replace(seed=3, eval={"views": "mirror"}, data={"eval_size": 12})
    moved = check_evaluation(run, other.replace(data={"path": "/elsewhere"}))
    assert not check_evaluation(run, other).is_elsewhere and moved.is_elsewhere and moved.fingerprints
    for changes, line in (
        ({"model": {"width": 4}}, "model.width was 3 and is now 4"),
        ({"data": {"mean": (0.5,), "std": (0.5,)}}, r"data.mean was \[0.485, .*\] and is now \[0.5\]"),
        ({"data": {"classes": "0:2"}}, "data.classes was None and is now '0:2'"),
        ({"train": {"ema": None}}, "train.ema was 0.5 and is now None"),
        ({"loss": {"class_weights": None}}, "loss.class_weights was 'balanced' and is now None"),
    ):
        with pytest.raises(InputError, match=f"^{run}/config.json: {line}; a checkpoint is .* as it was trained"):
            check_evaluation(run, config.replace(**changes))
    with pytest.raises(InputError, match="data.limit was None and is now 4; a checkpoint is evaluated as it was"):
        check_evaluation(run, config.replace(data={"limit": 4}))
    assert {f"loss.{field.name}" for field in dataclasses.fields(LossConfig)} <= {*EVALUATION_KEYS}


def test_data_with_other_classes_are_rejected(folder, run, tmp_path, capfd):
    tables = (ArrayTable(table.images, table.labels % 3, tuple("abc")) for table in map(random_table, (20, 9)))
    file = write_arrays(tmp_path / "others.npz", *tables)
    assert "other classes (0, 1, 2) than the run was" in fails(["eval", "copy", "--data.path", str(file)], capfd)
    text = (run / "signature.json").read_text()
    (run / "signature.json").write_text(text.replace('"0"', '"\uff10"'))
    assert "on, did you mean '\uff10' (U+FF10, where this is U+0030)?; give the" in fails(["eval", "copy"], capfd)


def test_balanced_weights_are_those_of_the_run_on_any_data(run, tmp_path, capfd):
    one_class = dataclasses.replace(random_table(20), labels=random_table(20).labels * 0)
    file = write_arrays(tmp_path / "others.npz", one_class, random_table(9, seed=1))
    assert evaluate(["eval", str(run), "--data.path", str(file)], capfd) == evaluate(["eval", str(run)], capfd)


@pytest.mark.slow
def test_every_command_takes_the_directory_of_a_run_as_its_config(run, tmp_path):
    for command in (Train, Eval, FindLr, DoctorOfConfig):
        options, file = parse_command(str(run), "--eval.batch-size", "5", command=command)
        assert file.config.model.width == 3 and file.config.eval.batch_size == 5 and file.is_run
        assert getattr(options, "workdir", run) == run and options.config == file.config
    # The name of a config takes precedence over a folder of this name.
    (tmp_path / "digits").mkdir()
    assert recipe_path("digits").name == "digits.py" and recipe_path("copy") == Path("copy/config.json")
    with pytest.raises(InputError, match="^digits/config.json: no such file, so this folder is no run; give a run"):
        recipe_path("./digits")


@pytest.mark.slow
def test_eval_of_a_run_from_python_needs_a_config(run):
    content = json.loads((run / "config.json").read_text())
    del content["model"]
    (run / "config.json").write_text(json.dumps(content))
    _, file = parse_command("digits", "--workdir", str(run), command=Eval, measures=True)
    assert file.config == load("digits") and not file.notice
    with pytest.raises(InputError, match="config.json: the run came from Python and its .* name the network; evaluate"):
        jaxddp.evaluate_run(run)


def test_paths_become_absolute_and_symbolic_links_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "link").symlink_to("/usr")
    for text, expected in {
        "set": f"{tmp_path}/set",
        "link/set/": f"{tmp_path}/link/set",
        "../set": f"{tmp_path.parent}/set",
        "link/../set": f"{tmp_path}/link/../set",
        "~/set": "/home/me/set",
        "/set": "/set",
        "s3://bucket/set": "s3://bucket/set",
        "tfds:mnist": "tfds:mnist",
    }.items():
        assert absolute(text) == expected
    data = {"path": "a", "unlabelled": "train", "local_cache": "b"}
    config = Config().replace(data=data, model={"weights": "c"}, objective={"teacher": "d"})
    resolved = with_absolute_paths(config).flat()
    keys = ("data.path", "data.unlabelled", "data.local_cache", "model.weights", "objective.teacher")
    assert [resolved[key] for key in keys] == [f"{tmp_path}/a", "train", *(f"{tmp_path}/{name}" for name in "bcd")]


def test_a_data_set_name_is_resolved_to_its_path(tmp_path, monkeypatch):
    (tmp_path / "datasets.toml").write_text('[mine]\npath = "set"\nclasses = "0:5"\n')
    monkeypatch.setenv(CATALOG_VARIABLE, str(tmp_path / "datasets.toml"))
    data = with_absolute_paths(Config().replace(data={"name": "mine", "train": "few.csv"})).data
    assert (data.path, data.name, data.train, data.classes) == (str(tmp_path / "set"), None, "few.csv", "0:5")


def test_a_path_on_the_command_line_replaces_a_data_set_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(Config().replace(data={"name": "mine"}).to_dict()))
    for words, expected in ((["--data.path", "x"], ("x", None)), (["--data.name", "y"], (None, "y"))):
        data = parse_command(".", *words)[1].config.data
        assert (data.path, data.name) == expected


@pytest.fixture
def first_run(tmp_path) -> Path:
    """A work directory with only the config of a run on small images."""
    images = {"mean": (0.5,), "std": (0.25,), "interpolation": "bicubic", "eval_crop": "squash"}
    config = load("digits").replace(model={"name": "resnet10", "width": 16}, data=images)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "config.json").write_text(json.dumps(config.to_dict()))
    return tmp_path / "first"


def test_fine_tuning_inherits_settings_of_the_first_run(first_run):
    _, file = parse_command("finetune_folder", "--model.weights", str(first_run), "--data.image-size", "48")
    model, data = file.config.model, file.config.data
    assert (model.name, model.width, model.stem) == ("resnet10", 16, "small")
    assert (data.image_size, data.resize, data.mean, data.std) == (48, 32, (0.5,), (0.25,))
    # The other settings are those of the recipe.
    assert (model.new_layers, file.config.train.batch_size, data.crop) == ("the head", 32, "random_area")
    assert file.notice == (
        f"{first_run}: the run's settings are taken over: data.eval_crop=squash, data.interpolation=bicubic, "
        "data.mean=[0.5], data.resize=32, data.std=[0.25], model.name=resnet10, model.stem=small, model.width=16"
    )
    same = parse_command(str(first_run), "--model.weights", str(first_run))[1]
    assert not same.notice and same.config.model.width == 16


def test_a_fine_tuned_run_resumes_after_the_first_run_was_removed(first_run, tmp_path):
    words = ["--model.weights", str(first_run), "--workdir", str(tmp_path / "own")]
    _, first = parse_command("finetune_folder", *words, "--model.width", "8")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(first.config.to_dict()))
    shutil.rmtree(first_run)
    assert parse_command("finetune_folder", *words)[1].config == first.config


def test_the_image_size_of_a_run_on_arrays_is_inherited(first_run):
    signature = {"class_ids": ["a"], "class_names": ["a"], "image_shape": [24, 24, 1], "dtype": "uint8"}
    (first_run / "signature.json").write_text(json.dumps(signature | {"in_memory": True, "label_form": "one label"}))
    data = parse_command("finetune_folder", "--model.weights", str(first_run))[1].config.data
    assert (data.image_size, data.resize, data.channels) == (24, 24, 1)
