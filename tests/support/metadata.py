"""A stand-in for Google's metadata server on the loopback, and the device files of TPU chips."""

import contextlib
import http.server
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

INSTANCE = "/computeMetadata/v1/instance/"


class MetadataServer(http.server.ThreadingHTTPServer):
    """Answers for the paths of `answers` below `instance/`, and with 404 for others. It records the paths."""

    daemon_threads = True

    def __init__(self, answers: Mapping[str, str]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.asked = dict(answers), list[str]()
        self.status, self.flavor = 200, "Google"
        self.drips = False
        """Whether the server sends an answer byte by byte, each within any time limit of a socket."""
        self.hangs, self.released = False, threading.Event()

    @property
    def environ(self) -> dict[str, str]:
        return {"GCE_METADATA_HOST": f"127.0.0.1:{self.server_port}"}


class _Handler(http.server.BaseHTTPRequestHandler):
    server: MetadataServer

    def do_GET(self) -> None:
        self.server.asked.append(self.path.removeprefix(INSTANCE))
        if self.server.hangs:
            self.server.released.wait(60)
            return
        content = self.server.answers.get(self.path.removeprefix(INSTANCE), "").encode()
        if self.server.drips:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n")
            for _ in range(40):
                self.wfile.write(b"x")
                if self.server.released.wait(0.05):
                    return
        is_allowed = self.headers["Metadata-Flavor"] == "Google" and self.path.startswith(INSTANCE)
        status = 403 if not is_allowed else self.server.status if content else 404
        self.send_response(status)
        self.send_header("Metadata-Flavor", self.server.flavor)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(answers: Mapping[str, str]) -> Iterator[MetadataServer]:
    """Run a metadata server in a thread."""
    with MetadataServer(answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join(10)


def write_chips(root: Path, *files: str, vendor: str = "0x1ae0", pci_class: str = "0x120000") -> Path:
    """Write the device files of chips (`dev/accel0`, `dev/vfio/3`), and the files in `sys` with vendor and class."""
    for file in files:
        group = f"kernel/iommu_groups/{Path(file).name}/devices" if "vfio" in file else "bus/pci/devices"
        device = root / "sys" / group / "0000:00:05.0"
        for path, text in ((root / file, ""), (device / "vendor", f"{vendor}\n"), (device / "class", f"{pci_class}\n")):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return root
