"""A packed copy of a data set has the same rows and images of the requested size, and the stream reads the copy."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.forms import put
from support.ilsvrc import write_tree
from support.images import encode

from jaxddp.cli import main
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.curate import PackOptions, pack, packed_image
from jaxddp.data.formats.folders import read_folders
from jaxddp.data.formats.ilsvrc import train_solutions, val_solutions
from jaxddp.data.formats.packed_records import holds_packed, read_packed
from jaxddp.data.stream.decode import Pixels
from jaxddp.data.table import ExampleTable


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExampleTable]:
    root = write_tree(tmp_path_factory.mktemp("tree"), classes=3, images=5, val=7, size=(48, 64))
    return {"train": train_solutions(root), "val": val_solutions(root)}


@pytest.fixture(scope="module")
def packed(tables: dict[str, ExampleTable], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "copy"
    pack(tables, out, PackOptions(short_side=24, quality=95))
    return out


def size_of(data: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(data)).size


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_packed_table_has_the_same_rows_and_classes_and_smaller_images(tables, packed: Path, split):
    assert holds_packed(packed)
    copy, original = read_packed(packed, split), tables[split]
    np.testing.assert_array_equal(copy.id, original.id)
    np.testing.assert_array_equal(copy.labels, original.labels)
    for attribute in ("class_ids", "class_names"):
        assert getattr(copy, attribute) == getattr(original, attribute)
    assert copy.fingerprint != original.fingerprint
    copy.check(DataConfig())
    assert {size_of(copy.read(row)) for row in range(len(copy))} == {(32, 24)}


def test_each_packed_image_is_the_resized_original(tables, packed: Path):
    copy = read_packed(packed, "train")
    for row in range(len(copy)):
        # Only brightness is compared, because JPEG stores color at half the resolution and loses the color of noise.
        small = np.asarray(Image.open(io.BytesIO(copy.read(row))).convert("L"), float)
        large = Image.open(io.BytesIO(tables["train"].read(row))).resize((32, 24), Image.Resampling.LANCZOS)
        assert np.abs(small - np.asarray(large.convert("L"), float)).mean() < 2


def test_small_rgb_jpegs_or_their_pixels_are_copied_and_other_images_are_reencoded():
    color = Image.fromarray(np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8))
    jpeg = encode(color, "JPEG", quality=77)
    assert packed_image(jpeg, PackOptions(short_side=30)) == jpeg
    ppm, pixels = packed_image(jpeg, PackOptions(short_side=30, pixels=True)), Pixels(20, resize=30)
    assert ppm.startswith(b"P6")
    np.testing.assert_array_equal(pixels(ppm), pixels(jpeg))
    for other in (encode(color, "PNG"), encode(color.convert("CMYK"), "JPEG"), encode(color.convert("L"), "JPEG")):
        packed = Image.open(io.BytesIO(packed_image(other, PackOptions(short_side=64))))
        assert (packed.format, packed.mode, packed.size) == ("JPEG", "RGB", (40, 30))


def test_the_shorter_side_has_the_requested_size():
    for height, width, expected in ((300, 200, (100, 150)), (200, 301, (150, 100)), (1000, 333, (100, 300))):
        image = encode(Image.new("RGB", (width, height)), "JPEG")
        assert size_of(packed_image(image, PackOptions(short_side=100))) == expected


def test_a_copy_of_several_files_is_read_completely(tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxddp.curate.SHARD_BYTES", 3000)
    assert len(pack(tables, tmp_path / "copy", PackOptions(short_side=48))["splits"]["train"]["files"]) > 2
    table = read_packed(tmp_path / "copy", "train")
    assert [table.read(row) for row in range(15)] == [tables["train"].read(row) for row in range(15)]


def test_two_packs_of_a_set_are_equal_in_bytes(tables, packed: Path, tmp_path: Path):
    shares = dataclasses.replace(tables["val"], labels=np.eye(3)[tables["val"].labels], label_form="shares")
    pack({**tables, "val": shares}, tmp_path / "copy", PackOptions(short_side=24, quality=95))
    files = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in (packed, tmp_path / "copy")]
    assert files[0] == files[1] and len(files[0]) == 5
    # The order of the features is the same in every process, also in those whose hashes differ.
    first = files[0]["train-00000.tfrecord"][:4000]
    assert first.index(b"\n\x02id") < first.index(b"\n\x05image") < first.index(b"\n\x05label")


def test_wrong_arguments_of_pack_raise_one_line_errors(tables, packed: Path, tmp_path: Path, capfd):
    (tmp_path / "link").symlink_to("nowhere")
    for out in (packed, tmp_path / "link"):
        with pytest.raises(InputError, match="exists already; remove it"):
            pack(tables, out, PackOptions())
    reversed_names = tables["val"].class_ids[::-1]
    other = dataclasses.replace(tables["val"], class_ids=reversed_names, class_names=reversed_names)
    with pytest.raises(InputError, match="val: class 0 is 'n01000274', and 'n01000000' in train; give all splits"):
        pack({**tables, "val": other}, tmp_path / "copy", PackOptions())
    weighted = dataclasses.replace(other, weights=np.ones(len(other), np.float32))
    with pytest.raises(InputError, match="the images have weights, which a packed copy does not hold; train on"):
        pack({"val": weighted}, tmp_path / "copy", PackOptions())
    assert main(["data", "pack", "nowhere", "--out", str(tmp_path / "copy"), "--quality", "0"]) == 2
    assert "--quality 0: expected 1 to 100" in capfd.readouterr().err.splitlines()[-1]
    with pytest.raises(InputError, match=r"packed.json: has no split 'test'"):
        read_packed(packed, "test")  # type: ignore[arg-type]


def test_a_bad_image_leaves_no_packed_files(tmp_path: Path):
    root = write_tree(tmp_path / "tree", classes=2, images=2, val=2)
    table = train_solutions(root)
    Path(table.name(2)).write_bytes(table.read(2)[:-300] + b"\xff\xd9")
    with pytest.raises(InputError, match=f"{table.name(2)}: damaged: Corrupt JPEG data"):
        pack({"train": table}, tmp_path / "copy", PackOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


def test_an_image_that_jpeg_cannot_hold_is_named(tmp_path: Path):
    for name, width in (("a/1.png", 9), ("b/2.png", 66_000)):
        put(tmp_path / "tree/train" / name, encode(Image.new("RGB", (width, 1)), "PNG"))
    table = read_folders(tmp_path / "tree", "train")
    with pytest.raises(InputError, match=r"/tree/train/b/2.png: cannot be converted to JPEG \(.*\); convert or shri"):
        pack({"train": table}, tmp_path / "copy", PackOptions())


def test_a_damaged_packed_copy_raises_a_one_line_error(tables, tmp_path: Path):
    root = tmp_path / "copy"
    pack(tables, root, PackOptions(short_side=24))
    index = (root / "val.npz").read_bytes()
    (root / "val.npz").write_bytes(index[: len(index) // 2])
    with pytest.raises(InputError, match=r"val.npz: damaged .*; pack the data set again"):
        read_packed(root, "val")
    shard = root / "train-00000.tfrecord"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"train-00000.tfrecord: \d+ bytes, but it was written with \d+; copy it"):
        read_packed(root, "train")
    shard.unlink()
    with pytest.raises(InputError, match=r"train-00000.tfrecord: no such file"):
        read_packed(root, "train")
    whole = json.loads((root / "packed.json").read_text())
    twice = {**whole["classes"], "ids": [whole["classes"]["ids"][0]] * 3}
    wrong_classes = (json.dumps({**whole, "classes": classes}) for classes in ({"ids": 3}, {**twice, "names": ["a"]}))
    for content in ("{}", "[" * 100_000, json.dumps({**whole, "splits": 3}), *wrong_classes):
        (root / "packed.json").write_text(content)
        with pytest.raises(InputError, match=r"packed.json: damaged .*; pack the data set again"):
            read_packed(root, "train")
    (root / "packed.json").write_text(json.dumps({**whole, "classes": twice}))
    with pytest.raises(InputError, match=r"packed.json: class 1: '.*' is also the name in class 0"):
        read_packed(root, "train")
