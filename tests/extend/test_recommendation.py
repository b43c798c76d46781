"""What extend recommends, from measurements made by hand."""

import dataclasses
import math

import numpy as np
import pytest

from posenc.extend.measure.evaluation import Evaluation
from posenc.extend.options import Options
from posenc.extend.recommendation import recommend
from posenc.extend.variants import Variant
from posenc.statistics.text_intervals import Estimate, estimate_mean

QUICK = Options(windows=2, search_evaluations=0, task_trials=1)


DOCUMENTS = np.arange(8)[:, None].repeat(128, 1)


def flat(*losses: float) -> Evaluation:
    edges = (0, 16, 32, 64, 96, 128)
    rows = np.repeat(np.array(losses, dtype=float), np.diff(edges))[None].repeat(8, 0)
    return Evaluation(edges, tuple(Estimate(x, x, x, 100) for x in losses), losses=rows)


def test_recommendation_weighs_short_and_long_alike_and_skips_what_stock_tools_cannot_load():
    def named(name: str, **options) -> Variant:
        return Variant(name, "", lambda: None, **options)  # type: ignore[arg-type]

    measured = {
        "none": (named("none"), flat(2, 2, 2, 8, 8)),
        "ntk": (named("ntk"), flat(2.2, 2.2, 2.2, 3, 3)),
        "linear": (named("linear"), flat(4, 4, 4, 3, 2.5)),
        "self-extend": (named("self-extend", needs_special_runtime=True), flat(2, 2, 2, 2, 2)),
        "dynamic": (named("dynamic", cache_safe=False), flat(2, 2, 2, 2.5, 2.5)),
    }
    name, reason = recommend(measured, 64, QUICK, DOCUMENTS)
    assert name == "ntk"
    assert reason.startswith("Extend it with ntk: it reads better than the unchanged model. ntk is")
    assert "against the unchanged model it costs 0.20 nats" in reason
    assert "saves 5.00 nats" in reason
    assert "self-extend reads 0.52 nats better over all positions, but no stock tool" in reason
    worse = {
        **measured,
        "self-extend": (named("self-extend", needs_special_runtime=True), flat(*[3] * 5)),
    }
    assert "no stock tool runs it" not in recommend(worse, 64, QUICK, DOCUMENTS)[1]
    alike = {
        **measured,
        "self-extend": (
            named("self-extend", needs_special_runtime=True),
            flat(2.2, 2.2, 2.2, 3, 2.97),
        ),
    }
    assert "no stock tool runs it" not in recommend(alike, 64, QUICK, DOCUMENTS)[1]
    allowed = dataclasses.replace(QUICK, allow_cache_unsafe=True)
    assert recommend(measured, 64, allowed, DOCUMENTS)[0] == "dynamic"


def test_where_no_method_helps_a_window_that_does_is_named():
    measured = {
        "none": (Variant("none", "", lambda: None), flat(2, 2, 2, 8, 8)),  # type: ignore[arg-type]
        "ntk": (Variant("ntk", "", lambda: None), flat(9, 9, 9, 9, 9)),  # type: ignore[arg-type]
        "window": (
            Variant("window", "", lambda: None, needs_special_runtime=True),
            flat(2, 2, 2, 2, 2),
        ),  # type: ignore[arg-type]
    }
    name, reason = recommend(measured, 64, QUICK, DOCUMENTS)
    assert name == "window"
    assert reason.startswith("Do not extend this one: cutting to the last 64 tokens reads better.")
    assert "it saves 6.00 nats per token beyond, and no method saves anything" in reason


def read(count, *losses):
    """An evaluation of one bucket within 2 tokens and one beyond, in `count` documents."""
    noise = np.linspace(-0.1, 0.1, count)[:, None]
    rows = np.repeat(np.array(losses, dtype=float)[None], count, 0) + noise * [1, 1, 1, 1]
    owners = np.arange(count)[:, None].repeat(4, 1)
    means = tuple(estimate_mean(rows[:, i : i + 2], owners[:, i : i + 2]) for i in (0, 2))
    return Evaluation((0, 2, 4), means, losses=rows)


NONE, METHOD, WINDOWED = (2.0, 2, 9, 9), (2.1, 2.1, 3, 3), (2.0, 2, 2.5, 2.5)


@pytest.mark.parametrize(
    ("count", "window", "tuned", "name", "said"),
    [
        (8, WINDOWED, None, "window", "Do not extend this one: cutting to the last 2 tokens reads"),
        (8, (2, 2, 6, 6), None, "ntk", "Extend it with ntk: it reads better than cutting"),
        (8, WINDOWED, (2, 2, 2, 2), "ntk", "Extend it with ntk, tuned: it reads better than"),
        (8, WINDOWED, (2.1, 2.1, 2.9, 2.9), "window", "Do not extend this one: cutting to the"),
        (8, (2.1, 2.1, 3, 3), None, "none", "Do not extend this one on this evidence: ntk and"),
        (8, (2.1, 2.1, 3.02, 3.02), None, "none", "Do not extend this one on this evidence: ntk"),
        (1, WINDOWED, None, "none", "Do not extend this one on this evidence: ntk and cutting"),
        (1, (2, 2, 6, 6), None, "none", "Do not extend this one on this evidence: ntk and cutting"),
        (1, (2.1, 2.1, 2.98, 2.98), None, "none", "Do not extend this one on this evidence: ntk"),
    ],
)
def test_the_first_sentence_says_what_to_do(count, window, tuned, name, said):
    variants = {n: Variant(n, "", lambda: None) for n in ("none", "ntk")}  # type: ignore[arg-type]
    variants["window"] = Variant(
        "window", "", lambda: None, needs_special_runtime=True, window_length=2
    )  # type: ignore[arg-type]
    losses = {"none": NONE, "ntk": METHOD, "window": window}
    measured = {n: (variants[n], read(count, *losses[n])) for n in losses}
    documents = np.arange(count)[:, None].repeat(4, 1)
    after = None if tuned is None else ("ntk", read(count, *tuned))
    got, reason = recommend(measured, 2, QUICK, documents, after)
    assert got == name and reason.startswith(said)
    assert ("too few documents" in reason) == (count == 1)
    assert ("Tuning may change that" in reason) == (name != "ntk" and tuned is None)
    assert "see the" not in reason and "was not measured" in reason  # there are no passkeys


def named(**losses: Evaluation):
    return {
        name: (Variant(name, "", lambda: None, needs_special_runtime=name == "window"), each)  # type: ignore[arg-type]
        for name, each in losses.items()
    }


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize(("count", "better"), [(8, 0.0), (8, 0.3), (1, 0.3), (8, 1e-4)])
def test_noise_recommends_nothing(count, better, window):
    """One of several methods is always the lowest, here by noise that differs by document."""
    documents = np.arange(count)[:, None].repeat(4, 1)
    base = read(count, 2, 2, 2, 2)
    assert base.losses is not None
    one = (np.arange(count) == 0)[:, None]
    rows = base.losses - 1e-6 + np.where(one, -better * count, better / 10)
    means = tuple(estimate_mean(rows[:, i : i + 2], documents[:, i : i + 2]) for i in (0, 2))
    measured = named(none=base, ntk=Evaluation((0, 2, 4), means, losses=rows))
    if window:
        measured |= named(window=base)
    name, reason = recommend(measured, 2, QUICK, documents)
    assert name == "none" and reason.startswith("Do not extend this one on this evidence: ntk and")
    assert "-0.00" not in reason and "better" not in reason
    assert ("too few documents" in reason) == (count == 1)


def test_a_window_that_is_lower_by_noise_is_not_named():
    measured = named(
        none=read(8, 2, 2, 2, 2), ntk=read(8, 3, 3, 3, 3), window=read(8, 2, 2, 2, 1.99)
    )
    name, reason = recommend(measured, 2, QUICK, np.arange(8)[:, None].repeat(4, 1))
    assert name == "none" and reason.startswith("Leave this one as it is")


def test_a_method_that_reads_worse_beyond_costs():
    measured = named(none=read(8, 3, 3, 3, 3), ntk=read(8, 2, 2, 3.2, 3.2))
    name, reason = recommend(measured, 2, QUICK, np.arange(8)[:, None].repeat(4, 1))
    assert name == "ntk" and "saves 1.00 nats per token within 2 tokens and costs 0.20" in reason
    measured = named(none=read(8, 3, 3, 3, 3), ntk=read(8, 2, 2, 3, 3.001))
    assert "-0.00" not in recommend(measured, 2, QUICK, np.arange(8)[:, None].repeat(4, 1))[1]


def test_a_table_that_ends_is_extended_where_no_window_can_be_measured():
    ended = Estimate(math.nan, math.nan, math.nan, 0)
    measured = named(
        none=Evaluation((0, 2, 4), (Estimate(2, 2, 2, 2), ended)), tile=read(8, 2, 2, 2.7, 2.7)
    )
    name, reason = recommend(measured, 2, QUICK, np.arange(8)[:, None].repeat(4, 1))
    assert name == "tile" and "inf" not in reason and "saves all text beyond" in reason


def test_a_table_that_ends_is_compared_with_the_window():
    cannot = Evaluation(
        (0, 2, 4), (Estimate(2, 2, 2, 2), Estimate(math.nan, math.nan, math.nan, 0))
    )
    window = Variant("window", "", lambda: None, needs_special_runtime=True, window_length=2)  # type: ignore[arg-type]
    measured = {
        "none": (Variant("none", "", lambda: None), cannot),  # type: ignore[arg-type]
        "tile": (Variant("tile", "", lambda: None), read(8, 2, 2, 2.7, 2.7)),  # type: ignore[arg-type]
        "window": (window, read(8, 2, 2, 2, 2)),
    }
    name, reason = recommend(measured, 2, QUICK, np.arange(8)[:, None].repeat(4, 1))
    assert name == "window" and reason.startswith("Do not extend this one: cutting")
    assert "tile is 0.35 nats per token worse" in reason and "reads at 2.70" in reason


def test_text_that_the_model_does_not_know_gives_no_recommendation():
    measured = {"none": (Variant("none", "", lambda: None), read(8, 8, 8, 9, 9))}  # type: ignore[arg-type]
    name, reason = recommend(measured, 2, QUICK, out_of_domain=True)
    assert name == "" and reason.startswith("No recommendation") and "2,98" in reason
    assert recommend(measured, 2, QUICK)[0] == "none"
