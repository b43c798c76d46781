"""The two lines of a study: which encoding to use, and what the study cannot say."""

import itertools
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
from posenc.compare.judge.summary import (
    bits_saved_by_doubling,
    has_learned,
    summarise,
    summarise_tasks,
)
from posenc.compare.results import Study, with_labels
from posenc.compare.trial.config import TrialConfig
from posenc.sentence import join_names
from posenc.statistics.pairs import Gap, significance_level
from posenc.tasks.known import TEXT

ANSWER_WORDS, LIMIT_WORDS = 60, 40
"""The maximum of words in the answer and in the line of limits, so that both are read: chosen."""
LAST_UNSCALED_T5 = 5
"""The last recipe in which `t5` meant what is `t5:unscaled=true` now."""
BASELINES = ("rope", "alibi", "nope", "t5", "sinusoidal", "learned")
"""What an encoding of the user's own is compared with: the first of these in the study."""
Sentence = tuple[str, Sequence[str]]
"""A sentence, and the encodings that it says to use."""
_NUMBER_WORDS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
)


def conclude(study: Study) -> Study:
    """Return the study with its summaries, its recommendation and its limits."""
    shown = with_labels(study)
    text = shown.of_task(TEXT)
    study = replace(
        study, summary=summarise(text) if text.trials else (), tasks=summarise_tasks(shown)
    )
    shown = replace(shown, summary=study.summary)
    return replace(study, recommendation=answer(shown), limits=limits(shown))


def answer(study: Study) -> str:
    """Return the recommendation: which encoding to use and why, in at most ANSWER_WORDS words, or
    why none can be named."""
    return answer_and_use(study)[0]


def answer_and_use(study: Study) -> tuple[str, list[str]]:
    """Return the recommendation, and the encodings that it says to use."""
    if not study.finished:
        failed = _list_up_to_six(r.config.encoding for r in study.failed)
        if failed:
            return f"No trial has finished, and {failed} failed.", []
        return "No trial has finished.", []
    sentences: list[Sentence] = [(text, ()) for text in _sentences_on_own_encodings(study)]
    # The next sentence, which names the encoding to use, is never left out.
    needed = {len(sentences)}
    overall = standing_of_tasks(study) if any(map(has_learned, study.finished)) else None
    if overall is not None:
        rank = f"lowest mean rank over {overall.where}"
        sentences.append(_recommend("Use", "Use perhaps", [(overall, rank)]))
    if any(result.config.task == TEXT for result in study.finished):
        sentences += _sentences_on_text(study.of_task(TEXT), brief=overall is not None)
    if overall is None:
        on_tasks = (_sentence_on_task(study, task) for task in study.sequence_tasks)
        sentences += filter(None, on_tasks)
    if unchecked := study.unchecked:
        needed |= {len(sentences)}  # nor is this warning
        names = _list_up_to_six(unchecked)
        fail = "it fails" if len(unchecked) == 1 else "they fail"
        warning = f"The losses of {names} mean nothing: {fail} a check."
        sentences.append((warning, ()))
    kept = _select_within(ANSWER_WORDS, [text for text, _ in sentences], needed)
    recommendation = " ".join(sentences[i][0] for i in kept)
    return recommendation, [*dict.fromkeys(name for i in kept for name in sentences[i][1])]


def limits(study: Study) -> str:
    """Return what the study leaves open, in at most LIMIT_WORDS words: its few seeds, texts and
    tasks, its small model, its short training, and encodings that are not in the verdict."""
    if not study.finished:
        return ""
    trials = [result.config for result in study.finished]
    steps, tasks = {trial.steps for trial in trials}, study.sequence_tasks
    size = fmean(result.parameters for result in study.finished)
    seeds = _fewest_usual_seeds(trials)
    parts = [f"{_number_word(seeds).capitalize()} {'seed' if seeds == 1 else 'seeds'}"]
    parts += ["one text"] if TEXT in {trial.task for trial in trials} else []
    if tasks:
        count = _number_word(len(tasks))
        parts.append(f"{count} {'task' if len(tasks) == 1 else 'tasks'}")
    parameters = f"{size / 1e6:.1f} M" if size >= 5e4 else f"{size:,.0f}"
    parts.append(f"{parameters} parameters")
    parts += [f"{min(steps):,} steps"] if len(steps) == 1 else []
    facts = ", ".join(parts)
    first = f"{facts}: {_effect_of_longer_training(study)}."
    older = any(t.encoding == "t5" and t.recipe <= LAST_UNSCALED_T5 for t in trials)
    named = ["Its t5 is today's t5:unscaled=true."] if older else []
    sentences = [first, *named, *_sentences_on_exclusions(study)]
    needed = set(range(1 + len(named)))
    kept = _select_within(LIMIT_WORDS, sentences, needed)
    return " ".join(sentences[i] for i in kept)


def _fewest_usual_seeds(trials: Sequence[TrialConfig]) -> int:
    """Return how many seeds an encoding usually has (the median over the encodings), for the task
    that has the fewest."""
    seeds_by_task: dict[str, Counter[str]] = {}
    for trial in trials:
        seeds_by_task.setdefault(trial.task, Counter())[trial.encoding] += 1
    return min(median_high(seeds.values()) for seeds in seeds_by_task.values())


def _effect_of_longer_training(study: Study) -> str:
    """Return in words how much the loss still falls with twice the steps, and which differences of
    encodings could change their sign by then."""
    fell = bits_saved_by_doubling(study)
    if not fell:
        return "what longer training changes was not measured"
    still = f"the loss still falls {fmean(fell.values()):.2f} bits per doubling of the steps"
    if len(fell) == 1:
        return still
    # The root mean square over all pairs; at least the last digit that is shown.
    apart = max(0.01, math.sqrt(2) * stdev(fell.values()))
    return f"{still}, so differences under {apart:.2f} may turn with twice the steps"


def why_unsure(standing: Standing) -> str | None:
    """Return why no difference in a standing can be significant and what to do; None if intervals
    exist."""
    pairs = standing.pairs
    if pairs.least < math.inf or len(pairs.names) < 2:
        return None
    most = max(map(len, pairs.values.values()))
    if len(set().union(*pairs.values.values())) < 2:
        return "one seed has no interval: take --seeds 3"
    if pairs.level is None:
        # With the most seeds of the table, fewer than 99, there is a level.
        needed = next(
            n for n in range(2, 99) if significance_level(pairs.where, len(pairs.names), n)
        )
        if pairs.freedom < 1 or needed <= most:
            return "they have too few seeds in common: run the same seeds of all"
        return f"{most} seeds cannot decide this: take --seeds {needed}"
    return "the seeds are equal to the last digit, and copies are no evidence"


def _sentences_on_text(study: Study, brief: bool) -> Iterator[Sentence]:
    """Yield the sentences on a text: which encoding to use, or why none.

    study: its part on text.
    brief: yield one sentence only, because others are on tasks.
    """
    at_lengths = standings(study)
    if not at_lengths or at_lengths[0].pairs.where == "beyond":
        if names := _list_up_to_six(
            name for name in study.encodings if name not in study.unchecked
        ):
            yield f"{names} can run at no tested length.", ()
        return
    near, name = at_lengths[0], at_lengths[0].order[0]
    lowest = near.mean(name)
    frequent = study.corpus.byte_entropy if study.corpus else None
    if frequent is not None and not lowest < frequent:
        use = "On text use none yet" if brief else "Use none yet"
        yield (
            (
                f"{use}: even the lowest loss ({name}, {lowest:.2f} bits per byte) is not below "
                f"{frequent:.2f}, the loss of predicting from byte frequencies alone. Give more "
                "--steps."
            ),
            (),
        )
        return
    if len(near.order) == 1 and not brief:
        runs = [each for each in at_lengths if name in each.order]
        losses = _joined_by_and([f"{s.mean(name):.2f} at {s.where}" for s in runs])
        yield f"{name} is the only encoding: {losses} (bits per byte). Add another.", ()
        return
    loss = [f"lowest loss at {each.where}" for each in at_lengths]
    if brief:
        use, perhaps = "On text use", "On text use perhaps"
        yield _recommend(use, perhaps, [(at_lengths[-1], loss[-1])])
        return
    loss[1:] = [f"lowest at {each.where}" for each in at_lengths[1:]]
    yield _recommend("Use", "Use perhaps", [*zip(at_lengths, loss, strict=True)])
    yield from _sentences_on_who_may_lead_elsewhere(at_lengths)


def _recommend(sure: str, unsure: str, places: Sequence[tuple[Standing, str]]) -> Sentence:
    """Return the sentence that names the encoding to use.

    sure, unsure: its first words if differences have intervals, and if one has none.
    places: standings, and what the first of each has.
    """
    name = _choose_encoding([standing for standing, _ in places])
    why = next(filter(None, (why_unsure(standing) for standing, _ in places)), None)
    if name is None:  # another one at each length
        (near, _), (far, _) = places
        a, b = near.order[0], far.order[0]
        here = _mean_and_gaps(near, a)
        there = _mean_and_gaps(far, b)
        text = (
            f"Use {a} up to {near.where} (lowest loss: {here}) and {b} for {far.where} ({there})."
        )
        return text, (a, b)
    reasons = []
    for standing, what in places:
        if name not in standing.order:
            reasons.append(f"cannot run at {standing.where}")
        elif name == standing.order[0]:
            reasons.append(f"{what} ({_mean_and_gaps(standing, name)})")
        else:
            numbers = _mean_and_gaps(standing, name)
            reasons.append(f"tied for the {what} ({numbers})")
    text = _joined_by_and(reasons)
    if why:
        sure, text = unsure, f"{text}; but {why}"
    return f"{sure} {name}: {text}.", (name,)


def _choose_encoding(standings: Sequence[Standing]) -> str | None:
    """Return the encoding to use at all of these places: the one that is first at the longest
    length and tied for the best elsewhere, or the reverse, or else one that is tied everywhere;
    None if there is none."""
    *_, last = standings
    tied = set.intersection(*(set(standing.first) for standing in standings))
    for standing in reversed(standings):
        if standing.order[0] in tied:
            return standing.order[0]
    return next((name for name in last.order if name in tied), None)


def _mean_and_gaps(standing: Standing, name: str) -> str:
    """Return the mean of an encoding as text, the encodings tied with it, and by how much the next
    one is worse: `2.31; alibi +0.01 ± 0.02, tied; nope +0.20 ± 0.05`."""
    parts = [f"{standing.mean(name):.2f}"]
    tied = [other for other in standing.first if other != name]
    named = tied if len(tied) <= 2 else tied[:1]
    gaps = {other: standing.gap(other, name) for other in standing.order if other != name}
    if standing.pairs.least == math.inf:  # then all are tied
        parts += [f"{other} {_with_sign(gap)}" for other, gap in [*gaps.items()][:1]]
        return "; ".join(parts)
    parts += [f"{other} {_with_sign(gaps[other])}, tied" for other in named]
    if len(named) < len(tied):
        parts.append(f"{len(tied) - 1} others tied")
    behind = [other for other in standing.order if (other, name) in standing.worse]
    parts += [f"{other} {_with_interval(gaps[other])}" for other in behind[:1]]
    return "; ".join(parts)


def _sentences_on_who_may_lead_elsewhere(standings: Sequence[Standing]) -> Iterator[Sentence]:
    """Yield a sentence for each standing whose next encoding is significantly worse by seeds but
    may be ahead on another text: the interval over windows of the text includes 0."""
    for standing in standings:
        best = standing.order[0]
        behind = [name for name in standing.order if (name, best) in standing.worse]
        gap = standing.windows.get((behind[0], best)) if behind else None
        if gap is not None and not gap.significant:
            where = standing.where
            yield f"On another text like this one {behind[0]} may be ahead at {where}.", ()


def _sentence_on_task(study: Study, task: str) -> Sentence | None:
    """Return the sentence on one task: which encoding to use, or why none; None if none ran it."""
    standing, part = standing_of_task(study, task), study.of_task(task)
    if standing is None:
        return None
    passed = {result.config.encoding for result in part.finished if has_learned(result)}
    if not passed:
        return f"No trial has learned {task}, so nothing is said of it: give more --steps.", ()
    metric = metric_beyond(task, part.trials[0].train_length)
    if len(standing.order) == 1:
        (name,) = standing.order
        score = standing.mean(name)
        return f"{name} is the only encoding: {score:.2f} {metric}. Add another.", ()
    highest = f"highest {metric}"
    return _recommend("Use", "Use perhaps", [(standing, highest)])


def _sentences_on_own_encodings(study: Study) -> Iterator[str]:
    """Yield a sentence for each of the user's own encodings: its difference from the first of
    BASELINES in the study, at the training length and at the longest."""
    text = study.of_task(TEXT)
    own = [n for n in text.encodings if any(t.code for t in text.trials if t.encoding == n)]
    base = next((name for name in BASELINES if name in text.encodings and name not in own), None)
    if not own or base is None:
        return
    at_lengths = standings(text)
    for name in own:
        gaps = [
            f"{_gap_and_verdict(each, name, base)} at {each.where}"
            for each in at_lengths
            if {name, base} <= set(each.order)
        ]
        if gaps:
            yield f"{name} - {base}: {_joined_by_and(gaps)}."


def _gap_and_verdict(standing: Standing, name: str, base: str) -> str:
    """Return the difference of an encoding from `base` as text, with (tied), (worse) or
    (better)."""
    gap = standing.gap(name, base)
    if gap.half == math.inf:
        return _with_sign(gap)
    verdict = "tied"
    if gap.significant:
        verdict = "worse" if (name, base) in standing.worse else "better"
    return f"{_with_interval(gap)} ({verdict})"


def _sentences_on_exclusions(study: Study) -> Iterator[str]:
    """Yield sentences that name the encodings with failed trials, those that run at no tested
    length, and those without a rank because a trial is missing."""
    failed = Counter(result.config.encoding for result in study.failed)
    planned = Counter(trial.encoding for trial in study.trials)
    counts = []
    for name, count in failed.items():
        counts.append(f"{name} {count} of {planned[name]}")
    if counts:
        yield f"Failed trials: {_list_up_to_six(counts)}."
    rows = summarise(study.of_task(TEXT))
    nowhere = [row.encoding for row in rows if all(s.mean is None for s in row.by_length)]
    if nowhere and len(nowhere) < len(rows):
        yield f"{_list_up_to_six(nowhere)} can run at no tested length."
    for name, (task, seed) in _first_missing_trials(study).items():
        trial = f"{task} seed {seed}"
        yield f"Not ranked: {name} ({trial} is missing)."


def _first_missing_trials(study: Study) -> dict[str, tuple[str, int]]:
    """Return, for each encoding without a rank, the first task and seed for which it has no
    result. An encoding is ranked with results of all tasks, for each seed of the ranked ones."""
    overall = standing_of_tasks(study)
    ranks = overall.pairs.values if overall else {}
    ranked_seeds = next(iter(ranks.values()), ())  # the same for every ranked encoding
    configs = [result.config for result in study.finished]
    finished = {(config.task, config.seed, config.encoding) for config in configs}
    unranked = {config.encoding for config in configs} - ranks.keys()
    tasks = {config.task for config in configs}
    needed = set(itertools.product(tasks, ranked_seeds, unranked))
    first: dict[str, tuple[str, int]] = {}
    for task, seed, name in sorted(needed - finished, reverse=True):
        first[name] = (task, seed)  # what comes first is written last, and stays
    return first


def _select_within(words: int, sentences: Sequence[str], needed: set[int]) -> list[int]:
    """Return the indices of sentences that have at most so many words together: those in `needed`,
    which are always kept, and then the others, in order, while there is room."""
    kept = needed & {*range(len(sentences))}
    for i in range(len(sentences)):
        if num_words(" ".join(sentences[j] for j in {*kept, i})) <= words:
            kept.add(i)
    return sorted(kept)


def num_words(text: str) -> int:
    """Return the number of words in a text."""
    return len(text.split())


def _list_up_to_six(names: Iterable[str]) -> str:
    """Return up to six names as a list in words; of more names the first five and the number of
    others."""
    unique = list(dict.fromkeys(names))
    others = [f"{len(unique) - 5} others"] if len(unique) > 6 else []
    return join_names([*unique[:5], *others] if others else unique) if unique else ""


def _joined_by_and(parts: Sequence[str]) -> str:
    """Return a single part, or two parts joined by "and"."""
    return parts[0] if len(parts) == 1 else f"{parts[0]} and {parts[1]}"


def _number_word(number: int) -> str:
    """Return a number up to ten as a word, "two", and a larger one in digits."""
    return _NUMBER_WORDS[number] if number < len(_NUMBER_WORDS) else str(number)


def _with_sign(gap: Gap) -> str:
    """Return a difference as text with its sign, with three decimals if it is below 0.01."""
    digits = 2 if abs(gap.value) >= 0.01 else 3
    return f"{round(gap.value, digits) + 0.0:+.{digits}f}"  # no -0.000


def _with_interval(gap: Gap) -> str:
    """Return a difference and its half interval as text, `+0.02 ± 0.01`, with a third decimal where
    two do not show whether the interval excludes 0."""
    near = min(abs(gap.value), gap.half, abs(abs(gap.value) - gap.half))
    digits = 2 if near >= 0.01 else 3
    return f"{gap.value:+.{digits}f} ± {gap.half:.{digits}f}"
