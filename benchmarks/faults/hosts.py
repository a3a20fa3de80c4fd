"""Network namespaces as hosts, a small disk and a web server for `benchmarks/chaos.py`. Needs Linux and root."""

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 30


class Cable:
    """Two network namespaces as hosts, with an address each, joined by a virtual cable that can be pulled.

    Each host has its own /etc/hosts. Without this file gloo would announce the loopback address. Raises RuntimeError
    if `ip` fails.
    """

    def __init__(self) -> None:
        number = os.getpid()
        self.hosts = [f"chaos-{number}-{letter}" for letter in "ab"]
        self.addresses = [f"10.78.{number % 250}.{last}" for last in (1, 2)]

    def __enter__(self) -> "Cable":
        try:
            self._add_hosts()
            self._connect()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add_hosts(self) -> None:
        for host, address in zip(self.hosts, self.addresses, strict=True):
            ip("netns", "add", host)
            folder = Path("/etc/netns") / host
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")

    def _connect(self) -> None:
        a, b = self.hosts
        ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for host, address in zip(self.hosts, self.addresses, strict=True):
            ip("-n", host, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "link", "set", "cable", "up")

    def pull(self, host: int) -> None:
        ip("-n", self.hosts[host], "link", "set", "cable", "down")

    def plug(self, host: int) -> None:
        ip("-n", self.hosts[host], "link", "set", "cable", "up")

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, timeout=TIMEOUT_SECONDS)
            shutil.rmtree(Path("/etc/netns") / host, ignore_errors=True)


def ip(*words: str) -> None:
    run(["ip", *words])


def run(command: list[str]) -> None:
    """Run a command. Raises RuntimeError with its output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def small_disk(place: Path, megabytes: int) -> Iterator[Path]:
    """Mount a separate file system of this size at `place`."""
    place.mkdir(parents=True)
    run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(place)])
    try:
        yield place
    finally:
        run(["umount", "--lazy", str(place)])


def fill(place: Path) -> Path:
    """Fill a disk, and return the file that takes the space."""
    file = place / "filler"
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as opened:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while opened.write(b"x" * size):
                    pass
    return file


class Store:
    """A web server for a folder. It can be stopped, started again at the same port, and made unresponsive."""

    def __init__(self, folder: Path):
        self.responding = threading.Event()
        self.responding.set()
        self._handler = functools.partial(_Handler, directory=str(folder), responding=self.responding)
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        give_up = time.monotonic() + TIMEOUT_SECONDS
        while self._server is None:
            try:
                self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler)
            except OSError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.1)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Stop accepting connections. An open connection ends after its current response."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, *arguments: Any, responding: threading.Event, **more: Any):
        self._responding = responding
        super().__init__(*arguments, **more)

    def do_GET(self) -> None:
        # The wait is bounded, because the thread must end.
        self._responding.wait(2 * TIMEOUT_SECONDS)
        with contextlib.suppress(ConnectionError):
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass
