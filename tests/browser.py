"""A browser for tests: headless Chromium, controlled by a pipe, with real pointer events. Standard library only."""

import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One browser tab."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer, self._count = write, read, b"", 0
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = None
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    _session: str | None = None

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that arrive meanwhile are kept in `events`."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, file: Path, width: int, height: int = 1000) -> None:
        """Open a page in a window of some size, and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        # A late font changes the height of lines, and moves everything below.
        self.call("Runtime.evaluate", expression="document.fonts.ready.then(() => 0)", awaitPromise=True)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def point(self, kind: str, x: float, y: float, pressed: bool = False) -> None:
        """Move, press or release the mouse."""
        button = "left" if pressed or kind != "mouseMoved" else "none"
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=int(pressed), clickCount=1)

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Scroll an element into view; return its left, top, width and height."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{where}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        found = self.evaluate(
            f"(({{left, top, width, height}}) => [left, top, width, height])({where}.getBoundingClientRect())"
        )
        return found[0], found[1], found[2], found[3]

    def problems(self) -> list[str]:
        """Return errors that the page has reported."""
        self.evaluate("1")
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(str(event["params"]["entry"]))
        return found

    def screenshot(self, file: Path) -> None:
        """Write a picture of the whole page."""
        import base64  # noqa: PLC0415

        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            self._buffer += os.read(self._read, 2**20)
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


def _high(descriptor: int) -> int:
    """Return another descriptor of the same pipe that is neither 3 nor 4."""
    other = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return other


@contextmanager
def browser() -> Iterator[Page]:
    """Start Chromium, and terminate it afterwards."""
    assert CHROMIUM is not None
    to_read, to_write, from_read, from_write = (_high(end) for pipe in (os.pipe(), os.pipe()) for end in pipe)

    def descriptors() -> None:
        os.dup2(to_read, 3)
        os.dup2(from_write, 4)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
            ],
            preexec_fn=descriptors,  # noqa: PLW1509 (the browser wants descriptors 3 and 4; no other thread forks)
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(to_write, from_read)
        finally:
            process.kill()
            process.wait()
            os.close(to_write)
            os.close(from_read)
