"""Write docs/figures/explore.png, the wavelengths of `posenc explore` as Chromium shows them; run
by `make readme`, which leaves the picture as it is where Chromium is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "posenc/explore/explore.html"
FIGURE = ROOT / "docs/figures/explore.png"
WIDTH = 1100


def write(target: Path) -> str | None:
    """Write the picture and return the sentence in it; None without Chromium."""
    sys.path.insert(0, str(ROOT))
    try:
        from tests.browser import CHROMIUM, Browser
    finally:
        sys.path.remove(str(ROOT))
    if CHROMIUM is None:
        return None
    with TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        browser.open(PAGE, WIDTH)
        browser.evaluate("(explorer.update({lang: 'en'}), new Promise(requestAnimationFrame))")
        target.write_bytes(browser.picture("#wave .stage", "#wave .legend"))
        return browser.evaluate("document.querySelector('#wave .finding').textContent")


if __name__ == "__main__":
    print(write(FIGURE) or "docs/figures/explore.png is left as it is: chromium is not installed.")
