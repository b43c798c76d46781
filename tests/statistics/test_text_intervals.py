"""Intervals of a mean loss over documents, and over windows, held to simulations and to scipy."""

import numpy as np
import pytest
from scipy import stats

from posenc.statistics.text_intervals import estimate_mean, window_gaps


def test_the_interval_is_that_of_the_normal_distribution_for_many_documents():
    """95 %: 1.96 standard errors to each side, on average over texts. 90 % would be 1.645."""
    widths = []
    for seed in range(40):
        count = 300 + seed
        losses = np.random.default_rng(seed).normal(2.0, 0.5, size=count)
        found = estimate_mean(losses, documents=np.arange(count))
        assert found.mean == pytest.approx(losses.mean()) and found.tokens == count
        error = losses.std(ddof=1) / count**0.5
        widths.append((found.high - found.low) / 2 / error)
    # The outermost five of 200 resamplings lie a little inside.
    assert np.mean(widths) == pytest.approx(1.92, abs=0.08)


def test_documents_are_drawn_and_not_their_tokens():
    """Tokens of a document are alike: a hundred of each tell no more than one."""
    of_document = np.random.default_rng(1).normal(2.0, 0.5, size=400)
    once = estimate_mean(of_document, np.arange(400))
    often = estimate_mean(np.repeat(of_document, 100), np.repeat(np.arange(400), 100))
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=0.01)


def text(random, count, gaps):
    """Losses of windows of very different difficulty, which all encodings share."""
    hard = random.gamma(4, 0.5, size=count)
    return {
        f"e{i}": (hard + gap + 0.1 * random.normal(size=count)).tolist()
        for i, gap in enumerate(gaps)
    }


def test_intervals_of_all_pairs_hold_together_on_other_texts():
    random, held = np.random.default_rng(0), 0
    for _ in range(200):
        found = window_gaps(text(random, 64, (0.0, 0.02, 0.3, 0.3)))
        truth = {"e0": 0.0, "e1": 0.02, "e2": 0.3, "e3": 0.3}
        held += all(
            abs(g.value - truth[a] + truth[b]) <= g.half_width for (a, b), g in found.items()
        )
    assert 0.90 <= held / 200 <= 0.99


def test_a_pair_alone_has_about_scipys_interval():
    random = np.random.default_rng(1)
    losses = text(random, 400, (0.0, 0.1))
    low, high = stats.ttest_rel(losses["e1"], losses["e0"]).confidence_interval(0.95)
    gap = window_gaps(losses)["e1", "e0"]
    assert (gap.value - gap.half_width, gap.value + gap.half_width) == pytest.approx(
        (low, high), rel=0.05
    )
    assert window_gaps(losses)["e0", "e1"].value == -gap.value


def test_windows_that_are_read_by_one_encoding_only_say_nothing():
    assert window_gaps({"a": [1.0] * 9, "b": [1.0] * 10}) == {}
    assert window_gaps({"a": [1.0] * 7, "b": [2.0] * 7}) == {}
    assert window_gaps({"a": [1.0] * 9}) == {} == window_gaps({})


def test_windows_that_all_say_the_same_have_no_width():
    gap = window_gaps({"a": [1.0] * 9, "b": [2.0] * 9, "c": [1.0, 3.0] * 4 + [1.0]})["a", "b"]
    assert (gap.value, gap.half_width) == (-1.0, 0.0)
