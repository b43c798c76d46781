"""Reach, spread, context and what training still gains follow from the numbers."""

import contextlib
import dataclasses
import io
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from rich.console import Console

import posenc
from posenc.compare.judging.summary import (
    HALF_RATE_FRACTIONS,
    estimate_bits_of_doubling_steps,
    summarise,
)
from posenc.compare.page.report import cautions_of, report_of
from posenc.compare.progress import LiveBars, PlainLines, StudyPace
from posenc.compare.results import (
    FORMAT,
    CorpusInfo,
    LengthScore,
    Study,
    Timing,
    TrainingPoint,
    TrialResult,
)
from posenc.compare.scores import FarScore, Reading
from posenc.compare.trial.config import SCHEDULES, TrialConfig
from posenc.compare.trial.run_trial import effective_spec
from posenc.compare.trial.train import learning_rate

RESULTS = Path(__file__).parents[3] / "results"

TRIAL = TrialConfig(
    encoding="rope",
    seed=0,
    corpus="c",
    train_length=128,
    test_lengths=(128, 256, 512),
    steps=100,
    batch=2,
    width=32,
    layers=2,
    heads=2,
    kv_heads=2,
    lr=1e-3,
    device="cpu",
    precision="float32",
    torch="2",
)


def _by_length(scores):
    return tuple(
        LengthScore(n, s, None if s is not None else "it has 128 positions")
        for n, s in zip(TRIAL.test_lengths, scores, strict=True)
    )


def far_scores(scores, saved=0.0):
    """The far bytes of 256 and 512, whose loss with far context is that of the whole window."""
    return tuple(
        FarScore(length, None, None, "it has 128 positions")
        if bits is None
        else FarScore(length, bits, bits + saved)
        for length, bits in zip(TRIAL.test_lengths[1:], scores[1:], strict=True)
    )


def result(encoding, seed, scores, context=(), fall=0.05, readings=()):
    """A trial; `readings`: losses at all lengths in other readings, by their name."""
    config = dataclasses.replace(TRIAL, encoding=encoding, seed=seed)
    return TrialResult(
        config,
        parameters=1_000_000,
        training=tuple(TrainingPoint(n, 2, 2 + fall * (n < 99)) for n in (10, 50, 100)),
        by_length=_by_length(scores),
        by_context=tuple(LengthScore(n, s) for n, s in context),
        timing=Timing(100.0 * (seed + 1), 1.0, 1.0),
        far=() if context else far_scores(scores),
        readings=tuple(
            Reading(name, _by_length(losses), far_scores(losses))
            for name, losses in dict(readings).items()
        ),
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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_half_of_the_learning_rates_is_spent_at_the_fraction_of_each_schedule(schedule):
    warmup = 1.0 if schedule == "constant" else 0.05
    long = dataclasses.replace(TRIAL, steps=4000, schedule=schedule, warmup=warmup)
    spent = np.cumsum([learning_rate(long, step) for step in range(long.steps)])
    assert np.searchsorted(spent, spent[-1] / 2) / long.steps == pytest.approx(
        HALF_RATE_FRACTIONS[schedule], abs=1e-3
    )


def test_a_fall_is_that_of_the_last_doubling_of_the_learning_rates():
    curve = [(10, 6.0), (30, 5.0), (50, 4.0), (70, 3.5), (100, 3.1)]
    points = tuple(TrainingPoint(step, 9.0, loss) for step, loss in curve)
    one = dataclasses.replace(result("rope", 0, (2, 2, 2)), training=points)
    two = dataclasses.replace(result("rope", 1, (2, 2, 2)), training=points[1:4])
    first, second = 5.0 - 1.3 / 20 - 3.1, 5.0 - 1.3 / 20 - 3.5
    assert estimate_bits_of_doubling_steps([one]) == {"rope": pytest.approx(first)}
    assert estimate_bits_of_doubling_steps([one, two]) == {
        "rope": pytest.approx((first + second) / 2)
    }
    assert estimate_bits_of_doubling_steps([dataclasses.replace(one, training=points[2:])]) == {}


def test_a_fall_is_near_what_separate_runs_of_half_the_steps_lack():
    """Runs of 200 and of 400 steps at one rate, each annealed to its own end: means of three
    seeds, in bits per byte (results/LOG.md)."""
    ends_of_200_and_400 = {
        "nope": (3.139, 2.854),
        "sinusoidal": (3.057, 2.508),
        "learned": (3.004, 2.354),
        "rope": (2.448, 1.904),
        "alibi": (2.532, 2.049),
        "t5": (2.290, 1.793),
    }
    given = Study.from_json((RESULTS / "compare/study.json").read_text(encoding="utf-8"))
    fell = estimate_bits_of_doubling_steps(given.finished)
    measured = {}
    for name, (end_of_200, end_of_400) in ends_of_200_and_400.items():
        measured[name] = end_of_200 - end_of_400
    assert len(fell) == 6 and fmean(measured.values()) == pytest.approx(0.50, abs=0.01)
    assert fmean(fell.values()) == pytest.approx(0.59, abs=0.01)
    assert all(fell[name] == pytest.approx(measured[name], abs=0.2) for name in fell)


def test_what_failed_and_what_is_missing_are_listed():
    failed = TrialResult(TRIAL, reason="nan")
    given = study(failed, missing=(dataclasses.replace(TRIAL, seed=1),))
    report = report_of(given)
    assert report.tables()["failed"].rows == [["rope seed 0", "nan"]]
    missing, failed = report.cautions
    assert "1 of 2 trials have run. Missing: rope seed 1. " in missing
    assert failed == "1 trial failed; the reasons are in a table."


def test_axes_that_a_row_of_tokens_does_not_have_are_told():
    def ran(name, task):
        spec = effective_spec(
            name, posenc.create(name, posenc.ModelShape(32, 2)), posenc.ModelShape(32, 2)
        )
        config = dataclasses.replace(TRIAL, encoding=name, task=task)
        return TrialResult(config, spec=spec)

    given = study(*(ran(n, t) for n in ("rope", "axial_rope", "mrope") for t in ("text", "copy")))
    lines = [*cautions_of(given)]
    assert [line.partition(" components")[0] for line in lines] == [
        "axial_rope: a position has 2",
        "mrope: a position has 3",
    ]
    assert [*cautions_of(study(ran("axial_rope", "grid")))] == []


def tell(opened):
    with opened as watcher:
        watcher.step(TRIAL, 50, 2.5)
        watcher.step(TRIAL, 60, 2.4)
        watcher.note(TRIAL, "a [note]")
        watcher.finished(TRIAL, result("rope", 0, (2.0, None, 3.0)))


def test_plain_lines_show_loss_time_left_and_outcome_without_escapes():
    out = io.StringIO()
    tell(contextlib.nullcontext(PlainLines(Console(file=out, width=80), StudyPace([TRIAL], 1))))
    text = out.getvalue()
    assert "rope seed 0: step 60 of 100, loss 2.400 bits per byte, 0:00 left" in text
    assert "rope seed 0: a [note]" in text
    assert "done; bits per byte at 128: 2.000, 256: cannot, 512: 3.000" in text
    assert "\x1b" not in text


def test_plain_lines_show_the_time_left_for_all_trials(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("posenc.command_line.progress.time.monotonic", lambda: now[0])
    out = io.StringIO()
    others = [dataclasses.replace(TRIAL, seed=seed) for seed in (1, 2)]
    lines = PlainLines(Console(file=out, width=200), StudyPace([TRIAL, *others], 2))
    lines.finished(others[0], TrialResult(others[0], reason="out of memory"))
    lines.step(TRIAL, 10, 2.5)
    now[0] = 20.0
    lines.step(TRIAL, 20, 2.4)  # 10 steps in 10 seconds: 80 are left of it, 180 of all by 2 workers
    lines.step(others[1], 50, 2.5)  # goes on from a checkpoint, and has no pace yet
    lines.step(TRIAL, 25, 2.4)  # no other tenth
    assert (
        out.getvalue()
        .splitlines()[1]
        .endswith("per byte, 1:20 left; all trials: 1 of 3, 1:30 left")
    )
    lines.step(TRIAL, 100, 2.3)  # 10 seconds for 90 steps; 50 are left of the third trial
    assert out.getvalue().endswith(", 0:00 left; all trials: 2 of 3, 0:03 left\n")


def test_live_bars_show_sweep_and_trial_with_loss_and_time_left():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    tell(LiveBars(console, StudyPace([TRIAL], 1)))
    text = out.getvalue()
    assert "all trials" in text and "1 of 1" in text
    assert "rope seed 0: a [note]" in text and "512: 3.000" in text
