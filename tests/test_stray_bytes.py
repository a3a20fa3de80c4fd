"""Stray bytes of a JPEG, which libjpeg reports without a file name, are removed before decoding. No pixel changes."""

from pathlib import Path

import numpy as np
import pytest
from support.ilsvrc import write_tree
from support.images import encode, picture

from jaxddp.config import DataConfig
from jaxddp.curate.check import check
from jaxddp.data.formats.ilsvrc import train_solutions
from jaxddp.data.images.header import DHT, jpeg_segments
from jaxddp.data.images.verify import verify, without_stray_bytes
from jaxddp.data.order import EvalOrder

WHOLE = encode(picture(48, 40), quality=90)
PROGRESSIVE = encode(picture(48, 40), quality=90, progressive=True)
TABLE = next(segment.start for segment in jpeg_segments(WHOLE) if segment.marker == DHT)
STRAY_AT_THE_END = WHOLE[:-2] + bytes(7) + WHOLE[-2:]
STRAY_BETWEEN_SEGMENTS = WHOLE[:TABLE] + b"what" + WHOLE[TABLE:]
BAD = 2


@pytest.mark.parametrize("whole", [WHOLE, PROGRESSIVE])
@pytest.mark.parametrize("count", [1, 7])
def test_bytes_after_the_last_block_are_removed(whole: bytes, count: int):
    assert without_stray_bytes(whole[:-2] + bytes(count) + whole[-2:], count) == whole


def test_bytes_between_segments_are_removed():
    assert without_stray_bytes(STRAY_BETWEEN_SEGMENTS, verify(STRAY_BETWEEN_SEGMENTS).left_over) == WHOLE


@pytest.mark.parametrize("data", [WHOLE, PROGRESSIVE, WHOLE[:-2] + b"\xff" + WHOLE[-2:], WHOLE + b"behind", b"\x89PNG"])
def test_a_file_without_stray_bytes_is_unchanged(data: bytes):
    assert without_stray_bytes(data, 0) is data


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
