"""Properties of every format: its content identifies it, batches have the written pixels, faults raise one line.

A new format needs a writer in `support/forms.py` and a line in its `FORMS`. Each format has a file for other tests.
"""

import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.forms import CLASSES, COUNTS, FORMS, Form, Pictures, Splits, pictures
from support.irregular import put_back, replace_by_irregular

import jaxddp
from jaxddp.cli import main
from jaxddp.config import DataConfig
from jaxddp.config.registry import FORMATS
from jaxddp.core.errors import InputError
from jaxddp.core.files import CACHE_VARIABLE
from jaxddp.curate import PackOptions, check, pack, write_manifest
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.opening import open_splits, open_tables
from jaxddp.data.order import EvalOrder, SampleOrder, Shard
from jaxddp.data.source import Source

# pytest ends a test that waits for a file that is not regular; no test takes a second.
pytestmark = pytest.mark.timeout(60)

FILES = [name for name, form in FORMS.items() if not form.in_memory]
FOLDERS = [name for name in FORMS if name.startswith("folders")]
# Where images are not decoded, one kind of image represents all.
ONCE = [name for name in FORMS if name not in FOLDERS[1:]]
BATCH = 4


@dataclasses.dataclass(frozen=True)
class Written:
    """A data set of a format on the disk, and the written pictures."""

    form: Form
    path: Path
    truth: Splits

    def data(self, **more) -> DataConfig:
        return self.form.data(self.path, **more)


def write(name: str, folder: Path, channels: int = 3, bits: int = 8, counts: dict[str, int] = COUNTS) -> Written:
    form = FORMS[name]
    truth = pictures(channels, bits, form.size, counts)
    return Written(form, form.write(folder, truth), truth)


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Written]:
    with pytest.MonkeyPatch.context() as patched:
        folder = tmp_path_factory.mktemp("form")
        patched.setenv(CACHE_VARIABLE, str(folder / "cache"))
        written_set = write(request.param, folder / "data")
        patched.setenv("TFDS_DATA_DIR", str(written_set.path))
        yield written_set


every_form = pytest.mark.parametrize("written", FORMS, indirect=True, scope="module")
every_form_once = pytest.mark.parametrize("written", ONCE, indirect=True, scope="module")


def stored(source: Source, row: int) -> np.ndarray:
    """Return the pixels of a row from another decoder."""
    if isinstance(source, ArrayTable):
        return source.images[row]
    pixels = np.asarray(Image.open(io.BytesIO(source.read(row))))  # type: ignore[attr-defined]
    return pixels.reshape(*pixels.shape[:2], -1)


def expected(written: Written, source: Source, truth: Pictures) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of a source in its order; checks that they are the written ones, each once."""
    images = np.stack([stored(source, row) for row in range(len(truth))])
    if not written.form.exact:
        assert images.shape == truth.images.shape
        return images, truth.labels
    places = {image.tobytes(): row for row, image in enumerate(truth.images)}
    rows = np.array([places[image.tobytes()] for image in images])
    assert sorted(rows) == [*range(len(truth))]
    assert not written.form.ordered or rows.tolist() == sorted(rows)
    return truth.images[rows], truth.labels[rows]


def test_every_format_has_a_writer():
    assert {form.format for form in FORMS.values()} == {*FORMATS.names()}


@every_form_once
def test_every_format_is_recognized_by_its_content(written: Written):
    for split, source in zip(("train", "val"), open_tables(written.data()), strict=True):
        assert source.class_names == CLASSES and len(source) == COUNTS[split]
        assert isinstance(source, ArrayTable) == written.form.in_memory
        _, labels = expected(written, source, written.truth[split])
        assert source.labels.tolist() == labels.tolist() and source.labels.dtype == np.int32
    some, _ = open_tables(written.data(classes="0:2", limit=3))
    assert (len(some), some.class_names) == (3, CLASSES[:2])


@every_form
def test_batches_hold_the_pixels_of_their_rows(written: Written):
    assert_pixels_of_rows(written, written.data())


def assert_pixels_of_rows(written: Written, data: DataConfig) -> None:
    """Read batches of one of two hosts, beyond the end of an epoch."""
    train, _ = open_tables(data)
    images, labels = expected(written, train, written.truth["train"])
    order, half = SampleOrder(len(train), BATCH, seed=5), Shard(1, 2)
    batches = list(train.train_batches(order, data, range(4), half))
    for step, batch in enumerate(batches):
        rows = half.of(order.rows(step))
        assert batch.row.tolist() == rows.tolist() and batch.label.tolist() == labels[rows].tolist()
        assert batch.epoch.tolist() == half.of(order.epochs(step)).tolist() and batch.mask.all()
        np.testing.assert_array_equal(batch.image, images[rows])
        assert batch.image.dtype == images.dtype
    assert len(batches) == 4


@every_form_once
def test_evaluation_counts_every_example_once(written: Written):
    _, val = open_tables(written.data())
    images, labels = expected(written, val, written.truth["val"])
    batches = list(val.eval_batches(EvalOrder(len(val), BATCH), written.data()))
    assert [batch.mask.tolist() for batch in batches] == [[1, 1, 1, 1], [1, 0, 0, 0]]
    rows = np.concatenate([batch.row[batch.mask > 0] for batch in batches])
    assert sorted(rows) == [*range(len(val))]
    for batch in batches:
        real = batch.mask > 0
        np.testing.assert_array_equal(batch.image[real], images[batch.row[real]])
        assert batch.label[real].tolist() == labels[batch.row[real]].tolist() and not batch.image[~real].any()


@pytest.mark.parametrize(
    ("name", "channels", "bits"), [("folders of webp", 4, 8), ("folders of tiff", 1, 16), ("NumPy", 1, 16)]
)
def test_channels_and_bits_are_those_of_the_written_images(name: str, channels: int, bits: int, tmp_path: Path):
    """`test_pixel_formats` covers every kind of image in every format. This test covers the stream."""
    written_set = write(name, tmp_path / "data", channels, bits)
    data = written_set.data() if written_set.form.in_memory else written_set.data(channels=channels, bits=bits)
    assert_pixels_of_rows(written_set, data)


def fingerprints(written: Written) -> list[str]:
    return [source.fingerprint for source in open_splits(written.data()).values()]


@every_form_once
def test_the_fingerprint_does_not_depend_on_the_path(written: Written, tmp_path: Path):
    results = fingerprints(written)
    assert len({*results}) == 2
    moved = written.path.rename(tmp_path / written.path.name)
    assert fingerprints(dataclasses.replace(written, path=moved)) == results
    moved.rename(written.path)
    assert fingerprints(written) == results


@every_form_once
def test_other_examples_have_another_fingerprint(written: Written, tmp_path: Path):
    name = next(name for name, form in FORMS.items() if form is written.form)
    train, val = fingerprints(write(name, tmp_path / "fewer", counts={"train": 9, "val": 5}))
    # The other split is the same and has the same fingerprint, also in another folder.
    before = fingerprints(written)
    assert before[0] != train and (before[1] == val or name == "packed")


@every_form_once
def test_a_validation_share_for_data_with_a_validation_split_raises_an_error(written: Written):
    with pytest.raises(InputError, match=r"^data\.val_share=0\.3: .* has its own validation split"):
        open_splits(written.data(val_share=0.3))


UNDIVIDED = {"folders of png": "train", "CSV": "train.csv", "Parquet": "data/train-00000-of-00001.parquet"}


@pytest.mark.parametrize("name", UNDIVIDED)
def test_data_without_a_validation_split_are_divided_by_class_and_reproducibly(name: str, tmp_path: Path):
    written_set = write(name, tmp_path / "data")
    path = written_set.path / UNDIVIDED[name]
    for file in (*written_set.path.glob("val.csv"), *written_set.path.glob("data/validation-*")):
        file.unlink()
    with pytest.raises(InputError, match=r"has no validation split; give data\.val_share"):
        open_splits(DataConfig(path=str(path)))
    train, val = open_splits(DataConfig(path=str(path), val_share=0.3)).values()
    # A class has three or four examples, of which one is held out.
    assert np.bincount(val.labels).tolist() == [1, 1, 1] and len(train) == COUNTS["train"] - 3
    names = [source.name(row) for source in (train, val) for row in range(len(source))]
    assert len({*names}) == COUNTS["train"]
    again = jaxddp.open_data(path, 0.3)
    assert [source.fingerprint for source in again] == [train.fingerprint, val.fingerprint]


def check_and_open(written: Written, tmp_path: Path) -> tuple[Any, Any]:
    """Return the splits, compared with the manifest of `data check`."""
    report, manifest = check(open_splits(written.data())), tmp_path / "manifest.jsonl"
    assert report.num_faults == 0
    write_manifest(report, manifest)
    return open_tables(written.data(verify="manifest", manifest=str(manifest)))


@pytest.mark.parametrize("written", [name for name in ONCE if name in FILES], indirect=True, scope="module")
def test_check_finds_no_fault_and_pack_copies_the_data_set(written: Written, tmp_path: Path):
    splits = open_splits(written.data())
    for table in check_and_open(written, tmp_path):
        assert not any(table.digests.fault(row, table.read(row)) for row in range(len(table)))
    pack(splits, tmp_path / "packed", PackOptions(short_side=written.form.size))
    copies = open_splits(DataConfig(path=str(tmp_path / "packed")))
    for copy, source in zip(copies.values(), splits.values(), strict=True):
        assert copy.labels.tolist() == source.labels.tolist() and copy.class_names == source.class_names


@pytest.mark.parametrize("written", [name for name in ONCE if name not in FILES], indirect=True, scope="module")
def test_check_accepts_arrays_and_pack_rejects_them(written: Written, tmp_path: Path):
    check_and_open(written, tmp_path)
    with pytest.raises(InputError, match="already arrays in few files; train on it directly"):
        pack(open_splits(written.data()), tmp_path / "packed", PackOptions())


# Files that are not regular


def essential_files(written: Written) -> list[Path]:
    """Return each file of the set. Of the images of a folder return only the first."""
    if written.path.is_file():
        return [written.path]
    results = sorted(path for path in written.path.rglob("*") if path.is_file() and path.suffix != ".jaxddp-index")
    images = (".JPEG", ".png", ".bmp")
    first = {path.parent: path for path in reversed(results) if path.suffix in images}
    return [path for path in results if path.suffix not in images or first[path.parent] == path]


def open_and_check(written: Written, capfd) -> tuple[bool, int, str]:
    """Return whether opening fails, and the exit code and the last line of `data check`."""
    is_rejected = False
    try:
        for source in open_tables(written.data()):
            source.read(0) if hasattr(source, "read") else None
    except InputError as error:
        assert "\n" not in str(error)
        is_rejected = True
    address = written.form.address or str(written.path)
    code = main(["data", "check", address])
    output = capfd.readouterr()
    assert "Traceback" not in output.err and code in (0, 1, 2)
    return is_rejected, code, output.out + output.err


@pytest.mark.parametrize(
    ("written", "kind"),
    [(name, kind) for name in ONCE for kind in ("a FIFO", "a directory", "a device")],
    indirect=["written"],
    scope="module",
)
def test_a_data_set_with_an_irregular_file_raises_a_one_line_error(written, kind, capfd, monkeypatch):
    monkeypatch.chdir(written.path.parent)
    for path in essential_files(written):
        kept = replace_by_irregular(path, kind)
        is_rejected, code, output = open_and_check(written, capfd)
        # Most formats do not need a file of class names, and the folder of a class may contain a folder.
        optional = path.suffix == ".txt" or (written.form.format, kind) == ("folders", "a directory")
        assert (is_rejected and code > 0) or optional, (path, output)
        put_back(path, kept)
    open_tables(written.data())


@pytest.mark.parametrize("share", [0.57, 0.0], ids=["cut", "emptied"])
@every_form_once
def test_check_names_a_truncated_or_empty_file(written: Written, share: float, capfd, monkeypatch):
    monkeypatch.chdir(written.path.parent)
    for path in essential_files(written):
        content = path.read_bytes()
        path.write_bytes(content[: int(share * len(content))])
        is_rejected, code, output = open_and_check(written, capfd)
        # A cut text may be valid. Of a damaged description, tensorflow-datasets names only the folder.
        named = path.name in output or (path.suffix == ".json" and str(written.path) in output)
        assert ((is_rejected or code > 0) and named) or path.suffix in (".txt", ".csv"), (path, output)
        path.write_bytes(content)
    assert open_and_check(written, capfd)[:2] == (False, 0)
