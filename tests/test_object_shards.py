"""Shards below a URL: tar files and Parquet files in a real S3 server on the loopback equal those of the disk."""

import os
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
from support.forms import CLASSES, FORMS, pictures
from support.s3 import CREDENTIALS, Server, running_server

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.files import CACHE_VARIABLE
from jaxddp.data.opening import open_images, open_splits, open_tables
from jaxddp.data.order import SampleOrder, Shard
from jaxddp.data.storage import tables
from jaxddp.data.storage.objects import Objects
from jaxddp.data.storage.root import folder_of

if not os.environ.get("CI"):
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")

pytestmark = pytest.mark.timeout(120)
URL = "s3://bucket/sets"
SHARDS = ("WebDataset", "Parquet")


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, Path]:
    """Data sets on the disk: a folder for each of `SHARDS`."""
    folder = tmp_path_factory.mktemp("sets")
    return {name: FORMS[name].write(folder / name, pictures()) for name in SHARDS}


@pytest.fixture(scope="module")
def server(sets) -> Iterator[Server]:
    with running_server() as server:
        for name, folder in sets.items():
            server.upload(folder, f"{URL}/{name}")
        yield server


@pytest.fixture
def store(server, monkeypatch, tmp_path) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    address = f"http://127.0.0.1:{server.port}"
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": address, CACHE_VARIABLE: str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)


def config_of(name: str, path: Any, **more) -> DataConfig:
    return FORMS[name].data(path, **more)


def batches(table, data: DataConfig, index: int = 0, count: int = 1) -> list:
    order = SampleOrder(len(table), 4, seed=2)
    return [batch[:5] for batch in table.train_batches(order, data, range(5), Shard(index, count))]


def assert_equal(actual: list, expected: list) -> None:
    for batch, other in zip(actual, expected, strict=True):
        for leaf, other_leaf in zip(batch, other, strict=True):
            np.testing.assert_array_equal(leaf, other_leaf)


@pytest.mark.parametrize("name", SHARDS)
def test_shards_of_s3_equal_those_of_the_disk(store, sets, name: str, tmp_path: Path):
    data, remote_data = config_of(name, sets[name]), config_of(name, f"{URL}/{name}")
    local, remote = open_tables(data), open_tables(remote_data)
    for ours, theirs in zip(local, remote, strict=True):
        assert theirs.fingerprint == ours.fingerprint and theirs.class_names == CLASSES
        assert [theirs.read(row) for row in range(len(theirs))] == [ours.read(row) for row in range(len(ours))]
        assert theirs.name(1) == ours.name(1).replace(str(sets[name]), f"{URL}/{name}")
    expected = batches(local[0], data)
    assert_equal(batches(remote[0], remote_data), expected)
    halves = [batches(remote[0], remote_data, index, 2) for index in range(2)]
    joined = [[*map(np.concatenate, zip(*pair, strict=True))] for pair in zip(*halves, strict=True)]
    assert_equal(joined, expected)


@pytest.mark.parametrize("name", SHARDS)
def test_images_of_shards_are_kept_in_the_local_cache(store, server, sets, name: str, tmp_path: Path):
    server.upload(sets[name], f"{URL}/cached-{name}")
    data = config_of(name, f"{URL}/cached-{name}", local_cache=str(tmp_path / "kept"))
    train, _ = open_splits(data).values()
    images = [train.read(row) for row in range(len(train))]
    assert sum(file.is_file() for file in (tmp_path / "kept").rglob("*")) == len(train)
    for file in sets[name].rglob("*.*"):
        server.put(f"{URL}/cached-{name}/{file.relative_to(sets[name]).as_posix()}", b"gone")
    assert [train.read(row) for row in range(len(train))] == images
    with pytest.raises(InputError, match=r"^data\.local_cache='.*': .* is on this machine and read in place"):
        open_splits(config_of(name, tmp_path, local_cache=str(tmp_path / "kept")))
    # Unlabelled images, or those of another command, may be on this machine.
    assert open_images(str(sets[name]), data).read(0) in images
    server.upload(FORMS[name].write(tmp_path / "other", pictures(size=13)), f"{URL}/cached-{name}")
    assert open_images(str(data.path), data).read(0) not in images, "The shard has changed."


def test_one_image_is_one_request_for_its_bytes(store, sets, monkeypatch: pytest.MonkeyPatch):
    train, _ = open_splits(config_of("WebDataset", f"{URL}/WebDataset")).values()
    requests, read = [], Objects.read_range
    # The public API does not show the requests.
    monkeypatch.setattr(Objects, "read_range", lambda *arguments: requests.append(arguments[1:]) or read(*arguments))
    image = train.read(7)
    assert requests == [(train.record(7).path, train.record(7).offset, 512 + len(image))]


def test_shards_of_a_web_server_are_named_by_a_pattern(sets, own_cache: None, monkeypatch: pytest.MonkeyPatch):
    together = Barrier(2)

    class Ranged(SimpleHTTPRequestHandler):
        """Answers requests for ranges of bytes, which the class of the standard library ignores."""

        def log_message(self, format, *args) -> None: ...

        def send_error(self, code: int, *reasons: str) -> None:
            # S3 answers 403 for a missing object, if its reader may not list the objects.
            super().send_error(403 if code == 404 and not self.path.endswith(".tar") else code, *reasons)

        def do_HEAD(self) -> None:
            if "train-000000.tar" in self.path or "train-000001.tar" in self.path:
                together.wait(60)
            super().do_HEAD()

        def do_GET(self) -> None:
            content = Path(self.translate_path(self.path))
            if not content.is_file() or "Range" not in self.headers:
                return super().do_GET()
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            part, size = content.read_bytes()[first : last + 1], content.stat().st_size
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{size}")
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Last-Modified", self.date_time_string(content.stat().st_mtime))
            self.end_headers()
            self.wfile.write(part)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranged, directory=sets["WebDataset"].parent)) as web:
        thread = Thread(target=web.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            url = f"http://127.0.0.1:{web.server_port}"
            files = {"train": "train-{000000..000001}.tar", "val": "val-{000000..000001}.tar"}
            of_web = open_splits(config_of("WebDataset", f"{url}/WebDataset", **files))
            of_disk = open_splits(config_of("WebDataset", sets["WebDataset"]))
            assert [one.fingerprint for one in of_web.values()] == [one.fingerprint for one in of_disk.values()]
            assert of_web["train"].read(3) == of_disk["train"].read(3)
            for train, message in (
                (None, f"^{url}/WebDataset: no shards of its train split; name them by data.train$"),
                ("train-{000000..000002}.tar", r"train-000002\.tar: no such file"),
                ("train-*.tar", r"^data\.train: .* cannot list its files; write a range"),
            ):
                with pytest.raises(InputError, match=message):
                    open_splits(config_of("WebDataset", f"{url}/WebDataset", **{**files, "train": train}))
            file = "data/train-00000-of-00001.parquet"
            for part in range(2):
                shutil.copyfile(sets["Parquet"] / file, sets["WebDataset"].parent / f"part-{part}.parquet")
            read, parts = tables.label_cells, "part-{0..1}.parquet"
            local = open_splits(config_of("Parquet", sets["WebDataset"].parent / parts, val_share=0.3))
            monkeypatch.setattr(tables, "label_cells", lambda *given: (together.wait(60), read(*given))[1])
            parquet = open_splits(config_of("Parquet", f"{url}/{parts}", val_share=0.3))
            assert [one.fingerprint for one in parquet.values()] == [one.fingerprint for one in local.values()]
            with pytest.raises(InputError, match="its rows name images; below a URL, write the images into its rows"):
                open_splits(config_of("Parquet", f"{url}/Parquet/{file}", val_share=0.3, columns=("image=label",)))
            monkeypatch.setattr(Ranged, "do_GET", SimpleHTTPRequestHandler.do_GET)
            with pytest.raises(InputError, match=r"^http\S+\.tar: '.* not supported .*, answers ranges of bytes$"):
                open_splits(config_of("WebDataset", f"{url}/WebDataset/val-000001.tar", val_share=0.3))
        finally:
            web.shutdown()
            thread.join(10)


def test_a_folder_is_listed_once(store, server, monkeypatch: pytest.MonkeyPatch):
    server.put(f"{URL}/WebDataset/._train-000000.tar", b"macOS writes such files beside others")
    folder = folder_of(f"{URL}/WebDataset")
    shards = [f"{split}-{number:06d}.tar" for split in ("train", "val") for number in range(2)]
    assert folder.files() == ["classes.txt", *shards]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert len(folder.files()) == 5 and folder.state("classes.txt")[0] == len("ant\nbee\ncat\n")
