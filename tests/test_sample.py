"""`jaxddp data sample` writes complete data or nothing, and overwrites nothing."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.runs import fails

import jaxddp
from jaxddp.cli import main


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sample") / "new" / "digits"
    assert main(["data", "sample", "digits", "--out", str(out)]) == 0
    return out


def test_the_sample_has_scikit_learns_digits_in_imagenets_layout(digits):
    from sklearn.datasets import load_digits

    expected = load_digits()
    train, val = jaxddp.train_solutions(digits), jaxddp.val_solutions(digits)
    held_out = np.arange(1797) % 6 == 0
    np.testing.assert_array_equal(val.labels, expected.target[held_out])
    assert np.bincount(train.labels).tolist() == np.bincount(expected.target[~held_out]).tolist()
    assert train.class_names[:2] == ("zero", "one")
    image = np.asarray(Image.open(digits / "ILSVRC/Data/CLS-LOC/val/digits_val_00006.JPEG"))
    assert image.shape == (32, 32)
    np.testing.assert_allclose(image.reshape(8, 4, 8, 4).mean((1, 3)), expected.images[6] * 255 / 16, atol=40)


@pytest.mark.slow
def test_existing_files_are_not_changed(digits, tmp_path, capfd):
    before = {path: path.stat().st_mtime_ns for path in digits.rglob("*")}
    assert jaxddp.write_sample("digits", digits) == digits
    assert {path: path.stat().st_mtime_ns for path in digits.rglob("*")} == before
    file, folder, empty = tmp_path / "file", tmp_path / "folder", tmp_path / "empty"
    file.write_text("mine")
    folder.mkdir()
    (folder / "LOC_synset_mapping.txt").write_text("mine")
    for place in (file, folder):
        line = fails(["data", "sample", "digits", "--out", str(place)], capfd)
        assert line == f"jaxddp: {place}: does not hold the sample 'digits'; give a new folder"
    assert [path.name for path in folder.iterdir()] == ["LOC_synset_mapping.txt"]
    empty.mkdir()
    assert (jaxddp.write_sample("digits", str(empty)) / "LOC_val_solution.csv").is_file()
    line = fails(["data", "sample", "digit", "--out", str(empty)], capfd)
    assert line == "jaxddp: name='digit': no such sample; did you mean 'digits'? there are: digits"
    with pytest.raises(jaxddp.InputError, match="^out=5: expected a path$"):
        jaxddp.write_sample("digits", 5)


def test_a_full_disk_leaves_no_file(tmp_path, capfd, monkeypatch):
    write_bytes = Path.write_bytes

    def fail_for_a_csv_file(path, data):
        if path.suffix == ".csv":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", fail_for_a_csv_file)
    out = tmp_path / "digits"
    line = fails(["data", "sample", "digits", "--out", str(out)], capfd)
    assert line == f"jaxddp: {out}: cannot be written (No space left on device); free some space there"
    assert not [*tmp_path.iterdir()]
