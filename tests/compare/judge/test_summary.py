"""Reach, spread and recommendation follow from the numbers."""

import dataclasses
import io

import pytest
from rich.console import Console

import posenc
from posenc.compare.judge.summary import summarise
from posenc.compare.judge.verdict import context_gains, describe_gains, recommend_encoding
from posenc.compare.page.progress import LiveBars, PlainLines
from posenc.compare.page.tables import notes
from posenc.compare.results import (
    FORMAT,
    CorpusInfo,
    LengthScore,
    Study,
    Timing,
    TrainingPoint,
    TrialResult,
)
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.effective_spec import effective_spec

TRIAL = TrialConfig(
    encoding="rope", seed=0, corpus="c", train_length=128, test_lengths=(128, 256, 512), steps=100,
    batch=2, width=32, layers=2, heads=2, kv_heads=2, lr=1e-3, device="cpu", precision="float32",
    torch="2",
)  # fmt: skip


def result(encoding, seed, scores, context=(), falling=0.0):
    config = dataclasses.replace(TRIAL, encoding=encoding, seed=seed)
    by_length = tuple(
        LengthScore(n, s, None if s is not None else "it has 128 positions")
        for n, s in zip(TRIAL.test_lengths, scores, strict=True)
    )
    return TrialResult(
        config,
        parameters=1_000_000,
        training=(TrainingPoint(80, 2, 2 * (1 + falling)), TrainingPoint(100, 2, 2)),
        by_length=by_length,
        by_context=tuple(LengthScore(n, s) for n, s in context),
        timing=Timing(100.0 * (seed + 1), 1.0, 1.0),
    )


OFFSETS = {"t5": (-1, 0, 1), "nope": (1, -1, 0), "rope": (0, 1, -1), "alibi": (1, 0, -1)}


def seeds(encoding, scores, apart=0.002, count=3, **more):
    """Trials around the same scores; a seed is good for one encoding and bad for another."""
    return [
        result(encoding, seed, [s and s + sign * apart for s in scores], **more)
        for seed, sign in enumerate(OFFSETS[encoding][:count])
    ]


def study(*results, missing=()):
    trials = tuple(r.config for r in results) + tuple(missing)
    info = CorpusInfo("text", "c", 1, 1, 1, 1, "by file")
    return Study(FORMAT, "posenc compare", "now", {}, {}, info, trials, results)


def advice(given):
    return recommend_encoding(given, summarise(given))


def test_reach_is_measured_against_an_encodings_own_loss():
    rows = summarise(
        study(
            result(
                "rope", 0, (2.0, 2.11, 2.0)
            ),  # 2.1 is its limit; what lies behind is not reached
            result("alibi", 0, (2.9, 2.9, 2.91)),  # poor, and flat
            result("nope", 0, (2.3, 2.4, 2.5)),
            result("learned", 0, (2.05, None, None)),
        )
    )
    assert [(r.encoding, r.reach) for r in rows] == [
        ("rope", 128),
        ("alibi", 512),
        ("nope", 256),
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


def test_the_best_everywhere_is_taken_with_its_intervals():
    text = advice(study(*seeds("t5", (2.0, 2.0, 2.0)), *seeds("nope", (3.0, 3.0, 3.0))))
    assert text.startswith(
        "Take t5: it has the lowest loss at 128 bytes (2.000 bits per byte, 1.000 ± 0.009 below "
        "nope) and at 512 bytes (2.000"
    )
    assert "keeps its own loss within 5 % up to 512 bytes, and nothing longer was tested" in text


def test_who_is_best_near_and_who_is_best_far_are_told_apart():
    text = advice(study(*seeds("rope", (2.0, 2.5, 3.0)), *seeds("alibi", (2.2, 2.2, 2.2))))
    assert text.startswith("rope has the lowest loss at 128 bytes (2.000")
    assert "; alibi has the lowest loss at 512 bytes (2.200" in text and "Take" not in text
    assert "rope does not keep its loss beyond 128 bytes" in text


@pytest.mark.parametrize("apart", [0.2, float("nan")])
def test_no_verdict_beyond_the_intervals(apart):
    given = study(*seeds("rope", (2.0, 2.5, 3.0), apart), *seeds("t5", (2.1, 2.2, 2.2), apart))
    text = advice(given)
    assert "Take" not in text and "cannot separate rope and t5 at 128 bytes" in text


def test_one_encoding_with_one_seed_does_not_silence_the_others():
    given = study(*seeds("t5", (2.0, 2.0, 2.0)), *seeds("nope", (3.0, 3.0, 3.0)))
    alone = result("alibi", 0, (2.5, 2.5, 2.5))
    text = advice(
        dataclasses.replace(
            given, trials=(*given.trials, alone.config), results=(*given.results, alone)
        )
    )
    assert "Nothing can be told apart" not in text
    assert text.startswith("The seeds cannot separate t5 and alibi at 128 bytes")


def test_one_seed_tells_nothing():
    text = advice(study(result("nope", 0, (6.870, 7, 7)), result("rope", 0, (6.872, 7, 7))))
    assert text.startswith("Nothing can be told apart here: with one seed")
    assert "Take" not in text and "says nothing yet" in text


@pytest.mark.parametrize("falling", [0.5, float("nan")])
def test_a_training_that_still_falls_tells_nothing(falling):
    given = study(
        *seeds("nope", (6, 7, 7), falling=falling), *seeds("rope", (5, 7, 7), falling=falling)
    )
    text = advice(given)
    assert text.startswith("Nothing can be told yet") and "Take" not in text
    short = [dataclasses.replace(r, training=r.training[-1:]) for r in given.results]
    assert "too short to see" in advice(study(*short))


@pytest.mark.parametrize(
    ("far", "said", "short"),
    [
        (
            2.1,
            "With more context it gets worse: the same bytes cost 0.100 bits more",
            "costs 0.100",
        ),
        (
            1.9,
            "With more context it gets better: the same bytes cost 0.100 bits less",
            "saves 0.100",
        ),
    ],
)
def test_what_more_context_does_is_said(far, said, short):
    context = ((128, 2.0), (512, far))
    given = study(*seeds("t5", (2.0, 2.0, 2.0), context=context), *seeds("nope", (3.0, 3.0, 3.0)))
    assert said in advice(given) and "in all 3 seeds" in advice(given)
    two = study(*seeds("t5", (2, 2, 2), count=2, context=context), *seeds("nope", (3, 3, 3)))
    assert "in both seeds" in advice(two)
    assert describe_gains(context_gains(given, "t5")) == short
    assert describe_gains(context_gains(given, "nope")) == "not measured"


def test_seeds_that_disagree_on_context_are_no_verdict():
    given = study(
        result("t5", 0, (2, 2, 2), ((128, 2.0), (512, 2.1))),
        result("t5", 1, (2, 2, 2), ((128, 2.0), (512, 1.9))),
    )
    assert "its seeds disagree" in advice(given) and "gets" not in advice(given)
    assert describe_gains(context_gains(given, "t5")) == "seeds disagree"


def test_two_seeds_are_told_that_they_are_few():
    close = study(*seeds("rope", (2, 2, 2), count=2), *seeds("alibi", (2.01, 2.01, 2.01), count=2))
    assert "cannot separate rope and alibi" in advice(close)
    assert "with two seeds only wide differences count, give --seeds 3 or more. " in advice(close)
    apart = study(*seeds("rope", (2, 2, 2), count=2), *seeds("alibi", (4, 4, 4), count=2))
    assert "Take rope" in advice(apart) and "--seeds" not in advice(apart)


def test_a_tie_is_named_and_a_wide_one_counted():
    many = {f"e{i}": [2.0 + 0.01 * ((i + seed) % 3) for seed in range(3)] for i in range(9)}
    given = study(*(result(n, s, [v] * 3) for n, each in many.items() for s, v in enumerate(each)))
    assert "cannot separate e0, e1, e2, e3, e4, e5 and 3 others at 128 bytes" in advice(given)


def test_no_seed_in_common_is_a_tie():
    given = study(*(result("rope", s, (2, 2, 2)) for s in (0, 1)),
                  *(result("t5", s, (9, 9, 9)) for s in (2, 3)))  # fmt: skip
    assert "cannot separate rope and t5" in advice(given) and "Take" not in advice(given)


@pytest.mark.parametrize("entropy, told", [(2.1, False), (2.0, True), (1.5, True), (None, False)])
def test_models_that_know_no_more_than_how_frequent_a_byte_is_tell_nothing(entropy, told):
    trials = study(*seeds("rope", (2.0, 2.0, 2.0), apart=0), *seeds("alibi", (4.0, 4.0, 4.0)))
    corpus = dataclasses.replace(trials.corpus, byte_entropy=entropy)
    given = dataclasses.replace(trials, corpus=corpus)
    assert ("how frequent each byte is" in advice(given)) is told
    assert ("Take " in advice(given)) is not told


def test_without_finished_trials_there_is_no_advice_but_a_list_of_what_is_missing():
    failed = TrialResult(TRIAL, reason="nan")
    given = study(failed, missing=(dataclasses.replace(TRIAL, seed=1),))
    assert "nothing to tell" in advice(given)
    assert notes(given) == ["rope seed 0 failed: nan", "missing 1 of 2 trials: rope seed 1"]


def test_axes_that_a_row_of_tokens_does_not_have_are_told():
    def ran(name, task):
        spec = effective_spec(
            name, posenc.create(name, posenc.ModelShape(32, 2)), posenc.ModelShape(32, 2)
        )
        config = dataclasses.replace(TRIAL, encoding=name, task=task)
        return TrialResult(config, spec=spec)

    given = study(*(ran(n, t) for n in ("rope", "axial_rope", "mrope") for t in ("text", "copy")))
    lines = notes(given)
    assert [line.partition(" components")[0] for line in lines] == [
        "axial_rope: a position has 2", "mrope: a position has 3",
    ]  # fmt: skip
    assert notes(study(ran("axial_rope", "grid"))) == []


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
