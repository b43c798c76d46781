"""What extend recommends, from measurements made by hand."""

import dataclasses
import math

import numpy as np
import pytest

from posenc.extend.measure.evaluation import Evaluation
from posenc.extend.measure.intervals import Estimate, estimate
from posenc.extend.options import Options
from posenc.extend.recommendation import recommend
from posenc.extend.variants.variant import Variant

QUICK = Options(windows=2, search_evaluations=0, task_trials=1)


def flat(*losses: float) -> Evaluation:
    edges = (0, 16, 32, 64, 96, 128)
    return Evaluation(edges, tuple(Estimate(x, x, x, 100) for x in losses))


def test_recommendation_weighs_short_and_long_alike_and_skips_what_stock_tools_cannot_load():
    def named(name: str, **options) -> Variant:
        return Variant(name, "", lambda: None, **options)  # type: ignore[arg-type]

    measured = {
        "none": (named("none"), flat(2, 2, 2, 8, 8)),
        "ntk": (named("ntk"), flat(2.2, 2.2, 2.2, 3, 3)),
        "linear": (named("linear"), flat(4, 4, 4, 3, 2.5)),
        "self-extend": (named("self-extend", needs_runtime=True), flat(2, 2, 2, 2, 2)),
        "dynamic": (named("dynamic", cache_safe=False), flat(2, 2, 2, 2.5, 2.5)),
    }
    name, reason = recommend(measured, 64, QUICK)
    assert name == "ntk"
    assert reason.startswith("Extend it with ntk: against the unchanged model it costs 0.20 nats")
    assert "saves 5.00 nats" in reason
    assert "self-extend reads 0.52 nats better over all positions, but no stock tool" in reason
    worse = {**measured, "self-extend": (named("self-extend", needs_runtime=True), flat(*[3] * 5))}
    assert "no stock tool runs it" not in recommend(worse, 64, QUICK)[1]
    alike = {
        **measured,
        "self-extend": (named("self-extend", needs_runtime=True), flat(2.2, 2.2, 2.2, 3, 2.97)),
    }
    assert "no stock tool runs it" not in recommend(alike, 64, QUICK)[1]
    allowed = dataclasses.replace(QUICK, allow_cache_unsafe=True)
    assert recommend(measured, 64, allowed)[0] == "dynamic"


def test_where_no_method_helps_a_window_that_does_is_named():
    measured = {
        "none": (Variant("none", "", lambda: None), flat(2, 2, 2, 8, 8)),  # type: ignore[arg-type]
        "ntk": (Variant("ntk", "", lambda: None), flat(9, 9, 9, 9, 9)),  # type: ignore[arg-type]
        "window": (Variant("window", "", lambda: None, needs_runtime=True), flat(2, 2, 2, 2, 2)),  # type: ignore[arg-type]
    }
    name, reason = recommend(measured, 64, QUICK)
    assert name == "none"
    assert reason.startswith("Do not extend this one: cutting to the last 64 tokens reads better.")
    assert "it saves 6.00 nats per token beyond, and no method saves anything" in reason


def read(count, *losses):
    """An evaluation of one bucket within 2 tokens and one beyond, in `count` documents."""
    noise = np.linspace(-0.1, 0.1, count)[:, None]
    rows = np.repeat(np.array(losses, dtype=float)[None], count, 0) + noise * [1, 1, 1, 1]
    owners = np.arange(count)[:, None].repeat(4, 1)
    means = tuple(estimate(rows[:, i : i + 2], owners[:, i : i + 2]) for i in (0, 2))
    return Evaluation((0, 2, 4), means, losses=rows)


NONE, METHOD, WINDOWED = (2.0, 2, 9, 9), (2.1, 2.1, 3, 3), (2.0, 2, 2.5, 2.5)


@pytest.mark.parametrize(
    ("count", "window", "tuned", "name", "said"),
    [
        (8, WINDOWED, None, "none", "Do not extend this one: cutting to the last 2 tokens reads"),
        (8, (2, 2, 6, 6), None, "ntk", "Extend it with ntk: it reads better than cutting"),
        (8, WINDOWED, (2, 2, 2, 2), "ntk", "Extend it with ntk, tuned: it reads better than"),
        (8, WINDOWED, (2.1, 2.1, 2.9, 2.9), "none", "Do not extend this one: cutting to the last"),
        (8, (2.1, 2.1, 3, 3), None, "none", "Do not extend this one on this evidence: ntk and"),
        (8, (2.1, 2.1, 3.02, 3.02), None, "none", "Do not extend this one on this evidence: ntk"),
        (1, WINDOWED, None, "none", "Do not extend this one: cutting to the last 2 tokens reads"),
        (1, (2.1, 2.1, 2.98, 2.98), None, "none", "Do not extend this one on this evidence: ntk"),
    ],
)
def test_the_first_sentence_says_what_to_do(count, window, tuned, name, said):
    variants = {n: Variant(n, "", lambda: None) for n in ("none", "ntk")}  # type: ignore[arg-type]
    variants["window"] = Variant("window", "", lambda: None, needs_runtime=True, window=2)  # type: ignore[arg-type]
    losses = {"none": NONE, "ntk": METHOD, "window": window}
    measured = {n: (variants[n], read(count, *losses[n])) for n in losses}
    documents = np.arange(count)[:, None].repeat(4, 1)
    after = None if tuned is None else ("ntk", read(count, *tuned))
    got, reason = recommend(measured, 2, QUICK, documents, after)
    assert got == name and reason.startswith(said)
    assert ("too few documents" in reason) == (count == 1)
    assert ("Tuning may change that" in reason) == (name == "none" and tuned is None)
    assert "see the" not in reason and "was not measured" in reason  # there are no passkeys


def test_a_table_that_ends_is_compared_with_the_window():
    cannot = Evaluation(
        (0, 2, 4), (Estimate(2, 2, 2, 2), Estimate(math.nan, math.nan, math.nan, 0))
    )
    window = Variant("window", "", lambda: None, needs_runtime=True, window=2)  # type: ignore[arg-type]
    measured = {
        "none": (Variant("none", "", lambda: None), cannot),  # type: ignore[arg-type]
        "tile": (Variant("tile", "", lambda: None), read(8, 2, 2, 2.7, 2.7)),  # type: ignore[arg-type]
        "window": (window, read(8, 2, 2, 2, 2)),
    }
    name, reason = recommend(measured, 2, QUICK, np.arange(8)[:, None].repeat(4, 1))
    assert name == "none" and reason.startswith("Do not extend this one: cutting")
    assert "tile is 0.35 nats per token worse" in reason and "reads at 2.70" in reason


def test_text_that_the_model_does_not_know_gives_no_recommendation():
    measured = {"none": (Variant("none", "", lambda: None), read(8, 8, 8, 9, 9))}  # type: ignore[arg-type]
    name, reason = recommend(measured, 2, QUICK, foreign=True)
    assert name == "" and reason.startswith("No recommendation") and "2,98" in reason
    assert recommend(measured, 2, QUICK)[0] == "none"
