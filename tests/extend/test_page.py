"""The page of an extension, right in a browser on a phone and on a desk."""

import csv
import io
import itertools
import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posenc.extend import run
from posenc.extend.api import extend_and_show, write_table
from posenc.extend.export.prover import Proof
from posenc.extend.measure.evaluation import Evaluation, position_edges
from posenc.extend.methods import METHODS, stretch
from posenc.extend.recommendation import Outcome
from posenc.extend.report import passkeys_not_found_warning, report_of
from posenc.extend.variants import Variant
from posenc.files.atomic import FIGURES_MARKER
from posenc.hf.rope_settings import RopeSetting
from posenc.report.figure_files import write_page
from posenc.report.html_page import Page, page_of
from posenc.report.report import as_json
from posenc.report.terminal import Terminal, show
from posenc.statistics.text_intervals import Estimate
from tests.browser import DESKTOP, PHONE, needs_chromium
from tests.charts import assert_drawn_from_its_table

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
    checkpoint: Any = SimpleNamespace(
        folder=SimpleNamespace(name=NASTY), trained_length=TRAINED, has_head=True
    )
    return Outcome(
        checkpoint,
        TARGET,
        measured,
        "linear",
        f"linear is best {NASTY}",
        tuned=evaluation(2.3),
        config_diff=["+ x: 1"],
        proof=Proof(0.0, 1e-6, 1e-6, 1e-6, 8),
    )


def page_of_nasty_names() -> Page:
    return page_of(report_of(outcome(), f"posenc extend '{NASTY}'", "Mind the text."))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "extend.html"
    page_of_nasty_names().write(path)
    return path


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_is_well_shown(browser, page, width, dark):
    seen = browser.open(page, width, dark=dark)
    seen.assert_well_shown(5)
    assert seen.text.index("linear is best") < seen.text.index("Perplexity is the exponential")
    assert seen.scripts == 0
    for shown in (
        "Mind the text.",
        "2 of 4 pairs never finish",
        "rows of a padded batch against each by itself",
        "1.0e-06",
        NASTY,
    ):
        assert shown in seen.text or shown in page.read_text(encoding="utf-8"), shown


def test_figures_show_the_numbers_of_their_tables():
    plots = page_of_nasty_names().plots()
    assert len(plots) == 5
    for plot in plots:
        assert_drawn_from_its_table(plot.chart)


def test_a_table_that_ends_says_so():
    text = page_of(report_of(outcome(TRAINED, rotary=False), "posenc extend")).html()
    assert "cannot" in text
    assert "no rows there" in text
    assert "nan" not in text.lower().replace("nano", "").replace("dominan", "")


def test_csv_holds_every_bucket_that_could_be_read(tmp_path):
    write_table(outcome(TRAINED), tmp_path / "extend.csv")
    header, *rows = (tmp_path / "extend.csv").read_text(encoding="utf-8").splitlines()
    assert header == "method,start,stop,loss,low,high,tokens"
    assert len([row for row in rows if row.startswith("none,")]) == 3
    assert len([row for row in rows if row.startswith("tuned,")]) == 7
    assert "tuned,0,64,2.2,2.1,2.3,256" in rows


def printed(made: Outcome, width: int = 140) -> str:
    console = Terminal(width=width, record=True, file=io.StringIO())
    show(report_of(made, "posenc extend"), console)
    return console.export_text()


def test_the_terminal_says_which_methods_stock_tools_load():
    found = outcome()
    given = {
        "dynamic": {"cache_safe": False},
        "self-extend": {"needs_special_runtime": True},
        "window": {"window_length": TRAINED},
    }
    for name, facts in given.items():
        variant = Variant(name, f"summary of {name}", nullcontext, (), **facts)  # type: ignore[arg-type]
        found.measured[name] = (variant, evaluation(2.4))
    found.not_measured = {"clip": "its rotation is another one"}
    shown = printed(found)
    for said in ("yes, but its cache is inexact", "needs our runtime", "no extension"):
        assert said in shown, said
    assert "dynamic: summary of dynamic" in shown
    assert "clip: not measured: its rotation is another one" in shown
    assert "+ x: 1" in shown and "step-by-step decoding against one pass: 1.0e-06" in shown


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_cuts_no_number(width):
    found = outcome()
    mapped = Variant("self-extend", "", nullcontext, (), needs_special_runtime=True)  # type: ignore[arg-type]
    found.measured["self-extend"] = (mapped, evaluation(2.4))
    shown = printed(found, width)
    assert "…" not in shown
    edges = position_edges(TRAINED, TARGET)
    for start, end in itertools.pairwise(edges):
        assert f" {start:,}–{end:,} " in shown
    interval = f"{math.exp(2.4):.2f} ({math.exp(2.3):.2f}–{math.exp(2.5):.2f})"
    assert shown.count(interval) == 4  # beyond the training length
    assert shown.count("│ self-extend ") == shown.count("┏")


def test_every_number_of_the_table_is_equal_in_json_and_on_the_page(undrawn):
    made = report_of(outcome(), "posenc extend")
    rows = json.loads(as_json(made))["tables"]["perplexity-by-position"]
    html = page_of(made).html()
    assert [row["method"] for row in rows] == ["none", "ntk", "yarn", "linear", "tuned"]
    for row in rows:
        value, low, high = (row["256–384" + end] for end in ("", ", low", ", high"))
        assert f"{value:.2f} ({low:.2f}–{high:.2f})" in html
    assert rows[0]["256–384"] == pytest.approx(math.exp(6.0))
    assert rows[0]["256–384, low"] == pytest.approx(math.exp(5.9))


def test_figures_are_written_with_their_numbers(tmp_path, undrawn):
    assert write_page(page_of_nasty_names(), None, tmp_path) == []
    stems = {
        "loss-by-position",
        "loss-by-context",
        "attention-entropy",
        "wavelengths",
        "passkeys",
    }
    kinds = ("svg", "pdf", "png", "csv")
    written = {path.name for path in tmp_path.iterdir()} - {FIGURES_MARKER}
    figures = {f"{stem}.{kind}" for stem in stems for kind in kinds}
    assert written == figures | {"perplexity-by-position.csv"}

    def rows(stem: str) -> list[dict[str, str]]:
        return list(csv.DictReader((tmp_path / f"{stem}.csv").read_text().splitlines()))

    losses = [float(r["loss, nats per token"]) for r in rows("loss-by-position")]
    assert losses[:3] == [2.2] * 3 and losses[3:7] == [6.0] * 4
    keys = rows("passkeys")
    assert {r["panel"] for r in keys} == {"none", "ntk", "yarn", "linear", "tuned"}
    assert {r["depth of the key"] for r in keys} == {"0 %", "50 %"}
    assert {r["length of the text, tokens"] for r in keys} == {"256", "512", "1024"}
    assert {r["tokens right"] for r in keys} == {"0.5"}


def test_keys_that_are_never_found_are_not_to_be_read():
    found = {(256, 0.0): 0.9, (512, 0.0): 0.1}
    assert passkeys_not_found_warning([found, dict.fromkeys(found, 0.1)]) == ""
    poor = passkeys_not_found_warning([dict.fromkeys(found, 0.1)])
    assert poor.startswith("Read nothing into this: not even at 256 tokens")
    assert passkeys_not_found_warning([{(256, 0.0): math.nan}]) != ""


def test_a_folder_for_figures_that_cannot_be_written_is_refused_first(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ValueError, match=r"--figures: .*taken is not a folder"):
        run(tmp_path / "no-model", 512, ["text"], figures=tmp_path / "taken")
    with pytest.raises(ValueError, match=r"--figures: .*taken is not a folder"):
        extend_and_show(
            tmp_path / "no-model",
            512,
            [],
            "posenc extend",
            None,
            out=None,
            method=None,
            figures_folder=tmp_path / "taken",
        )
