"""The page of an extension, right in a browser on a phone and on a desk."""

from __future__ import annotations

import io
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from posenc.extend.export.prover import Proof
from posenc.extend.extension import Outcome
from posenc.extend.measure.evaluation import Evaluation, position_edges
from posenc.extend.measure.intervals import Estimate
from posenc.extend.page import write_extension_page
from posenc.extend.terminal import show_losses, write_csv
from posenc.extend.variants.methods import METHODS, stretch
from posenc.extend.variants.variant import Variant
from posenc.hf.rope_config import RopeSetting
from tests.browser import DESKTOP, PHONE, Browser, needs_chromium

TRAINED, TARGET = 256, 1024
NASTY = "<script>alert(1)</script>"


def evaluation(beyond: float, limit: int = TARGET) -> Evaluation:
    edges = position_edges(TRAINED, TARGET)

    def bucket(edge: int) -> Estimate:
        mean = 2.2 if edge <= TRAINED else beyond
        return Estimate(mean, mean - 0.1, mean + 0.1, 256 if edge <= limit else 0)

    lengths = [n for n in (256, 512, 1024) if n <= limit]
    return Evaluation(
        edges,
        tuple(map(bucket, edges[1:])),
        {n: bucket(n) for n in lengths},
        {(n, depth): 0.5 for n in lengths for depth in (0.0, 0.5)},
        tuple(1.0 + i for i in range(len(edges) - 1)),
    )


def outcome(limit: int = TARGET, *, rotary: bool = True) -> Outcome:
    plain = (RopeSetting(None, 10000.0, 8, None, TRAINED),)
    measured = {}
    for i, name in enumerate(["none", "ntk", "yarn", "linear"]):
        settings = stretch(plain, METHODS[name], TARGET) if rotary else ()
        variant = Variant(name, "", nullcontext, settings)  # type: ignore[arg-type]
        measured[name] = (variant, evaluation(6.0 - i, limit if name == "none" else TARGET))
    checkpoint: Any = SimpleNamespace(folder=SimpleNamespace(name=NASTY), trained_length=TRAINED)
    return Outcome(
        checkpoint, TARGET, measured, "linear", f"linear is best {NASTY}",
        tuned=evaluation(2.3), config_diff=["+ x: 1"], proof=Proof(0.0, 1e-6, 1e-6, 8),
    )  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_page_is_well_shown(browser, tmp_path, width):
    page = tmp_path / "extend.html"
    write_extension_page(outcome(), page, f"posenc extend '{NASTY}'", "Mind the text.")
    seen = browser.open(page, width)
    seen.assert_well_shown(5)
    assert seen.scripts == 0
    for shown in (
        "Mind the text.",
        "2 of 4 pairs never finish",
        "none: 50 % on average",
        "1.0e-06",
        NASTY,
    ):
        assert shown in seen.text or shown in page.read_text(encoding="utf-8"), shown


def test_a_table_that_ends_says_so(tmp_path):
    page = tmp_path / "extend.html"
    write_extension_page(outcome(TRAINED, rotary=False), page, "posenc extend", None)
    text = page.read_text(encoding="utf-8")
    assert "cannot" in text
    assert "no rows there" in text
    assert "nan" not in text.lower().replace("nano", "").replace("dominan", "")


def test_csv_holds_every_bucket_that_could_be_read(tmp_path):
    write_csv(outcome(TRAINED), tmp_path / "extend.csv")
    header, *rows = (tmp_path / "extend.csv").read_text(encoding="utf-8").splitlines()
    assert header == "method,start,stop,loss,low,high,tokens"
    assert len([row for row in rows if row.startswith("none,")]) == 3
    assert len([row for row in rows if row.startswith("tuned,")]) == 7
    assert "tuned,0,64,2.200000,2.100000,2.300000,256" in rows


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_cuts_no_number(width):
    found = outcome()
    mapped = Variant("self-extend", "", nullcontext, (), needs_runtime=True)  # type: ignore[arg-type]
    found.measured["self-extend"] = (mapped, evaluation(2.4))
    console = Console(width=width, record=True, file=io.StringIO())
    show_losses(found, console)
    shown = console.export_text()
    assert "…" not in shown and "* " not in shown
    assert shown.count("self-extend†") == shown.count("Perplexity by position")
    assert " ".join(shown.split()).endswith("† needs our runtime. 95 % intervals are on the page.")
    for end in position_edges(TRAINED, TARGET)[1:]:
        assert f" {end:,} " in shown
    assert shown.count(f"{math.exp(2.4):.3g} ") == 4  # beyond the trained length
