"""A headless Chromium, controlled through its DevTools protocol over a pipe."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


class Chromium:
    """A browser with one page; `errors` has the errors and warnings of its console."""

    def __init__(self, profile: Path) -> None:
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()

        def places() -> None:  # the browser reads from descriptor 3 and writes to 4
            ends = [os.dup(theirs_in), os.dup(theirs_out)]
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(
            [PROGRAM, *options, "--no-first-run", "--disable-dev-shm-usage", "about:blank"],
            preexec_fn=places,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._last, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []  # addresses that the page has requested

        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(60)
            if answer.get("id") == self._last:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "Chromium does not answer"
            self._buffer += os.read(self._from, 1 << 20)
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._look(message)
        return message

    def _look(self, message: dict[str, Any]) -> None:
        own = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(own["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(own["exceptionDetails"])[:2000])
        elif message.get("method") == "Runtime.consoleAPICalled" and own["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(own["args"])[:2000])
        elif message.get("method") == "Log.entryAdded" and own["entry"]["level"] in ("error", "warning"):
            self.errors.append(own["entry"]["text"])

    def open(self, url: str, width: int = 1440) -> None:
        """Open a page in a window of this width."""
        mobile = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=mobile)
        self.ask("Page.navigate", url="about:blank")
        self.ask("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && document.querySelector('section') !== null")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression or promise."""
        found = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, f"{expression} did not become true; {self.errors}"
            time.sleep(0.05)

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        self.ask("Browser.close")
        self._process.wait(30)
        os.close(self._to)
        os.close(self._from)
