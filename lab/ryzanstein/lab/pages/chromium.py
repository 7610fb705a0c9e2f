"""A real Chromium over its DevTools protocol: a page that is looked at, typed into and listened to."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0",
    "--force-prefers-reduced-motion",
)  # fmt: skip
MESSAGE_BYTES = 2**26
LISTEN = """
addEventListener("securitypolicyviolation", (event) =>
    (window.violations ??= []).push(`${event.violatedDirective} ${event.blockedURI}`));
addEventListener("error", (event) => (window.failures ??= []).push(String(event.message)));
addEventListener("unhandledrejection", (event) => (window.failures ??= []).push(String(event.reason)));
"""


class Page:
    """One tab. `requests` are the addresses that it asked for, `errors` what its console was told."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def begin(self) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=LISTEN)

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await self.call("Page.close")
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._connection.close()

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        return await asyncio.wait_for(self._waiting[number], 60)

    async def _read(self) -> None:
        async for text in self._connection:
            message = json.loads(text)
            if "id" in message:
                waiting = self._waiting.pop(message["id"])
                if "error" in message:
                    waiting.set_exception(RuntimeError(str(message["error"])))
                else:
                    waiting.set_result(message["result"])
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, parameters: Any) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Network.webSocketCreated":
                self.requests.append(parameters["url"])
            case "Page.loadEventFired":
                self._loaded.set()
            case "Runtime.exceptionThrown":
                self.errors.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                entry = parameters["entry"]
                if entry["level"] == "error" and entry.get("source") in ("security", "violation", "javascript"):
                    self.errors.append(entry["text"])

    async def go(self, url: str) -> None:
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), 30)

    async def reload(self) -> None:
        self._loaded.clear()
        await self.call("Page.reload")
        await asyncio.wait_for(self._loaded.wait(), 30)

    async def see(self, expression: str) -> Any:
        """What an expression of JavaScript is, in the page."""
        done = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise AssertionError(done["exceptionDetails"])
        return done["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 30) -> None:
        """Waits, bounded, until an expression is true."""
        deadline = time.monotonic() + timeout_s
        while not await self.see(f"(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()"):
            if time.monotonic() > deadline:
                text = await self.see("document.body.innerText")
                raise AssertionError(f"{expression} did not become true; the page: {text[-1500:]} {self.errors}")
            await asyncio.sleep(0.02)

    async def type(self, text: str) -> None:
        """Types into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: str = "", modifiers: int = 0) -> None:
        numbers = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
        texts = {"Enter": "\r", " ": " "}
        key_code = numbers.get(key, ord(key.upper()) if len(key) == 1 else 0)
        common = {"key": key, "code": code or key, "modifiers": modifiers, "windowsVirtualKeyCode": key_code}
        down = {"type": "keyDown", "text": texts[key]} if key in texts and not modifiers else {"type": "rawKeyDown"}
        await self.call("Input.dispatchKeyEvent", **down, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def size(self, width: int, height: int) -> None:
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    async def offline(self, cut: bool) -> None:
        await self.call("Network.emulateNetworkConditions", offline=cut, latency=0, downloadThroughput=-1, uploadThroughput=-1)

    async def scheme(self, name: str) -> None:
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def picture(self) -> bytes:
        """The page as a PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    @property
    async def violations(self) -> list[str]:
        """Violations of the page's policy, and failures of its scripts."""
        return [*await self.see("[...(window.violations ?? []), ...(window.failures ?? [])]"), *self.errors]


class Chromium:
    """A browser with a profile of its own."""

    def __init__(self, port: int, connection: ClientConnection) -> None:
        self._port, self._connection = port, connection
        self._pages: list[Page] = []

    async def page(self) -> Page:
        """Opens a page in a window of its own: of the tabs of one window only one is visible."""
        asked = {
            "id": len(self._pages) + 1,
            "method": "Target.createTarget",
            "params": {"url": "about:blank", "newWindow": True},
        }
        await self._connection.send(json.dumps(asked))
        target = json.loads(await self._connection.recv())["result"]["targetId"]
        url = f"ws://127.0.0.1:{self._port}/devtools/page/{target}"
        page = Page(await connect(url, max_size=MESSAGE_BYTES, proxy=None, ping_interval=None))
        await page.begin()
        self._pages.append(page)
        return page

    async def close(self) -> None:
        for page in self._pages:
            await page.close()
        await self._connection.close()


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Chromium]:
    """Starts a browser; fails if there is none."""
    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    assert program, f"a browser is needed, one of {', '.join(BROWSERS)}: bash .ci/parts browser"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = _started(program, Path(profile))
        try:
            port, path = await _place_of(Path(profile))
            url = f"ws://127.0.0.1:{port}{path}"
            made = Chromium(port, await connect(url, max_size=MESSAGE_BYTES, proxy=None, ping_interval=None))
            yield made
            await made.close()
        finally:
            browser.terminate()
            await asyncio.to_thread(browser.wait, 20)


def _started(program: str, profile: Path) -> subprocess.Popen[bytes]:
    with (profile / "log").open("wb") as log:
        command = (program, *FLAGS, f"--user-data-dir={profile}", "about:blank")
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


async def _place_of(profile: Path) -> tuple[int, str]:
    """Waits until the browser listens, and returns the port and the path of its socket."""
    deadline = time.monotonic() + 30
    file = profile / "DevToolsActivePort"
    while not (file.exists() and "\n" in file.read_text().strip()):
        assert time.monotonic() < deadline, (profile / "log").read_text(errors="replace")[-2000:]
        await asyncio.sleep(0.05)
    port, path = file.read_text().split()
    return int(port), path
