"""Headless Chromium for tests, driven over the DevTools protocol on two pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

PHONE, TABLET, DESKTOP = 390, 768, 1280

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

_DEFECTS = (Path(__file__).parent / "browser_defects.js").read_text(encoding="utf-8")

_MEASURE = """({
  figures: [...document.querySelectorAll('figure svg')].map(svg => {
    const box = svg.getBoundingClientRect();
    const ink = [...svg.querySelectorAll('path, text, image, use')].filter(
      e => { const b = e.getBoundingClientRect(); return b.width + b.height > 0; });
    return {width: box.width, height: box.height, marks: ink.length,
            smallest: Math.min(...[...svg.querySelectorAll('text')].map(t =>
              parseFloat(getComputedStyle(t).fontSize) * box.width / svg.viewBox.baseVal.width)),
            title: svg.querySelector('title')?.textContent};
  }),
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  scrolling: [...document.querySelectorAll('.table')].filter(e => e.scrollWidth > e.clientWidth)
    .map(e => e.getAttribute('aria-label')),
  defects: (%s)(),
  text: document.body.innerText,
  scripts: document.scripts.length,
  paper: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.body).color,
})""".replace("%s", _DEFECTS)


@dataclass
class Seen:
    """What a page looked like: sizes in CSS pixels."""

    figures: list[dict[str, Any]]
    overflow: int
    """How far the page is wider than the screen."""
    scrolling: list[str]
    """Tables that are wider than the page and scroll sideways."""
    defects: list[str]
    """Text that is cut off, unreadable or printed over, in words; see browser_defects.js."""
    text: str
    scripts: int
    paper: str
    ink: str
    complaints: list[str] = field(default_factory=list)
    """Console messages, uncaught exceptions and requests for anything but the page."""
    screenshot: bytes = b""

    def assert_well_shown(self, num_figures: int) -> None:
        """As many figures as told, none empty or illegible; nothing wider than the screen; no
        error and no request; no text cut off, printed over or too faint."""
        assert self.complaints == []
        assert self.overflow <= 0, f"the page is {self.overflow} pixels wider than the screen"
        assert self.defects == []
        assert len(self.figures) == num_figures
        for shown in self.figures:
            assert shown["width"] > 250 and shown["height"] > 120, shown
            assert shown["marks"] > 10, shown
            assert shown["smallest"] >= 7.5, shown
            assert shown["title"], shown


class Browser:
    """A running Chromium; use as a context manager."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self._stack = ExitStack()
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # The protocol wants file descriptors 3 and 4; first move ours out of their way.
        given = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$@" 3<&{given[0]} 4>&{given[1]}', "bash"),
                *(CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"),
            ],
            pass_fds=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *given):
            os.close(fd)
        self._out = self._stack.enter_context(os.fdopen(ours_out, "wb"))
        self._in = self._stack.enter_context(os.fdopen(ours_in, "rb"))
        self._last, self._session = 0, None
        self._events: list[dict[str, Any]] = []
        self._rest = b""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._process.terminate()
        self._process.wait(20)

    def open(self, page: Path, width: int = DESKTOP, *, dark: bool = False) -> Seen:
        """Load a file and say how it looks on a screen `width` CSS pixels wide."""
        self.load(page, width, dark=dark)
        return self.look()

    def load(
        self, page: Path, width: int = DESKTOP, *, dark: bool = False, fragment: str = ""
    ) -> None:
        """Load a file on a screen `width` CSS pixels wide. A long page stays where it scrolled to,
        which the picture of `look` would change.

        fragment: what the address has behind the file's name, beginning with #.
        """
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=844,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self._url = page.resolve().as_uri() + fragment
        if fragment:  # an address that differs in its fragment only loads nothing
            self._call("Page.navigate", url="about:blank")
            self._wait_for("Page.loadEventFired")
            self._events.clear()
        self._call("Page.navigate", url=self._url)
        self._wait_for("Page.loadEventFired")

    def look(self) -> Seen:
        """Say how the page looks now, with all complaints since it was opened."""
        shown = self._call("Runtime.evaluate", expression=_MEASURE, returnByValue=True)
        complaints = [c for event in self._events if (c := _complaint(event, self._url))]
        picture = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        return Seen(
            **shown["result"]["value"], complaints=complaints, screenshot=base64.b64decode(picture)
        )

    def picture(self, first: str, last: str, margin: int = 16) -> bytes:
        """Return what lies from one element to another as a PNG, 1.5 times as large."""
        box = self.evaluate(
            f"""[{first!r}, {last!r}].map(s => document.querySelector(s).getBoundingClientRect())
            .map(b => [b.left, b.top + scrollY, b.right, b.bottom + scrollY])"""
        )
        (left, top, right, _), (*_, bottom) = box
        clip = {"x": left - margin, "y": top - margin, "scale": 1.5}
        clip |= {"width": right - left + 2 * margin, "height": bottom - top + 2 * margin}
        shot = self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def drag(self, points: list[tuple[float, float]], *, touch: bool = False) -> None:
        """Lead the mouse, or a finger, from the first point to the last."""
        for i, (x, y) in enumerate([*points, points[-1]]):
            first, last = i == 0, i == len(points)
            if touch:
                kind = "touchStart" if first else "touchEnd" if last else "touchMove"
                at = [] if last else [{"x": x, "y": y}]
                self._call("Input.dispatchTouchEvent", type=kind, touchPoints=at)
            else:
                kind = "mousePressed" if first else "mouseReleased" if last else "mouseMoved"
                self._call(
                    "Input.dispatchMouseEvent",
                    type=kind,
                    x=x,
                    y=y,
                    button="left",
                    buttons=0 if last else 1,
                    clickCount=1,
                )

    def press(self, key: str) -> None:
        """Press and release a key, by its name in the DOM."""
        codes = {"Tab": 9, "PageUp": 33, "End": 35, "ArrowRight": 39}
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
            )

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript in the page, awaited.

        Raises: AssertionError where it throws.
        """
        done = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (reply := self._read()).get("id") != self._last:
            self._events.append(reply)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    def _wait_for(self, method: str) -> None:
        while not any(event.get("method") == method for event in self._events):
            self._events.append(self._read())

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._in.fileno(), 1 << 20)
            if not chunk:
                raise RuntimeError(f"chromium ended with {self._process.poll()}")
            self._rest += chunk
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)


def _complaint(event: dict[str, Any], url: str) -> str | None:
    method, params = event.get("method"), event.get("params", {})
    if method == "Runtime.exceptionThrown":
        return params["exceptionDetails"]["text"]
    if method == "Log.entryAdded":
        return params["entry"]["text"]
    if method == "Runtime.consoleAPICalled":
        return str(params["args"])
    if method == "Network.requestWillBeSent":
        asked = params["request"]["url"]
        return None if asked == url or asked.startswith("data:") else f"request for {asked}"
    return None
