"""`jaxddp data show` draws the images that the model gets, at any step, from a config or a run's config.json."""

import io
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from support.ilsvrc import write_tree
from support.runs import recipe_of

import jaxddp
from jaxddp.augment.preprocess import Preprocess
from jaxddp.cli import main
from jaxddp.config import Config
from jaxddp.data.batch import Batch
from jaxddp.setup.input_figure import denormalized, show
from jaxddp.setup.run_setup import initialize
from jaxddp.training.pictures import input_grid, png

pytestmark = pytest.mark.usefixtures("linear_resnet")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = write_tree(tmp_path_factory.mktemp("tree"), classes=3, images=8, val=3)
    return Config().replace(
        data={"path": str(root), "image_size": 32, "crop": "whole", "augment": {"flip": False}},
        model={"name": "resnet18", "stem": "small", "width": 4},
        train={"batch_size": 8, "duration": "3 epochs"},
        parallel={"devices": 2},
    )


def drawn_inputs(monkeypatch: pytest.MonkeyPatch, config: Config, out: Path, **options) -> tuple[np.ndarray, list[str]]:
    """Return the pixels and titles of the picture that `show` draws."""
    # Drawing all images takes longer than making them.
    grid = mock.Mock(side_effect=lambda pixels, titles: input_grid(pixels[:1], titles[:1]))
    monkeypatch.setattr("jaxddp.setup.input_figure.input_grid", grid)
    show(recipe_of(config), out=out, **{"step": 1, "count": 32} | options)
    return grid.call_args.args


@pytest.mark.slow
def test_the_images_are_those_of_the_step(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    setup = initialize(recipe_of(config))
    table = setup.resources.train
    for step in (1, 5):
        with monkeypatch.context() as patched:
            pixels, titles = drawn_inputs(patched, config, tmp_path / "show.png", step=step)
        rows = setup.feed.order.rows(step - 1)
        names = [table.class_names[table.labels[row]].split(",")[0] for row in rows]
        assert titles == [f"{name}\nrow {row}" for name, row in zip(names, rows, strict=True)]
        for image, row in zip(pixels, rows, strict=True):
            original = np.asarray(Image.open(io.BytesIO(table.read(int(row)))).convert("RGB"))
            np.testing.assert_array_equal(image, original)


@pytest.mark.slow
def test_a_notebook_shows_a_step_as_the_command_does(config: Config, tmp_path: Path):
    config = config.replace(data={"augment": {"pad": 4}})
    experiment = recipe_of(config)
    show(experiment, step=2, count=5, out=tmp_path / "show.png")
    setup = initialize(experiment)
    figure = jaxddp.show_inputs(setup, 5, step=2)
    assert png(figure) == (tmp_path / "show.png").read_bytes()
    with Image.open(tmp_path / "show.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 5 * 100
    assert png(jaxddp.show_inputs(setup, 5, step=3)) != png(figure)


def test_normalizing_is_undone_to_the_pixel():
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), np.uint8)
    columns = {name: np.zeros(4, np.int32) for name in ("label", "row", "epoch")}
    batch = Batch(image=images, mask=np.ones(4, np.float32), **columns)
    preprocess = Preprocess()
    np.testing.assert_array_equal(denormalized(preprocess, preprocess(batch, train=False)), images)


@pytest.mark.slow
def test_a_run_is_shown_with_its_config(config: Config, tmp_path: Path, capfd):
    config_file = tmp_path / "config.json"
    config_file.write_text(json.dumps({**config.to_dict(), "fingerprint": {"train": "x", "val": "y"}}))
    out = tmp_path / "pictures" / "show.png"
    arguments = ["data", "show", str(config_file), "--step", "2", "--count", "3", "--out", str(out)]
    assert main([*arguments, "--parallel.devices", "1"]) == 0
    assert capfd.readouterr().out == f"3 of 8 images of step 2: {out}\n"
    assert out.is_file()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "data: unknown command ''; there are: check, get, pack, sample, show, split"),
        (["shwo"], "data: unknown command 'shwo'; did you mean 'show'?"),
        (["show", "digits", "--step", "0"], "--step 0: expected 1 to"),
        (["show", "nothing.json"], "config 'nothing.json' does not exist"),
    ],
)
def test_a_mistake_raises_a_one_line_error(arguments: list[str], expected: str, tmp_path: Path, capfd):
    assert main(["data", *arguments, *(["--out", str(tmp_path / "show.png")] if "--step" in arguments else [])]) == 2
    assert expected in capfd.readouterr().err.splitlines()[-1]
