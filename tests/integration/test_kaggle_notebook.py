"""The notebook for Kaggle runs on a small data set in Kaggle's folders, and writes a submission."""

import ast
import csv
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from support.ilsvrc import IMAGES, write_csv
from support.metadata import write_chips
from support.notebooks import JUPYTER_FOLDERS, cell_with, execute, printed, read, shown

from jaxddp import write_sample

pytestmark = pytest.mark.ci

COMPETITION = "imagenet-object-localization-challenge"
CLASSES = 3
TEST_IMAGES = 24
SETTINGS = """
INPUT, WORK = Path({input!r}), Path({work!r})
CLASSES, MODEL, IMAGE_SIZE, BATCH_SIZE, EPOCHS = "0:3", "resnet10", 16, 32, 3
OPTIONS = ["--model.width", 8, "--model.stem", "small", "--data.crop", "whole", "--data.augment.no-flip", "--lr", 1]
"""
AGAIN = 'command("train", *words, *OPTIONS, "--resume", "must")'


def write_competition(root: Path) -> dict[str, str]:
    """Write the digits in the folders of the competition, and return the synset of each test image, in order.

    The solution files list ten classes, but the images of only the first three exist.
    """
    write_sample("digits", root)
    synsets = [line.split()[0] for line in (root / "LOC_synset_mapping.txt").read_text().splitlines()]
    for synset in synsets[CLASSES:]:
        shutil.rmtree(root / IMAGES / "train" / synset)
    with (root / "LOC_val_solution.csv").open(newline="") as file:
        val = {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(file)}
    (root / IMAGES / "test").mkdir()
    test = {}
    for number, (image_id, synset) in enumerate(val.items()):
        image = root / IMAGES / "val" / f"{image_id}.JPEG"
        if synset not in synsets[:CLASSES]:
            image.unlink()
        elif len(test) < TEST_IMAGES:
            # The order of the rows is not the order of the names.
            name = f"ILSVRC2012_test_{number * 7919 % 100_000:08d}"
            shutil.copy(image, root / IMAGES / "test" / f"{name}.JPEG")
            test[name] = synset
    write_csv(root / "LOC_sample_submission.csv", [(name, f"{synsets[0]} 0 0 9 9") for name in test])
    return test


def state_of(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and modification time of everything below a folder."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in (folder, *folder.rglob("*"))}


class Executed:
    """The notebook after it was run on a read-only mount, with the folders before and after."""

    def __init__(self, place: Path):
        root, self.work = place / "input/competitions" / COMPETITION, place / "working"
        self.test = write_competition(root)
        self.synsets = [line.split()[0] for line in (root / "LOC_synset_mapping.txt").read_text().splitlines()]
        count = {split: len([*(root / IMAGES / split).rglob("*.JPEG")]) for split in ("train", "val")}
        self.images = (count["train"], count["val"])
        self.work.mkdir()
        folders = [path for path in (place / "input", *(place / "input").rglob("*")) if path.is_dir()]
        for folder in folders:
            folder.chmod(0o555)
        self.before = state_of(place / "input")
        self.notebook = read("kaggle")
        at = next(i for i, cell in enumerate(self.notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
        settings = SETTINGS.format(input=str(place / "input"), work=str(self.work))
        self.notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(settings))
        try:
            execute(self.notebook, AGAIN)
            self.after = state_of(place / "input")
        finally:
            for folder in folders:
                folder.chmod(0o755)


@pytest.fixture(scope="module")
def kaggle(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in JUPYTER_FOLDERS:
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        # The commands have two devices. The notebook chooses the folder of the cache.
        patch.setenv("JAX_NUM_CPU_DEVICES", "2")
        patch.delenv("JAXDDP_CACHE")
        yield Executed(tmp_path_factory.mktemp("kaggle"))


@pytest.fixture(scope="module")
def submission(kaggle):
    with (kaggle.work / "submission.csv").open(newline="") as file:
        return [*csv.reader(file)]


def test_the_accelerator_is_found(kaggle):
    assert ast.literal_eval(shown(kaggle.notebook, "PROBE =")) == (
        *(2, "cpu", "float32"),
        {"image_size": 16, "batch_size": 32, "epochs": 3},
    )
    assert "2 x cpu" in printed(kaggle.notebook, 'command("doctor"')


def test_a_subset_needs_no_other_images(kaggle):
    """The images of the other classes do not exist."""
    train, val, names = ast.literal_eval(shown(kaggle.notebook, "open_data("))
    assert names == ("zero", "one", "two")
    assert (train, val) == kaggle.images


def test_the_run_is_trained_once(kaggle):
    assert "done at step" in printed(kaggle.notebook, "hours=HOURS, codes=")
    assert "nothing to train" in printed(kaggle.notebook, AGAIN)
    assert (kaggle.work / "resnet10_cpu/checkpoints").is_dir()


def test_a_row_for_each_test_image_in_order(kaggle, submission):
    assert submission[0] == ["ImageId", "PredictionString"]
    assert [image_id for image_id, _ in submission[1:]] == [*kaggle.test]
    assert [*kaggle.test] != sorted(kaggle.test)
    assert ast.literal_eval(shown(kaggle.notebook, "DictReader(submission)"))[0] == TEST_IMAGES


def test_the_first_predictions_are_right(kaggle, submission):
    right = sum(prediction.split()[0] == kaggle.test[image_id] for image_id, prediction in submission[1:])
    assert right > 0.8 * TEST_IMAGES


def test_nothing_is_written_beside_the_data(kaggle):
    assert kaggle.after == kaggle.before
    assert {path.name for path in kaggle.work.iterdir()} == {"cache", "resnet10_cpu", "submission.csv"}


@pytest.mark.parametrize(("device", "extra"), [("dev/accel0", "[tpu]"), ("dev/nvidia0", "[cuda12]"), ("dev/null", "")])
def test_the_installation_fits_the_accelerator(device, extra, tmp_path, monkeypatch):
    package = tmp_path / "jaxddp-0.1.0-py3-none-any.whl"
    package.touch()
    words = installation(str(package), write_chips(tmp_path / "machine", device), monkeypatch)
    assert words[1:] == [
        *("-m", "pip", "install", "--quiet", "--find-links", str(tmp_path), f"jaxddp{extra} @ {package.as_uri()}")
    ]


def installation(package: str | None, root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the command that the cell of the installation runs on a machine, whose `dev` and `sys` are in a folder."""
    import glob

    calls: list[list[str]] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(glob, "glob", lambda pattern: [str(file) for file in root.glob(pattern.removeprefix("/"))])
    monkeypatch.setattr(subprocess, "run", lambda words, check: calls.append(words))
    exec(cell_with(read("kaggle"), "find_spec(").source, {"PACKAGE": package, "PIP_OPTIONS": [], "Path": Path})
    return calls[0]


def test_warnings_in_place_of_variables_are_removed(tmp_path, monkeypatch):
    """libtpu does not start with them."""
    variables = {"TPU_WORKER_HOSTNAMES": "WARNING: could not determine", "TPU_WORKER_ID": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JAXDDP_CACHE", str(tmp_path))
    exec(cell_with(read("kaggle"), "def command(").source, {"WORK": tmp_path})
    assert "TPU_WORKER_HOSTNAMES" not in os.environ and os.environ["TPU_WORKER_ID"] == "0"


@pytest.mark.parametrize("folder", [COMPETITION, f"competitions/{COMPETITION}"])
def test_the_competition_is_found(folder, tmp_path):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "LOC_train_solution.csv").touch()
    values = {"INPUT": tmp_path, "Path": Path}
    exec(cell_with(read("kaggle"), "COMPETITION =").source, values)
    assert values["DATA"] == tmp_path / folder
