"""inspect.html in a browser, and the figures that need a model, on made-up data."""

from __future__ import annotations

import pytest

from posenc import ModelShape
from posenc.inspect.encoding import behaviour as running
from posenc.inspect.encoding.page import write_page
from posenc.inspect.encoding.sheet import measure
from tests.browser import DESKTOP, PHONE, Browser, needs_chromium

SHAPE = ModelShape(embed_dim=64, num_heads=4, head_dim=16, train_length=128)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "inspect.html"
    with pytest.MonkeyPatch.context() as patch:  # slow, and tested with the spec sheet
        for name in ("compiles", "exports"):
            patch.setattr(running, name, lambda encoding, shape: "yes")
        sheets = [measure(name, SHAPE) for name in ("sinusoidal", "yarn", "alibi", "t5", "cope")]
    write_page(sheets, path, True, "posenc inspect sinusoidal yarn")
    return path


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(PHONE, False), (DESKTOP, True)])
def test_page_is_well_shown(browser, page, width, dark):
    seen = browser.open(page, width, dark=dark)
    seen.assert_well_shown(num_figures=17)
    assert "unfinished pairs" in seen.text and "all up to 15, some up to 112" in seen.text
    assert "mathdefault" not in seen.text
