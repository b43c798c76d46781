"""How many bytes of context a row uses, against models whose context is known."""

import dataclasses
import math

import numpy as np
import pytest

from posenc.compare.judging.answer import answer, conclude
from posenc.compare.judging.context_use import (
    ContextUse,
    context_gains,
    context_use,
)
from posenc.compare.judging.sentences import sentence_on_context
from posenc.compare.page.numbers import facts_of
from posenc.compare.rows import rows_by_name
from posenc.compare.scores import FarScore, LengthScore, Reading
from posenc.statistics.seed_intervals import Gap
from tests.compare.judging.test_summary import TRIAL, result, seeds, study

TRAIN_LENGTH = 128
LENGTHS = (256, 512, 1024)


def bits(context, used, worth=0.2):
    """The loss of a byte by a model that uses `used` bytes of context, of which each doubling is
    worth `worth` bits."""
    return 4.0 - worth * np.log2(np.minimum(context, used))


def scores_of_model(used, seed, num_windows=64, worth=0.2):
    """Far scores of a model that uses `used` bytes, from losses byte by byte; all windows end at
    the same places."""
    random = np.random.default_rng(seed)
    of_window = random.normal(scale=0.3, size=num_windows)  # a text that is harder here than there
    # Far bytes with near context: each half at the end of a window of the training length.
    half = np.arange(TRAIN_LENGTH // 2, TRAIN_LENGTH)
    near = bits(np.concatenate([half, half]), used, worth).mean() + of_window
    far = {}
    for length in LENGTHS:
        context = np.arange(length - TRAIN_LENGTH, length)
        noise = random.normal(scale=0.01, size=num_windows)
        far[length] = bits(context, used, worth).mean() + of_window + noise
    return tuple(
        FarScore(n, far[n].mean(), near.mean(), None, tuple(far[n].tolist()), tuple(near.tolist()))
        for n in LENGTHS
    )


def rows_with(scores_by_seed):
    lengths = (TRAIN_LENGTH, *LENGTHS)
    results = []
    for seed, scores in enumerate(scores_by_seed):
        made = result("t5", seed, (2.0, 2.0, 2.0))
        config = dataclasses.replace(made.config, test_lengths=lengths)
        results.append(dataclasses.replace(made, config=config, far=scores))
    return rows_by_name(study(*results))["t5"]


def scores_with_little_context(used, seed, num_windows=64):
    """Scores of the same bytes with at most 16, 32 and 64 bytes of context, half of it at least."""
    random = np.random.default_rng(seed)
    of_window = random.normal(scale=0.3, size=num_windows)  # the same as in scores_of_model
    scores = []
    for longest in (16, 32, 64):
        losses = bits(np.arange(longest // 2, longest), used).mean() + of_window
        scores.append(LengthScore(longest, losses.mean(), windows=tuple(losses.tolist())))
    return tuple(scores)


@pytest.mark.parametrize(
    ("used", "more_than", "at_most"), [(8, 0, 16), (24, 16, 64), (60, 32, 128)]
)
def test_a_range_below_the_training_length_holds_what_a_model_uses(used, more_than, at_most):
    rows = rows_with([scores_of_model(used, seed) for seed in (1, 2)])
    assert context_use(rows).at_most == TRAIN_LENGTH, "without little context no more is known"
    rows = [
        dataclasses.replace(row, by_context=scores_with_little_context(used, seed))
        for row, seed in zip(rows, (1, 2), strict=True)
    ]
    use = context_use(rows)
    assert (use.more_than, use.at_most) == (more_than, at_most)
    assert use.near_length == TRAIN_LENGTH, "what far context saves is against the training length"


def test_only_readings_that_see_the_same_have_losses_with_little_context():
    by_context = scores_with_little_context(60, 1)
    trial_result = dataclasses.replace(
        result("t5", 0, (2.0, 2.0, 2.0)), far=scores_of_model(60, 1), by_context=by_context
    )
    readings = tuple(
        Reading(name, trial_result.by_length, trial_result.far) for name in ("window", "tuned")
    )
    for width, has_contexts in ((TRAIN_LENGTH, True), (TRAIN_LENGTH - 1, False)):
        config = dataclasses.replace(trial_result.config, test_window=width)
        rows = rows_by_name(
            study(dataclasses.replace(trial_result, config=config, readings=readings))
        )
        assert rows["t5"][0].by_context == by_context
        assert rows["t5 in a window"][0].by_context == (by_context if has_contexts else ())
        assert rows["t5 tuned"][0].by_context == ()
    old = dataclasses.replace(trial_result, far=())  # its losses by context are of other bytes
    assert rows_by_name(study(old))["t5"][0].by_context == ()


@pytest.mark.parametrize("used", [16, 64, 100, 200, 256, 400, 700, 4000])
def test_the_range_holds_the_context_that_a_model_uses(used):
    rows = rows_with([scores_of_model(used, seed) for seed in (1, 2)])
    use = context_use(rows)
    assert use.more_than < used
    assert use.at_most is None or used <= use.at_most or used <= TRAIN_LENGTH
    assert use.more_than in (0, 64, 128, 384) and use.at_most in (None, 128, 256, 512)
    if used >= 256:  # far from an end of a range, the range is not trivial
        assert use.more_than >= 64


def test_what_is_saved_is_the_difference_on_the_same_bytes_with_an_interval_over_windows():
    """Recomputed in numpy: the mean of paired differences, and a bootstrap of the largest."""
    by_seed = [scores_of_model(300, seed) for seed in (3, 4)]
    use = context_use(rows_with(by_seed))
    near = np.mean([scores[-1].near_windows for scores in by_seed], axis=0)
    far = {n: np.mean([s[i].windows for s in by_seed], axis=0) for i, n in enumerate(LENGTHS)}
    assert use.saved.value == pytest.approx((near - far[1024]).mean(), abs=1e-9)
    errors = (near - far[1024]).std(ddof=1) / math.sqrt(len(near))
    # For one difference t(63) has 2.00 standard errors; for all six together the interval is wider.
    assert 2.0 * errors < use.saved.half_width < 3.5 * errors


def test_a_saving_is_certain_only_outside_the_interval_above_the_margin_and_with_every_seed():
    def used(*by_seed):
        return context_use(rows_with(by_seed)).more_than

    certain = scores_of_model(4000, 1)
    assert used(certain, scores_of_model(4000, 2)) == 384
    small = [scores_of_model(4000, seed, worth=0.004) for seed in (1, 2)]
    assert used(*small) == 0  # 0.013 bits, ten standard errors
    assert used(*(scores_of_model(4000, seed, num_windows=7) for seed in (1, 2))) == 0
    worse = tuple(
        dataclasses.replace(score, far=score.far_near + 0.1, windows=tuple(score.near_windows))
        for score in certain
    )
    costs = tuple(
        dataclasses.replace(s, windows=tuple(w + 0.1 for w in s.near_windows)) for s in worse
    )
    assert used(certain, costs) == 0  # better on average


def test_few_windows_that_differ_leave_open_how_much_is_enough():
    """Far context saves nothing on average; the interval reaches beyond the margin."""
    near = np.linspace(2.0, 3.0, 16)
    signs = np.tile([1, -1], 8)

    def at_most(spread):
        far = near + spread * signs
        scores = FarScore(1024, far.mean(), near.mean(), None, tuple(far), tuple(near))
        return context_use(rows_with([(scores,)] * 2)).at_most

    assert at_most(0.01) == 128
    assert at_most(0.1) is None


def test_one_that_breaks_after_a_longer_window_uses_no_more_than_it_gained():
    """256 saves and 1,024 costs; that 512 is better than the worst says nothing."""
    near = np.linspace(2.0, 3.0, 32)
    losses = {256: near - 0.1, 512: near + 0.9, 1024: near + 0.5}
    scores = tuple(
        FarScore(n, far.mean(), near.mean(), None, tuple(far), tuple(near))
        for n, far in losses.items()
    )
    use = context_use(rows_with([scores, scores]))
    assert (use.more_than, use.at_most) == (64, 256)
    assert use.saved.value == pytest.approx(-0.5)


def test_windows_that_end_elsewhere_are_not_compared():
    """A text that is too short for the longest windows: their far bytes are others."""
    *shorter, _ = scores_of_model(4000, 1)
    elsewhere = scores_of_model(4000, 9, num_windows=32)[-1]
    use = context_use(rows_with([(*shorter, elsewhere)] * 2))
    assert (use.more_than, use.at_most) == (64, None)  # near context and 1,024 only
    assert use.saved.value == pytest.approx(elsewhere.far_near - elsewhere.far)


def test_models_that_see_both_sides_have_no_least_context():
    rows = rows_with([scores_of_model(4000, 1), scores_of_model(4000, 2)])
    masked = [
        dataclasses.replace(row, trial=dataclasses.replace(row.trial, objective="masked"))
        for row in rows
    ]
    assert context_use(masked).more_than == 0


def test_a_row_that_cannot_run_far_or_was_not_measured_uses_nothing_that_is_known():
    cannot = tuple(FarScore(n, None, None, "it has 128 positions") for n in LENGTHS)
    assert context_use(rows_with([cannot])) is None
    assert context_use(rows_with([()])) is None


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (
            ContextUse(64, 256, 128, 1024, Gap(0.12, 0.02)),
            "t5 uses more than 64 and at most 256 bytes of context, where more than 0.02 bits "
            "count; 1,024 save 0.12 ± 0.02 against 128.",
        ),
        (
            ContextUse(384, None, 128, 1024, Gap(0.12, 0.02)),
            "t5 uses more than 384 bytes of context, where more than 0.02 bits count; 1,024 save "
            "0.12 ± 0.02 against 128.",
        ),
        (
            ContextUse(0, 128, 128, 1024, Gap(-0.011, 0.003)),
            "t5 uses at most 128 bytes of context, where more than 0.02 bits count; 1,024 cost "
            "0.011 ± 0.003 against 128: near context gives its loss on far bytes.",
        ),
        (
            ContextUse(0, 128, 128, 1024, Gap(-1.8, 0.1)),
            "t5 uses at most 128 bytes of context, where more than 0.02 bits count; 1,024 cost "
            "1.80 ± 0.10 against 128.",
        ),
        (
            ContextUse(0, None, 128, 1024, Gap(0.04, 0.05)),
            "Whether t5 uses more than 128 bytes of context is open: 1,024 and 128 do not differ "
            "significantly over windows (-0.04 ± 0.05).",
        ),
    ],
    ids=["range", "more", "less", "breaks", "open"],
)
def test_the_sentence_names_the_measured_range(use, sentence):
    assert sentence_on_context("t5", use) == sentence


def test_the_answer_says_how_much_context_the_row_to_take_uses():
    def with_far(each):
        config = dataclasses.replace(each.config, test_lengths=(TRAIN_LENGTH, *LENGTHS))
        worse = 0.5 * (each.config.encoding == "nope") + each.by_length[0].bits_per_byte
        scores = tuple(
            dataclasses.replace(
                score,
                far=score.far + worse,
                far_near=score.far_near + worse,
                windows=tuple(w + worse for w in score.windows),
                near_windows=tuple(w + worse for w in score.near_windows),
            )
            for score in scores_of_model(300, config.seed)
        )
        return dataclasses.replace(each, config=config, far=scores)

    trials = [*seeds("t5", (2.0, 2.0, 2.0)), *seeds("nope", (2.5, 2.5, 2.5))]
    given = study(*map(with_far, trials))
    text = answer(given)
    assert text.startswith("Use t5: ")
    assert "t5 uses more than 128 and at most 512 bytes of context, where" in text
    in_json = facts_of(conclude(given))["context"]["t5"]
    assert (in_json["more_than"], in_json["at_most"]) == (128, 512)
    assert f"{in_json['saved']:.3f} ± {in_json['half_over_windows']:.3f}" in text
    assert "bytes of context" not in answer(study(*trials))  # no windows, no interval


def test_gains_of_old_results_are_by_context_and_by_seed():
    context = ((128, 2.0), (512, 1.9))
    given = study(
        result("t5", 0, (2, 2, 2), context),
        result("t5", 1, (2, 2, 2), ((128, 2.0), (512, 2.1))),
        *seeds("nope", (3.0, 3.0, 3.0)),
    )
    length, gains = context_gains(given, "t5")
    assert length == 512 and gains == pytest.approx([0.1, -0.1])
    assert context_gains(given, "nope")[1] == [0.0, 0.0, 0.0]
    assert max(TRIAL.test_lengths) == 512
