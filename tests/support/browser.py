"""Headless Chromium, driven through its DevTools protocol over a pair of pipes.

https://chromedevtools.github.io/devtools-protocol/
"""

import itertools
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update"),
    *("--remote-debugging-pipe", "--force-color-profile=srgb", "--font-render-hinting=none"),
)
_HANGING = 60
"""Seconds to wait for an answer."""


class Browser:
    """A browser with one page at a time, whose console errors and requests it records."""

    def __init__(self, profile: Path):
        self._numbers = itertools.count(1)
        self._read, self._buffer = b"", b""
        to_browser, self._write = os.pipe()
        self._read_end, from_browser = os.pipe()
        # The protocol uses file descriptors 3 and 4.
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        command = ["bash", "-c", shell, "bash", "chromium", *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        self._process = subprocess.Popen(command, pass_fds=(to_browser, from_browser), **streams)
        os.close(to_browser)
        os.close(from_browser)
        self.errors, self.requests = list[str](), list[str]()
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, page: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Load a file in a window of this size, as on a phone if it is narrow. Returns after the scripts have run."""
        self.errors, self.requests = [], []
        phone = width < 600
        screen = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        give_up = time.monotonic() + _HANGING
        while self.run("document.readyState") != "complete" or not self.run(f"location.href == '{page.as_uri()}'"):
            assert time.monotonic() < give_up, f"{page} does not load"
            time.sleep(0.05)
        self.settle()

    def settle(self) -> None:
        """Wait for two frames, after which earlier changes are drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise, as JSON's types."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Events that arrive meanwhile are recorded."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def close(self) -> None:
        """End the browser."""
        os.close(self._write)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._read_end)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read_end], [], [], _HANGING)
            assert ready, f"chromium did not answer for {_HANGING} s"
            part = os.read(self._read_end, 1 << 20)
            assert part, f"chromium ended with exit code {self._process.wait(10)}"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", str(params)))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent" and not params["request"]["url"].startswith("data:"):
            self.requests.append(params["request"]["url"])
