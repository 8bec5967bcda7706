# A headless Chromium that a test looks through: its DevTools protocol over a web socket.

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import aiohttp
import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 60  # for what comes at once, unless the test is red


def binary():
    """The browser; a test that needs one is skipped where there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    return found


class Gone(Exception):  # noqa: N818 - it goes by loading anew
    """The page that was asked is there no more; the next one may be."""


# what a browser answers to a question whose page was left meanwhile; which of them is a race
_LEFT = ("navigated", "context was destroyed", "Promise was collected")


class Tab:
    """One page of a browser."""

    def __init__(self, socket, wait_s=WAIT_S):
        self._socket, self._n, self._wait_s = socket, 0, wait_s
        self.events = []

    async def ask(self, method, **params):
        self._n += 1
        await self._socket.send_json({"id": self._n, "method": method, "params": params})
        while True:
            told = json.loads((await self._socket.receive(self._wait_s)).data)
            if told.get("id") == self._n:
                why = told.get("error", {}).get("message", "")
                if any(sign in why for sign in _LEFT):
                    raise Gone(why)
                assert not why, told
                return told["result"]
            self.events.append(told)

    async def js(self, expression):
        """The value of an expression; a promise is waited for."""
        found = await self.ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, condition):
        """Wait until an expression is true, in the page itself or in the next one; what is not
        there yet, in a page that is loading, is waited for.
        """
        look = "new Promise((done, fail) => { const look = () => { let now = false; "
        look += f"try {{ now = {condition}; }} catch (error) "
        look += "{ if (!(error instanceof TypeError)) return fail(error); } "
        look += "now ? done(true) : setTimeout(look, 20); }; look(); })"
        while True:
            with contextlib.suppress(Gone):
                await self.js(look)
                return

    async def open(self, url, key=None, width=1280, height=900, dark=False):
        await self.ask("Page.enable")
        await self.ask("Runtime.enable")
        await self.ask("Log.enable")
        await self.look(width, height, dark)
        if key is not None:
            given = "Basic " + base64.b64encode(f"me:{key}".encode()).decode()
            await self.ask("Network.enable")
            await self.ask("Network.setExtraHTTPHeaders", headers={"Authorization": given})
        await self.ask("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && document.querySelector('h1')")

    async def look(self, width, height, dark):
        """Have a window of a size, in light or in dark."""
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])

    async def click(self, selector):
        """A real click in the middle of an element."""
        at = await self.js(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'center'}); const r = one.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.ask(
                "Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], button="left", clickCount=1
            )

    async def type(self, text):
        await self.ask("Input.insertText", text=text)

    async def press(self, key, code=0):
        for kind in ("rawKeyDown", "keyUp"):
            await self.ask(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, code=key
            )

    async def picture(self, path):
        found = await self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(found["data"]))

    def complaints(self):
        """What the page or the browser complained of."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        found = [e["params"] for e in self.events if e["method"] in kinds]
        logged = (e["params"] for e in self.events if e["method"] == "Runtime.consoleAPICalled")
        return found + [one for one in logged if one["type"] in ("error", "assert")]


@contextlib.asynccontextmanager
async def tab(*options, wait_s=WAIT_S):
    """A tab of a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [binary(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        command += ["--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0"]
        command += ["--disable-background-networking", "--remote-allow-origins=*", *options]
        command += [f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            url = await asyncio.to_thread(_announced, process)
            host = url.split("/")[2]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{host}/json/list") as answer:
                    pages = [one for one in await answer.json() if one["type"] == "page"]
                socket = pages[0]["webSocketDebuggerUrl"]
                async with session.ws_connect(socket, max_msg_size=0) as connected:
                    yield Tab(connected, wait_s)
        finally:
            process.terminate()
            process.communicate()


def _announced(process):
    """Where the browser listens, as it says when it does."""
    for line in process.stderr:
        if b"DevTools listening on" in line:
            return line.split()[-1].decode()
    raise AssertionError("the browser ended before it listened")
