"""Data sets in object stores: a real S3 server on the loopback, behind a proxy that fails on purpose.

The tests do not use Amazon's, Google's or any other real service.
"""

import contextlib
import dataclasses
import http.client
import logging
import os
import pickle
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.errors import error_line
from support.ilsvrc import IMAGES, write_tree
from support.s3 import CREDENTIALS, Server, running_server
from support.streams import assert_same

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, JaxddpError, Unreachable
from jaxddp.data.formats import ilsvrc
from jaxddp.data.formats.ilsvrc import train_solutions, val_solutions
from jaxddp.data.order import SampleOrder
from jaxddp.data.storage.objects import Objects, RetryPolicy, classify_error
from jaxddp.data.storage.store import CachedStore
from jaxddp.data.table import ExampleTable

if not os.environ.get("CI"):
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")

pytestmark = pytest.mark.timeout(120)
ROOT = "s3://bucket/imagenet"
DATA = DataConfig(image_size=16, resize=20)
# The deadline is long, because the machine may be busy. The limited number of tries still ends a test soon.
FEW_TRIES = RetryPolicy(deadline=20, read_timeout=10, tries=3)


@pytest.fixture(scope="session")
def server(tree) -> Iterator[Server]:
    with running_server() as server:
        server.upload(tree, ROOT)
        yield server


class Proxy(ThreadingHTTPServer):
    """A proxy that forwards requests to the S3 server, except requests for which `fault` returns a failure."""

    daemon_threads = True

    def __init__(self, target: int):
        super().__init__(("127.0.0.1", 0), Forward)
        self.target = target
        self.stopping = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.reset()

    def reset(self) -> None:
        self.requests: list[str] = []
        self.fault: Callable[[int], str | None] = lambda number: None

    def fail_first(self, count: int, fault: str) -> None:
        """Let the next `count` requests fail with `fault`."""
        self.reset()
        self.fault = lambda number: fault if number <= count else None

    def handle_error(self, request, client_address) -> None:
        """Ignore clients that closed their connection."""


class Forward(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, format, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        fault = self.server.fault(len(self.server.requests))
        if fault == "silence":
            self.server.stopping.wait()
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif fault and fault.isdecimal():
            return self.answer(int(fault), {}, b"")
        if fault in ("silence", "reset"):
            self.close_connection = True
            return self.connection.close()
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=20)
        with contextlib.closing(upstream):
            upstream.request("GET", self.path, headers={k: v for k, v in self.headers.items() if k != "host"})
            reply = upstream.getresponse()
            body = reply.read()
            headers = {k: v for k, v in reply.getheaders() if k.lower() in ("content-type", "etag", "last-modified")}
        self.answer(reply.status, headers, body, fault)

    do_PUT = do_GET

    def answer(self, status: int, headers: dict[str, str], body: bytes, fault: str | None = None) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if fault == "cut":
            self.close_connection = True
            body = body[: len(body) // 2]
        elif fault == "drip":
            while body and not self.server.stopping.wait(0.1):
                self.wfile.write(body[:1])
                body = body[1:]
        self.wfile.write(body)


@pytest.fixture(scope="session")
def running_proxy(server) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield proxy
        proxy.stopping.set()
        proxy.shutdown()
        thread.join(10)


@pytest.fixture
def proxy(running_proxy, monkeypatch) -> Iterator[Proxy]:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in (CREDENTIALS | {"AWS_ENDPOINT_URL": running_proxy.url}).items():
        monkeypatch.setenv(name, value)
    running_proxy.reset()
    yield running_proxy
    running_proxy.reset()


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    return write_tree(tmp_path_factory.mktemp("ilsvrc"), classes=3, images=4, val=5, test=2)


@pytest.fixture
def store(proxy) -> Objects:
    return Objects.open_url(ROOT, FEW_TRIES)


def error_of(kind: type[JaxddpError], call, *args, **kwargs) -> str:
    return error_line(call, *args, kind=kind, longest=500, **kwargs)


def batches(table: ExampleTable) -> list:
    return list(table.train_batches(SampleOrder(len(table), 4, seed=3), DATA, range(4)))


@pytest.mark.parametrize("reader", [train_solutions, val_solutions, ilsvrc.test_listing])
def test_a_table_from_s3_equals_that_of_the_disk(proxy, tree, reader):
    local, remote = reader(tree), reader(ROOT)
    assert remote.fingerprint == local.fingerprint and remote.class_names == local.class_names
    for column in ("id", "path", "labels"):
        np.testing.assert_array_equal(getattr(remote, column), getattr(local, column))
    assert remote.name(1) == f"{ROOT}/{os.fsdecode(local.path[1])}"
    remote.check(DATA)
    assert [remote.read(row) for row in range(len(remote))] == [local.read(row) for row in range(len(local))]


def test_unusual_file_names_are_requested_correctly(proxy, server):
    names = ["é b.JPEG", "a#b.JPEG", "a%20b.JPEG", "a+b&c.JPEG", "a'(b).JPEG"]
    for name in names:
        server.put(f"s3://bucket/odd/of all/{name}", name.encode())
    store = Objects.open_url("s3://bucket/odd", FEW_TRIES)
    paths = np.array([f"of all/{name}".encode() for name in names])
    assert store.faults(paths) == []
    assert [store.read(path) for path in paths.tolist()] == [name.encode() for name in names]


def test_messages_name_the_url_and_the_line(proxy, server, tree):
    root = "s3://bucket/wrong"
    train = (tree / "LOC_train_solution.csv").read_bytes()
    assert error_of(InputError, train_solutions, root).endswith("Kaggle's archive, Parquet or .tar files)")
    server.put(f"{root}/LOC_train_solutions.csv", train)
    server.put(f"{root}/LOC_synset_mapping.txt", (tree / "LOC_synset_mapping.txt").read_bytes())
    text = error_of(InputError, train_solutions, root)
    assert text == f"{root}/LOC_train_solution.csv: no such file, did you mean 'LOC_train_solutions.csv'?"
    server.put(f"{root}/LOC_train_solution.csv", train[: train.index(b"\n") + 1] + b"\xff\n")
    assert "wrong/LOC_train_solution.csv:2: not UTF-8; save the" in error_of(InputError, train_solutions, root)


def test_a_local_solution_file_may_list_images_in_a_store(proxy, tree, tmp_path):
    rows = (tree / "LOC_train_solution.csv").read_text().splitlines(keepends=True)
    (tmp_path / "some.csv").write_text("".join(rows[:5]))
    table = train_solutions(ROOT, tmp_path / "some.csv")
    assert len(table) == 4 and table.read(3) == train_solutions(tree).read(3)
    assert "cannot" not in error_of(InputError, train_solutions, ROOT, tmp_path / "none.csv")
    assert "../some.csv' is not a path in a store" in error_of(InputError, train_solutions, ROOT, "../some.csv")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    ["503", "429", "reset", "cut", *(pytest.param(fault, marks=pytest.mark.ci) for fault in ("500", "silence"))],
)
def test_temporary_failures_are_retried(proxy, tree, fault):
    store = Objects.open_url(ROOT, dataclasses.replace(FEW_TRIES, read_timeout=1 if fault == "silence" else 10))
    table = train_solutions(tree)
    path = bytes(table.path[0])
    proxy.fail_first(2, fault)
    assert store.read(path) == table.read(0) and len(proxy.requests) == 3
    proxy.fail_first(1, fault)
    assert {path: size for path, (size, _) in store.states(f"{IMAGES}/val").items()} == {
        f"{IMAGES}/val/{file.name}": file.stat().st_size for file in (tree / IMAGES / "val").iterdir()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "limits", "reason"),
    [
        ("reset", {}, "3 tries, the last: Connection reset by peer;"),
        ("cut", {}, "3 tries); start again, or check AWS_ACCESS_KEY_ID"),
        ("silence", {"read_timeout": 0.5, "deadline": 0.4}, "1 try, the last: no data arrived;"),
        ("503", {"deadline": 0.01}, "1 try, the last: 503 Service Unavailable;"),
        ("drip", {"deadline": 1}, "1 try); start again, or check AWS"),
    ],
)
def test_permanent_failures_raise_a_one_line_error(proxy, tree, fault, limits, reason):
    store = Objects.open_url(ROOT, dataclasses.replace(FEW_TRIES, **limits))
    path = bytes(train_solutions(tree).path[0])
    proxy.fault = lambda number: fault
    text = error_of(Unreachable, store.read, path)
    answered = {"cut": "the answer was cut short (after ", "drip": "only "}.get(fault)
    assert text.startswith(f"{store.name(path)}: {answered or 'no answer in '}") and reason in text
    assert answered or text.endswith("; check that the store and the network are up, and start again")
    assert len(proxy.requests) == int(reason[0])
    # The deadline ends a slow answer after a second; obstore would wait longer.
    assert fault != "drip" or "bytes arrived in time" in text


def test_a_body_of_another_length_than_announced_is_never_returned(proxy, store, monkeypatch):
    """obstore already checks the length; this test covers a release that does not."""

    class Answer:
        def __init__(self, body: bytes):
            self.body, self.meta = body, {"size": 6}

        def stream(self, min_chunk_size: int) -> Iterator[bytes]:
            yield from (self.body[:3], self.body[3:])

    bodies = [b"some", b"too much", b"enough"]
    monkeypatch.setitem(store.__dict__, "_client", SimpleNamespace(get=lambda key: Answer(bodies.pop(0))))
    assert store.read(b"x") == b"enough" and not bodies
    bodies += [b"some"] * 9
    message = error_of(Unreachable, store.read, b"x")
    assert re.search(r": 4 bytes arrived in place of 6 \(after \d+ s and 3 tries\); start again", message)
    # A server that sends a body in chunks does so each time.
    unannounced = "Generic HTTP error: Content-Length Header missing from response"
    assert classify_error(Exception(unannounced))[0] is InputError
    assert "SSL_CERT_FILE" in classify_error(Exception("HTTP error\n\nDebug source:\nInvalidCertificate(Expired)"))[1]


def test_an_error_names_missing_objects_and_buckets(proxy, store):
    assert error_of(InputError, store.read, b"no.JPEG") == f"{ROOT}/no.JPEG: missing image; upload it or leave it out"
    assert sum(path.endswith("/no.JPEG") for path in proxy.requests) == 1
    store = Objects.open_url("s3://buckets/imagenet", FEW_TRIES)
    assert "s3://buckets/imagenet/a: no such bucket; check AWS_ACCESS_KEY_ID" in error_of(InputError, store.read, b"a")
    assert "s3://buckets/imagenet/: " in error_of(InputError, store.faults, np.array([b"a"]))


def test_wrong_credentials_and_plain_http_are_reported(proxy, store, server, monkeypatch):
    server.request("POST", "/moto-api/reset-auth", b"0")
    try:
        for call in (lambda: store.read(b"a"), lambda: store.faults(np.array([b"a"])), lambda: train_solutions(ROOT)):
            text = error_of(InputError, call)
            assert text.startswith(ROOT)
            assert ": 403 Forbidden (InvalidAccessKeyId); check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, " in text
    finally:
        server.request("POST", "/moto-api/reset-auth", b"1000000000")
    store.read(b"LOC_synset_mapping.txt")
    proxy.fail_first(1, "301")
    assert "/a: the bucket is in another region; check AWS_ACCESS_KEY_ID, " in error_of(InputError, store.read, b"a")
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    text = error_of(InputError, Objects.open_url(ROOT, FEW_TRIES).read, b"a")
    assert f"{ROOT}/a: plain http is not allowed unless AWS_ALLOW_HTTP=true is set;" in text
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    text = error_of(Unreachable, Objects.open_url(ROOT, RetryPolicy(tries=1)).read, b"a")
    assert "no credentials are set, and the machine has none: Connection refused; check AWS_ACCESS_KEY_ID" in text


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hdfs://name/x", "hdfs://name/x: no such kind of store, there are: gs, http, https, s3; or give a directory"),
        ("s3://", "s3://: not the address of a store; write s3://NAME/PREFIX only"),
        ("s3a://me:password@bucket/x", "s3a://: not the address of a store"),
        ("s3://bucket/a/../../b", "'bucket/a/../../b' is not a path in a store; write names with single slashes"),
    ],
)
def test_invalid_urls_are_rejected_and_no_path_leaves_the_prefix(proxy, url, expected):
    text = error_of(InputError, train_solutions, url)
    assert expected in text and "password" not in text
    # A stream of an earlier test may still read ahead.
    assert [request for request in proxy.requests if not request.startswith("/bucket/imagenet/")] == []
    store = Objects.open_url(f"{ROOT}/ILSVRC", FEW_TRIES)
    for path in (b"a/../../secret", b"/secret", b"a//secret"):
        assert "is not a path in a store" in error_of(InputError, store.read, path)
    assert not any("secret" in request for request in proxy.requests)


def test_without_obstore_the_error_says_what_to_install(proxy, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert error_of(InputError, train_solutions, ROOT).endswith("obstore is not installed; pip install 'jaxddp[cloud]'")


def test_a_store_is_pickled_without_its_credentials(proxy, store):
    pickled = pickle.dumps(store)
    assert b"do-not-tell" not in pickled and len(pickled) < 500
    assert pickle.loads(pickled) == store and pickle.loads(pickled).read(b"LOC_synset_mapping.txt")


@pytest.mark.slow
def test_with_a_cache_the_second_epoch_sends_no_requests(proxy, tree, tmp_path):
    """Three batches are an epoch, and the fourth batch belongs to the second epoch."""
    disk_batches = batches(train_solutions(tree))
    assert_same(batches(train_solutions(ROOT, cache=tmp_path)), disk_batches)
    # Batches of both epochs are fetched at the same time, so an image in both may be requested twice.
    assert len(set(proxy.requests)) == 2 + 12
    table = train_solutions(ROOT, cache=tmp_path)
    proxy.reset()
    assert_same(batches(table), disk_batches)
    assert proxy.requests == []


def test_solution_files_are_not_cached(proxy, server, tree, tmp_path):
    root = "s3://bucket/changing"
    server.upload(tree, root)
    assert len(train_solutions(root, cache=tmp_path)) == 12
    rows = (tree / "LOC_train_solution.csv").read_bytes().splitlines(keepends=True)
    server.put(f"{root}/LOC_train_solution.csv", b"".join(rows[:4]))
    assert len(train_solutions(root, cache=tmp_path)) == 3


def files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("damage", ["flipped", "of another image"])
def test_a_damaged_file_in_the_cache_is_fetched_again(proxy, store, tree, tmp_path, damage):
    local = train_solutions(tree)
    paths = [bytes(path) for path in local.path[:2]]
    cached = CachedStore(store, tmp_path)
    cached.read(paths[0])
    (file,) = files_in(tmp_path)
    content = file.read_bytes()
    cached.read(paths[1])
    (other,) = (path for path in files_in(tmp_path) if path != file)
    flipped = content[:100] + bytes([content[100] ^ 1]) + content[101:]
    file.write_bytes(flipped if damage == "flipped" else other.read_bytes())
    # A killed process leaves such an unfinished file.
    (file.parent / ".0123").write_bytes(content[:100])
    proxy.reset()
    for row, path in enumerate(paths):
        assert cached.read(path) == local.read(row)
    assert len(proxy.requests) == 1 and file.read_bytes() == content


def test_without_a_writable_cache_reading_continues(proxy, store, tree, tmp_path, caplog):
    for number in range(256):
        (tmp_path / f"{number:02x}").write_text("in the way of a folder")
    local, cached = train_solutions(tree), CachedStore(store, tmp_path)
    with caplog.at_level(logging.WARNING, "jaxddp.data"), ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            images = [*pool.map(lambda path: cached.read(bytes(path)), local.path)]
            assert images == [local.read(row) for row in range(12)]
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(f"{tmp_path}: cannot be written (") and "free some space or name another folder" in text
