"""The page of an extension, right in a browser on a phone and on a desk."""

import csv
import io
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from posenc.extend import run
from posenc.extend.answer import captions
from posenc.extend.answer.page import make_page
from posenc.extend.answer.terminal import extend_and_show, show_losses, write_csv
from posenc.extend.export.prover import Proof
from posenc.extend.extension import Outcome
from posenc.extend.measure.evaluation import Evaluation, position_edges
from posenc.extend.measure.intervals import Estimate
from posenc.extend.variants.methods import METHODS, stretch
from posenc.extend.variants.variant import Variant
from posenc.hf.rope.settings import RopeSetting
from posenc.report.page.figure_files import write_figures
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
    checkpoint: Any = SimpleNamespace(folder=SimpleNamespace(name=NASTY), trained_length=TRAINED)
    return Outcome(
        checkpoint, TARGET, measured, "linear", f"linear is best {NASTY}",
        tuned=evaluation(2.3), config_diff=["+ x: 1"], proof=Proof(0.0, 1e-6, 1e-6, 1e-6, 8),
    )  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "extend.html"
    made = make_page(outcome(), f"posenc extend '{NASTY}'", "Mind the text.")
    made.write(path)
    assert all(plot.seen.endswith(".") for plot in made.plots())
    for plot in made.plots():
        assert_drawn_from_its_table(plot.chart)
    write_figures(made.plots(), path.parent)
    return path


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_is_well_shown(browser, page, width, dark):
    seen = browser.open(page, width, dark=dark)
    seen.assert_well_shown(5)
    assert seen.text.index("linear is best") < seen.text.index("Perplexity by position")
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
    make_page(outcome(TRAINED, rotary=False), "posenc extend", None).write(page)
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


def test_the_legend_of_marks_answers_no_question():
    found = outcome()
    found.measured["dynamic"] = (
        Variant("dynamic", "", nullcontext, (), cache_safe=False),
        evaluation(2),
    )  # type: ignore[arg-type]
    console = Console(width=100, record=True, file=io.StringIO())
    show_losses(found, console)
    assert "* its cache is inexact." in console.export_text()


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
    assert shown.count(f"{math.exp(2.4):.3g} ") == 4  # beyond the training length


def test_figures_are_written_with_their_numbers(page):
    stems = {
        "loss-by-position", "loss-by-context", "attention-entropy", "wavelengths", "passkeys",
    }  # fmt: skip
    kinds = ("svg", "pdf", "png", "csv")
    written = {path.name for path in page.parent.iterdir()} - {page.name}
    assert written == {f"{stem}.{kind}" for stem in stems for kind in kinds}

    def rows(stem: str) -> list[dict[str, str]]:
        return list(csv.DictReader((page.parent / f"{stem}.csv").read_text().splitlines()))

    losses = [float(r["loss, nats per token"]) for r in rows("loss-by-position")]
    assert losses[:3] == [2.2] * 3 and losses[3:7] == [6.0] * 4
    keys = rows("passkeys")
    assert {r["panel"] for r in keys} == {"none", "ntk", "yarn", "linear", "tuned"}
    assert {r["depth of the key"] for r in keys} == {"0 %", "50 %"}
    assert {r["length of the text, tokens"] for r in keys} == {"256", "512", "1024"}
    assert {r["tokens right"] for r in keys} == {"0.5"}


def test_what_is_seen_in_the_figures():
    ends = (128, 256, 512)
    losses = {"none": [2, 2, 6.0], "ntk": [2, 2, 3.0], "window": [2, 2, 3.5]}
    assert captions.in_losses(losses, ends, 256) == (
        "Beyond 256 tokens the unchanged model reads 2.50 nats worse than with only the last 256; "
        "lowest beyond 256 tokens: ntk, at 3.00 nats."
    )
    # Harder text beyond 256 tokens is no loss of the model: the window finds it as hard.
    alike = captions.in_losses({"none": [2, 2, 6.0], "window": [2, 2, 6.0]}, ends, 256)
    assert "reads as well as with only the last 256" in alike
    nan = math.nan
    assert "cannot read beyond" in captions.in_losses({"none": [2, 2, nan]}, ends, 256)
    falls, rises = {256: 3.0, 512: 2.5}, {256: 3.0, 512: 4.0}
    assert "Improved by context beyond 256 tokens: ntk; none loses most, 1.00" in (
        captions.in_contexts({"none": rises, "ntk": falls}, 256)
    )
    assert "No method improves" in captions.in_contexts({"none": rises}, 256)
    assert "was measured with more context" in captions.in_contexts({"none": {256: 3.0}}, 256)
    spread = captions.in_entropies({"none": [1, 2.0], "ntk": [1, 3.0]})
    assert "over about 20 tokens with ntk, over 7 with none" in spread
    assert "with" not in captions.in_entropies({"none": [1, 2.0]})
    assert captions.in_wavelengths(2, 4) == "2 of 4 pairs do not finish a turn in training."
    assert "All 4 pairs finish" in captions.in_wavelengths(0, 4)
    found = {"ntk": {(256, 0.0): 0.9, (512, 0.0): 0.8}, "none": {(256, 0.0): 1, (512, 0.0): 0.1}}
    assert captions.in_passkeys(found) == "At 512 tokens ntk finds most, 80% of the key's tokens."
    poor = {name: dict.fromkeys(grid, 0.1) for name, grid in found.items()}
    assert "Read nothing into this" in captions.in_passkeys(poor)


def test_a_folder_for_figures_that_cannot_be_written_is_refused_first(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ValueError, match=r"--figures: .*taken is not a folder"):
        run(tmp_path / "no-model", 512, ["text"], figures=tmp_path / "taken")
    with pytest.raises(ValueError, match=r"--figures: .*taken is not a folder"):
        extend_and_show(
            tmp_path / "no-model", 512, [], "posenc extend", None, out=None, method=None,
            figures=tmp_path / "taken",
        )  # fmt: skip
