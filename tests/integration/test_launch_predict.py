"""`jaxddp launch -- predict`: several processes write the file that one writes, errors and all."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from started import HANGING, Launched

COUNT = 150


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Two of them cannot be used: the second process meets one in the first batch, the first in the second."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for row in range(COUNT):
        pixels = rng.integers(0, 256, (20, 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{row:03d}.png")
    for row in (100, 130):
        (folder / f"{row:03d}.png").write_bytes(b"not a picture")
    return folder


def predicted(run: Path, pictures: Path, folder: Path, processes: int, start) -> bytes:
    words = ["predict", str(run), str(pictures), "--out", str(folder / "out.csv")]
    start(Launched, folder, processes, words).ends_well()
    assert not (folder / "out.csv.partial").exists()
    return (folder / "out.csv").read_bytes()


def test_two_processes_write_the_bytes_that_one_writes(reference_of_files, pictures, start, tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    one = predicted(reference_of_files, pictures, folders[0], 1, start)
    two = predicted(reference_of_files, pictures, folders[1], 2, start)
    assert one == two
    rows = one.decode().splitlines()
    assert len(rows) == 1 + COUNT
    assert [row[:7] for row in rows if not row.endswith(",")] == ["id,clas", "100.png", "130.png"]


def test_processes_that_are_asked_differently_say_so(reference_of_files, pictures, start, tmp_path):
    code = (
        "import os, sys; from jaxddp.cli import main; "
        "sys.exit(main([*sys.argv[1:], '--top', os.environ['JAX_PROCESS_ID'] + '1']))"
    )
    words = ["predict", str(reference_of_files), str(pictures), "--out", str(tmp_path / "out.csv")]
    job = start(Launched, tmp_path, 2, ["python", "-c", code, *words])
    assert job.end(HANGING) == 2
    for rank in range(2):
        assert "--top differs: process" in job.last_of(rank)
