"""moto's S3 server on the loopback, in a process of its own."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "do-not-tell",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


class Server:
    """moto's S3 server in a new process."""

    def __init__(self, port: int):
        self.port = port

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        headers = {
            # moto recognizes a request for S3 by its signature.
            "Authorization": "AWS4-HMAC-SHA256 Credential=somebody/20200101/us-east-1/s3/aws4_request",
            "Content-Type": "application/octet-stream",
        }
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers, method=method)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.read()

    def put(self, url: str, body: bytes) -> None:
        self.request("PUT", "/" + urllib.request.quote(url.removeprefix("s3://")), body)

    def upload(self, folder: Path, url: str) -> None:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.put(f"{url}/{file.relative_to(folder).as_posix()}", file.read_bytes())


@contextlib.contextmanager
def running_server() -> Iterator[Server]:
    """Run a server with an empty bucket `bucket`."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    # A page of a listing has at most three names, so the list of each folder has several pages.
    environment = os.environ | {"MOTO_S3_DEFAULT_MAX_KEYS": "3"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        server = Server(port)
        for _ in range(150):
            with contextlib.suppress(OSError):
                server.request("PUT", "/bucket")
                break
            assert process.poll() is None, "the S3 server ended"
            time.sleep(0.2)
        yield server
    finally:
        process.kill()
        process.wait(20)
