"""Images are compared with the SHA-256 that `data check` wrote: an error names a changed image."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.forms import put, write_npz
from support.ilsvrc import IMAGES, write_tree
from support.networks import linear_model
from support.shared import sgd

import jaxddp
import jaxddp.data.stream.workers as graph
from jaxddp.config import Config, DataConfig
from jaxddp.core.errors import InputError
from jaxddp.curate import check, write_manifest
from jaxddp.data.images import sound_image
from jaxddp.data.opening import labelled_and_unlabelled, open_splits, open_tables
from jaxddp.data.order import EvalOrder, SampleOrder
from jaxddp.data.source import Source
from jaxddp.workdir.claim import with_absolute_paths

N, BATCH, BAD_ROW = 8, 4, 3


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None) -> Path:
    """A data set in the working directory, with its manifest beside it."""
    monkeypatch.chdir(tmp_path)
    root = write_tree(tmp_path / "tree", classes=2, images=N // 2, val=4, size=16)
    write_manifest(check(open_splits(DataConfig(path=str(root)))), tmp_path / "tree.manifest.jsonl")
    return root


def data(root: Path, **more) -> DataConfig:
    images = {"image_size": 16, "resize": 16, "crop": "whole"}
    return DataConfig(**{"path": str(root), "verify": "manifest", **images, **more})  # pyright: ignore[reportArgumentType]


def read_epoch(train: Source, config: DataConfig) -> list:
    order, substitutes = SampleOrder(N, BATCH, seed=0), train.substitutes(config)
    return list(train.train_batches(order, config, range(N // BATCH), substitutes=substitutes))


def flip_a_bit(file: Path) -> None:
    """Flip a bit that changes pixels without an error of the decoder."""
    content, before = bytearray(file.read_bytes()), np.asarray(Image.open(file))
    for offset in reversed(range(len(content) - 2)):
        content[offset] ^= 1
        with contextlib.suppress(InputError, OSError):
            sound_image(bytes(content))
            if (np.asarray(Image.open(io.BytesIO(content))) != before).any():
                file.write_bytes(content)
                return
        content[offset] ^= 1
    raise AssertionError("every flipped bit is an error")


@pytest.mark.slow
def test_only_the_manifest_finds_a_flipped_bit(root: Path):
    config = data(root)
    train, val = open_tables(config)
    sound = read_epoch(train, config)
    flip_a_bit(file := Path(train.name(BAD_ROW)))
    first = data(root, verify="first")
    differs = [(a.image != b.image).any() for a, b in zip(sound, read_epoch(open_tables(first)[0], first), strict=True)]
    assert sum(differs) == 1
    # The table that was opened before the change raises the same error.
    for table in (train, open_tables(config)[0]):
        with pytest.raises(InputError) as caught:
            read_epoch(table, config)
        line = str(caught.value)
        assert line.startswith(f"{file}: its SHA-256 is ") and f"… in {root}.manifest.jsonl; put the file back" in line
    flip_a_bit(file := Path(val.name(0)))
    with pytest.raises(InputError, match=f"^{file}: its SHA-256 is "):
        next(val.eval_batches(EvalOrder(4, 4), config))


def test_another_image_of_its_class_may_be_substituted_for_a_changed_image(root: Path, caplog):
    config = data(root, bad_images="substitute")
    name = Path(open_splits(config)["train"].name(BAD_ROW))
    manifest = root.with_name("tree.manifest.jsonl")
    lines = [line for line in manifest.read_text().splitlines(keepends=True) if name.stem not in line]
    manifest.write_text("".join(lines))
    train, _ = open_tables(config)
    substituted = [row for batch in read_epoch(train, config) for row in batch.row[batch.substituted > 0].tolist()]
    assert substituted == [BAD_ROW] and any(str(name) in message for message in caplog.messages)


def test_with_verify_never_images_are_neither_verified_nor_cached_as_sound(root: Path, monkeypatch: pytest.MonkeyPatch):
    verified_sizes: list[int] = []
    monkeypatch.setattr(graph, "sound_image", lambda data, *kept: verified_sizes.append(len(data)) or sound_image(data))
    # `data check` has cached the images as sound.
    shutil.rmtree(root.with_name("cache"))
    config = data(root, verify="never")
    read_epoch(open_tables(config)[0], config)
    assert verified_sizes == []
    config = data(root, verify="first")
    read_epoch(open_tables(config)[0], config)
    assert len(verified_sizes) == N


def test_images_of_the_same_name_in_two_splits_have_digests_of_their_own(tmp_path: Path):
    for folder in (tmp_path / "train", tmp_path / "val"):
        put(folder / "labels.csv", b"path,label\n1.png,x\n")
        Image.new("L", (4, 4), len(folder.name)).save(folder / "1.png")
    write_manifest(check(open_splits(DataConfig(path=str(tmp_path)))), tmp_path / "m")
    tables = open_tables(data(tmp_path, manifest=str(tmp_path / "m")))
    assert [table.digests.fault(0, table.read(0)) for table in tables] == [None, None]


def shorten(manifest: Path) -> None:
    manifest.write_text("".join(manifest.read_text().splitlines(keepends=True)[:-2]))


def rewrite_line(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def rewrite(manifest: Path) -> None:
        head, first, *others = map(json.loads, manifest.read_text().splitlines())
        change(first)
        manifest.write_text("".join(json.dumps(line) + "\n" for line in (head, first, *others)))

    return rewrite


MISSING = r"^data\.verify=manifest: no tree\.manifest\.jsonl in {0}; run `jaxddp data check {0}/tree`, or give "
WRONG = r"^{0}/tree\.manifest\.jsonl, line %d: not a line of a manifest; write "


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (Path.unlink, MISSING),
        (shorten, r"^{0}/tree/.*JPEG: {0}/tree\.manifest\.jsonl does not list it, nor 1 other; run `jaxddp data "),
        (rewrite_line(lambda image: image.pop("path")), WRONG % 2),
        (rewrite_line(lambda image: image.update(sha256="ab")), WRONG % 2),
        (lambda file: file.write_bytes(b"\xff"), WRONG % 1),
    ],
)
def test_an_incomplete_manifest_raises_a_one_line_error_at_the_start(root: Path, change, line: str):
    change(root.with_name("tree.manifest.jsonl"))
    with pytest.raises(InputError, match=line.format(root.parent)):
        open_tables(data(root))


def test_the_manifest_is_found_by_its_key_or_beside_the_data_set(root: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    digests = open_tables(data(root))[0].digests
    new_path = root.with_name("tree.manifest.jsonl").rename(tmp_path / "m")
    with pytest.raises(InputError, match=f"no tree.manifest.jsonl in {tmp_path}/elsewhere or {tmp_path}; run"):
        open_tables(data(root))
    with pytest.raises(InputError, match=f"^{tmp_path}/n: no such file; give data.manifest what `jaxddp data check`"):
        open_tables(data(root, manifest=str(tmp_path / "n")))
    assert (open_tables(data(root, manifest=str(new_path)))[0].digests.sha256 == digests.sha256).all()
    # With another value of `verify`, the path of a manifest is allowed and ignored.
    assert open_tables(data(root, verify="first", manifest=str(new_path)))[0].digests is None


def test_a_run_records_the_path_of_its_manifest(root: Path):
    config = Config().replace(data={"path": "tree", "verify": "manifest"})
    assert with_absolute_paths(config).data.manifest == f"{root}.manifest.jsonl"
    new_path = root.with_name("tree.manifest.jsonl").rename(root.with_name("m"))
    assert with_absolute_paths(config.replace(data={"manifest": "m"})).data.manifest == str(new_path)


def test_a_selection_of_a_table_keeps_its_digests(root: Path, caplog):
    train, unlabelled = labelled_and_unlabelled(*[open_tables(data(root))[0], data(root, unlabelled="train")])
    other = data(root, unlabelled=str(root / IMAGES / "train"), labels_per_class=2)
    few, others = labelled_and_unlabelled(train, other)
    for table in (train, few, train.take(3), train.select("1:2"), unlabelled):
        assert [table.digests.fault(row, table.read(row)) for row in range(len(table))] == [None] * len(table)
    assert others.digests is None
    assert caplog.messages == ["data.verify=manifest: the images of data.unlabelled are compared with no manifest"]


def test_arrays_are_compared_with_the_manifest_when_they_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    file = write_npz(tmp_path / "arrays")
    config = DataConfig(path=str(file), image_size=12, resize=12, crop="whole")
    write_manifest(check(open_splits(config)), tmp_path / "arrays.npz.manifest.jsonl")
    with_manifest = DataConfig(path=str(file), image_size=12, resize=12, crop="whole", verify="manifest")
    assert len(open_tables(with_manifest)[0]) == 10
    arrays = dict(np.load(file))
    arrays["train_images"][4, 0, 0, 0] ^= 1
    np.savez(file, **arrays)
    with pytest.raises(InputError, match=rf"^row 4: {file}.manifest.jsonl lists no image with these pixels \(SHA-256 "):
        open_tables(with_manifest)


def test_from_python_a_table_is_opened_with_its_manifest(root: Path):
    train, _ = jaxddp.open_data(root, manifest=root.with_name("tree.manifest.jsonl"))
    assert train.digests.fault(0, b"other") and train.digests.fault(0, train.read(0)) is None
    with pytest.raises(InputError, match=r"from Python, give the table that open_data\(PATH, manifest=FILE\) opens"):
        jaxddp.prepare_training(linear_model(), train, 1, sgd(0.1), 4, data=data(root))
    with pytest.raises(InputError, match="^/nowhere: no such file; give manifest what"):
        jaxddp.open_data(root, manifest="/nowhere")
