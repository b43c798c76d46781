"""Reach, spread and recommendation follow from the numbers."""

import dataclasses
import io

import pytest
from rich.console import Console

from posenc.compare.progress import LiveBars, PlainLines
from posenc.compare.results import FORMAT, CorpusInfo, LengthScore, Study, Timing, TrialResult
from posenc.compare.summary import recommend_encoding, summarise
from posenc.compare.tables import notes
from posenc.compare.trial import TrialConfig

TRIAL = TrialConfig(
    encoding="rope", seed=0, corpus="c", train_length=128, test_lengths=(128, 256, 512), steps=100,
    batch=2, width=32, layers=2, heads=2, kv_heads=2, lr=1e-3, device="cpu", precision="float32",
    torch="2",
)  # fmt: skip


def result(encoding, seed, scores, context=()):
    config = dataclasses.replace(TRIAL, encoding=encoding, seed=seed)
    by_length = tuple(
        LengthScore(n, s, None if s is not None else "it has 128 positions")
        for n, s in zip(TRIAL.test_lengths, scores, strict=True)
    )
    return TrialResult(
        config,
        parameters=1_000_000,
        by_length=by_length,
        by_context=tuple(LengthScore(n, s) for n, s in context),
        timing=Timing(100.0 * (seed + 1), 1.0, 1.0),
    )


def study(*results, missing=()):
    trials = tuple(r.config for r in results) + tuple(missing)
    info = CorpusInfo("text", "c", 1, 1, 1, 1, "by file")
    return Study(FORMAT, "posenc compare", "now", {}, {}, info, trials, results)


def advice(given):
    return recommend_encoding(given, summarise(given))


def test_reach_is_the_longest_length_within_5_percent_of_the_best_at_the_training_length():
    rows = summarise(
        study(
            result("rope", 0, (2.0, 2.11, 3.0)),  # 2.1 is the limit
            result("alibi", 0, (2.2, 2.1, 2.09)),  # comes within it only further out
            result("nope", 0, (2.3, 2.2, 2.3)),
            result("learned", 0, (2.05, None, None)),
        )
    )
    assert [(r.encoding, r.reach) for r in rows] == [
        ("rope", 128),
        ("alibi", 512),
        ("nope", None),
        ("learned", 128),
    ]
    assert rows[3].by_length[1].cannot == "it has 128 positions"


def test_mean_spread_and_speed_are_over_seeds():
    (row,) = summarise(
        study(result("rope", 0, (2.0, 2.1, 3.0)), result("rope", 1, (2.2, 2.2, 4.0)))
    )
    assert row.num_seeds == 2 and row.tokens_per_second == 150
    assert [s.mean for s in row.by_length] == pytest.approx([2.1, 2.15, 3.5])
    assert [s.spread for s in row.by_length] == pytest.approx([0.1, 0.05, 0.5])


def test_recommendation_names_the_far_sighted_and_the_near_best():
    given = study(
        result("rope", 0, (2.0, 2.5, 3.0)),
        result("alibi", 0, (2.06, 2.05, 2.04), context=((128, 2.06), (512, 2.07))),
    )
    text = advice(given)
    assert text.startswith("Take alibi to read beyond the training length")
    assert "up to 512; take rope (2.000 bits per byte against 2.060)" in text
    assert "nothing longer was tested" in text and "one seed has no spread" in text
    assert "512 bytes of context instead of 128 cost alibi 0.010 bits per byte" in text


def test_recommendation_where_one_is_best_everywhere():
    text = advice(study(result("t5", 0, (2.0, 2.0, 2.5)), result("nope", 0, (3.0, 3.0, 3.0))))
    assert text.startswith("Take t5: the best at the training length (2.000 bits per byte at 128)")
    assert "up to 256" in text and "nothing longer" not in text


def test_recommendation_where_nothing_reaches_beyond_training():
    text = advice(study(result("rope", 0, (2.0, 2.5, 3.0)), result("nope", 0, (2.1, 3.0, 3.0))))
    assert "no encoding here stays within 5 % of that beyond 128" in text


def test_recommendation_admits_what_seeds_do_not_tell_apart():
    given = study(
        result("rope", 0, (2.00, 2.5, 3.0)), result("rope", 1, (2.04, 2.5, 3.0)),
        result("t5", 0, (2.03, 2.03, 2.03)), result("t5", 1, (2.05, 2.04, 2.04)),
    )  # fmt: skip
    text = advice(given)
    assert text.startswith("Take t5: within the spread of the best")
    assert "the seeds cannot separate t5 from rope" in text


def test_without_finished_trials_there_is_no_advice_but_a_list_of_what_is_missing():
    failed = TrialResult(TRIAL, reason="nan")
    given = study(failed, missing=(dataclasses.replace(TRIAL, seed=1),))
    assert "nothing to recommend_encoding" in advice(given)
    assert notes(given) == [
        "rope seed 0 failed: nan",
        "missing 1 of 2 trials: rope seed 1",
    ]


def tell(watcher):
    with watcher:
        watcher.step(TRIAL, 50, 2.5)
        watcher.step(TRIAL, 60, 2.4)
        watcher.note(TRIAL, "a [note]")
        watcher.finished(TRIAL, result("rope", 0, (2.0, None, 3.0)))


def test_plain_lines_show_loss_time_left_and_outcome_without_escapes():
    out = io.StringIO()
    tell(PlainLines(Console(file=out, width=80)))
    text = out.getvalue()
    assert "rope seed 0: step 60 of 100, loss 2.400 bits per byte, 0:00 left" in text
    assert "rope seed 0: a [note]" in text
    assert "done; bits per byte at 128: 2.000, 256: cannot, 512: 3.000" in text
    assert "\x1b" not in text


def test_live_bars_show_sweep_and_trial_with_loss_and_time_left():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    tell(LiveBars(console, [TRIAL], 1))
    text = out.getvalue()
    assert "all trials" in text and "1 of 1" in text
    assert "rope seed 0: a [note]" in text and "512: 3.000" in text
