"""A server on the loopback with the answers of the Hugging Face Hub and of torchvision's file server.

The answers follow what huggingface_hub 2.4 sends and expects. Files of more than `LARGE` bytes are LFS files, as on the
hub: a HEAD request redirects to the content, and states its SHA-256.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 2000
TOKEN = "hf_a_token_that_may_write"
_RESOLVE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """The state of the server.

    Attributes:
        url: the address.
        repos: the files of each repository by name.
        files: the files of torchvision's server, below /models.
        requests: the number of requests by "METHOD path".
        statuses: the status codes of the next answers to a path; each is used once.
        delay: seconds before an answer with content.
        damaged: paths whose next content has another last byte.
        private: the repositories that were created as private.
    """

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    requests: Counter = field(default_factory=Counter)
    statuses: dict[str, list[int]] = field(default_factory=dict)
    delay: float = 0.0
    damaged: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    private: list[str] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)


@contextmanager
def serving() -> Iterator[Hub]:
    """Run a server during the block."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OfHub", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None: ...

    def do_HEAD(self) -> None:
        self._read()

    do_GET = do_HEAD

    def do_PUT(self) -> None:
        body = self._body()
        self.hub.blobs[hashlib.sha256(body).hexdigest()] = body
        self._answer(200, {})

    def do_POST(self) -> None:
        body = self._body()
        self.hub.requests[f"POST {self.path}"] += 1
        if not self.path.endswith("validate-yaml") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid token"})
        elif self.path.endswith("validate-yaml"):
            self._answer(200, {"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif "/preupload/" in self.path:
            files = {file["path"]: "lfs" if file["size"] > LARGE else "regular" for file in json.loads(body)["files"]}
            modes = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in files.items()]
            self._answer(200, {"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for one in objects:
                one["actions"] = {"upload": {"href": f"{self.hub.url}/upload/{one['oid']}"}}
            self._answer(200, {"transfer": "basic", "objects": objects})
        else:
            self._commit(body)

    def _create(self, request: dict) -> None:
        repo = f"{request.get('organization') or 'me'}/{request['name']}"
        if repo in self.hub.repos:
            self._answer(409, {"error": "exists", "url": f"{self.hub.url}/{repo}"})
            return
        self.hub.repos[repo] = {}
        if request.get("visibility") == "private":
            self.hub.private.append(repo)
        self._answer(200, {"url": f"{self.hub.url}/{repo}"})

    def _commit(self, body: bytes) -> None:
        repo = "/".join(self.path.split("/")[3:5])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.repos[repo][value["path"]] = self.hub.blobs[value["oid"]]
        url = f"{self.hub.url}/{repo}/commit/{COMMIT}"
        self._answer(200, {"commitUrl": url, "commitOid": COMMIT, "hookOutput": ""})

    def _read(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests[f"{self.command} {path}"] += 1
        if statuses := self.hub.statuses.get(path):
            self._answer(statuses.pop(0), {"error": "planned"})
            return
        found = _RESOLVE.fullmatch(path)
        if path.startswith("/models/"):
            file = self.hub.files.get(path.rpartition("/")[2])
            self._send(404 if file is None else 200, file or b"", {})
        elif path.startswith("/blob/"):
            self._send(200, self.hub.blobs[path.rpartition("/")[2]], {})
        elif found is None or found[1] not in self.hub.repos:
            self._error(401 if found else 404, "RepoNotFound")
        elif found[2] not in ("main", COMMIT):
            self._error(404, "RevisionNotFound")
        elif found[3] not in self.hub.repos[found[1]]:
            self._error(404, "EntryNotFound")
        else:
            self._resolve(self.hub.repos[found[1]][found[3]])

    def _resolve(self, file: bytes) -> None:
        if len(file) <= LARGE:
            etag = hashlib.sha1(b"blob %d\0" % len(file) + file).hexdigest()
            self._send(200, file, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
            return
        digest = hashlib.sha256(file).hexdigest()
        self.hub.blobs[digest] = file
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(file)), "X-Repo-Commit": COMMIT}
        # The hub's contents have another host, so huggingface_hub does not follow the redirect of a HEAD request.
        other_host = self.hub.url.replace("127.0.0.1", "localhost")
        self._send(302, b"", {**linked, "Location": f"{other_host}/blob/{digest}"})

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, "X-Repo-Commit": COMMIT})

    def _answer(self, status: int, value: dict) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        path, content = self.path.partition("?")[0], self.command != "HEAD"
        if content and status == 200:
            time.sleep(self.hub.delay)
            if path in self.hub.damaged:
                self.hub.damaged.remove(path)
                body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if content and path in self.hub.cut:
            self.hub.cut.remove(path)
            self.close_connection = True
            body = body[: len(body) // 2]
        self.end_headers()
        if content:
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))


def use(hub: Hub, cache: Path, monkeypatch) -> None:
    """Let this process use the server, with empty caches below a folder."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    for name, value in environment(hub, cache).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def environment(hub: Hub, cache: Path) -> dict[str, str]:
    """Return environment variables with which another process uses the server."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(cache / "hub"),
        "HF_TOKEN": TOKEN,
        # The server does not speak Xet, the protocol by which the hub moves the content of large files.
        "HF_HUB_DISABLE_XET": "1",
        "JAXDDP_TORCHVISION_URL": f"{hub.url}/models",
        "JAXDDP_CACHE": str(cache),
    }
