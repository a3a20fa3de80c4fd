"""Images from files: pixels depend on (seed, epoch, row), no example is lost, and a bad file gives a one-line error."""

import io
import math
import os
import random
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import optax
import pytest
from PIL import Image
from support.cases import essential_and_rare
from support.images import encode, png
from support.networks import linear_model
from support.processes import environment
from support.streams import DATA, NUM_EXAMPLES, SEED, SIZE, assert_same, waves, write_table

import jaxddp
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, JaxddpError
from jaxddp.data.batch import Batch
from jaxddp.data.images import sound_image
from jaxddp.data.order import WHOLE, EvalOrder, SampleOrder, Shard
from jaxddp.data.source import Labels, Substitutes
from jaxddp.data.storage.store import CachedStore
from jaxddp.data.stream import decode, workers
from jaxddp.data.stream.decode import (
    ASPECT,
    Area,
    Pixels,
    decode_image,
    example_keys,
    quick_header,
    random_area_window,
    resize,
)
from jaxddp.data.stream.pipeline import BATCHES_AHEAD
from jaxddp.data.table import ExampleTable

IN_WORKERS = replace(DATA, workers=2)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ExampleTable:
    contents = [encode(waves(row, 50 + 3 * row, 90 - 2 * row), quality=90) for row in range(NUM_EXAMPLES)]
    return write_table(tmp_path_factory.mktemp("images"), contents)


def train_batches(table: ExampleTable, batch_size: int = 6, steps: range = range(4), seed: int = SEED) -> list[Batch]:
    return list(table.train_batches(SampleOrder(len(table), batch_size, seed), DATA, steps))


@pytest.fixture(scope="module")
def epochs(table: ExampleTable) -> list[Batch]:
    """Return the first 24 examples of two epochs of 11, and one more batch."""
    return train_batches(table, steps=range(5))


def pixels_by_epoch_and_row(batches: list[Batch]) -> dict[tuple[int, int], bytes]:
    return {
        (int(epoch), int(row)): image.tobytes()
        for batch in batches
        for image, row, epoch in zip(batch.image, batch.row, batch.epoch, strict=True)
    }


@pytest.mark.slow
def test_slots_have_the_images_of_their_slices_and_padding(table: ExampleTable, epochs: list[Batch]):
    order, sizes = SampleOrder(NUM_EXAMPLES, 6, SEED), (1, 3, 2)
    for shard in (Shard(sizes=sizes), *(Shard(index, 3, sizes) for index in range(3))):
        for batch, whole in zip(table.train_batches(order, DATA, range(4), shard), epochs, strict=False):
            devices = np.split(np.arange(6), np.cumsum(sizes)[:-1])[shard.index :: shard.count]
            real = batch.mask > 0
            assert [slot.sum() for slot in real.reshape(-1, 3)] == [len(rows) for rows in devices]
            np.testing.assert_array_equal(batch.image[real], whole.image[np.concatenate(devices)])
            assert len(batch.image) == len(real) and not batch.image[~real].any()


def test_columns_and_pixels_belong_together(table: ExampleTable, epochs: list[Batch]):
    order = SampleOrder(NUM_EXAMPLES, 6, SEED)
    for step, batch in enumerate(epochs[:4]):
        assert [leaf.dtype for leaf in batch[:5]] == [np.uint8, np.int32, np.float32, np.int32, np.int32]
        np.testing.assert_array_equal(batch.row, order.rows(step))
        np.testing.assert_array_equal(batch.label, order.rows(step) % 3)
        keys = example_keys(SEED, batch.epoch, batch.row)
        for image, row, key in zip(batch.image, batch.row, keys, strict=True):
            np.testing.assert_array_equal(image, Pixels(SIZE, area=DATA.crop_area)(table.read(row), key))
    # Starting at a step equals skipping to it.
    assert_same(train_batches(table, steps=range(2, 5)), epochs[2:])
    assert train_batches(table, steps=range(3, 3)) == []


def test_interpolation_and_crop_mode_of_the_config_reach_the_pixels(table: ExampleTable):
    data = DataConfig(image_size=SIZE, resize=SIZE + 4, crop="whole", interpolation="bicubic", eval_crop="squash")
    trained = next(iter(table.train_batches(SampleOrder(NUM_EXAMPLES, 6, SEED), data, range(1))))
    evaluated = next(iter(table.eval_batches(EvalOrder(NUM_EXAMPLES, 6), data)))
    squashed = Pixels(SIZE, interpolation="bicubic", resize=SIZE + 4, squash=True)
    for batch, pixels in ((trained, Pixels(SIZE, interpolation="bicubic")), (evaluated, squashed)):
        for row, image in [*zip(batch.row, batch.image, strict=True)][:2]:
            np.testing.assert_array_equal(image, pixels(table.read(row)))


@pytest.mark.slow
def test_pixels_depend_on_seed_epoch_and_row_alone(
    table: ExampleTable, epochs: list[Batch], monkeypatch: pytest.MonkeyPatch
):
    first = pixels_by_epoch_and_row(epochs[:4])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    for data in (DATA, IN_WORKERS):
        batches = table.train_batches(SampleOrder(NUM_EXAMPLES, 4, SEED), data, range(6))
        assert len(first) == 24 and first == pixels_by_epoch_and_row([*batches])
    other_seed = pixels_by_epoch_and_row(train_batches(table, seed=8))
    # The rows of the third epoch, which is incomplete, depend on the seed.
    assert all(other_seed[epoch, row] != first[epoch, row] for epoch, row in first if epoch < 2)
    assert all(first[0, row] != first[1, row] for row in range(NUM_EXAMPLES))


def test_keys_are_all_different():
    rows = np.array([0, 1, 2**16, 2**31 - 1, 0, 1, 2**31 - 1], np.int32)
    epochs = np.array([0, 0, 0, 0, 1, 1, 2**31 - 1], np.int32)
    keys = np.concatenate([example_keys(seed, epochs, rows) for seed in (0, 1, 2**63 - 1)])
    assert keys.dtype == np.uint64
    assert len({tuple(key) for key in keys}) == 21


def test_images_are_fetched_a_few_batches_ahead(table: ExampleTable, monkeypatch: pytest.MonkeyPatch):
    steps, rows = [], EvalOrder.rows
    monkeypatch.setattr(EvalOrder, "rows", lambda order, step: steps.append(step) or rows(order, step))
    large = table.rows(np.arange(2000) % NUM_EXAMPLES)
    large.eval_batches(EvalOrder(2000, 64), DATA).close()
    assert not any(thread.join(9) or thread.is_alive() for thread in threading.enumerate() if "images" in thread.name)
    batches = large.eval_batches(EvalOrder(2000, 64), DATA)
    assert max(steps) == BATCHES_AHEAD - 1
    for step in range(3):
        next(batches)
        assert max(steps) == step + BATCHES_AHEAD


def test_steps_before_the_start_are_not_read(tmp_path: Path):
    table = write_table(tmp_path, [encode(waves(row)) for row in range(12)])
    order = SampleOrder(12, 3, seed=0)
    for row in np.concatenate([order.rows(0), order.rows(1), order.rows(3)]):
        Path(table.name(row)).unlink()
    (batch,) = table.train_batches(order, DATA, range(2, 3))
    np.testing.assert_array_equal(batch.row, order.rows(2))


def windows(size: tuple[int, int], area: Area, num: int = 3000) -> np.ndarray:
    return np.array([random_area_window(*size, key, area) for key in example_keys(11, np.arange(num), np.arange(num))])


def reference_window(size: tuple[int, int], share: Area, rng: random.Random) -> tuple[int, int, int, int]:
    height, width = size
    for _ in range(10):
        area = rng.uniform(*share) * height * width
        aspect = math.exp(rng.uniform(*map(math.log, ASPECT)))
        h, w = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < h <= height and 0 < w <= width:
            return rng.randint(0, height - h), rng.randint(0, width - w), h, w
    h, w = min(height, round(width / ASPECT[0])), min(width, round(height * ASPECT[1]))
    return (height - h) // 2, (width - w) // 2, h, w


# The sizes are wide, so long that most draws do not fit, or so small that rounding matters.
@pytest.mark.slow
@pytest.mark.parametrize("size", essential_and_rare(((100, 1000), (7, 5)), (375, 500)))
def test_crops_are_distributed_as_defined(size: tuple[int, int]):
    drawn = windows(size, DATA.crop_area)
    rng = random.Random(0)
    reference = np.array([reference_window(size, DATA.crop_area, rng) for _ in range(10_000)])
    top, left, height, width = drawn.T
    assert (drawn >= [0, 0, 1, 1]).all()
    assert (top + height <= size[0]).all() and (left + width <= size[1]).all()
    measures = [
        np.stack([each[:, 2] * each[:, 3], each[:, 3] / each[:, 2], *each.T[:2]]) for each in (drawn, reference)
    ]
    for ours, theirs in zip(*(np.sort(each) for each in measures), strict=True):
        places = np.concatenate([ours, theirs])
        shares = [np.searchsorted(each, places, "right") / len(each) for each in (ours, theirs)]
        distance = shares[0] - shares[1]
        # The Kolmogorov-Smirnov bound, which equal distributions meet 9,999 times in 10,000.
        assert np.abs(distance).max() < 2.23 * math.sqrt(1 / len(ours) + 1 / len(theirs))


def test_crop_bounds_are_kept(monkeypatch: pytest.MonkeyPatch):
    central = windows((100, 1000), (1.0, 1.0), 5)
    assert {tuple(window) for window in central} == {(0, (1000 - 133) // 2, 100, 133)}
    monkeypatch.setattr("jaxddp.data.stream.decode.ASPECT", (1.0, 1.0))
    drawn = windows((400, 300), (0.5, 0.5), 50)
    assert set(drawn[:, 2]) == set(drawn[:, 3]) == {round(math.sqrt(0.5 * 400 * 300))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "options"),
    [("JPEG", {"subsampling": each, "progressive": each == 0}) for each in range(3)] + [("PNG", {})],
)
def test_decoding_a_window_equals_decoding_and_slicing(form: str, options: dict):
    data = encode(waves(1, 75, 101), form, **options)
    whole, rng = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), np.random.default_rng(0)
    # The decoder may smooth colors differently at the borders of blocks.
    corners = [(16, 32, 32, 32), (0, 0, 75, 101), (74, 100, 1, 1), (0, 16, 75, 16), (5, 0, 16, 96)]
    for _ in range(30):
        height, width = int(rng.integers(1, 76)), int(rng.integers(1, 102))
        corners.append((int(rng.integers(0, 76 - height)), int(rng.integers(0, 102 - width)), height, width))
    for top, left, height, width in corners:
        part = decode_image(data, quick_header(data), (top, left, height, width))
        np.testing.assert_array_equal(part, whole[top : top + height, left : left + width])


# Stray bytes end simplejpeg's decoding before the first pixel if they precede the frame.
@pytest.mark.parametrize(("mode", "stray"), [("CMYK", b""), ("RGB", b"stray bytes")])
def test_a_window_of_a_jpeg_that_pillow_decodes_is_cut_at_its_full_size(mode: str, stray: bytes):
    data = encode(Image.fromarray(waves(1, 75, 101)).convert(mode))
    data, whole = data[:20] + stray + data[20:], np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(decode_image(data, quick_header(data), (30, 20, 40, 70), 8), whole[30:70, 20:90])


def test_colors_at_a_quarter_of_the_rows_which_simplejpeg_does_not_know_are_decoded():
    data = cv2.imencode(".jpg", waves(1, 64, 64), [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, 0x411111])[1].tobytes()
    data = data.replace(b"\x01\x41\x00", b"\x01\x14\x00")  # From a quarter of the columns; as many blocks.
    whole = np.asarray(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(decode_image(data, quick_header(data)), whole)


@pytest.mark.parametrize("options", [{"subsampling": 0}, {"subsampling": 2}, {"keep_rgb": True}, {"mode": "CMYK"}])
def test_verification_keeps_the_pixels_of_later_epochs(options: dict):
    kept_crops, pixels = 0, Pixels(SIZE, area=(0.5, 1.0))
    for row, key in enumerate(example_keys(SEED, np.zeros(40, np.int32), np.arange(40))):
        image = Image.fromarray(waves(row, 32 + row % 2 * 16, 44)).convert(options.get("mode", "RGB"))
        data = encode(image, **({"subsampling": row % 3} if "mode" in options else options))
        kept = pixels.keeping(data, key)
        assert replace(pixels, resize=SIZE).keeping(data, key) is None
        header, _ = sound_image(data, kept)
        np.testing.assert_array_equal(pixels(data, key, header, kept), pixels(data, key))
        kept_crops += kept is not None and kept.pixels is not None
    assert (kept_crops > 10) == ("mode" not in options)


@pytest.mark.parametrize("size", [(75, 101), (300, 20), (39, 33), (38, 33), (24, 24), (20, 13), (1, 1)])
def test_resize_is_bilinear_up_to_a_ratio_and_by_area_beyond(size: tuple[int, int]):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3)).astype(np.uint8)
    by_area = max(size) > 1.6 * SIZE
    down, across = (area_weights(n, SIZE) if by_area and n > SIZE else sample_weights(n, SIZE) for n in size)
    expected = np.einsum("yh,xw,hwc->yxc", down, across, image.astype(float))
    difference = np.abs(resize(image, SIZE) - np.round(expected))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.01


def area_weights(length: int, size: int) -> np.ndarray:
    """Return the weight of each input pixel in each output pixel of one axis by definition, float64[size, length]."""
    places, step = np.arange(length), length / size
    starts = np.arange(size)[:, None] * step
    return np.clip(np.minimum(places + 1, starts + step) - np.maximum(places, starts), 0, None) / step


def sample_weights(length: int, size: int) -> np.ndarray:
    """Return the weights of bilinear sampling at the centers of the output's pixels, float64[size, length]."""
    centers = np.clip((np.arange(size)[:, None] + 0.5) * length / size - 0.5, 0, length - 1)
    return np.clip(1 - np.abs(centers - np.arange(length)), 0, None)


@pytest.mark.parametrize("scale", [2, 8])
def test_large_windows_are_decoded_at_a_fraction(scale: int):
    height, width = 300, 420
    smooth = np.asarray(Image.fromarray(waves(0, 30, 42)).resize((width, height), Image.Resampling.BICUBIC))
    data, size = encode(smooth, quality=95), 32
    rng = np.random.default_rng(scale)
    for _ in range(10):
        tall, wide = (int(rng.integers(scale * size, min(2 * scale * size, most) + 1)) for most in (height, width))
        window = int(rng.integers(0, height - tall + 1)), int(rng.integers(0, width - wide + 1)), tall, wide
        quick, exact = (decode_image(data, quick_header(data), window, least) for least in (size, None))
        assert quick.shape[0] < exact.shape[0]
        quick, exact = resize(quick, size).astype(float), resize(exact, size).astype(float)
        # A shift by one pixel would change the image at least twice as much.
        assert np.abs(quick - exact).mean() < 0.5 * np.abs(np.roll(exact, 1, axis=1) - exact)[:, 1:].mean() + 1


def png_header(width: int, height: int) -> bytes:
    return png([(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IEND", b"")])


CUT = "cut short: no end-of-image marker at the end"
BAD: dict[str, tuple[Callable[[], bytes | None], str]] = {
    "missing": (lambda: None, "missing image; download it or leave it out"),
    "empty": (lambda: b"", "empty file; download it again or leave it out"),
    "cut": (lambda: encode(waves(5))[:-200], f"{CUT}; download it again or leave it out"),
    "cut, then zeros": (lambda: encode(waves(5))[:-200] + bytes(200), CUT),
    "nothing but markers": (lambda: b"\xff\xd8\xff\xd9", "cut short: no image data at the end"),
    "png cut": (lambda: encode(waves(5), "PNG")[:-12], "cut short: no IEND chunk at the end"),
    "png bomb": (lambda: png_header(60_000, 50_000), "60000x50000 pixels, more than the limit of 100,000,000"),
    "text": (lambda: b"<html>404</html>", "not a JPEG, PNG, WebP, TIFF, BMP, PPM, GIF, AVIF or HEIC but a file"),
    "png without pixels": (lambda: png_header(60, 50), "damaged"),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["train", "eval", "train in workers"])
def test_a_one_line_error_names_each_bad_image(tmp_path: Path, phase: str):
    contents = [make() for make, _ in BAD.values()]
    table = write_table(tmp_path, [content or b"" for content in contents] + [encode(waves(row)) for row in range(3)])
    Path(table.name([*BAD].index("missing"))).unlink()
    size = len(table)
    omissions = Substitutes(Labels(np.zeros(size, np.int32), (), ()))
    if phase == "eval":
        list(table.eval_batches(EvalOrder(size, size), DATA, WHOLE, omissions))
    else:
        data = DATA if phase == "train" else IN_WORKERS
        list(table.train_batches(SampleOrder(size, size, SEED), data, range(1), WHOLE, omissions))
    assert sorted(omissions.faults) == [*range(len(BAD))]
    for row, (_, message) in enumerate(BAD.values()):
        fault = omissions.faults[row]
        assert fault.startswith(f"{table.name(row)}: {message}") and "\n" not in fault


# The verification and the decoder find one of these faults each.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cut", "png without pixels"])
def test_a_bad_image_ends_the_stream_after_the_batches_before_it(tmp_path: Path, kind: str):
    make, message = BAD[kind]
    table = write_table(tmp_path, [*(encode(waves(row)) for row in range(5)), make() or b""])
    order = next(order for seed in range(99) if 5 in (order := SampleOrder(6, 2, seed)).rows(2))
    batches = table.train_batches(order, DATA, range(3))
    assert len({row for _ in range(2) for row in next(batches).row.tolist()} - {5}) == 4
    with pytest.raises(InputError, match=f"^{tmp_path}/image 5 é.JPEG: {message}"):
        next(batches)


def test_an_exception_of_a_thread_is_raised_after_the_batches_before(table: ExampleTable, monkeypatch):
    failure, order, read = RuntimeError("a mistake"), SampleOrder(NUM_EXAMPLES, 6, SEED), ExampleTable.read
    calls: list[int] = []

    def failing(source: ExampleTable, row: int) -> bytes:
        calls.append(row)
        if len(calls) == 14:
            raise failure
        return read(source, row)

    monkeypatch.setattr(ExampleTable, "read", failing)
    batches = table.train_batches(order, DATA, range(4))
    assert [len(next(batches).row) for _ in range(2)] == [6, 6]
    with pytest.raises(RuntimeError) as caught:
        next(batches)
    assert caught.value is failure


@pytest.mark.slow
@pytest.mark.parametrize("lacking", ("nothing", "memfd_create"))
def test_images_that_workers_load_are_warned_about_once(lacking, tmp_path: Path, caplog, monkeypatch):
    monkeypatch.delattr(os, lacking, raising=False)
    monkeypatch.setattr(workers, "_idle", [])
    monkeypatch.setattr(decode, "_warned", threading.Lock())
    (tmp_path / "numbers.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    wide = [cv2.imencode(".png", np.full((9, 9, 3), 257 * row, np.uint16))[1].tobytes() for row in range(4)]
    (batch,) = write_table(tmp_path, wide).eval_batches(EvalOrder(4, 4), IN_WORKERS)
    assert batch.image[:, 0, 0, 0].tolist() == [0, 1, 2, 3] and caplog.text.count("some images have 16 bits") == 1


@pytest.mark.slow
def test_a_worker_that_ends_or_cannot_be_used_is_one_line(table: ExampleTable, tmp_path: Path):
    batches = table.train_batches(SampleOrder(NUM_EXAMPLES, 6, SEED), IN_WORKERS, range(10**9))
    next(batches)
    subprocess.run(["pkill", "-KILL", "-P", str(os.getpid()), "-f", "stream.workers"], check=True)
    with pytest.raises(JaxddpError, match="^data.workers: process \\d+ ended with SIGKILL; if the memory"):
        deque(batches, 0)
    next(table.train_batches(SampleOrder(NUM_EXAMPLES, 6, SEED), IN_WORKERS, range(1)))
    with pytest.raises(InputError, match="data.workers=2: needs images in files, TFRecord or .tar files"):
        replace(table, store=CachedStore(table.store, tmp_path)).check(IN_WORKERS)


def test_an_order_or_a_crop_that_does_not_fit_is_refused(table: ExampleTable):
    with pytest.raises(InputError, match="batch size 6 does not divide into 4 equal parts; use 4 or 8"):
        table.train_batches(SampleOrder(NUM_EXAMPLES, 6, 0), DATA, range(1), Shard(0, 4))
    with pytest.raises(InputError, match="an order of 12 examples, but the data set has 11"):
        table.eval_batches(EvalOrder(12, 6), DATA)
    with pytest.raises(InputError, match="data.resize=23: validation crops data.image_size=24 pixels"):
        table.eval_batches(EvalOrder(NUM_EXAMPLES, 6), DataConfig(image_size=24, resize=23))
    with pytest.raises(InputError, match=r"data.crop_area=\(0.0, 1.0\): give the smallest share"):
        _ = DataConfig(crop_area=(0, 1)).area


PROGRAM = """
import dataclasses, sys, time
from pathlib import Path
from support.images import encode
from jaxddp.data.order import SampleOrder
from jaxddp.data.table import ExampleTable
from support.streams import *

class Slow(ExampleTable):
    def read(self, row):
        time.sleep(0.1)
        return super().read(row)

workers = int(sys.argv[2])
small = write_table(Path(sys.argv[1]), [encode(waves(row, 16, 16)) for row in range(8)])
slow = Slow(**{field.name: getattr(small, field.name) for field in dataclasses.fields(small)})
source = small if workers else slow
batches = source.train_batches(SampleOrder(8, 4, 0), dataclasses.replace(DATA, workers=workers), range(10**9))
next(batches)
print(["tensorflow" in sys.modules])
"""


@pytest.mark.ci
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_program_with_an_unfinished_stream_ends_without_tensorflow_and_messages(tmp_path: Path, workers: str):
    # The output ends when the last worker has ended.
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), workers]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, "[False]\n", "")


def test_tf_data_gives_the_batches_of_training(table: ExampleTable):
    setup = jaxddp.prepare_training(linear_model(3), table, 2, optax.sgd(0.1), 3, epochs=3, data=DATA)
    expected = [*setup.feed.read(range(1, 4))]
    for _ in range(2):
        for batch, other in zip(jaxddp.tf_dataset(setup, 1, 4).as_numpy_iterator(), expected, strict=True):
            assert batch.keys() == {name for name, column in other._asdict().items() if column is not None}
            for name, column in batch.items():
                np.testing.assert_array_equal(column, getattr(other, name))
