"""The share of damaged images that is detected: files with lost or additional data, and headers with another size.

An undetected damaged file is a valid image with as many blocks as the original, and has no bytes after its data.
"""

import functools
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.damage import HEADERS, STRETCHES, Damage, resized, segment_of, size_of
from support.ilsvrc import write_tree
from support.images import EOI, PNGS, chunks, encode, passes, picture, png, ycck

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.curate import check, examine_file
from jaxddp.data.formats.ilsvrc import train_solutions
from jaxddp.data.images import DHT, MAX_LEFT_OVER, PNG_START, sound_image, verify
from jaxddp.data.order import EvalOrder

OPTIONS = {
    "4:2:0": {"subsampling": 2},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0},
    "optimized tables": {"optimize": True},
    "restarts": {"restart_marker_rows": 1},
    "restarts within rows": {"restart_marker_blocks": 7},
    "progressive": {"progressive": True},
    "gray": {},
}


@functools.cache
def encoded_pictures(kind: str, count: int) -> tuple[bytes, ...]:
    """Return undamaged JPEGs of various pictures."""
    mode, seeds = "L" if kind == "gray" else "RGB", range(count)
    images = [picture(170 + 5 * i % 60, 210, mode, seed=i, noise=(3, 12, 25, 60)[i % 4]) for i in seeds]
    return tuple(encode(images[i], quality=(60, 75, 90, 95)[i // 4 % 4], **OPTIONS[kind]) for i in seeds)


def count_accepted(damage: Damage, files: list[bytes], times: int = 1) -> tuple[int, int]:
    """Damage the files. Return how many files changed, and how many of these are accepted."""
    rng, tried, accepted = random.Random(0), 0, 0
    for data in times * files:
        if (damaged := damage(data, rng)) != data:
            tried += 1
            accepted += passes(damaged)
    return tried, accepted


@pytest.mark.parametrize("kind", HEADERS)
def test_a_header_that_contradicts_the_data_is_found(kind: str):
    files = [data for name in ("4:2:0", "4:4:4", "optimized tables") for data in encoded_pictures(name, 12)]
    tried, accepted = count_accepted(HEADERS[kind], files)
    assert tried >= 24
    assert accepted <= (
        0.1 * tried if kind in ("another sampling", "a Huffman symbol", "swapped Huffman tables") else 0
    )


@pytest.mark.parametrize("kind", STRETCHES)
def test_lost_or_additional_data_is_found(kind: str):
    """In photographs more is detected (`benchmarks/input/verify.py`). Here a few bytes are more often whole blocks."""
    tried, accepted = count_accepted(STRETCHES[kind], [data for name in OPTIONS for data in encoded_pictures(name, 12)])
    share = {"256 bytes deleted": 0.08, "64 bytes zeroed": 0.05}.get(kind, 0.03)
    assert tried >= 64 and accepted <= share * tried


@pytest.mark.parametrize("name", OPTIONS)
def test_a_few_leftover_bytes_are_noted_and_more_are_rejected(name: str):
    for data in encoded_pictures(name, 3):
        for count in (1, 4, MAX_LEFT_OVER):
            changed = data[:-2] + bytes(count) + EOI
            assert verify(changed).left_over == count
            assert f"bytes left over: {count} behind the last pixel" in examine_file(changed, "n.jpg").notes
        for count in (MAX_LEFT_OVER + 1, 600, 20_000):
            changed = data[:-2] + random.Random(count).randbytes(count).replace(b"\xff", b"\xfe") + EOI
            with pytest.raises(InputError, match="bytes are left over after its last pixel, so data were lost or"):
                verify(changed)


def test_a_restart_marker_at_the_end_is_left_over_and_zeros_that_an_encoder_wrote_are_not():
    data, flat = encode(picture(37, 45)), np.full((400, 400), 128, np.uint8)
    assert verify(data[:-2] + b"\xff\xd0" + EOI).left_over == 2
    assert bytes(16) in encode(flat, optimize=True) and verify(encode(flat, optimize=True)).left_over == 0
    with pytest.raises(InputError, match="^damaged: its header says 45x0 pixels; download it again"):
        verify(resized(data, 0, 45))


@pytest.mark.slow
def test_damage_to_subsampled_cmyk_is_found():
    """No strict decoder reads these files; see `_count_by_altering`."""
    files = [encode(picture(120, 150, "CMYK", seed), subsampling=2) for seed in range(8)]
    assert [verify(data).left_over for data in files] == 8 * [0]
    for kind in ("512 random bytes", "1 KiB repeated", "1 KiB deleted"):
        tried, accepted = count_accepted(STRETCHES[kind], files, times=3)
        assert tried >= 20 and accepted <= 1
    for data in files:
        height, width = size_of(data)
        assert not passes(resized(data, height - 16, width)) and not passes(resized(data, height + 16, width))
    assert count_accepted(STRETCHES["64 bytes zeroed"], [ycck()], times=20) == (20, 0)


@pytest.mark.parametrize("kind", PNGS)
def test_a_png_with_lost_or_additional_data_is_rejected(kind: str):
    data, rng = PNGS[kind](), random.Random(1)
    offsets = range(len(PNG_START), len(data) - 12)
    changed = [data[:offset] + data[offset + 3 :] for offset in offsets]
    changed += [data[:offset] + b"\r" + data[offset:] for offset in offsets]
    changed += [data.replace(*ends) for ends in ((b"\r\n", b"\n"), (b"\n", b"\r\n"), (b"\r", b"\n"))]
    changed += [data[:offset] + rng.randbytes(4) + data[offset + 4 :] for offset in offsets[:-3]]
    # A PNG without one of these line ends is unchanged by its replacement.
    assert [file for file in changed if file != data and passes(file)] == []


def test_a_damaged_png_with_recomputed_checksums_is_rejected():
    parts = dict(chunks(PNGS["color"]()))
    rows = zlib.decompress(parts[b"IDAT"])

    def with_rows(content: bytes) -> bytes:
        return png([(b"IHDR", parts[b"IHDR"]), (b"IDAT", zlib.compress(content)), (b"IEND", b"")])

    assert passes(with_rows(rows)) and not passes(with_rows(rows[:-1]))
    assert not passes(with_rows(b"\5" + rows[1:]))
    header = (b"IHDR", parts[b"IHDR"])
    assert not passes(png([header, (b"IEND", b"")]))
    halves = parts[b"IDAT"][:50], parts[b"IDAT"][50:]
    assert passes(png([header, *((b"IDAT", half) for half in halves), (b"IEND", b"")]))
    assert not passes(png([header, (b"IDAT", halves[0]), (b"IEND", b"")]))


def test_a_png_without_its_palette_is_rejected():
    data = png([part for part in chunks(PNGS["palette"]()) if part[0] != b"PLTE"])
    with pytest.raises(InputError, match="^damaged: no palette, though its pixels are indices of one; download it"):
        verify(data)
    assert examine_file(data, "n.png").fault is not None


# Stray bytes, which libjpeg reports without a file name, are removed before decoding. No pixel changes.
WHOLE = encode(picture(48, 40), quality=90)
PROGRESSIVE = encode(picture(48, 40), quality=90, progressive=True)
TABLE = segment_of(WHOLE, DHT).start
STRAY_AT_THE_END = WHOLE[:-2] + bytes(7) + WHOLE[-2:]
STRAY_BETWEEN_SEGMENTS = WHOLE[:TABLE] + b"what" + WHOLE[TABLE:]
BAD = 2


@pytest.mark.parametrize("whole", [WHOLE, PROGRESSIVE])
@pytest.mark.parametrize("count", [1, 7])
def test_bytes_after_the_last_block_are_removed(whole: bytes, count: int):
    assert sound_image(whole[:-2] + bytes(count) + whole[-2:])[1] == whole
    assert sound_image(STRAY_BETWEEN_SEGMENTS)[1] == WHOLE


@pytest.mark.parametrize("data", [WHOLE, PROGRESSIVE, WHOLE[:-2] + b"\xff" + WHOLE[-2:], WHOLE + b"behind"])
def test_a_file_sound_image_is_unchanged(data: bytes):
    assert sound_image(data)[1] is data


@pytest.mark.slow
@pytest.mark.parametrize("data", [STRAY_AT_THE_END, STRAY_BETWEEN_SEGMENTS])
def test_stray_bytes_print_nothing_in_any_epoch(tmp_path: Path, capfd, data: bytes):
    table = train_solutions(write_tree(tmp_path / "tree", classes=2, images=2, val=2, size=20))
    Path(table.name(BAD)).write_bytes(WHOLE)
    table.verified.check_files()
    batches = [next(table.eval_batches(EvalOrder(4, 4), DataConfig(image_size=40, resize=40)))]
    Path(table.name(BAD)).write_bytes(data)
    table.verified.check_files()
    batches += [next(table.eval_batches(EvalOrder(4, 4), DataConfig(image_size=40, resize=40))) for _ in range(2)]
    for batch in batches[1:]:
        np.testing.assert_array_equal(batch.image, batches[0].image)
    assert "Corrupt JPEG data" not in capfd.readouterr().err
    check({"train": table})
    # The file is verified again at the next reading.
    assert table.verified.sound.tolist() == [row != BAD for row in range(4)]
