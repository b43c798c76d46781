"""The two lines of a study: which encoding to use, and what the study cannot say."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from posenc.compare.judge.standing import (
    Standing,
    metric_beyond,
    standing_at,
    standing_of_task,
    standing_of_tasks,
)
from posenc.compare.judge.summary import falls, learned, rises, summarise, summarise_tasks
from posenc.compare.results import Study, labelled
from posenc.sentence import listed
from posenc.statistics.pairs import Gap, level_of
from posenc.tasks.known import TEXT

ANSWER_WORDS, LIMIT_WORDS = 60, 40
BASELINES = ("rope", "alibi", "nope", "t5", "sinusoidal", "learned")
"""What an encoding of the user's own is compared with: the first of these in the study."""
_NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")


def conclude(study: Study) -> Study:
    """Return the study with its summaries and its two lines."""
    shown = labelled(study)
    text = shown.of_task(TEXT)
    study = replace(
        study, summary=summarise(text) if text.trials else (), tasks=summarise_tasks(shown)
    )
    shown = replace(shown, summary=study.summary)
    return replace(study, recommendation=answer(shown), limits=limits(shown))


def answer(study: Study) -> str:
    """Say which encoding to use and why, in at most 60 words, or why none can be named."""
    if not study.finished:
        failed = _some(r.config.encoding for r in study.failed)
        return f"No trial has finished{f', and {failed} failed' if failed else ''}."
    own = [*_own_first(study)]
    said = [*own]
    overall = standing_of_tasks(study)
    if overall is not None:
        said.append(_use("", overall, [(overall, "lowest mean rank over {}")]))
    if any(result.config.task == TEXT for result in study.finished):
        said += _of_text(study.of_task(TEXT), brief=overall is not None)
    if overall is None:
        said += filter(None, (_of_task(study, task) for task in study.drawn))
    void = [f"The losses of {name} mean nothing: it fails a check." for name in study.unchecked]
    return _within(ANSWER_WORDS, [*said, *void], first=min(len(own), len(said) - 1))


def limits(study: Study) -> str:
    """Say what the study cannot say, in at most 40 words."""
    if not study.finished:
        return ""
    trials = [result.config for result in study.finished]
    steps, tasks = {trial.steps for trial in trials}, study.drawn
    size = fmean(result.parameters for result in study.finished)
    parts = [_count(len({trial.seed for trial in trials}), "seed")]
    parts += ["one text"] if TEXT in {trial.task for trial in trials} else []
    parts += [_count(len(tasks), "task").lower()] if tasks else []
    parts += [f"{size / 1e6:.1f} M parameters" if size >= 5e4 else f"{size:,.0f} parameters"]
    parts += [f"{min(steps):,} steps"] if len(steps) == 1 else []
    return _within(LIMIT_WORDS, [f"{', '.join(parts)}: {_may_turn(study)}.", *_left_out(study)])


def _may_turn(study: Study) -> str:
    """Say how much the loss still falls, and which differences may turn with twice the steps."""
    fell = falls(study.of_task(TEXT).finished)
    if not fell:
        return "what longer training changes was not measured"
    still = f"the loss still falls {fmean(fell.values()):.2f} bits per doubling of the steps"
    if len(fell) == 1:
        return still
    apart = max(0.01, math.sqrt(2) * stdev(fell.values()))  # the root mean square over all pairs
    return f"{still}, so differences under {apart:.2f} may turn with twice the steps"


def why_unsure(standing: Standing) -> str | None:
    """Say why no difference can be significant there and what to do; None if intervals exist."""
    pairs = standing.pairs
    if pairs.least < math.inf or len(pairs.names) < 2:
        return None
    most = max(map(len, pairs.values.values()))
    if len(set().union(*pairs.values.values())) < 2:
        return "one seed has no interval: take --seeds 3"
    if pairs.freedom < 1:
        return "they have too few seeds in common: run the same seeds of all"
    if pairs.level is None:
        needed = next(n for n in range(2, 99) if level_of(pairs.where, len(pairs.names), n))
        return f"{most} seeds cannot decide this: take --seeds {needed}"
    return "the seeds are equal to the last digit, and copies are no evidence"


def _of_text(study: Study, brief: bool) -> Iterator[str]:
    config = study.trials[0]
    near = standing_at(study, config.train_length)
    far = standing_at(study, max(config.test_lengths))
    if near is None:
        yield f"{_some(study.encodings)} can run at no tested length."
        return
    lowest = near.mean(near.order[0])
    frequent = study.corpus.byte_entropy if study.corpus else None
    if frequent is not None and not lowest < frequent:
        yield (
            f"Use none yet: the lowest loss, {near.order[0]}'s {lowest:.2f} bits per byte, is not "
            f"below {frequent:.2f}, which knowing how frequent each byte is gives. Give more "
            "--steps."
        )
        return
    places = [(each, "lowest loss at {}") for each in (near, far) if each is not None]
    places = places[:1] if near.where == places[-1][0].where else places
    if len(near.order) == 1 and not brief:
        losses = " and ".join(
            f"{each.mean(near.order[0]):.2f} at {each.where}"
            for each, _ in places
            if near.order[0] in each.order
        )
        yield f"{near.order[0]} is the only encoding: {losses} (bits per byte). Add another."
        return
    yield _use("On text u" if brief else "", places[-1][0], places[-1:] if brief else places)
    if not brief:
        yield from _another_text(places)
        yield from _with_length(study)


def _use(opening: str, chosen_by: Standing, places: Sequence[tuple[Standing, str]]) -> str:
    """Write the sentence that names the encoding to use.

    opening: "" or the start of the sentence with the first letter of "use".
    places: standings, and what the first of each has, with room for where.
    """
    name = _chosen([standing for standing, _ in places])
    unsure = next(filter(None, (why_unsure(standing) for standing, _ in places)), None)
    if name is None:  # another one at each length
        (near, _), (far, _) = places
        a, b = near.order[0], far.order[0]
        first = f"Use {a} up to {near.where} (lowest loss: {_numbers(near, a)})"
        return f"{first} and {b} for {far.where} ({_numbers(far, b)})."
    said = []
    for standing, what in places:
        if name not in standing.order:
            said.append(f"cannot run at {standing.where}")
            continue
        tied = "" if name == standing.order[0] else "tied for the "
        shown = what if not said else what.replace("loss ", "")
        said.append(f"{tied}{shown.format(standing.where)} ({_numbers(standing, name)})")
    start = f"{opening}se {name}" if opening else f"Use {name}"
    if unsure:
        return f"{start.replace('se ', 'se perhaps ', 1)}: {' and '.join(said)}; but {unsure}."
    return f"{start}: {' and '.join(said)}."


def _chosen(standings: Sequence[Standing]) -> str | None:
    """Return the encoding that is first at the longest length and tied elsewhere, or the
    reverse, or else tied everywhere; None if there is none."""
    *_, last = standings
    tied = set.intersection(*(set(standing.first) for standing in standings))
    for standing in reversed(standings):
        if standing.order[0] in tied:
            return standing.order[0]
    return next((name for name in last.order if name in tied), None)


def _numbers(standing: Standing, name: str) -> str:
    """Write the mean of an encoding, those tied with it, and by how much the next one is worse."""
    parts = [f"{standing.mean(name):.2f}"]
    tied = [other for other in standing.first if other != name]
    named = tied if len(tied) <= 2 else tied[:1]
    gaps = {other: standing.pairs.gap(other, name) for other in standing.order if other != name}
    if standing.pairs.least == math.inf:  # then all are tied
        named, tied = [*gaps][:1], [*gaps][:1]
        return "; ".join([*parts, *(f"{other} {_signed(gaps[other])}" for other in named)])
    parts += [f"{other} {_signed(gaps[other])}, tied" for other in named]
    parts += [f"{len(tied) - 1} others tied"] if len(named) < len(tied) else []
    behind = [other for other in standing.order if (other, name) in standing.worse]
    parts += [f"{other} {_interval(gaps[other])}" for other in behind[:1]]
    return "; ".join(parts)


def _another_text(places: Sequence[tuple[Standing, str]]) -> Iterator[str]:
    """Name encodings whose significant difference has an interval over windows that includes 0."""
    for standing, _ in places:
        best = standing.order[0]
        behind = [name for name in standing.order if (name, best) in standing.worse]
        gap = standing.windows.get((behind[0], best)) if behind else None
        if gap is not None and not gap.significant:
            yield f"On another text like this one {behind[0]} may be ahead at {standing.where}."


def _with_length(study: Study) -> Iterator[str]:
    """Name the encodings whose loss does not rise with length."""
    found = rises(study)
    if len(found) < 2 or max(study.trials[0].test_lengths) == study.trials[0].train_length:
        return
    kept = [name for name, each in found.items() if max(each) <= 0]
    if not kept:
        least = min(found, key=lambda name: fmean(found[name]))
        yield f"All get worse with length, {least} least ({fmean(found[least]):+.2f})."
    elif len(kept) == 1:
        yield f"{kept[0]} is the only one that does not get worse with length."
    elif len(kept) == len(found):
        yield "None gets worse with length."
    else:
        yield f"{_some(kept)} do not get worse with length."


def _of_task(study: Study, task: str) -> str | None:
    standing, part = standing_of_task(study, task), study.of_task(task)
    if standing is None:
        return None
    passed = {result.config.encoding for result in part.finished if learned(result)}
    if not passed:
        return f"No trial has learned {task}, so nothing is said of it: give more --steps."
    metric = metric_beyond(task, part.trials[0].train_length)
    if len(standing.order) == 1:
        (name,) = standing.order
        return f"{name} is the only encoding: {standing.mean(name):.2f} {metric}. Add another."
    return _use("", standing, [(standing, f"highest {metric}")])


def _own_first(study: Study) -> Iterator[str]:
    """Compare the user's own encodings with a baseline."""
    text = study.of_task(TEXT)
    own = [n for n in text.encodings if any(t.code for t in text.trials if t.encoding == n)]
    base = next((name for name in BASELINES if name in text.encodings and name not in own), None)
    if not own or base is None:
        return
    lengths = dict.fromkeys([text.trials[0].train_length, max(text.trials[0].test_lengths)])
    standings = list(filter(None, (standing_at(text, length) for length in lengths)))
    for name in own:
        said = [
            f"{_against(standing, name, base)} at {standing.where}"
            for standing in standings
            if {name, base} <= set(standing.order)
        ]
        if said:
            yield f"{name} - {base}: {' and '.join(said)}."


def _against(standing: Standing, name: str, base: str) -> str:
    gap = standing.pairs.gap(name, base)
    if gap.half == math.inf:
        return _signed(gap)
    verdict = "tied"
    if gap.significant:
        verdict = "worse" if (name, base) in standing.worse else "better"
    return f"{_interval(gap)} ({verdict})"


def _left_out(study: Study) -> Iterator[str]:
    """Name encodings without a finished trial, and those that run at no length."""
    done = {result.config.encoding for result in study.finished}
    failed = dict.fromkeys(r.config.encoding for r in study.failed)
    gone = [name for name in failed if name not in done]
    if gone:
        yield f"{_some(gone)} failed and {'is' if len(gone) == 1 else 'are'} left out."
    read = {True: set[str](), False: set[str]()}
    for result in study.of_task(TEXT).finished:
        known = any(score.bits_per_byte is not None for score in result.by_length)
        read[known].add(result.config.encoding)
    nowhere = [name for name in study.encodings if name in read[False] - read[True]]
    if nowhere and read[True]:
        yield f"{_some(nowhere)} can run at no tested length."


def _within(words: int, sentences: Sequence[str], first: int = 0) -> str:
    """Join the sentence number `first` and those of the others for which there is room."""
    kept = {first}
    for i in range(len(sentences)):
        if len(" ".join(sentences[j] for j in {*kept, i}).split()) <= words:
            kept.add(i)
    return " ".join(sentences[i] for i in sorted(kept))


def _some(names: Iterable[str]) -> str:
    """List at most six names, and how many others there are."""
    found = list(dict.fromkeys(names))
    more = [f"{len(found) - 5} others"] if len(found) > 6 else []
    return listed([*found[:5], *more] if more else found) if found else ""


def _count(number: int, noun: str) -> str:
    word = _NUMBERS[number] if number < len(_NUMBERS) else str(number)
    return f"{word} {noun}{'' if number == 1 else 's'}"


def _signed(gap: Gap) -> str:
    digits = 2 if abs(gap.value) >= 0.01 else 3
    return f"{round(gap.value, digits) + 0.0:+.{digits}f}"  # no -0.000


def _interval(gap: Gap) -> str:
    """Write a difference and its half interval with enough digits to see whether it excludes 0."""
    near = min(abs(gap.value), gap.half, abs(abs(gap.value) - gap.half))
    digits = 2 if near >= 0.01 else 3
    return f"{gap.value:+.{digits}f} ± {gap.half:.{digits}f}"
