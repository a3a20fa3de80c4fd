"""`jaxddp data sample` and `jaxddp data get` write complete files or none, and overwrite nothing."""

import errno
import gzip
import hashlib
import importlib.util
import os
import tarfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image
from support.forms import write_cifar, write_idx
from support.hub import serving
from support.runs import fails

import jaxddp
from jaxddp.cli import main
from jaxddp.data import published
from jaxddp.data.storage import web
from jaxddp.data.storage.objects import RetryPolicy


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_no_file(tmp_path, capfd, monkeypatch, number):
    full = OSError(number, os.strerror(number))
    monkeypatch.setattr(Path, "write_bytes", mock.Mock(side_effect=[1] * 99 + [full]))
    out = tmp_path / "digits"
    line = fails(["data", "sample", "digits", "--out", str(out)], capfd)
    assert line == f"jaxddp: {out}: cannot be written ({full.strerror}); free some space there"
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A server with small files in place of the published ones; the list has their sizes and digests."""
    contents = {f"{file.name}.gz": gzip.compress(file.read_bytes()) for file in write_idx(tmp_path / "idx").iterdir()}
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", "w:gz") as tar:
        tar.add(write_cifar(tmp_path / "cifar"), "cifar-10-batches-bin")
    contents["cifar-10-binary.tar.gz"] = (tmp_path / "cifar-10-binary.tar.gz").read_bytes()
    sets = published.published_sets()
    monkeypatch.setattr(web, "RETRY_POLICY", RetryPolicy(deadline=30, tries=2))
    with serving() as hub:
        hub.files |= contents

        def small(file: published.PublishedFile) -> published.PublishedFile:
            content, url = contents.get(file.name, b""), f"{hub.url}/models/{file.name}"
            return file._replace(url=url, size=len(content), sha256=hashlib.sha256(content).hexdigest())

        monkeypatch.setattr(published, "published_sets", lambda: {name: [*map(small, sets[name])] for name in sets})
        yield hub


@pytest.mark.parametrize(
    ("name", "fetched", "first"), [("mnist", 4, "0"), ("fashion_mnist", 4, "T-shirt/top"), ("cifar10", 1, "ant")]
)
def test_a_published_set_is_fetched_once_and_opens(served, tmp_path, name, fetched, first, capsys):
    for _ in range(2):
        assert main(["data", "get", name, "--out", str(tmp_path / "got")]) == 0
        assert capsys.readouterr().out == f"data.path: {tmp_path / 'got'}\n"
    assert served.requests.total() == fetched
    train, val = jaxddp.open_data(tmp_path / "got")
    assert len(train) and len(val) and train.class_names[0] == first


def test_only_a_verified_file_gets_its_name(served, tmp_path, capfd):
    out, archive = tmp_path / "got", served.files["cifar-10-binary.tar.gz"]
    command, path = ["data", "get", "cifar10", "--out", str(out)], "/models/cifar-10-binary.tar.gz"
    served.damaged.extend([path] * 2)
    line = fails(command, capfd, code=1)
    assert "is not the published file: its SHA-256 begins with" in line
    assert line.endswith(f" elsewhere, and save it in {out}") and line.count("elsewhere") == 1
    assert [*out.iterdir()] == []
    # A file from a browser is used, and nothing is fetched.
    (out / "cifar-10-binary.tar.gz").write_bytes(archive)
    assert main(command) == 0 and served.requests.total() == 2
    assert [file.name for file in out.iterdir()] == ["cifar-10-batches-bin"]
    line = fails(["data", "get", "mnist", "--out", str(out)], capfd)
    assert line == f"jaxddp: {out}: holds 'cifar-10-batches-bin', which is no file of mnist; give a new folder"
    line = fails(["data", "get", "cifar", "--out", str(out)], capfd)
    assert line.startswith("jaxddp: 'cifar': no such published data set; did you mean 'cifar10'? there are: cifar10, ")


def test_the_list_states_the_facts_of_tensorflow_datasets():
    facts = Path(importlib.util.find_spec("tensorflow_datasets").origin).parent / "url_checksums"
    for name, files in published.published_sets().items():
        lines = [line.split("\t")[:3] for line in (facts / f"{name}.txt").read_text().splitlines()]
        assert [[file.url, str(file.size), file.sha256] for file in files] == lines
