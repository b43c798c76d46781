"""Which encoding for what: only what the seeds carry, with ties by name."""

import dataclasses

import pytest

from posenc.compare.judge.verdict import conclude, say_for_what
from tests.compare.test_tasks import result, study_of

NEAR = (0.50, 0.52, 0.51, 0.50, 0.52)
FAR = (0.90, 0.92, 0.91, 0.90, 0.92)
CLOSE = (0.88, 0.95, 0.90, 0.94, 0.88)


def study(*tasks, passes=True, **by_encoding):
    return study_of(
        *(
            result(name, seed, (1.0 if passes else 0.5, value), task)
            for task in tasks or ("copy",)
            for name, values in by_encoding.items()
            for seed, value in enumerate(values)
        )
    )


def said(made):
    return list(say_for_what(made, conclude(made).tasks))


def test_the_first_is_named_where_the_seeds_tell_it_from_all():
    lines = said(study(t5=FAR, rope=NEAR, nope=NEAR))
    assert lines[0].startswith("On the task copy 15 of 15 trials reached")
    assert lines[1].startswith("For copy beyond 4 symbols take t5: 0.910, 0.400 ± 0.0")
    assert len(lines) == 2


def test_a_tie_is_named_and_who_stands_behind_it():
    (_, line) = said(study(t5=FAR, alibi=CLOSE, rope=NEAR))
    assert line == (
        "For copy beyond 4 symbols the seeds cannot separate t5 0.910 and alibi 0.910; behind, as "
        "the seeds tell: rope."
    )


@pytest.mark.parametrize("seeds", [1, 2, 4])
def test_few_seeds_tell_nothing_apart_however_wide_the_gap(seeds):
    (_, line) = said(study(t5=(1.0,) * seeds, rope=(0.0,) * seeds))
    assert line == (
        "For copy beyond 4 symbols these seeds describe and do not decide, which takes 5 seeds of "
        "both: t5 1.000 and rope 0.000."
    )


def test_who_has_few_seeds_is_in_the_tie_and_hides_nobody_who_is_behind():
    (_, line) = said(study(fire=(1.0, 1.0), t5=FAR, alibi=CLOSE, rope=NEAR))
    assert line == (
        "For copy beyond 4 symbols the seeds cannot separate fire 1.000, t5 0.910 and alibi 0.910; "
        "behind, as the seeds tell: rope."
    )


def test_a_seed_that_did_not_learn_has_no_say():
    made = study(t5=NEAR, rope=CLOSE)
    worse = [
        dataclasses.replace(r, by_case=(dataclasses.replace(r.by_case[0], exact_match=0.89),
                                        dataclasses.replace(r.by_case[1], exact_match=1.0)))
        if r.config.encoding == "t5" and r.config.seed else r
        for r in made.results
    ]  # fmt: skip
    lines = said(dataclasses.replace(made, results=tuple(worse)))
    assert "t5 1/5" in lines[0]
    assert "do not decide, which takes 5 seeds of both: rope 0.910 and t5 0.500" in lines[1]


def test_where_nobody_learned_nothing_is_told():
    lines = said(study(t5=FAR, rope=NEAR, passes=False))
    assert lines[1] == "For copy beyond 4 symbols nothing here tells which to take."


def test_what_cannot_run_is_not_taken():
    made = study(learned=(1.0,) * 5, rope=NEAR)
    cannot = [
        dataclasses.replace(r, by_case=(r.by_case[0], dataclasses.replace(
            r.by_case[1], exact_match=None, token_accuracy=None, cannot="it has 10 positions"
        ))) if r.config.encoding == "learned" else r
        for r in made.results
    ]  # fmt: skip
    (_, line) = said(dataclasses.replace(made, results=tuple(cannot)))
    assert line == "For copy beyond 4 symbols only rope is left (0.510)."


@pytest.mark.parametrize(
    "far, words",
    [
        ({"t5": FAR, "rope": NEAR}, "For all tasks together take t5: 0.910, 0.400 ± 0.0"),
        ({"t5": FAR[:3], "rope": NEAR[:3]}, "For all tasks together take t5: 0.910, 0.400 ± 0.0"),
        ({"t5": FAR, "rope": CLOSE}, "For all tasks together the seeds cannot separate "),
        (
            {"t5": FAR[:2], "rope": NEAR[:2]},
            "For all tasks together these seeds describe and do not decide, which takes 3 seeds of "
            "both in each task: t5 and rope.",
        ),
    ],
)
def test_all_tasks_together_end_the_answer(far, words):
    made = study("copy", "reverse", **far)
    assert said(made)[-1].startswith(words)
    assert conclude(made).recommendation.endswith(said(made)[-1])
