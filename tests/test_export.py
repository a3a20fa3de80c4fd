"""`jaxddp export`, and a run that starts from exported weights, on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from support.data import random_table, write_arrays
from support.networks import make_shallow
from support.runs import LEAN, SMALL, fails

from jaxddp.cli import main
from jaxddp.mesh import Topology
from jaxddp.models.interface import shapes_of
from jaxddp.setup.initial_weights import WeightsTarget, initial_weights
from jaxddp.setup.recipe import model_of
from jaxddp.setup.user_objects import objects_of_hooks
from jaxddp.workdir.saved_state import read_run, recipe_of_run
from jaxddp.workdir.signature import Signature

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def shallow():
    with pytest.MonkeyPatch.context() as patch:
        make_shallow(patch, (1, 1))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "images.npz"
    return write_arrays(file, random_table(24, image=16), random_table(8, seed=1, image=16))


def train_command(data: Path, workdir: Path, *more: str) -> list[str]:
    return ["train", "digits", *SMALL, *LEAN, "--data.path", str(data), "--workdir", str(workdir), *more]


@pytest.fixture(scope="module")
def run(data, tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("run") / "first"
    arguments = train_command(data, workdir, "--train.duration", "6 steps", "--eval.every", "3 steps")
    assert main(arguments) == 0
    return workdir


@pytest.mark.ci
def test_a_run_starts_from_the_exported_weights_of_another_run(data, run, tmp_path, capfd):
    file = tmp_path / "w.safetensors"
    assert main(["export", str(run), "--out", str(file), "--step", "latest"]) == 0
    assert capfd.readouterr().out == f"{file}: 32 arrays of step 6 of {run}\n"
    arrays = safetensors.numpy.load_file(file)
    _, ours = read_run(run, "latest", Topology.create(1))
    kernel = ours["params/layer1_0/conv1/kernel"]
    assert np.array_equal(arrays["layer1.0.conv1.weight"], kernel.transpose(3, 2, 0, 1))
    assert np.array_equal(arrays["layer2.0.downsample.1.running_var"], ours["batch_stats/layer2_0/downsample_bn/var"])

    more = ["--model.weights", str(file), "--model.freeze", "all but fc", "--train.duration", "2 steps"]
    assert main(train_command(data, tmp_path / "probe", *more)) == 0
    _, probed = read_run(tmp_path / "probe", "latest", Topology.create(1))
    changed = {path for path in ours if not np.array_equal(ours[path], probed[path])}
    assert changed == {"params/fc/bias", "params/fc/kernel"}
    # The run resumes and is evaluated without the file.
    file.unlink()
    more = [*more[:-1], "3 steps"]
    assert main(train_command(data, tmp_path / "probe", *more)) == 0
    assert main(["eval", str(tmp_path / "probe" / "config.json"), "--workdir", str(tmp_path / "probe")]) == 0
    capfd.readouterr()
    line = fails(train_command(data, tmp_path / "other", *more), capfd)
    assert line.startswith(f"jaxddp: {file}: no such file; give a .safetensors file")


def test_a_run_starts_from_another_run(data, run, tmp_path):
    more = ["--model.weights", str(run), "--optimizer.learning-rate", "0", "--train.duration", "1 step"]
    assert main(train_command(data, tmp_path / "w", *more)) == 0
    validations = json.loads((run / "checkpoints/validation.json").read_text())
    # Of equal validations, the last is the best.
    best = max((validation["top1"], int(step)) for step, validation in validations.items())[1]
    step, ours = read_run(run, "best", Topology.create(1))
    _, theirs = read_run(tmp_path / "w", "latest", Topology.create(1))
    assert len(ours) == 32 and step == best
    assert all(np.array_equal(theirs[path], ours[path]) for path in ours if path.startswith("params/"))


def test_a_run_with_other_classes_starts_with_a_new_head(run, caplog):
    file, signature = recipe_of_run(run), Signature.read(run)
    assert signature is not None
    ids = signature.class_ids
    model, topology = model_of(file.config, len(ids), objects_of_hooks(file.hooks)), Topology.create(1)
    shapes = shapes_of(model, (16, 16, 3))
    targets = [WeightsTarget(model, (16, 16, 3), len(ids), class_ids) for class_ids in (ids, ids[::-1])]
    weights = [initial_weights(run, target, topology) for target in targets]
    assert [shapes.keys() - arrays for arrays in weights] == [set(), {"params/fc/kernel", "params/fc/bias"}]
    heads = "a new head for 5 other classes: params/fc/bias, params/fc/kernel"
    assert {*caplog.messages} == {f"{run}: 30 of the network's 32 arrays; {heads}"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{tmp}/absent --out w.safetensors", "{tmp}/absent: no such work directory"),
        ("{tmp} --out w.safetensors", "{tmp}/config.json: the run came from Python and its config does not name the"),
        ("{run} --out {tmp}/w.pth", "{tmp}/w.pth: its extension names no format; there are: hub, onnx, safetensors,"),
        ("{run} --out {tmp}/none/w.safetensors", "{tmp}/none/w.safetensors: cannot be written (No such file"),
        ("{run} --out w.safetensors --step 5", "{run}/checkpoints: no checkpoint '5'; give latest, best or one of the"),
    ],
)
def test_a_wrong_export_argument_raises_a_one_line_error(run, tmp_path, capfd, arguments, message):
    content = json.loads((run / "config.json").read_text())
    del content["model"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    arguments, message = (text.format(tmp=tmp_path, run=run) for text in (arguments, message))
    assert fails(["export", *arguments.split()], capfd).startswith(f"jaxddp: {message}")
