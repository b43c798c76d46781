"""Reach, spread, context and what training still gains follow from the numbers."""

import dataclasses
import io

import pytest
from rich.console import Console

import posenc
from posenc.compare.judge.summary import (
    context_gains,
    describe_gains,
    falls,
    rises,
    summarise,
)
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


def result(encoding, seed, scores, context=(), fall=0.1):
    config = dataclasses.replace(TRIAL, encoding=encoding, seed=seed)
    by_length = tuple(
        LengthScore(n, s, None if s is not None else "it has 128 positions")
        for n, s in zip(TRIAL.test_lengths, scores, strict=True)
    )
    return TrialResult(
        config,
        parameters=1_000_000,
        training=(TrainingPoint(50, 2, 2 + fall), TrainingPoint(100, 2, 2)),
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


@pytest.mark.parametrize(("far", "short"), [(2.1, "costs 0.100"), (1.9, "saves 0.100")])
def test_what_more_context_does_is_said(far, short):
    context = ((128, 2.0), (512, far))
    given = study(*seeds("t5", (2.0, 2.0, 2.0), context=context), *seeds("nope", (3.0, 3.0, 3.0)))
    assert describe_gains(context_gains(given, "t5")) == short
    assert describe_gains(context_gains(given, "nope")) == "not measured"


def test_seeds_that_disagree_on_context_are_no_verdict():
    given = study(
        result("t5", 0, (2, 2, 2), ((128, 2.0), (512, 2.1))),
        result("t5", 1, (2, 2, 2), ((128, 2.0), (512, 1.9))),
    )
    assert describe_gains(context_gains(given, "t5")) == "seeds disagree"


def test_a_fall_is_that_of_the_last_doubling_of_the_steps():
    curve = [(10, 6.0), (30, 5.0), (50, 4.0), (70, 3.5), (100, 3.1)]
    points = tuple(TrainingPoint(step, 9.0, loss) for step, loss in curve)
    one = dataclasses.replace(result("rope", 0, (2, 2, 2)), training=points)
    two = dataclasses.replace(result("rope", 1, (2, 2, 2)), training=(points[2], points[3]))
    assert falls([one]) == {"rope": pytest.approx(0.9)}
    assert falls([one, two]) == {"rope": pytest.approx((0.9 + 0.5) / 2)}
    assert falls([dataclasses.replace(one, training=points[3:])]) == {}


def test_what_is_lost_with_length_is_by_seed_and_of_those_that_run_there():
    given = study(
        result("t5", 0, (2, 2, 2.25)),
        result("t5", 1, (2, 2, 1.75)),
        result("rope", 0, (2, 2, None)),
    )
    assert rises(given) == {"t5": [0.25, -0.25]}


def test_what_failed_and_what_is_missing_are_listed():
    failed = TrialResult(TRIAL, reason="nan")
    given = study(failed, missing=(dataclasses.replace(TRIAL, seed=1),))
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
