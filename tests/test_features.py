"""Features: the input of the head or the output of a layer, for every image once, in files and in Python."""

import dataclasses
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pyarrow.parquet
import pytest
from flax import nnx
from PIL import Image
from small_recipe import SmallNet
from support.data import random_table, write_arrays, write_pictures
from support.errors import error_line
from support.networks import linear_model
from support.runs import LEAN, train_words
from support.trained import random_run

from jaxddp.cli import main
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.data.opening import open_one_split
from jaxddp.inference.output_files import write_features
from jaxddp.inference.trained import TrainedRun
from jaxddp.models.activations import LayerCall, find_layer, heat_map_layer
from jaxddp.models.adapt import adapt

TABLE = random_table(150, image=8)
NET = SmallNet(width=3)


def logits_of(run: TrainedRun, features: np.ndarray) -> np.ndarray:
    head = run.state.params["Dense_0"]
    return features @ np.asarray(head["kernel"]) + np.asarray(head["bias"])


@pytest.mark.slow
def test_features_of_every_image_are_in_order_and_equal_on_any_number_of_devices():
    one, four = (random_run(NET, 8, devices=devices) for devices in (1, 4))
    features = one.features(TABLE.images)
    assert features.shape == (150, 3) and features.dtype == np.float32
    assert np.array_equal(features, four.features(TABLE.images))
    # 150 images are no multiple of the batch size. Each image alone has the same features.
    rows = [0, 63, 64, 128, 149]
    alone = np.concatenate([one.features(TABLE.images[row : row + 1]) for row in rows])
    assert np.allclose(features[rows], alone, rtol=1e-5, atol=1e-6)
    assert np.allclose(jax.nn.softmax(logits_of(one, features)), one.predict(TABLE.images).probabilities, atol=1e-5)


@pytest.mark.slow
def test_the_output_of_a_layer_is_averaged_over_pixels_or_not():
    run = random_run(NET, 8)
    maps, means = (run.features(TABLE.images[:6], "Conv_0", pool) for pool in ("none", "mean"))
    assert maps.shape == (6, 8, 8, 3) and np.allclose(means, maps.mean((1, 2)), atol=1e-5)
    assert np.allclose(np.maximum(maps, 0).mean((1, 2)), run.features(TABLE.images[:6]), atol=1e-5)
    # The head's own output are the logits.
    assert np.allclose(run.features(TABLE.images[:6], "Dense_0"), logits_of(run, run.features(TABLE.images[:6])))


class Repeated(nn.Module):
    """A network that calls a layer twice, the second time inside a transformation of Flax."""

    @nn.compact
    def __call__(self, images):
        layer = nn.Dense(3, name="twice")
        x = nn.remat(lambda module, x: module(x))(layer, nn.tanh(layer(images)))
        return nn.Dense(5)(nn.relu(x).mean((1, 2)))


class RepeatedNNX(nnx.Module):
    def __init__(self, rngs):
        self.twice, self.blocks = nnx.Linear(3, 3, rngs=rngs), nnx.List([nnx.Linear(3, 5, rngs=rngs)])

    def __call__(self, images):
        x = nnx.remat(lambda module, x: module(x))(self.twice, nnx.tanh(self.twice(images)))
        return self.blocks[0](nnx.relu(x).mean((1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(("network", "head"), [(Repeated(), "Dense_0"), (RepeatedNNX, "blocks/0")])
def test_the_last_call_of_a_layer_is_read_also_inside_a_transformation(network, head):
    run = random_run(network, 8)
    layer = run.state.params["twice"]
    assert find_layer(run.model, (8, 8, 3)) == LayerCall(head, (3,), before=True)
    assert heat_map_layer(run.model, (8, 8, 3)) == LayerCall("twice", (8, 8, 3), calls=2)
    features = run.features(TABLE.images[:4], "twice", "none")
    x = (TABLE.images[:4] / 255 - np.array(run.preprocess.mean)) / np.array(run.preprocess.std)
    for activate in (np.tanh, np.array):
        x = activate(x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"]))
    assert np.allclose(features, x, atol=1e-4)


class ConvolutionalHead(nn.Module):
    @nn.compact
    def __call__(self, images):
        return nn.Conv(5, (1, 1))(images).mean((1, 2))


@pytest.mark.parametrize(
    ("model", "layer", "message"),
    [
        (NET, "Conv_1", "layer 'Conv_1': the network has no such layer, did you mean 'Conv_0'?"),
        (NET, "stem", "layer 'stem': the network has no such layer; there are: Conv_0, Dense_0"),
        (RepeatedNNX, "stem", "layer 'stem': the network has no such layer; there are: twice, blocks/0"),
        (linear_model(), None, "of type FunctionModel, whose layers cannot be read; give a Linen or NNX module"),
        (ConvolutionalHead(), None, "the network has no dense layer that returns the logits"),
    ],
    ids=["similar", "unknown", "NNX", "functions", "head"],
)
def test_a_layer_that_cannot_be_read_is_refused(model, layer, message):
    assert message in error_line(find_layer, adapt(model), (8, 8, 3), layer)


def write(run: TrainedRun, out: Path, table: Any = TABLE, **options: Any) -> bytes:
    form: Any = out.suffix[1:]
    write_features(run, table, out, form, **options)
    assert not out.with_name(f"{out.name}.partial").exists()
    return out.read_bytes()


@pytest.mark.slow
def test_a_file_has_every_image_once_in_order_with_ids_labels_and_classes(tmp_path):
    run = random_run(NET, 8)
    write(run, tmp_path / "all.npz")
    write(run, tmp_path / "all.parquet")
    arrays = dict(np.load(tmp_path / "all.npz"))
    assert np.array_equal(arrays["features"], run.features(TABLE))
    assert arrays["ids"].tolist() == [str(row) for row in range(150)]
    assert np.array_equal(arrays["labels"], TABLE.labels) and arrays["class_names"].tolist() == list("abcde")
    assert set(arrays["errors"].tolist()) == {""} and (arrays["layer"], str(arrays["network"])[-6:]) == ("", "step 0")
    table = pyarrow.parquet.read_table(tmp_path / "all.parquet")
    assert np.array_equal(np.stack(table["features"].to_numpy()), arrays["features"])
    assert table["id"].to_pylist() == arrays["ids"].tolist() and table["label"].to_pylist() == TABLE.labels.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["npz", "parquet"])
def test_an_interrupted_file_continues_and_has_the_same_bytes_on_any_number_of_devices(tmp_path, form):
    run, two = random_run(NET, 8), random_run(NET, 8, devices=2)
    resized = dataclasses.replace(run, config=run.config.replace(data={"resize": run.config.data.resize + 1}))
    whole = write(random_run(NET, 8, devices=4), tmp_path / f"whole.{form}")
    out, steps = tmp_path / f"parts.{form}", list[int]()

    def stop(done: int, errors: int) -> None:
        raise KeyboardInterrupt

    # Neither the rows of another layer nor those of images that were prepared in another way are continued.
    anew = [64, 128, 150]
    for layer, second, expected in ((None, two, [150]), ("Conv_0", run, anew), (None, resized, anew)):
        with pytest.raises(KeyboardInterrupt):
            write(run, out, layer=layer, progress=stop)
        assert not out.exists()
        steps.clear()
        content = write(second, out, progress=lambda done, errors: steps.append(done))
        assert steps == expected and (second is resized or content == whole)
        out.unlink()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), 12, 9, 24)


@pytest.mark.slow
def test_the_command_writes_the_features_of_a_split_and_of_unlabelled_images(pictures, tmp_path, capfd):
    workdir, out = tmp_path / "run", tmp_path / "val.npz"
    assert main(train_words(pictures, workdir, *LEAN, "--train.duration", "2 steps")) == 0
    capfd.readouterr()
    assert main(["features", str(workdir), str(pictures), "--out", str(out)]) == 0
    assert capfd.readouterr().out == f"{out}: 4 features of 9 images, step 2 of {workdir}\n"
    val = np.load(out)
    # Ids are the paths, and folders are the classes.
    names = [identity.split("/")[-2] for identity in val["ids"].tolist()]
    assert [val["class_names"][label] for label in val["labels"]] == names and len({*names}) == 5
    assert main(["features", str(workdir), str(pictures), "--out", str(out), "--split", "train"]) == 0
    assert len(np.load(out)["features"]) == 12
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "bad.png").write_text("no picture")
    Image.open(pictures / "val" / "a" / "000.png").save(folder / "good.png")
    assert main(["features", str(workdir), str(folder), "--out", str(out)]) == 0
    assert "2 images, of which 1 cannot be used" in capfd.readouterr().out
    arrays = np.load(out)
    assert "labels" not in arrays and arrays["errors"][1] == "" and "bad.png" in arrays["errors"][0]
    assert np.isnan(arrays["features"][0]).all()
    assert np.allclose(arrays["features"][1], val["features"][0], rtol=1e-5, atol=1e-5)


def test_splits_are_those_of_the_data_set(tmp_path):
    data = DataConfig(path=str(tmp_path / "own.npz"))
    write_arrays(tmp_path / "own.npz", random_table(8), random_table(3))
    assert [len(open_one_split([data.path], data, split)) for split in ("train", "val", None)] == [8, 3, 3]
    photos = tmp_path / "photos"
    for name in ("a/1.png", "a/2.png", "b/3.png", "b/4.png"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(photos / name)
    whole = open_one_split([str(photos)], data)
    assert whole.class_names == ("a", "b") and whole.labels.tolist() == [0, 0, 1, 1]
    with pytest.raises(InputError, match="--split val: .*photos has no validation split; leave it out for all images"):
        open_one_split([str(photos)], data, "val")
    Image.new("RGB", (8, 8)).save(photos / "5.png")
    assert open_one_split([str(photos)], data).labels.tolist() == [-1] * 5
    (photos / "5.png").unlink()
    # The config's own path has the validation split that the config makes.
    assert len(open_one_split([str(photos)], DataConfig(path=str(photos), val_share=0.4))) == 2
    assert open_one_split([str(photos / "a" / "1.png"), str(photos / "b" / "3.png")], data).labels.tolist() == [-1, -1]
    with pytest.raises(InputError, match="--split train: .*1.png is no data set with splits; leave it out"):
        open_one_split([str(photos / "a" / "1.png")], data, "train")
    listings = (
        *(("path,label\na/1.png,x\n", [0]), ("path\na/1.png\n", [-1])),
        *(('"path","label"\na/1.png,x\n', [0]), ("\ufefflabel, path \nx,a/1.png\n", [0])),
    )
    for listing, labels in listings:
        (photos / "list.csv").write_text(listing)
        assert open_one_split([str(photos / "list.csv")], data).labels.tolist() == labels
