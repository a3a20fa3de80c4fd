"""`jaxddp export` and `push` write the weights of a run, and for the Hub a model card; `model.weights` reads them."""

import json
import runpy
import shutil
import subprocess
import tarfile
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import safetensors.numpy
import yaml
from support.data import random_table, write_arrays
from support.hub import COMMIT, Hub, serving, use
from support.networks import make_shallow
from support.runs import LEAN, fails

from jaxddp import load_run, open_data
from jaxddp.cli import main
from jaxddp.command_line.parse import parse_recipe
from jaxddp.commands.train import Train
from jaxddp.config.goal import Goal
from jaxddp.inference.published import PublishedRun
from jaxddp.mesh import Topology
from jaxddp.models.interface import by_path
from jaxddp.setup.initial_weights import WeightsTarget, initial_weights
from jaxddp.setup.recipe import model_of
from jaxddp.setup.run_setup import initialize, open_recipe
from jaxddp.setup.user_objects import objects_of_hooks
from jaxddp.training.checkpoints.integrity import ValidationFile
from jaxddp.weights.places import local_weights
from jaxddp.workdir.saved_state import recipe_of_run
from jaxddp.workdir.signature import Signature

RECIPE = """
from jaxddp.config import Config

def get_config():
    return Config().replace(
        data={"path": "set.npz", "image_size": 6, "resize": 9, "crop": "whole", "mean": (0.25,), "std": (0.5,)},
        model={"name": "resnet10", "width": 4, "stem": "small"},
        train={"batch_size": 8, "duration": "1 epoch"}, eval={"batch_size": 8},
    )
"""
HOOKS = """
def get_model(config, num_classes):
    import flax.linen as nn

    class Network(nn.Module):
        @nn.compact
        def __call__(self, images):
            return nn.Dense(num_classes, name="head")(images.reshape(len(images), -1))

    return Network()
"""
PLACE = "hf://me/net"
RELEASE = Path(__file__).parent.parent / ".ci" / "release.py"


@pytest.fixture(scope="module", autouse=True)
def shallow():
    with pytest.MonkeyPatch.context() as patch:
        make_shallow(patch, (1, 1))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a data set, two recipes, and a run of each. The first run was validated after steps 2 and 3."""
    root = tmp_path_factory.mktemp("pushed")
    write_arrays(root / "set.npz", random_table(24), random_table(9, seed=1))
    (root / "mine.py").write_text(RECIPE)
    (root / "own.py").write_text(RECIPE.replace('model={"name": "resnet10", "width": 4, "stem": "small"},', "") + HOOKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        words = ["--eval.every", "2 steps", *LEAN[:-1], "jsonl,curves,parameters"]
        assert main(["train", "mine.py", "--workdir", "run", *words]) == 0
        assert main(["train", "own.py", "--workdir", "own", *LEAN]) == 0
    return root


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serving() as server:
        use(server, tmp_path / "cache", monkeypatch)
        yield server


def best_of(run: Path) -> tuple[int, dict]:
    """Return the step of the best checkpoint, the last of equal ones, and its measurements."""
    validations = json.loads((run / "checkpoints" / "validation.json").read_text())
    step = max(validations, key=lambda step: (validations[step]["top1"], int(step)))
    return int(step), validations[step]


def front_matter(card: str) -> dict:
    _, front, _ = card.split("---\n", 2)
    return yaml.safe_load(front)


@pytest.mark.ci
def test_a_run_with_other_classes_starts_with_a_new_head(folder, caplog):
    run, shape = folder / "run", (6, 6, 3)
    file, signature = recipe_of_run(run), Signature.read(run)
    assert signature is not None
    ids = signature.class_ids
    model, topology = model_of(file.config, len(ids), objects_of_hooks(file.hooks)), Topology.create(1)
    targets = [WeightsTarget(model, shape, len(ids), class_ids) for class_ids in (ids, ids[::-1])]
    weights = [initial_weights(run, target, topology) for target in targets]
    zeros = [{path for path, array in arrays.items() if not array.any()} for arrays in weights]
    assert zeros[1] - zeros[0] == {"params/fc/kernel", "params/fc/bias"}
    heads = "a new head for 5 other classes: params/fc/bias, params/fc/kernel"
    assert {*caplog.messages} == {f"{run}: 30 of the network's 32 arrays; {heads}"}


@pytest.mark.slow
def test_a_pushed_run_is_read_back_with_its_settings_and_its_head(folder, hub: Hub, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    assert main(["push", "run", PLACE, "--private"]) == 0
    printed = capfd.readouterr().out
    assert printed.startswith(f"{PLACE}: ") and printed.rstrip().endswith(f"{hub.url}/me/net/commit/{COMMIT}")
    assert hub.private == ["me/net"]
    files = hub.repos["me/net"]
    assert sorted(files) == ["README.md", "config.json", "curves.png", "model.safetensors", "signature.json"]
    assert main(["export", "run", "--out", "w.safetensors"]) == 0
    exported = safetensors.numpy.load_file(folder / "w.safetensors")
    pushed = safetensors.numpy.load(files["model.safetensors"])
    assert pushed.keys() == exported.keys() and all(np.array_equal(pushed[name], exported[name]) for name in exported)
    # Another recipe takes over the network and the images.
    (folder / "other.py").write_text(RECIPE.replace('"width": 4, "stem": "small"', "").replace('"mean": (0.25,), ', ""))
    _, file = parse_recipe(Train, "jaxddp train", ["other.py", "--model.weights", PLACE])
    assert (file.config.model.width, file.config.model.stem, file.config.data.mean) == (4, "small", (0.25,))
    taken = "data.mean=[0.25], data.resize=6, model.stem=small, model.width=4"
    assert file.notice == f"{PLACE}: the settings are taken over: {taken}"
    setup = initialize(open_recipe(file))
    head = by_path(setup.state.params, setup.state.model_state)["params/fc/kernel"]
    assert np.array_equal(head, exported["fc.weight"].T)
    # Of other classes, only the head is new.
    signature = json.loads(files["signature.json"])
    signature["class_ids"] = [f"other {name}" for name in signature["class_ids"]]
    files["signature.json"] = json.dumps(signature).encode()
    shutil.rmtree(Path(huggingface_hub.constants.HF_HUB_CACHE) / "models--me--net")
    other = by_path(initialize(open_recipe(file)).state.params, {})
    assert not np.array_equal(other["params/fc/kernel"], exported["fc.weight"].T)
    assert np.array_equal(other["params/bn1/scale"], exported["bn1.weight"])


@pytest.mark.slow
def test_nothing_that_is_pushed_names_this_machine(folder, hub: Hub, monkeypatch):
    monkeypatch.chdir(folder)
    for run in ("run", "own"):
        assert main(["push", run, f"hf://me/{run}"]) == 0
        for name, content in hub.repos[f"me/{run}"].items():
            assert name == "curves.png" or str(folder).encode() not in content, name
    config = json.loads(hub.repos["me/run"]["config.json"])
    assert config["model"]["width"] == 4 and "path" not in config["data"] and "to" not in config["log"]
    # The settings of a network that Python code defines would not build it.
    assert "model" not in json.loads(hub.repos["me/own"]["config.json"])
    card = hub.repos["me/own"]["README.md"].decode()
    assert "The network of the recipe, with 545 parameters, was" in card and "(get_model)" in card
    words = "--model.weights hf://me/own --model.new-layers head --optimizer.rate-factors head=10\n"
    assert "PyTorch" not in card and f"\njaxddp train RECIPE --data.path PICTURES {words}" in card


def test_the_card_states_what_the_run_measured(folder, tmp_path, monkeypatch, capfd):
    out = tmp_path / "net"
    out.mkdir()
    monkeypatch.chdir(out)
    assert main(["export", str(folder / "run"), "--out", ".", "--format", "hub"]) == 0
    step, validated = best_of(folder / "run")
    assert capfd.readouterr().out.startswith(f".: 32 arrays of step {step} of {folder / 'run'}, with a model card")
    monkeypatch.chdir(folder)
    card = (out / "README.md").read_text()
    front = front_matter(card)
    assert front["library_name"] == "jaxddp" and front["datasets"] == ["set.npz"]
    (results,) = front["model-index"][0]["results"]
    assert {metric["name"]: metric["value"] for metric in results["metrics"]} == {"top1": validated["top1"]}
    assert f"| top1 | {validated['top1']:.2%} |" in card and f"after step {step} on 9 images" in card
    assert card.split("---\n")[2].startswith("\n# net\n")
    assert "--model.weights net\n" in card and "resized to 6 pix" in card and "into 5 classes: 0, 1, 2, 3, 4." in card
    assert "| train.duration | 1 epoch |" in card and "![curves of the training](curves.png)" in card
    assert "To train it again:\n\n```\njaxddp train config.json --data.path DATA --workdir runs/again\n" in card
    (published := PublishedRun(folder / "run", "best", out)).base = "timm/resnet18"
    published.write(tmp_path)
    assert front_matter((tmp_path / "README.md").read_text())["base_model"] == "timm/resnet18.a1_in1k"
    # The folder is like the repository.
    (folder / "third.py").write_text(RECIPE.replace('"width": 4, "stem": "small"', ""))
    _, file = parse_recipe(Train, "jaxddp train", ["third.py", "--model.weights", str(out)])
    assert (file.config.model.width, file.config.model.stem) == (4, "small")
    assert local_weights(str(out)) == out / "model.safetensors"
    # A run's weights are those of its checkpoint.
    (folder / "run" / "model.safetensors").touch()
    assert local_weights(str(folder / "run")) == folder / "run"
    (folder / "run" / "model.safetensors").unlink()


@pytest.mark.ci
def test_the_card_of_averaged_weights_states_their_accuracy(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    words = ["--train.ema", "0.5", "--train.duration", "3 epochs", "--optimizer.learning-rate", "0.3", *LEAN]
    assert main(["train", "mine.py", "--workdir", str(tmp_path / "run"), *words]) == 0
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "net"), "--format", "hub"]) == 0
    run, val = load_run(tmp_path / "run"), open_data("set.npz")[1]
    validations = ValidationFile(tmp_path / "run" / "checkpoints", None)
    measured = validations.by_step[run.step]
    # By default, the best checkpoint is the best of the averaged weights, which are exported.
    assert validations.goal == Goal("val_ema top1") and measured["val_ema loss"] != measured["loss"]
    probabilities = run.predict(val).probabilities
    loss = -np.log(probabilities[np.arange(len(val)), val.labels]).mean()
    card = (tmp_path / "net" / "README.md").read_text()
    (metric,) = front_matter(card)["model-index"][0]["results"][0]["metrics"]
    assert metric == {"type": "accuracy", "name": "top1", "value": run.outcome(val).accuracy}
    assert f"| loss | {loss:.4f} |" in card and "val_ema" not in card and "of the averaged parameters" in card


@pytest.mark.ci
def test_a_release_has_checksums_and_a_run_that_continues(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    release = runpy.run_path(str(RELEASE))["main"]
    with pytest.raises(SystemExit, match="two runs are called run; rename the folder of one"):
        release([str(tmp_path / "dist"), "run", "other/run"])
    release([str(tmp_path / "dist"), "run"])
    names = ["run.onnx", "run.onnx.json", "run.stablehlo", "run.stablehlo.json", "run.tar.gz"]
    lines = (tmp_path / "dist" / "SHA256SUMS").read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == names
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "dist", check=True)
    with tarfile.open(tmp_path / "dist" / "run.tar.gz") as archive:
        assert {(member.uname, member.uid) for member in archive} == {("", 0)}
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / "run"
    for path in unpacked.rglob("*"):
        assert path.name == "commit_success.txt" or path.is_dir() or str(folder).encode() not in path.read_bytes(), path
    capfd.readouterr()
    words = ["--data.path", str(folder / "set.npz"), *LEAN[2:]]
    assert main(["train", str(unpacked), *words]) == 0
    assert "nothing to train" in capfd.readouterr().out
    assert main(["train", str(unpacked), "--train.duration", "2 epochs", *words]) == 0
    assert json.loads((unpacked / "result.json").read_text())["step"] == 6


def test_wrong_commands_are_one_line(folder, hub: Hub, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    shutil.copytree("run", "damaged")
    Path("damaged/signature.json").write_text("{")
    content, checkpoints = json.loads(Path("run/config.json").read_text()), folder / "run" / "checkpoints"
    Path("python").mkdir()
    Path("python/config.json").write_text(json.dumps({key: content[key] for key in content.keys() - {"model"}}))
    for words, message in (
        ("push run me/net", "me/net: not a repository of the Hub; write hf://OWNER/NAME"),
        ("push run hf://net", "hf://net: not the address of a file of the Hub; write hf://owner/name, hf://owner/name"),
        ("push run hf://me/net/w", "hf://me/net/w: not a repository of the Hub; write hf://OWNER/NAME"),
        (f"push gone {PLACE}", "gone: no such work directory; give one that a run wrote into"),
        (f"push run {PLACE} --step 7", f"{checkpoints}: no checkpoint '7'; give latest, best or one of the steps "),
        ("export run --out run --format hub", "run: is not empty; give a new folder"),
        ("export damaged --out new --format hub", "damaged/signature.json"),
        ("export run/checks --out new.h5", "run/checks: no such work directory, did you mean 'run/checkpoints'?"),
        ("export python --out new.safetensors", "python/config.json: the run came from Python and its config does not"),
        ("export run --out w.pth", "w.pth: its extension names no format; there are: hub, onnx, safetensors,"),
        ("export run --out none/w.safetensors", "none/w.safetensors: cannot be written (No such file"),
        ("export run --out new.safetensors --step 5", f"{checkpoints}: no checkpoint '5'; give latest, best or one of"),
    ):
        assert fails(words.split(), capfd).startswith(f"jaxddp: {message}")
    assert not [*Path().glob("new*")]
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    assert f"{PLACE}: the hub refuses the token (401 Unauthorized); log in" in fails(["push", "run", PLACE], capfd)
    with monkeypatch.context() as patch:
        patch.setattr("jaxddp.inference.published.CURVES", "checkpoints/validation.json")
        line = fails(["export", "run", "--out", "new", "--format", "hub"], capfd)
        assert "new/checkpoints/validation.json: cannot be written (" in line and not [*Path("new").iterdir()]
        patch.setattr("huggingface_hub.get_token", lambda: None)
        assert f"{PLACE}: uploading needs a token; log in with `hf auth login`" in fails(["push", "run", PLACE], capfd)
    assert not hub.repos
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert f"{PLACE}: upload failed (" in fails(["push", "run", PLACE], capfd, code=1)
