"""`jaxddp launch -- predict`: several processes write the same file as one, with the same errors."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.processes import Launched

from jaxddp.data.opening import open_inputs
from jaxddp.inference.output_files import write_features, write_predictions
from jaxddp.inference.trained import restore_run
from jaxddp.mesh import Topology

COUNT = 150


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """Pictures of which two are bad: one is in the second process's first batch, one in the first process's second."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for row in range(COUNT):
        pixels = rng.integers(0, 256, (20, 24, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{row:03d}.png")
    for row in (100, 130):
        (folder / f"{row:03d}.png").write_bytes(b"not a picture")
    return folder


# tests/test_features.py and tests/test_heat_maps.py test one process.
@pytest.mark.ci
def test_two_processes_write_the_features_and_the_heat_maps_that_one_writes(reference, pictures, start, tmp_path):
    one, two, maps = tmp_path / "one.npz", tmp_path / "two.npz", [tmp_path / "one", tmp_path / "two"]
    start(Launched, tmp_path, 2, ["features", str(reference), str(pictures), "--out", str(two)]).ends_well()
    run = restore_run(reference, "best", Topology.create(1))
    write_features(run, open_inputs([pictures]), one, "npz")
    assert two.read_bytes() == one.read_bytes()
    assert np.flatnonzero(np.load(two)["errors"] != "").tolist() == [100, 130]
    words = ["predict", str(reference), str(pictures), "--out", str(tmp_path / "two.csv"), "--explain", str(maps[1])]
    start(Launched, tmp_path / "second", 2, words).ends_well()
    write_predictions(run, open_inputs([pictures]), tmp_path / "one.csv", "csv", explain=maps[0])
    assert (tmp_path / "two.csv").read_bytes() == (tmp_path / "one.csv").read_bytes()
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in maps]
    assert len(files[0]) == COUNT - 2 and files[0] == files[1]
