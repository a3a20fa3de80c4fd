"""Sets of tensorflow-datasets: examples are read as the builder wrote them, from both kinds of files, offline."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from support.streams import waves

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.data.formats.tfds import read_tfds
from jaxddp.data.opening import open_splits
from jaxddp.data.storage.shards import records_of, write_example

tfds.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("own_cache")
FORMATS = ("tfrecord", "array_record")
NAMES = ["cat", "ant", "bee"]
SPLITS = {"train": 23, "test": 7}


def label_of(number: int) -> int:
    return number * 7 % 3


class SmallSet(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A set whose split `train` has the images 0..22; each further split has the next ones."""

    VERSION = tfds.core.Version("1.0.0")
    splits = SPLITS
    kind: Any = tfds.features.Image(shape=(28, 28, 1), encoding_format="png")
    extra_features: Any = ()

    def _info(self):
        label = tfds.features.ClassLabel(names=NAMES)
        features = {"label": label, "image": self.kind, **{name: kind for name, kind, _ in self.extra_features}}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        ends = np.cumsum([*self.splits.values()]).tolist()
        return {
            name: self._generate_examples(range(end - count, end))
            for (name, count), end in zip(self.splits.items(), ends, strict=True)
        }

    def _generate_examples(self, numbers):
        for number in numbers:
            extra_values = {name: value for name, _, value in self.extra_features}
            image = waves(number, *self.kind.shape[:2])[..., : self.kind.shape[2]].astype(self.kind.np_dtype)
            yield number, {"label": self.label(number), "image": image, **extra_values}

    def label(self, number: int) -> int:
        return label_of(number)


class TinyGray(SmallSet):
    """A set like fashion_mnist: gray PNG."""


class TinyColor(SmallSet):
    """A set like cifar10, with a validation split in addition to the test split."""

    kind = tfds.features.Image(shape=(32, 32, 3), encoding_format="png")
    splits = SPLITS | {"validation": 5}
    extra_features = (("id", tfds.features.Text(), "some id"),)


def prepare(builder: type[SmallSet], data_dir: Path, file_format: str = "tfrecord", shards: int = 3, **options) -> Path:
    """Prepare a set and return the folder of its files."""
    small_set = builder(data_dir=str(data_dir), file_format=file_format, **options)
    small_set.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=shards))
    return Path(small_set.data_dir)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same sets for each kind of file. Tests that change a set copy it first."""
    home = tmp_path_factory.mktemp("prepared")
    for file_format in FORMATS:
        for builder in (TinyGray, TinyColor):
            prepare(builder, home / file_format, file_format)
    return home


@pytest.fixture(params=FORMATS)
def copy(request: pytest.FixtureRequest, prepared: Path, tmp_path: Path) -> Path:
    """A new data_dir with TinyGray, which was never opened."""
    folder = shutil.copytree(prepared / request.param / "tiny_gray", tmp_path / "data/tiny_gray")
    for index in folder.rglob("*.jaxddp-index"):
        index.unlink()
    return folder.parent


def shards_of(data_dir: Path, split: str = "train") -> list[Path]:
    return sorted(file for file in data_dir.rglob(f"*-{split}.*") if "-of-" in file.name)


def fault(*arguments) -> str:
    with pytest.raises(InputError) as raised:
        read_tfds(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_config_names_other_splits(prepared: Path):
    def opened(**keys: str) -> list[str]:
        data = DataConfig(path="tfds:tiny_color", data_dir=str(prepared / "tfrecord"), **keys)
        return [table.record(0).id.partition("-")[2].partition(".")[0] for table in open_splits(data).values()]

    assert opened() == ["train", "validation"] and opened(val="test") == ["train", "test"]
    assert opened(train="validation") == ["validation", "test"]
    for keys, message in (
        ({"val": "tset"}, "^data.val='tset': .* has no such split, did you mean 'test'\\?; the splits are "),
        ({"train": "test", "val": "test"}, "^data.val='test': is also the training split; the splits are "),
    ):
        with pytest.raises(InputError, match=message):
            opened(**keys)


def test_ids_are_those_of_the_library(prepared: Path):
    for name in ("tiny_gray", "tiny_color"):
        table = read_tfds(name, "train", prepared / "tfrecord")
        builder = tfds.builder_from_directory(shards_of(prepared / "tfrecord" / name)[0].parent)
        config = tfds.ReadConfig(add_tfds_id=True)
        examples = builder.as_dataset(split="train", read_config=config, decoders={"image": tfds.decode.SkipDecoding()})
        rows = {table.id[row]: (table.read(row), int(table.labels[row])) for row in range(len(table))}
        actual = {each["tfds_id"]: (each["image"], int(each["label"])) for each in examples.as_numpy_iterator()}
        assert len(rows) == 23 and rows == actual


def test_a_set_is_found_by_its_version_or_its_config(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class WithConfig(TinyGray, skip_registration=True):
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="plain"), tfds.core.BuilderConfig(name="fancy")]  # noqa: RUF012

    plain = read_tfds("tiny_gray", "val", prepared / "tfrecord")
    assert read_tfds("tiny_gray:1.0.0", "val", prepared / "tfrecord").fingerprint == plain.fingerprint
    by_path = open_splits(DataConfig(path=f"{prepared}/tfrecord/tiny_gray/1.0.0"))["val"]
    assert by_path.fingerprint == plain.fingerprint
    prepare(WithConfig, tmp_path, config="fancy")
    assert len(open_splits(DataConfig(path=f"{tmp_path}/with_config/fancy/1.0.0"))["val"]) == 7
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    for name in ("with_config/fancy:1.0.0", "with_config/fancy", "with_config"):
        assert len(read_tfds(name, "val")) == 7
    assert "did you mean 'with_config/fancy'" in fault("with_config/fanci", "val")
    assert "prepared there: with_config/fancy;" in fault("with_config/plain", "val")


def test_an_error_for_an_unprepared_set_gives_the_command_that_prepares_it(prepared: Path, tmp_path: Path):
    home = prepared / "tfrecord"
    message = fault("tiny_grey", "train", home)
    assert message.startswith(f"{home}: no prepared data set 'tiny_grey', did you mean 'tiny_gray'?")
    assert "prepared there: tiny_color, tiny_gray" in message
    assert message.endswith(f"tfds.builder('tiny_grey', data_dir='{home}').download_and_prepare()\"")
    assert "prepared there: tiny_color:1.0.0" in fault("tiny_gray:2.0.0", "train", home)
    assert "nothing is prepared there" in fault("cifar10", "train", tmp_path / "nowhere")
    for name in ("no name", "", "../tfrecord"):
        assert fault(name, "train", home).startswith(f"{home}: ")


class TwoImages(SmallSet, skip_registration=True):
    extra_features = (("mask", tfds.features.Image(shape=(4, 4, 1)), np.zeros((4, 4, 1), np.uint8)),)


class DeepPixels(SmallSet, skip_registration=True):
    kind = tfds.features.Image(shape=(28, 28, 1), dtype=np.uint16, encoding_format="png")


class Unlabelled(SmallSet, skip_registration=True):
    def label(self, number: int) -> int:
        return -1 if number % 4 == 3 else label_of(number)


@pytest.mark.parametrize(("builder", "more"), [(TwoImages, ", mask (Image)"), (DeepPixels, "")])
def test_an_error_names_a_set_that_is_no_image_classification(tmp_path: Path, builder: type[SmallSet], more: str):
    root, features = prepare(builder, tmp_path), f"its features are image (Image), label (ClassLabel){more};"
    assert fault(builder.name, "train", tmp_path).startswith(f"{root}: not a data set of images; {features}")


def test_code_of_a_set_is_not_run(copy: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(copy)
    (copy / "tiny_gray/own.py").write_text("raise SystemExit")
    file, library = copy / "tiny_gray/1.0.0/features.json", "tensorflow_datasets.core.features.image_feature."
    file.write_text(file.read_text().replace(library, "tiny_gray.own."))
    assert "a feature is of the class 'tiny_gray.own.Image'" in fault("tiny_gray", "train", copy)


@pytest.mark.parametrize("file_format", FORMATS)
def test_an_error_names_a_split_without_labels(tmp_path: Path, file_format: str):
    root = prepare(Unlabelled, tmp_path, file_format)
    message = fault("unlabelled", "train", tmp_path)
    assert message.startswith(str(root)) and "the label -1 is not one of the 3 classes (1 such" in message
    name, _, position = message.partition(": ")[0].rpartition(" ")
    assert name.partition(", record")[0] in map(str, shards_of(tmp_path)) and position.isdecimal()


def test_an_error_names_a_label_that_overflows_32_bits(prepared: Path, tmp_path: Path):
    shutil.copytree(prepared / "tfrecord/tiny_gray", tmp_path / "tiny_gray")
    shard = shards_of(tmp_path)[0]
    count = len([*records_of(shard)])
    with shard.open("wb") as file:
        for row in range(count):
            write_example(file, {"image": b"any", "label": 2**32 * (row == 1)})
    assert "the label 4294967296 is not one of the 3 classes (1 such" in fault("tiny_gray", "train", tmp_path)


def test_an_error_names_a_missing_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TinyGray, "splits", {"train": 23})
    root, expected = prepare(TinyGray, tmp_path), "no split val; its splits are train;"
    assert fault("tiny_gray", "val", tmp_path).startswith(f"{root}: {expected}")


def test_each_incomplete_shard_is_reported_and_the_others_are_read(copy: Path):
    rows, (first, second, third) = len(read_tfds("tiny_gray", "train", copy)), shards_of(copy)
    for index in copy.rglob("*.jaxddp-index"):
        index.unlink()
    first.write_bytes(first.read_bytes()[:100])
    second.unlink()
    messages: list[str] = []
    table = read_tfds("tiny_gray", "train", copy, messages.append)
    assert len(messages) == 2 and all(map(str.startswith, messages, map(str, (second, first))))
    assert 0 < len(table) < rows and {bytes(path) for path in table.path} == {os.fsencode(third.name)}
    assert all(table.read(row) for row in range(len(table)))
    # The next run reports the faults too.
    assert fault("tiny_gray", "train", copy).startswith(str(second)) and not list(copy.rglob("*.jaxddp-index"))


@pytest.mark.slow
def test_reading_is_quiet_and_needs_no_network_and_no_tensorflow(prepared: Path):
    program = """
    import socket
    import sys

    def refuse(*arguments, **named):
        raise AssertionError("the network")

    socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
    import jaxddp.data.formats.tfds as formats
    assert "tensorflow" not in sys.modules and "tensorflow_datasets" not in sys.modules
    for file_format in ("tfrecord", "array_record"):
        table = formats.read_tfds("tiny_gray", "train", f"{sys.argv[1]}/{file_format}")
        assert len(table.read(3))
    try:
        formats.read_tfds("cifar10", "train", sys.argv[1])
    except ValueError:
        pass
    assert "tensorflow" not in sys.modules
    """
    noisy = {"NO_GCE_CHECK", "TF_CPP_MIN_LOG_LEVEL"}
    environment = {name: value for name, value in os.environ.items() if name not in noisy}
    command = [sys.executable, "-c", textwrap.dedent(program), str(prepared)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
