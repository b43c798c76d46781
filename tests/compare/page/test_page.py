"""The page of a study: the answer, the numbers, and what is missing, in a browser."""

import csv
import dataclasses
import itertools

import numpy as np
import pytest

from posenc import ModelShape, PositionEncoding
from posenc.compare import run
from posenc.compare.judging.standing import standing_at
from posenc.compare.page.figures import _merge_position_scores, half_bar
from posenc.compare.page.report import report_of
from posenc.compare.page.settings import specs_table
from posenc.compare.page.tables import describe_detectable_difference
from posenc.compare.results import (
    FORMAT,
    CorpusInfo,
    EncodingSummary,
    LengthScore,
    LengthSummary,
    PositionScore,
    Study,
    Timing,
    TrainingPoint,
    TrialResult,
)
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.run_trial import effective_spec
from posenc.files.atomic import FIGURES_MARKER
from posenc.report.figure_files import write_page
from posenc.report.html_page import page_of
from tests.browser import DESKTOP, PHONE, needs_chromium
from tests.charts import assert_drawn_from_its_table

LENGTHS = (128, 256, 512, 1024)
GROWTH = {"rope": 0.6, "alibi": 0.0, "t5": 0.2, "sinusoidal": 0.8, "learned": None, "nope": 0.1}
NASTY = "<b>x</b> & 战争与和平.txt"
REASON = "it has 128 positions"


def trial(encoding: str, seed: int) -> TrialConfig:
    return TrialConfig(
        encoding=encoding,
        seed=seed,
        corpus="0123456789abcdef",
        train_length=128,
        test_lengths=LENGTHS,
        steps=500,
        batch=32,
        width=128,
        layers=4,
        heads=4,
        kv_heads=4,
        lr=0.003,
        device="cpu",
        precision="bfloat16",
        torch="2.13.0",
    )


def loss(encoding: str, length: float, seed: int) -> float | None:
    growth = GROWTH[encoding]
    if growth is None:
        return 2.5 if length <= 128 else None
    return 2.2 + 0.02 * seed + growth * max(0.0, length / 128 - 1) ** 0.5


def result(config: TrialConfig) -> TrialResult:
    def scores() -> tuple[LengthScore, ...]:
        bits = {n: loss(config.encoding, n, config.seed) for n in LENGTHS}
        return tuple(LengthScore(n, b, None if b else REASON) for n, b in bits.items())

    edges = [0, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024]
    pieces = itertools.pairwise(edges)
    return TrialResult(
        config=config,
        parameters=853_000,
        encoding_parameters=0,
        spec={
            "class": config.encoding.upper(),
            "args": "<class 'inspect._empty'>",
            "rope_theta": "10000.0",
            "scaling": "None",
            "text": NASTY.replace("<", ""),
        },
        training=tuple(
            TrainingPoint(s, 6.0 / (1 + s / 60) + 2.1, 6.0 / (1 + s / 60) + 2.2)
            for s in range(25, 501, 25)
        ),
        by_length=scores(),
        by_position=tuple(
            PositionScore(a, b, bits + 2 / (1 + a))
            for a, b in pieces
            if (bits := loss(config.encoding, b, config.seed)) is not None
        ),
        by_context=scores(),
        timing=Timing(33_000.0, 80.0, 9.0),
    )


def summary(encoding: str) -> EncodingSummary:
    def one(length: int) -> LengthSummary:
        bits = loss(encoding, length, 0)
        if bits is None:
            return LengthSummary(length, None, None, REASON)
        return LengthSummary(length, bits + 0.01, 0.01)

    reach = {"alibi": 1024, "learned": None}.get(encoding, 128)
    return EncodingSummary(encoding, 853_000, 2, tuple(map(one, LENGTHS)), reach, 33_000.0)


def study() -> Study:
    trials = tuple(trial(e, seed) for seed in (0, 1) for e in GROWTH)
    return Study(
        format=FORMAT,
        command=f"posenc compare rope alibi --text '{NASTY}'",
        started="2026-01-31T12:00:00+00:00",
        versions={"posenc": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        hardware={"processor": "some processor", "cores": "2", "workers": "2"},
        corpus=CorpusInfo(NASTY, "0123456789abcdef", 700, 10**7, 10**6, 10**6, "by file"),
        trials=trials,
        results=tuple(map(result, trials)),
        summary=tuple(map(summary, GROWTH)),
        recommendation="Use alibi: lowest loss at 128 bytes and at 1,024.",
        limits="Two seeds, one text.",
    )


def half_finished() -> Study:
    whole = study()
    failed = dataclasses.replace(
        whole.results[1], reason=f"loss became nan at step 40 {NASTY}", training=(), by_length=()
    )
    return dataclasses.replace(
        whole, results=(whole.results[0], failed), summary=(summary("rope"),), recommendation=""
    )


def not_begun() -> Study:
    return dataclasses.replace(study(), results=(), summary=(), recommendation="")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    page_of(report_of(study())).write(path)
    return path


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, 768, DESKTOP])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_report_is_well_shown(browser, page, width, dark):
    seen = browser.open(page, width, dark=dark)
    seen.assert_well_shown(num_figures=4)
    assert seen.scrolling == []  # nor in a fold
    assert "Use alibi" in seen.text
    assert NASTY in seen.text


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_half_finished_report_is_well_shown(browser, tmp_path, width):
    page_of(report_of(half_finished())).write(tmp_path / "report.html")
    browser.open(tmp_path / "report.html", width).assert_well_shown(num_figures=4)


@needs_chromium
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_first_screen_is_the_verdict(browser, page, width):
    text = browser.open(page, width).text
    assert text.index("Use alibi") < text.index("What this cannot say") < text.index("Best first")


def test_report_repeats_the_numbers(page):
    html = page.read_text(encoding="utf-8")
    assert "<strong>2.210 tied</strong>" in html
    assert "3.249" in html  # rope at 512 bytes: 2.21 + 0.6 * sqrt(3)
    assert "853,000" in html and "25,600" in html
    assert "Every seed, and both intervals" in html and "2.200 2.220" in html
    assert "posenc compare rope alibi --text" in html
    assert "0123456789abcdef" in html and "some processor" in html


def test_report_says_why_an_encoding_cannot(page):
    html = page.read_text(encoding="utf-8")
    assert html.count("cannot<sup>") == 3
    assert html.count(f"<li>learned: {REASON}</li>") == 1


def test_unfinished_report_says_what_is_missing(tmp_path):
    page_of(report_of(half_finished())).write(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "2 of 12 trials have run" in html
    assert "t5 seed 0" in html and "nope seed 1" in html
    assert "1 trial failed" in html
    assert "loss became nan at step 40 &lt;b&gt;" in html


def test_report_of_a_study_without_results(tmp_path):
    page_of(report_of(not_begun())).write(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "0 of 12 trials have run" in html
    assert "<svg" not in html


def test_positions_are_merged_into_wider_buckets():
    fine = [PositionScore(i, i + 8, 2.0 + i / 1000) for i in range(0, 1024, 8)]
    merged = _merge_position_scores(fine, 128)
    assert 15 < len(merged) < 30
    mean = sum(score.bits_per_byte for score in fine) / len(fine)
    edges = [0.0]
    for middle, _ in merged:
        edges.append(2 * middle - edges[-1])
    assert 128 in edges and edges[-1] == 1024
    widths = [b - a for a, b in itertools.pairwise(edges)]
    weighted = sum(bits * w for (_, bits), w in zip(merged, widths, strict=True)) / 1024
    assert weighted == pytest.approx(mean)


def test_one_seed_has_no_spread(tmp_path):
    alone = dataclasses.replace(
        study(), summary=(dataclasses.replace(summary("rope"), num_seeds=1),)
    )
    seeds = tuple(r for r in alone.results if r.config.seed == 0)
    made = page_of(report_of(dataclasses.replace(alone, results=seeds))).html()
    assert "Without two seeds that differ no difference has an interval." in made


def test_one_encoding_has_no_difference():
    results = tuple(r for r in study().results if r.config.encoding == "rope")
    alone = dataclasses.replace(study(), summary=(summary("rope"),), results=results)
    assert len({r.config.seed for r in results}) > 1
    assert describe_detectable_difference(alone) == "With one encoding there is no difference."


def test_report_is_reproducible(page, tmp_path):
    page_of(report_of(study())).write(tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()


def test_what_ran_has_no_internals(page):
    html = page.read_text(encoding="utf-8")
    what = html[html.index("The settings of every") : html.index("How to repeat it")]
    assert "rope theta 10000.0" in what
    for internal in ("inspect._empty", "args", "ROPE", "class ", "scaling None"):
        assert internal not in what, internal
    assert "_empty" not in str(effective_spec("nope", PositionEncoding(), ModelShape(32, 2)))


def test_settings_that_follow_the_length_of_a_task_are_shown_for_each():
    given = study()
    config = dataclasses.replace(trial("learned", 0), task="copy")
    other = dataclasses.replace(result(config), encoding_parameters=77)
    same = result(dataclasses.replace(trial("rope", 0), task="copy"))
    rows = specs_table(dataclasses.replace(given, results=(*given.results, other, same))).rows
    assert [(row[0], row[1]) for row in rows if row[1]] == [("learned on copy", 77)]
    assert [row[0] for row in rows].count("rope") == 1 and "learned on text" in str(rows)


def test_what_was_not_checked_is_never_the_lowest():
    html = page_of(
        report_of(dataclasses.replace(study(), unchecked={"alibi": "it sees later"}))
    ).html()
    row = html[html.index("<th scope=row>alibi") :]
    assert "<strong>" not in row[: row.index("</tr>")]
    assert "alibi is compared unchecked, and its losses mean nothing: it sees later." in html


def test_what_the_curves_show_is_a_table():
    found = study()
    rows = {row[0]: row[1:] for row in report_of(found).tables()["curves"].rows}
    assert (rows["alibi"][0], rows["rope"][0], rows["learned"][0]) == (1024, 128, None)
    curves = {r.config.encoding: r.training for r in found.finished if r.config.seed == 0}
    for name, row in rows.items():
        steps, losses = zip(*((point.step, point.valid) for point in curves[name]), strict=True)
        fall = np.interp(steps[-1] / 2, steps, losses) - losses[-1]
        assert row[1].value == pytest.approx(fall)
    untold = tuple(dataclasses.replace(r, training=r.training[-1:]) for r in found.results)
    table = report_of(dataclasses.replace(found, results=untold)).tables()["curves"]
    assert {row[2] for row in table.rows} == {None}


def test_figures_are_written_with_their_numbers(tmp_path, request):
    page = page_of(report_of(study()))
    for each in page.plots():
        assert_drawn_from_its_table(each.chart)
    request.getfixturevalue("undrawn")  # what the files show is held by tests/files
    write_page(page, None, tmp_path)
    stems = {"by-length", "by-context", "by-position", "training"}
    tables = {"text", "curves", "settings", "seeds-at-128-bytes"}
    kinds = ("svg", "pdf", "png", "csv")
    written = {path.name for path in tmp_path.iterdir()}
    of_figures = {f"{stem}.{kind}" for stem in stems for kind in kinds}
    assert written == {FIGURES_MARKER, *of_figures, *(f"{name}.csv" for name in tables)}
    rows = list(csv.DictReader((tmp_path / "by-length.csv").read_text().splitlines()))
    (row,) = [r for r in rows if r["series"] == "rope" and r["test length, bytes"] == "512"]
    assert float(row["bits per byte"]) == pytest.approx(2.21 + 0.6 * 3**0.5, abs=1e-8)
    assert row["high"] == row["low"]  # copies have no interval
    names = {
        r["series"] for r in csv.DictReader((tmp_path / "training.csv").read_text().splitlines())
    }
    assert {"rope", "rope, training batches"} <= names


def test_bars_that_do_not_overlap_are_significant_and_have_a_caption():
    moved = {"rope": 0.31, "alibi": 0.004, "t5": -0.006, "nope": 0.02}

    def changed(r):
        away = moved.get(r.config.encoding, 0.1) * (1 + r.config.seed)
        scores = tuple(
            dataclasses.replace(s, bits_per_byte=s.bits_per_byte and s.bits_per_byte + away)
            for s in r.by_length
        )
        return dataclasses.replace(r, by_length=scores)

    given = dataclasses.replace(study(), results=tuple(map(changed, study().results)))
    standing = standing_at(given, 512)
    first, *others = standing.order
    for name in others:
        apart = standing.mean(name) - standing.mean(first)
        bars_overlap = apart <= half_bar(standing, name) + half_bar(standing, first)
        if abs(standing.gap(name).value) > standing.margin:
            assert bars_overlap is not ((name, first) in standing.worse_pairs), name
    assert len(standing.worse_pairs) > 5
    captions = [plot.caption for plot in page_of(report_of(given)).plots()]
    assert "Bars are half of the 95 % interval" in captions[0]
    alone = dataclasses.replace(
        given, results=tuple(r for r in given.results if r.config.seed == 0)
    )
    assert "No bars" in page_of(report_of(alone)).plots()[0].caption


def test_a_folder_for_figures_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr(
        "posenc.compare.plan.tokens.find_text", lambda *_: pytest.fail("it went on")
    )
    with pytest.raises(ValueError, match=r"--figures: .*taken is not a folder"):
        run(["rope"], text="none.txt", figures=tmp_path / "taken")
