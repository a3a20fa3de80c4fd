"""A hub of data sets on the loopback, with the few endpoints of the Hugging Face Hub that a download of files needs."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """A server of the files in a folder, as the data set `owner/pets`."""

    daemon_threads = True
    name = "owner/pets"

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.downloads: list[str] = []
        """The files whose content was sent."""

    @property
    def files(self) -> dict[str, bytes]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(self.files).encode()).hexdigest()

    def handle_error(self, request, client_address) -> None:
        """Ignore clients that closed their connection."""


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format, *args) -> None: ...

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        repository, api = f"/datasets/{hub.name}", f"/api/datasets/{hub.name}"
        if path.startswith(f"{repository}/resolve/"):
            self._send_file(path.removeprefix(f"{repository}/resolve/").partition("/")[2])
        elif path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in hub.files]
            self._send(json.dumps({"id": hub.name, "sha": hub.commit, "siblings": siblings, "tags": []}).encode())
        elif path.startswith(f"{api}/tree/"):
            self._send_tree(path.removeprefix(f"{api}/tree/").partition("/")[2], "recursive=true" in self.path.lower())
        elif path.startswith(f"{api}/paths-info/"):
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else []
            self._send(json.dumps([entry for entry in self._entries() if entry["path"] in wanted]).encode())
        else:
            self._send(b"", 404, {"X-Error-Code": "RepoNotFound"})

    do_POST = do_HEAD = do_GET

    def _entries(self) -> list[dict[str, object]]:
        files = self.server.files.items()
        return [{"type": "file", "path": name, "size": len(data), "oid": _digest(data)} for name, data in files]

    def _send_tree(self, folder: str, recursive: bool) -> None:
        prefix = f"{folder}/" if folder else ""
        below = [entry for entry in self._entries() if str(entry["path"]).startswith(prefix)]
        parts = {name: str(name).removeprefix(prefix).partition("/") for name in (entry["path"] for entry in below)}
        folders = sorted({prefix + first for first, slash, _ in parts.values() if slash})
        if not recursive:
            below = [entry for entry in below if not parts[entry["path"]][1]]
        made = [{"type": "directory", "path": name, "size": 0, "oid": _digest(name.encode())} for name in folders]
        self._send(json.dumps([*made, *below]).encode())

    def _send_file(self, name: str) -> None:
        content = self.server.files.get(name)
        if content is None:
            return self._send(b"", 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.server.commit})
        if self.command == "GET":
            self.server.downloads.append(name)
        self._send(content, 200, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": self.server.commit})

    def _send(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def running_hub(folder: Path) -> Iterator[Hub]:
    """Serve the files in a folder."""
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join(10)
