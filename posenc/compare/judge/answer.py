"""The two lines of a study: which encoding to use, and what the study cannot say."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, median_high, stdev

from posenc.compare.judge.standing import (
    Standing,
    metric_beyond,
    standing_of_task,
    standing_of_tasks,
    standings,
)
from posenc.compare.judge.summary import learned, saved, summarise, summarise_tasks
from posenc.compare.results import Study, with_labels
from posenc.sentence import listed, phrase, speaking
from posenc.statistics.pairs import Gap, level_of
from posenc.tasks.known import TEXT

ANSWER_WORDS, LIMIT_WORDS = 60, 40
LAST_UNSCALED_T5 = 5
"""The last recipe in which `t5` meant what is `t5:unscaled=true` now."""
BASELINES = ("rope", "alibi", "nope", "t5", "sinusoidal", "learned")
"""What an encoding of the user's own is compared with: the first of these in the study."""
Said = tuple[str, Sequence[str]]
"""A sentence, and the encodings that it says to use."""
_NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")


def conclude(study: Study) -> Study:
    """Return the study with its summaries and its two lines, in English."""
    shown = with_labels(study)
    text = shown.of_task(TEXT)
    study = replace(
        study, summary=summarise(text) if text.trials else (), tasks=summarise_tasks(shown)
    )
    shown = replace(shown, summary=study.summary)
    with speaking("en"):
        return replace(study, recommendation=answer(shown), limits=limits(shown))


def answer(study: Study) -> str:
    """Say which encoding to use and why, in at most 60 words, or why none can be named."""
    return answer_and_use(study)[0]


def answer_and_use(study: Study) -> tuple[str, list[str]]:
    """Return the answer, and the encodings that it says to use."""
    if not study.finished:
        failed = _some(r.config.encoding for r in study.failed)
        none = "No trial has finished, and {names} failed." if failed else "No trial has finished."
        return phrase(none, names=failed), []
    said: list[Said] = [(each, ()) for each in _own_first(study)]
    first = {len(said)}
    overall = standing_of_tasks(study) if any(map(learned, study.finished)) else None
    if overall is not None:
        rank = phrase("lowest mean rank over {where}", where=overall.where)
        said.append(_use(phrase("Use"), phrase("Use perhaps"), [(overall, rank)]))
    if any(result.config.task == TEXT for result in study.finished):
        said += _of_text(study.of_task(TEXT), brief=overall is not None)
    if overall is None:
        said += filter(None, (_of_task(study, task) for task in study.sequence_tasks))
    if void := study.unchecked:
        first |= {len(said)}  # a warning, which is never left out
        said.append((phrase("losses mean nothing", number=len(void), names=_some(void)), ()))
    kept = _within(ANSWER_WORDS, [each for each, _ in said], first)
    words = phrase(" ").join(said[i][0] for i in kept)
    return words, [*dict.fromkeys(name for i in kept for name in said[i][1])]


def limits(study: Study) -> str:
    """Say what the study cannot say, in at most 40 words."""
    if not study.finished:
        return ""
    trials = [result.config for result in study.finished]
    steps, tasks = {trial.steps for trial in trials}, study.sequence_tasks
    size = fmean(result.parameters for result in study.finished)
    counts = Counter((trial.task, trial.encoding) for trial in trials)
    seeds = min(median_high(n for (t, _), n in counts.items() if t == each) for each, _ in counts)
    parts = [phrase("{count} seed|{count} seeds", number=seeds, count=_in_words(seeds))]
    parts += [phrase("one text")] if TEXT in {trial.task for trial in trials} else []
    if tasks:
        count = _in_words(len(tasks)).lower()
        parts.append(phrase("{count} task|{count} tasks", number=len(tasks), count=count))
    parameters = "{millions:.1f} M parameters" if size >= 5e4 else "{size:,.0f} parameters"
    parts.append(phrase(parameters, millions=size / 1e6, size=size))
    parts += [phrase("{steps:,} steps", steps=min(steps))] if len(steps) == 1 else []
    first = phrase("{facts}: {turn}.", facts=phrase(", ").join(parts), turn=_may_turn(study))
    older = any(t.encoding == "t5" and t.recipe <= LAST_UNSCALED_T5 for t in trials)
    named = [phrase("Its t5 is today's t5:unscaled=true.")] if older else []
    said = [first, *named, *_left_out(study)]
    needed = set(range(1 + len(named)))
    return phrase(" ").join(said[i] for i in _within(LIMIT_WORDS, said, needed))


def _may_turn(study: Study) -> str:
    """Say how much the loss still falls, and which differences may turn with twice the steps."""
    fell = saved(study)
    if not fell:
        return phrase("what longer training changes was not measured")
    still = phrase("loss still falls", fall=fmean(fell.values()))
    if len(fell) == 1:
        return still
    apart = max(0.01, math.sqrt(2) * stdev(fell.values()))  # the root mean square over all pairs
    return phrase("differences may turn", still=still, apart=apart)


def why_unsure(standing: Standing) -> str | None:
    """Say why no difference can be significant there and what to do; None if intervals exist."""
    pairs = standing.pairs
    if pairs.least < math.inf or len(pairs.names) < 2:
        return None
    most = max(map(len, pairs.values.values()))
    if len(set().union(*pairs.values.values())) < 2:
        return phrase("one seed has no interval: take --seeds 3")
    if pairs.level is None:
        needed = next(n for n in range(2, 99) if level_of(pairs.where, len(pairs.names), n))
        if pairs.freedom < 1 or needed <= most:
            return phrase("they have too few seeds in common: run the same seeds of all")
        return phrase("too few seeds", most=most, needed=needed)
    return phrase("the seeds are equal to the last digit, and copies are no evidence")


def _of_text(study: Study, brief: bool) -> Iterator[Said]:
    """Yield the sentences on a text: which encoding to use, or why none. brief: one sentence, next
    to those on tasks."""
    found = standings(study)
    if not found or found[0].pairs.where == "beyond":
        if names := _some(name for name in study.encodings if name not in study.unchecked):
            yield phrase("{names} can run at no tested length.", names=names), ()
        return
    near, name = found[0], found[0].order[0]
    lowest = near.mean(name)
    frequent = study.corpus.byte_entropy if study.corpus else None
    if frequent is not None and not lowest < frequent:
        numbers = {"lowest": lowest, "frequent": frequent}
        use = phrase("On text use none yet" if brief else "Use none yet")
        yield phrase("no loss below byte frequencies", use=use, name=name, **numbers), ()
        return
    if len(near.order) == 1 and not brief:
        at = "{number:.2f} at {where}"
        runs = [each for each in found if name in each.order]
        losses = _joined_by_and([phrase(at, number=s.mean(name), where=s.where) for s in runs])
        yield phrase("only one encoding", name=name, losses=losses), ()
        return
    loss = [phrase("lowest loss at {where}", where=each.where) for each in found]
    if brief:
        use, perhaps = phrase("On text use"), phrase("On text use perhaps")
        yield _use(use, perhaps, [(found[-1], loss[-1])])
        return
    loss[1:] = [phrase("lowest at {where}", where=each.where) for each in found[1:]]
    yield _use(phrase("Use"), phrase("Use perhaps"), [*zip(found, loss, strict=True)])
    yield from _another_text(found)


def _use(sure: str, unsure: str, places: Sequence[tuple[Standing, str]]) -> Said:
    """Write the sentence that names the encoding to use.

    sure, unsure: its first words if differences have intervals, and if one has none.
    places: standings, and what the first of each has.
    """
    name = _chosen([standing for standing, _ in places])
    why = next(filter(None, (why_unsure(standing) for standing, _ in places)), None)
    if name is None:  # another one at each length
        (near, _), (far, _) = places
        a, b = near.order[0], far.order[0]
        here, there = {"a": a, "here": _numbers(near, a)}, {"b": b, "there": _numbers(far, b)}
        where = {"near": near.where, "far": far.where}
        return phrase("use one up to a length", **where, **here, **there), (a, b)
    said = []
    for standing, what in places:
        if name not in standing.order:
            said.append(phrase("cannot run at {where}", where=standing.where))
        elif name == standing.order[0]:
            said.append(phrase("{what} ({numbers})", what=what, numbers=_numbers(standing, name)))
        else:
            numbers = _numbers(standing, name)
            said.append(phrase("tied for the {what} ({numbers})", what=what, numbers=numbers))
    found = _joined_by_and(said)
    if why:
        sure, found = unsure, phrase("{found}; but {why}", found=found, why=why)
    return phrase("{use} {name}: {found}.", use=sure, name=name, found=found), (name,)


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
    gaps = {other: standing.gap(other, name) for other in standing.order if other != name}
    if standing.pairs.least == math.inf:  # then all are tied
        parts += [f"{other} {_signed(gap)}" for other, gap in [*gaps.items()][:1]]
        return phrase("; ").join(parts)
    parts += [phrase("{gap}, tied", gap=f"{other} {_signed(gaps[other])}") for other in named]
    if len(named) < len(tied):
        parts.append(phrase("{count} others tied", count=len(tied) - 1))
    behind = [other for other in standing.order if (other, name) in standing.worse]
    parts += [f"{other} {_interval(gaps[other])}" for other in behind[:1]]
    return phrase("; ").join(parts)


def _another_text(standings: Sequence[Standing]) -> Iterator[Said]:
    """Name encodings whose significant difference has an interval over windows that includes 0."""
    for standing in standings:
        best = standing.order[0]
        behind = [name for name in standing.order if (name, best) in standing.worse]
        gap = standing.windows.get((behind[0], best)) if behind else None
        if gap is not None and not gap.significant:
            where = standing.where
            yield phrase("may be ahead on another text", name=behind[0], where=where), ()


def _of_task(study: Study, task: str) -> Said | None:
    """Return the sentence on one task: which encoding to use, or why none; None if none ran it."""
    standing, part = standing_of_task(study, task), study.of_task(task)
    if standing is None:
        return None
    passed = {result.config.encoding for result in part.finished if learned(result)}
    if not passed:
        return phrase("task not learned", task=task), ()
    metric = metric_beyond(task, part.trials[0].train_length)
    if len(standing.order) == 1:
        (name,) = standing.order
        score = standing.mean(name)
        return phrase("only one encoding on a task", name=name, score=score, metric=metric), ()
    highest = phrase("highest {metric}", metric=metric)
    return _use(phrase("Use"), phrase("Use perhaps"), [(standing, highest)])


def _own_first(study: Study) -> Iterator[str]:
    """Compare the user's own encodings with a baseline."""
    text = study.of_task(TEXT)
    own = [n for n in text.encodings if any(t.code for t in text.trials if t.encoding == n)]
    base = next((name for name in BASELINES if name in text.encodings and name not in own), None)
    if not own or base is None:
        return
    found = standings(text)
    for name in own:
        said = [
            phrase("{gap} at {where}", gap=_against(each, name, base), where=each.where)
            for each in found
            if {name, base} <= set(each.order)
        ]
        if said:
            yield phrase(
                "{name} - {base}: {gaps}.", name=name, base=base, gaps=_joined_by_and(said)
            )


def _against(standing: Standing, name: str, base: str) -> str:
    """Write the difference of an encoding from `base`, and whether it is tied, worse or better."""
    gap = standing.gap(name, base)
    if gap.half == math.inf:
        return _signed(gap)
    verdict = "{gap} (tied)"
    if gap.significant:
        verdict = "{gap} (worse)" if (name, base) in standing.worse else "{gap} (better)"
    return phrase(verdict, gap=_interval(gap))


def _left_out(study: Study) -> Iterator[str]:
    """Name encodings with failed trials, without a length that runs, or without a rank."""
    done = {result.config.encoding for result in study.finished}
    failed = Counter(r.config.encoding for r in study.failed)
    of, part = Counter(trial.encoding for trial in study.trials), "{name} {part} of {whole}"
    if some := [phrase(part, name=n, part=count, whole=of[n]) for n, count in failed.items()]:
        yield phrase("Failed trials: {names}.", names=_some(some))
    rows = summarise(study.of_task(TEXT))
    nowhere = [row.encoding for row in rows if all(s.mean is None for s in row.by_length)]
    if nowhere and len(nowhere) < len(rows):
        yield phrase("{names} can run at no tested length.", names=_some(nowhere))
    ranks = found.pairs.values if (found := standing_of_tasks(study)) else {}
    keys = {(c.task, c.seed, c.encoding) for c in (result.config for result in study.finished)}
    others, seeds = [n for n in done if n not in ranks], next(iter(ranks.values()), ())
    lacks = {(t, s, n) for t, _, _ in keys for s in seeds for n in others} - keys
    for name, (task, seed) in {n: (t, s) for t, s, n in sorted(lacks, reverse=True)}.items():
        trial = phrase("{name} seed {seed}", name=task, seed=seed)
        yield phrase("Not ranked: {names} ({trial} is missing).", names=name, trial=trial)


def _within(words: int, sentences: Sequence[str], first: set[int]) -> list[int]:
    """Return the numbers of the sentences in `first` and of others for which there is room."""
    kept = first & {*range(len(sentences))}
    for i in range(len(sentences)):
        if num_words(" ".join(sentences[j] for j in {*kept, i})) <= words:
            kept.add(i)
    return sorted(kept)


def num_words(text: str) -> float:
    """Count words; two Chinese characters count as one."""
    return len(text.split()) + sum("一" <= character <= "鿿" for character in text) / 2


def _some(names: Iterable[str]) -> str:
    """List at most six names, and how many others there are."""
    found = list(dict.fromkeys(names))
    more = [phrase("{count} others", count=len(found) - 5)] if len(found) > 6 else []
    return listed([*found[:5], *more] if more else found) if found else ""


def _joined_by_and(parts: Sequence[str]) -> str:
    """Return one part as it is, or two joined by "and"."""
    return parts[0] if len(parts) == 1 else phrase("{one} and {two}", one=parts[0], two=parts[1])


def _in_words(number: int) -> str:
    """Return a small number as a word."""
    return phrase(_NUMBERS[number]) if number < len(_NUMBERS) else str(number)


def _signed(gap: Gap) -> str:
    """Write a difference with its sign, and three digits if it is below 0.01."""
    digits = 2 if abs(gap.value) >= 0.01 else 3
    return f"{round(gap.value, digits) + 0.0:+.{digits}f}"  # no -0.000


def _interval(gap: Gap) -> str:
    """Write a difference and its half interval with enough digits to see whether it excludes 0."""
    near = min(abs(gap.value), gap.half, abs(abs(gap.value) - gap.half))
    digits = 2 if near >= 0.01 else 3
    return f"{gap.value:+.{digits}f} ± {gap.half:.{digits}f}"
