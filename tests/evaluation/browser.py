"""Debian's Chromium behind its own chromedriver, spoken to in plain WebDriver: no package to install."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)
MISSING = (
    None if shutil.which("chromium") and shutil.which("chromedriver") else "chromium and chromedriver are not here"
)


class Browser:
    """One window; a context manager that ends the processes it started."""

    def __init__(self, profile: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={self.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        options = {"binary": shutil.which("chromium"), "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        self.session = ""
        self.session = self._begin({"capabilities": {"alwaysMatch": wanted}})

    def _begin(self, wanted: dict[str, Any]) -> str:
        deadline = time.monotonic() + 60
        while True:
            try:
                return str(self.call("POST", "", wanted)["sessionId"])
            except urllib.error.URLError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        address = f"http://127.0.0.1:{self.port}/session" + (f"/{self.session}" if self.session else "") + path
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 (our own driver)
            return json.loads(answer.read())["value"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait(10)

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def size(self, width: int, height: int) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def theme(self, name: str) -> None:
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, page: Path) -> None:
        self.call("POST", "/url", {"url": page.as_uri()})

    def run(self, script: str) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def console(self) -> list[str]:
        return [row["message"] for row in self.call("POST", "/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Addresses asked for since the last call; not by the browser's own pages, such as that of a new tab."""
        rows = [json.loads(row["message"])["message"] for row in self.call("POST", "/se/log", {"type": "performance"})]
        asked = [row["params"] for row in rows if row["method"] == "Network.requestWillBeSent"]
        return [found["request"]["url"] for found in asked if not found["documentURL"].startswith("chrome")]

    def screenshot(self) -> bytes:
        return base64.b64decode(self.call("GET", "/screenshot"))

    def pdf(self) -> bytes:
        return base64.b64decode(self.devtools("Page.printToPDF", printBackground=True)["data"])
