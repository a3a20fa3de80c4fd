"""Weights that no run trained: the names of foreign checkpoints, and the commands that measure and use such weights."""

import csv
from typing import Any

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from support.errors import error_line
from support.images import encode, picture
from support.networks import state_dict_of
from support.runs import fails

import jaxddp
from jaxddp.cli import main
from jaxddp.core.errors import InputError
from jaxddp.inference.pretrained import imagenet_classes
from jaxddp.models.adapt import adapt
from jaxddp.models.interface import shapes_of
from jaxddp.recipe.file import read_recipe
from jaxddp.weights.foreign import in_terms_of
from jaxddp.weights.match import dotted_path, match
from jaxddp.weights.state_dict import read, write

RECIPE = """
import flax.linen as nn
from jaxddp.config import Config

class Net(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(4, (3, 2), name="stem")(x)
        x = nn.Conv(4, (3, 3), feature_group_count=4, use_bias=False, name="block_0_dw")(x)
        x = nn.BatchNorm(use_running_average=not train, name="norm")(x).mean((1, 2))
        return nn.Dense(self.classes, name="head")(x + nn.Dense(4, name="square")(x))

def get_config():
    return Config().replace(
        model={"weights": "net.safetensors"}, train={"precision": "float32"}, parallel={"devices": 1},
        data={"image_size": 16, "resize": 16},
    )

def get_model(config, num_classes):
    return Net(num_classes)
"""
FUNCTION = """
def rename(name):
    return None if name.startswith("aux") else name.replace("features.conv", "stem").replace("dw", "block_0_dw")
"""
TABLE = 'rename = {"^features.conv": "stem", "^dw": "block_0_dw", "^aux": None}\n'
SHAPES = {"features.conv.weight": (4, 3, 3, 2), "features.conv.bias": (4,), "dw.weight": (4, 1, 3, 3)}
SHAPES |= {"square.weight": (4, 4), "square.bias": (4,), "aux.weight": (2, 3)}
SHAPES |= {f"norm.{name}": (4,) for name in ("weight", "bias", "running_mean", "running_var")}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with recipes, foreign weights for 1,000 classes, and images of three classes of ImageNet."""
    monkeypatch.chdir(tmp_path)
    rng, shapes = np.random.default_rng(0), SHAPES | {"head.weight": (1000, 4), "head.bias": (1000,)}
    write(tmp_path / "net.safetensors", {name: rng.uniform(0.1, 1, shape) for name, shape in shapes.items()})
    for name, rename in (("none", ""), ("function", FUNCTION), ("table", TABLE)):
        (tmp_path / f"{name}.py").write_text(RECIPE + rename)
    for number, synset in enumerate(imagenet_classes().ids[7:997:450]):
        (tmp_path / "set" / synset).mkdir(parents=True)
        for other in range(2):
            image = encode(picture(16, 16, seed=2 * number + other), "PNG")
            (tmp_path / "set" / synset / f"{other}.png").write_bytes(image)
    return tmp_path


def mapped(recipe: str) -> Any:
    file = read_recipe(recipe)
    model = adapt(file.hooks["get_model"](file.config, 1000))
    stored = read(file.path.parent / "net.safetensors")
    return model, stored, in_terms_of(shapes_of(model, (16, 16, 3)), stored, file.rename)


@pytest.mark.parametrize("recipe", ["function.py", "table.py"])
def test_a_recipe_renames_foreign_arrays_and_kernels_are_transposed_by_their_kind(folder, recipe):
    _, stored, found = mapped(recipe)
    kernels = {"stem": (2, 3, 1, 0), "block_0_dw": (2, 3, 1, 0), "square": (1, 0), "head": (1, 0)}
    for layer, axes in kernels.items():
        name = found.names[f"params/{layer}/kernel"]
        assert np.array_equal(found.arrays[f"params.{layer}.kernel"], stored[name].transpose(axes))
    assert found.names["batch_stats/norm/var"] == "norm.running_var" and "aux.weight" not in found.names.values()
    assert found.told == ["2 from [O, I, H, W] to [H, W, I, O]", "2 from [O, I] to [I, O]"]


def test_arrays_in_flax_layout_keep_it_and_attention_gets_its_axes():
    shapes = {"params/a/kernel": (4, 4), "params/b/kernel": (4, 2, 2)}
    shapes |= {"params/c/kernel": (2, 3), "params/d/bias": (2, 2)}
    stored = {"a.kernel": (4, 4), "b.weight": (4, 4), "c.weight": (2, 3), "d.bias": (4,)}
    stored = {name: np.arange(np.prod(shape)).reshape(shape) for name, shape in stored.items()}
    found = in_terms_of(shapes, stored).arrays
    assert np.array_equal(found["params.a.kernel"], stored["a.kernel"])
    assert np.array_equal(found["params.b.kernel"], stored["b.weight"].T.reshape(4, 2, 2))
    assert np.array_equal(found["params.c.kernel"], stored["c.weight"]) and found["params.d.bias"].shape == (2, 2)


def test_a_missing_array_names_the_nearest_of_the_file_and_the_remedy(folder):
    model, _, found = mapped("none.py")
    assert error_line(match, shapes_of(model, (16, 16, 3)), found.arrays, (dotted_path,), 1000).startswith(
        "3 of the network's 11 arrays missing: params.block_0_dw.kernel, params.stem.bias and 1 more (the nearest in "
        "the file is 'dw.weight', [4, 1, 3, 3]); give weights of this network for such images, define rename(name) in "
    )
    shapes = shapes_of(model, (16, 16, 3))
    renames: Any = {"returned 3 for 'a'": lambda name: 3, "both 'a' and 'b' are": lambda name: "stem.bias"}
    for fault, rename in renames.items():
        with pytest.raises(InputError, match=fault):
            in_terms_of(shapes, {"a": np.zeros(4), "b": np.zeros(4)}, rename)
    (folder / "bad.py").write_text(RECIPE + 'rename = {"(": "a"}')
    with pytest.raises(InputError, match=r"bad.py: rename: (error|PatternError): missing \)"):
        mapped("bad.py")


def test_the_arrays_of_a_file_and_their_mapping_are_listed(folder, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["weights", "inspect", "net.safetensors"]) == 0
    printed = capfd.readouterr().out
    assert "dw.weight [4, 1, 3, 3] float64" in " ".join(printed.split())
    assert [word for word in printed.split() if word in SHAPES] == sorted(SHAPES)
    assert "set: is a folder; give a file of weights, which" in fails(["weights", "inspect", "set"], capfd)
    assert main(["weights", "inspect", "net.safetensors", "table.py"]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "dw.weight [4, 1, 3, 3] float64 params/block_0_dw/kernel from [O, I, H, W] to [H, W, I, O]" in shown
    assert "aux.weight [2, 3] float64 not used" in shown and "missing" not in shown
    assert main(["weights", "inspect", "net.safetensors", "none.py"]) == 0
    line = "missing: params/block_0_dw/kernel [3, 3, 1, 4], the nearest in the file is 'dw.weight'"
    assert line in capfd.readouterr().out.splitlines()
    (folder / "named.json").write_text('{"model": {"name": "resnet10", "width": 4}}')
    arrays = state_dict_of(adapt(jaxddp.resnet("resnet10", 1000, width=4)), (32, 32, 3))
    held = {f"model.{name}": array for name, array in arrays.items()} | {"conv1.weight": np.ones(3)}
    write(folder / "held.safetensors", held)
    assert (
        main(["weights", "inspect", "held.safetensors", "named.json"]) == 0 and "missing" not in capfd.readouterr().out
    )
    write(folder / "held.safetensors", held | {f"ema.{name}": array for name, array in arrays.items()})
    line = fails(["weights", "inspect", "held.safetensors", "named.json"], capfd)
    assert "held.safetensors: the network is below 'ema.' and 'model.'; define rename(name) in" in line


@pytest.mark.ci
def test_every_command_takes_weights_and_measures_synsets_among_the_classes_of_imagenet(folder, capfd, caplog):
    # The bias of one class makes it the prediction of every image.
    arrays, names = read(folder / "net.safetensors"), imagenet_classes().names
    arrays["head.bias"] = np.where(np.arange(1000) == 457, 1e3, arrays["head.bias"])
    write(folder / "net.safetensors", arrays)
    assert main(["predict", "table.py", "--data", "set", "--out", "p.csv"]) == 0
    rows = list(csv.reader((folder / "p.csv").open()))[1:]
    assert len(rows) == 6 and {row[1] for row in rows} == {imagenet_classes().ids[457]}
    capfd.readouterr()
    words = ["eval", "table.py", "--data", "set", "--metrics", "top1", "--precision", "float32"]
    assert main([*words, "--per-class"]) == 0
    printed = capfd.readouterr().out
    assert "the classes are 1,000, n01440764, n01443537, n01484850, ..., among them the 3 of the data" in caplog.text
    assert "net.safetensors: loss" in printed and "top-1 33.33%" in printed
    assert f"{names[7]} 2 0.00% {names[457]} (2) " in " ".join(printed.split())
    figures = dict(line.split(": ") for line in printed.splitlines() if ": " in line)
    # The same from Python, with the network and its parameters.
    model, _, found = mapped("table.py")
    paths = {path: found.arrays[dotted_path(path)].astype(np.float32) for path in shapes_of(model, (16, 16, 3))}
    variables = unflatten_dict({tuple(path.split("/")): array for path, array in paths.items()})
    data = jaxddp.DataConfig(image_size=16, resize=16)
    measured = jaxddp.evaluate(model.module, variables, "set", data=data)
    assert measured["count"] == 6 and f"{measured['loss']:.5g}" == f"{float(figures['loss']):.5g}"
    with pytest.raises(InputError, match=r"architecture: batch_stats/norm/mean is absent in the tree and \[4\]"):
        jaxddp.evaluate(model.module, variables["params"], "set", data=data)
    for out, command in (("f.npz", "features"), ("r.html", "report"), ("e.safetensors", "export")):
        assert main([command, "table.py", "--out", out, *([] if command == "export" else ["--data", "set"])]) == 0
    page = (folder / "r.html").read_text()
    assert np.load("f.npz")["features"].shape == (6, 4) and names[457] in page and 'id="speed"' not in page
    kernel = "params.block_0_dw.kernel"
    assert np.array_equal(read(folder / "e.safetensors")[kernel], paths[kernel.replace(".", "/")])
    for name, synset in (("cat", 7), ("dog", 457), ("emu", 907)):
        (folder / "set" / imagenet_classes().ids[synset]).rename(folder / "set" / name)
    line = fails(words, capfd)
    assert "the weights have 1,000 classes (n01440764, " in line and "the data have cat, dog, emu, which are " in line


@pytest.mark.parametrize("command", ["predict", "features", "export", "report"])
def test_the_help_of_a_command_with_weights_has_the_keys_of_the_network(command, capsys):
    assert main([command, "timm/resnet18.a1_in1k", "--help"]) == 0
    page = capsys.readouterr().out
    assert all(option in page for option in ("--out PATH", "--model.width", "--data.image-size"))
