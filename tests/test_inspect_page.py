"""inspect.html in a browser, and the figures that need a model, on made-up data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from posenc import ModelShape
from posenc.drawing import to_svg
from posenc.inspect import figures, running
from posenc.inspect.page import mask_plots, write_page
from posenc.inspect.spec import measure
from posenc.report import Page, Plot
from tests.browser import DESKTOP, PHONE, Browser, needs_chromium

SHAPE = ModelShape(embed_dim=64, num_heads=4, head_dim=16, train_length=128)
TOKENS = ["公司", "收购", "了", "竞争", "对手", "$a$", "<b>"]


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


def attention_plots():
    generator = np.random.default_rng(0)
    weights = np.tril(generator.random((7, 7)))
    yield Plot(
        figures.attention_map(weights / weights.sum(-1, keepdims=True), TOKENS),
        "Attention of one head.",
        "Seven tokens by seven tokens.",
    )
    yield Plot(
        figures.attention_distance(generator.random((6, 8)) * 20),
        "Mean distance of attention.",
        "Dots by layer.",
    )


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_attention_and_mask_figures_are_well_shown(browser, tmp_path, width):
    page = Page("Attention", "")
    page.section("Figures", *attention_plots(), *mask_plots())
    page.write(tmp_path / "page.html")
    seen = browser.open(tmp_path / "page.html", width)
    seen.assert_well_shown(num_figures=6)
    assert all(figure["title"] for figure in seen.figures)


def test_tokens_of_any_script_are_on_both_axes():
    svg = to_svg(next(attention_plots()).figure, "tokens")
    for token in ("公司", "竞争", "$a$", "&lt;b&gt;"):
        assert svg.count(f">{token}<") == 2


def test_masks_are_drawn_square_by_square():
    drawn = figures.mask_matrix(torch.ones(3, 3, dtype=torch.bool).tril().numpy())
    assert len(drawn.axes[0].patches) == 6
