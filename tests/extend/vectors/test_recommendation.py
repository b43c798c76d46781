"""What is recommended for a model without a head, from ranks that were written by hand."""

import numpy as np
import pytest

from posenc.extend.measure.evaluation import Evaluation, VectorScores
from posenc.extend.options import Options
from posenc.extend.variants import Variant
from posenc.extend.vectors.recommendation import rank_difference, recommend_by_vectors

TRAINED, TARGET = 64, 128
FOUND, LOST = np.ones(16), np.arange(2.0, 18.0)
SHORT = np.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0][:, :5]
SHORT /= np.linalg.norm(SHORT, axis=-1, keepdims=True)


def variant(name, **fields):
    return Variant(name, name, lambda: None, **fields)


def measured(none, yarn, window, trained=FOUND, moved=SHORT):
    ranks = {"none": none, "yarn": yarn, "window": window}
    fields = {"window": {"needs_special_runtime": True, "window_length": TRAINED}}
    found = {}
    for name, at_target in ranks.items():
        by_length = {TRAINED: trained} | ({} if at_target is None else {TARGET: at_target})
        vectors = VectorScores(moved if name == "yarn" else SHORT, by_length)
        evaluation = Evaluation((), (), vectors=vectors)
        found[name] = (variant(name, **fields.get(name, {})), evaluation)
    return found


@pytest.mark.parametrize(
    "ranks,method,first",
    [
        (
            (LOST, FOUND, LOST),
            "yarn",
            "Extend it with yarn: among texts of 128 tokens it finds 16 of 16, ",
        ),
        ((None, FOUND, LOST), "yarn", "Extend it with yarn: "),
        (
            (LOST, LOST, FOUND),
            "window",
            "Do not extend this one: cutting to the first 64 tokens finds more than yarn",
        ),
        ((FOUND, LOST, LOST), "none", "Do not extend this one: the unchanged model finds more"),
        ((LOST, FOUND, FOUND), "none", "Do not extend this one on this evidence: yarn and "),
    ],
)
def test_what_finds_clearly_more_is_recommended(ranks, method, first):
    chosen, reason = recommend_by_vectors(measured(*ranks), TRAINED, Options())
    assert chosen == method
    assert reason.startswith(first)
    assert reason.endswith("With yarn, vectors of short texts stay as they were.")


def test_a_model_that_finds_nothing_at_its_own_length_gets_no_recommendation():
    chosen, reason = recommend_by_vectors(
        measured(LOST, FOUND, LOST, trained=LOST), TRAINED, Options()
    )
    assert chosen == ""
    assert "its vectors find 0 of 16, where chance finds one." in reason


def test_moved_vectors_are_said():
    moved = SHORT.copy()
    moved[0, 0] += 1
    moved /= np.linalg.norm(moved, axis=-1, keepdims=True)
    cosines = (SHORT * moved).sum(-1)
    _, reason = recommend_by_vectors(measured(LOST, FOUND, LOST, moved=moved), TRAINED, Options())
    said = f"a cosine of {cosines.mean():.3f} with the old ones ({cosines.min():.3f} at least)"
    assert said in reason


def test_a_length_that_cannot_be_read_counts_as_nothing_found():
    found = measured(None, FOUND, LOST)
    gain = rank_difference(found["yarn"][1], found["none"][1], TRAINED)
    assert (gain.mean, gain.low, gain.high) == (1, 1, 1)
