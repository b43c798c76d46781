"""Intervals of a mean loss over documents."""

import numpy as np
import pytest

from posenc.statistics.text_intervals import estimate_mean


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
