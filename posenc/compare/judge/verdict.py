"""What a study says in a few sentences, and nothing that its intervals do not carry.

Three questions are kept apart: whose loss is lowest (quality), how far an encoding keeps its own
loss (reach), and whether it gets better from more context (use).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from posenc.compare.judge import pooled
from posenc.compare.judge.standing import Standing, standing_at, who_is_first
from posenc.compare.judge.summary import mean_at, say_learned, summarise, summarise_tasks
from posenc.compare.results import EncodingSummary, Study, TaskSummary, TrialResult, labelled
from posenc.report.page.sentence import listed
from posenc.statistics.ranks import rank
from posenc.tasks.known import TASKS, TEXT

STILL_FALLING = 0.03
"""Share of the loss that a training may still lose in its last tenth."""
_LOWEST = "has the lowest loss "
_MOST_NAMES = 6
"""Encodings of a tie that are named; the table has all of them."""


def conclude(study: Study) -> Study:
    """The study with the summary and the recommendation that its results carry."""
    shown = labelled(study)
    text = shown.of_task(TEXT)
    study = replace(
        study, summary=summarise(text) if text.trials else (), tasks=summarise_tasks(shown)
    )
    said = [recommend_encoding(*without_unchecked(text, study.summary))] if text.trials else []
    said += [*say_for_what(shown, study.tasks), *warnings(shown)]
    return replace(study, recommendation=" ".join(said))


def recommend_encoding(study: Study, rows: Sequence[EncodingSummary]) -> str:
    """Which encoding to take, or why these numbers cannot tell; how far it reads, and whether more
    context helps it."""
    if not rows:
        return "No trial has finished, so there is nothing to tell."
    lengths = study.trials[0].test_lengths
    train_length, longest = study.trials[0].train_length, max(lengths)
    near = min(rows, key=lambda row: mean_at(row.by_length, train_length))
    nothing = _why_nothing(study, near)
    if nothing is not None:
        return nothing
    said = [_quality(study, rows, near, train_length, longest)]
    for row in dict.fromkeys([near, _lowest(rows, longest)]):
        said += [_reach(row, train_length, longest), _use(study, row, train_length)]
    return " ".join(filter(None, said))


def context_gains(study: Study, encoding: str) -> tuple[int, list[float]] | None:
    """The longest context measured, and for each seed the bits per byte that it saves on the same
    bytes against context of the training length; None where that was not measured."""
    train_length, found = study.trials[0].train_length, []
    for result in _of(study, encoding):
        scores = {s.length: s.bits_per_byte for s in result.by_context if s.bits_per_byte}
        far = max(scores, default=0)
        if train_length not in scores or far <= train_length:
            return None
        found.append((far, scores[train_length] - scores[far]))
    if not found or len({far for far, _ in found}) > 1:
        return None
    return found[0][0], [gain for _, gain in found]


def describe_gains(found: tuple[int, list[float]] | None) -> str:
    """What more context does, in a few words: only where the seeds agree."""
    if found is None:
        return "not measured"
    _, gains = found
    if not (all(g > 0 for g in gains) or all(g < 0 for g in gains)):
        return "seeds disagree"
    return f"{'saves' if gains[0] > 0 else 'costs'} {abs(fmean(gains)):.3f}"


def _why_nothing(study: Study, near: EncodingSummary) -> str | None:
    """Why no encoding can be preferred, or None."""
    lowest = mean_at(near.by_length, study.trials[0].train_length)
    measured = (
        f"The lowest mean loss at {study.trials[0].train_length:,} bytes, {lowest:.3f} bits per "
        f"byte, is that of {near.encoding}, which says nothing yet."
    )
    by_frequency = study.corpus.byte_entropy if study.corpus else None
    if by_frequency is not None and not lowest < by_frequency:
        return (
            "Nothing can be told: no encoding's model has learned more of this text than how "
            f"frequent each byte is, which alone gives {by_frequency:.3f} bits per byte; give more "
            f"--steps, or another --lr. {measured}"
        )
    seeds = sorted(Counter(result.config.encoding for result in study.finished).values())
    if min(seeds[-2:]) < 2:  # two encodings need two, if there are two
        return (
            "Nothing can be told apart here: with one seed no number has an interval; take three "
            f"seeds or more (posenc compare --seeds 3). {measured}"
        )
    falling = still_falling(study.finished)
    if falling is None or not falling <= STILL_FALLING:
        how = "too short to see whether it had settled"
        if falling is not None:
            how = f"still falling by {falling:.0%} in the last tenth"
        return (
            f"Nothing can be told yet: the training of {study.trials[0].steps:,} steps was {how}; "
            f"give more --steps. {measured}"
        )
    return None


def still_falling(results: Sequence[TrialResult]) -> float | None:
    """The largest share that a trial's validation loss lost in the last tenth of its steps."""
    shares = []
    for result in results:
        early = [p for p in result.training if p.step <= 0.9 * result.config.steps]
        if not early:
            return None
        last = result.training[-1].valid
        shares.append((early[-1].valid - last) / last)
    return max(shares, default=None)


def _quality(
    study: Study, rows: Sequence[EncodingSummary], near: EncodingSummary, train: int, longest: int
) -> str:
    if len(rows) == 1:
        loss = mean_at(near.by_length, train)
        return f"{near.encoding} alone was tried: {loss:.3f} bits per byte at {train:,} bytes."
    at_train, told_near = _compared(standing_at(study, train), train)
    if longest == train:
        return f"Take {near.encoding}: it {at_train}." if told_near else f"{at_train}."
    far = _lowest(rows, longest)
    at_far, told_far = _compared(standing_at(study, longest), longest)
    if near is far and told_near and told_far:
        return f"Take {near.encoding}: it {at_train} and {at_far.removeprefix(_LOWEST)}."
    parts = [
        f"{row.encoding} {words}" if told else words
        for row, words, told in ((near, at_train, told_near), (far, at_far, told_far))
    ]
    few = min(len(_of(study, row.encoding)) for row in rows) == 2
    advice = "; with two seeds only wide differences count, give --seeds 3 or more"
    said = f"{'; '.join(parts)}{advice if few and not (told_near and told_far) else ''}."
    return said if said.startswith(near.encoding) else said[0].upper() + said[1:]


def _compared(standing: Standing | None, length: int) -> tuple[str, bool]:
    """What can be said of the lowest loss at a length, and whether its seeds tell it from all
    others: then it is the end of a sentence about the best."""
    if standing is None:
        return f"at {length:,} bytes no encoding can run", False
    first, order = standing.first, standing.ranking.order
    loss = standing.mean(order[0])
    if len(order) == 1:
        return f"is the only one that can run at {length:,} bytes ({loss:.3f})", True
    if len(first) > 1:
        return f"the seeds cannot separate {_named(first)} at {length:,} bytes ({loss:.3f})", False
    gap = standing.difference(order[0], order[1])
    return (
        f"{_LOWEST}at {length:,} bytes ({loss:.3f} bits per byte, {gap.value:.3f} ± "
        f"{gap.half:.3f} below {order[1]})"
    ), True


def _named(encodings: Sequence[str]) -> str:
    """The names of a tie, the last ones as a number where there are many."""
    names, more = encodings, len(encodings) - _MOST_NAMES
    if more > 1:
        names = [*encodings[:_MOST_NAMES], f"{more} others"]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _reach(row: EncodingSummary, train_length: int, longest: int) -> str:
    if longest == train_length or row.reach is None:
        return ""
    if row.reach == train_length:
        return f"{row.encoding} does not keep its loss beyond {train_length:,} bytes."
    more = ", and nothing longer was tested" if row.reach == longest else ""
    return f"{row.encoding} keeps its own loss within 5 % up to {row.reach:,} bytes{more}."


def _use(study: Study, row: EncodingSummary, train_length: int) -> str:
    found = context_gains(study, row.encoding)
    if found is None:
        return ""
    far, gains = found
    if not (all(g > 0 for g in gains) or all(g < 0 for g in gains)):
        return f"Whether {row.encoding} uses more than {train_length:,} bytes, its seeds disagree."
    seeds = "both seeds" if len(gains) == 2 else f"all {len(gains)} seeds"
    verb, which = ("gets better", "less") if gains[0] > 0 else ("gets worse", "more")
    return (
        f"With more context it {verb}: the same bytes cost {abs(fmean(gains)):.3f} bits {which} "
        f"after {far:,} bytes than after {train_length:,}, in {seeds}."
    )


def _lowest(rows: Sequence[EncodingSummary], length: int) -> EncodingSummary:
    return min(rows, key=lambda row: mean_at(row.by_length, length))


def _of(study: Study, encoding: str) -> list[TrialResult]:
    return [r for r in study.finished if r.config.encoding == encoding]


def without_unchecked(
    study: Study, rows: Sequence[EncodingSummary]
) -> tuple[Study, list[EncodingSummary]]:
    """What a recommendation may be about."""
    left = replace(
        study,
        trials=tuple(t for t in study.trials if t.encoding not in study.unchecked),
        results=tuple(r for r in study.results if r.config.encoding not in study.unchecked),
    )
    return left, [row for row in rows if row.encoding not in study.unchecked]


def warnings(study: Study) -> list[str]:
    """A sentence about each encoding that was compared although it fails."""
    return [
        f"{encoding} is compared unchecked, and its losses mean nothing: {why}."
        for encoding, why in study.unchecked.items()
    ]


def say_for_what(study: Study, rows: Sequence[TaskSummary]) -> Iterator[str]:
    """For each task who learned it and which encoding to take for it, then for all together."""
    scores = pooled.scores_of(study)
    for task in (name for name in scores.tasks if name != TEXT):
        yield from say_learned([row for row in rows if row.task == task])
        means, gaps = pooled.task_scores(scores, task)
        length = next(trial.train_length for trial in study.trials if trial.task == task)
        shown = {name: f"{name} {mean:.3f}" for name, mean in means.items()}
        what = f"{task} beyond {length:,} {TASKS[task].counts}"
        yield _taken(what, means, gaps, shown, f"{pooled.TASK_SEEDS} seeds of both")
    if len(pooled.run_enough(scores).tasks) > 1:
        means, gaps = pooled.pooled_scores(scores)
        shown = {name: name for name in means}  # means of unequal trials do not compare
        needed = f"{pooled.POOLED_SEEDS} seeds of both in each task"
        yield _taken("all tasks together", means, gaps, shown, needed)


def _taken(
    what: str,
    means: Mapping[str, float],
    gaps: pooled.Gaps,
    shown: Mapping[str, str],
    needed: str,
) -> str:
    """The first where the seeds tell it from all others, else the tie that it stands in.

    shown: how each encoding is written in a tie. needed: the seeds without which nothing is told.
    """
    if not means:
        return f"For {what} nothing here tells which to take."
    ranking = rank(means, gaps)
    best, *others = ranking.order
    if not others:
        return f"For {what} only {best} is left ({means[best]:.3f})."
    if all(gap.half == math.inf for gap in gaps.values()):
        names = listed([shown[name] for name in ranking.order])
        return f"For {what} these seeds describe and do not decide, which takes {needed}: {names}."
    first = who_is_first(ranking)
    if len(first.names) == 1:
        gap = gaps.get((best, others[0])) or gaps[others[0], best]
        return (
            f"For {what} take {best}: {means[best]:.3f}, {abs(gap.value):.3f} ± {gap.half:.3f} "
            f"above {others[0]}."
        )
    rest = f"; behind, as the seeds tell: {listed(first.behind)}" if first.behind else ""
    tie = listed([shown[name] for name in first.names])
    return f"For {what} the seeds cannot separate {tie}{rest}."
