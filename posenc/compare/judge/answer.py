"""The two lines of a study: which encoding to use, and what the study cannot say.

Both are put together here from facts without words (`judgement.py`, `Limits`, standings of tasks);
the sentences of the first are in `posenc.compare.judge.sentences`.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median_high
from typing import NamedTuple

from posenc.compare.judge import sentences
from posenc.compare.judge.context_use import context_use
from posenc.compare.judge.judgement import (
    Judgement,
    bits_that_may_turn,
    judge,
    moves_of_leads,
    why_no_interval,
)
from posenc.compare.judge.near_far import failed_trials, near_and_far
from posenc.compare.judge.sentences import number_word
from posenc.compare.judge.served_by import SERVERS, servers_of
from posenc.compare.judge.standing import (
    MARGIN,
    Standing,
    metric_beyond,
    standing_of_task,
    standing_of_tasks,
)
from posenc.compare.judge.summary import has_learned, summarise, summarise_tasks
from posenc.compare.results import Study, TrialResult, with_labels
from posenc.compare.rows import Row, row_name, rows_by_name, rows_of
from posenc.compare.trial.config import ENCODING_LR, TrialConfig
from posenc.report.report import join_names
from posenc.tasks.registry import TEXT


class Answer(NamedTuple):
    """Hold the recommendation in words and what it says.

    rows: the names of the rows to take, without repetition.
    certainties: how sure each choice is, USE, LEADS or TIED: near bytes, far bytes, then tasks.
    """

    text: str
    rows: list[str]
    certainties: list[str]


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
    """Return the recommendation: which row to take and how sure that is, or why there is none."""
    return answer_and_choices(study).text


def answer_and_choices(study: Study) -> Answer:
    """Return the recommendation and what it says to take.

    What failed and what was not checked comes first, then the user's own encodings, then the row
    to take. None of these is ever left out.
    """
    failed = failed_trials(study)
    if not study.finished:
        return Answer(sentences.sentence_without_results(failed), [], [])
    judgement = judge(study) if any(r.config.task == TEXT for r in study.finished) else None
    parts = list(sentences.sentences_on_failures(failed))
    if study.unchecked:
        parts.append(sentences.sentence_on_unchecked(study.unchecked))
    overall = standing_of_tasks(study) if any(map(has_learned, study.finished)) else None
    rows: list[str] = []
    certainties: list[str] = []
    if judgement is not None:
        parts += sentences.sentences_on_own(judgement.own)
        on_text = list(sentences.sentences_on_text(judgement))
        if not on_text and judgement.places.near is None:
            on_text = _where_nothing_runs(study)
        parts += on_text
        rows += _taken(judgement)
        certainties += [choice.certainty for choice in judgement.choices]
    for standing, metric in _standings_of_tasks(study, overall):
        parts.append(sentences.sentence_on_task(standing, metric, why_no_interval(standing)))
        if len(standing.order) > 1:
            rows.append(standing.order[0])
            certainties.append(sentences.certainty_on_task(standing))
    parts += _unlearned_tasks(study, overall)
    text = " ".join(parts)
    return Answer(text, [*dict.fromkeys(rows)], certainties)


def limits(study: Study) -> str:
    """Return what the study leaves open: its few seeds, texts and tasks, its small model, its short
    training, what was not tested, and encodings that are not in the verdict."""
    if not study.finished:
        return ""
    return " ".join(
        [
            *limit_sentences(limits_of(study)),
            *_sentences_on_tunings(study),
            *_sentences_on_table_rates(study),
            *_sentences_on_servers(study),
            *_sentences_on_exclusions(study),
        ]
    )


def _sentences_on_tunings(study: Study) -> Iterator[str]:
    """Yield the sentence on encodings whose short tuning at length made their weights worse than
    they are in a window without it, near or far, by more than MARGIN; nothing otherwise."""
    by_name = rows_by_name(study)
    not_helped = []
    for encoding in dict.fromkeys(row.encoding for row in rows_of(study)):
        tuned = by_name.get(row_name(encoding, "tuned"))
        in_window = by_name.get(row_name(encoding, "window"))
        if tuned and in_window and _is_worse(tuned, in_window):
            not_helped.append(encoding)
    if not_helped:
        yield sentences.sentence_on_tunings_without_gain(not_helped)


def _is_worse(tuned: Sequence[Row], in_window: Sequence[Row]) -> bool:
    """Return True if the mean loss over seeds of `tuned` is higher by more than MARGIN than that of
    `in_window`, at the training length or on far bytes."""
    longest = max(tuned[0].trial.test_lengths)
    near = [_mean_known(row.near.bits_per_byte for row in rows) for rows in (tuned, in_window)]
    far = [
        _mean_known(row.far_by_length[longest].far for row in rows if longest in row.far_by_length)
        for rows in (tuned, in_window)
    ]
    # A missing loss is nan, which is higher than none.
    return near[0] > near[1] + MARGIN or far[0] > far[1] + MARGIN


def _mean_known(losses: Iterable[float | None]) -> float:
    """Return the mean of the losses that are known; nan if none is."""
    known = [bits for bits in losses if bits is not None]
    return fmean(known) if known else math.nan


def _sentences_on_table_rates(study: Study) -> Iterator[str]:
    """Yield the sentence on how much faster than the model the tables and scalars of encodings
    learned, where a search chose a factor other than the default; nothing otherwise."""
    chosen = {}
    for check in study.rates:
        best = check.best
        if check.task == TEXT and best is not None and best.encoding_lr != ENCODING_LR:
            chosen[check.encoding] = best.encoding_lr
    if chosen:
        yield sentences.sentence_on_table_rates(chosen)


def _sentences_on_servers(study: Study) -> Iterator[str]:
    """Yield the sentence on the servers without a decoder of the encoding to take, and on the best
    rows that all of them run, those not told apart together."""
    if not any(result.config.task == TEXT for result in study.finished):
        return
    judgement = judge(study)
    standing = judgement.places.far or judgement.places.near
    if judgement.taken is None or standing is None:
        return
    encoding_of = judgement.places.encoding_of
    encoding = encoding_of[judgement.taken]
    without = [server for server in SERVERS if server not in servers_of(encoding)]
    if not without:
        return
    served = [row for row in standing.order if {*without} <= {*servers_of(encoding_of[row])}]
    best_served = {
        row: standing.gap(row) for row in served if (row, served[0]) not in standing.worse_pairs
    }
    yield sentences.sentence_on_servers(encoding, without, best_served)


def _taken(judgement: Judgement) -> list[str]:
    """Return the names of the rows to take: the one for both places and, where another is better
    for near bytes, that one too; [] if there is no choice."""
    if judgement.taken is None:
        return []
    near, far = judgement.near, judgement.far
    if near is None or far is None:
        return [judgement.taken]
    near_row = judgement.places.near_row_of.get(judgement.taken, judgement.taken)
    return [judgement.taken] if near_row in near.tied else [judgement.taken, near.taken]


def _where_nothing_runs(study: Study) -> list[str]:
    """Return the sentence on encodings that run at no tested length."""
    names = [name for name in study.of_task(TEXT).encodings if name not in study.unchecked]
    return [sentences.sentence_on_running_nowhere(names)] if names else []


def _standings_of_tasks(study: Study, overall: Standing | None) -> Iterator[tuple[Standing, str]]:
    """Yield the standing over all tasks or, if there is none, that of each task that some trial has
    learned, with what its numbers are in words."""
    if overall is not None:
        yield overall, f"mean rank over {overall.where}"
        return
    for task in study.sequence_tasks:
        part = study.of_task(task)
        standing = standing_of_task(study, task)
        if standing is not None and any(map(has_learned, part.finished)):
            yield standing, metric_beyond(task, part.trials[0].train_length)


def _unlearned_tasks(study: Study, overall: Standing | None) -> list[str]:
    """Return a sentence for each task that no trial has learned, where tasks are not ranked."""
    if overall is not None:
        return []
    parts = []
    for task in study.sequence_tasks:
        finished = study.of_task(task).finished
        if finished and not any(map(has_learned, finished)):
            parts.append(sentences.sentence_on_unlearned_task(task))
    return parts


def _sentences_on_exclusions(study: Study) -> Iterator[str]:
    """Yield sentences that name the encodings that run at no tested length, and those without a
    rank because a trial is missing."""
    rows = summarise(study.of_task(TEXT))
    nowhere = [row.encoding for row in rows if all(s.mean is None for s in row.by_length)]
    if nowhere and len(nowhere) < len(rows):
        yield sentences.sentence_on_running_nowhere(nowhere)
    places = near_and_far(study)
    only_near = []
    if places.near is not None and places.far is not None:
        in_far = {places.encoding_of[name] for name in places.far.order}
        near = {places.encoding_of[name] for name in places.near.order}
        only_near = [name for name in study.encodings if name in near - in_far]
    if only_near:
        yield sentences.sentence_on_running_only_near(
            only_near, places.far.where if places.far else ""
        )
    for name, (task, seed) in _first_missing_trials(study).items():
        yield sentences.sentence_on_missing_rank(name, task, seed)


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


LAST_UNSCALED_T5 = 5
"""The last recipe in which `t5` meant what is `t5:unscaled=true` now."""
ROPE = "rope"
"""The encoding whose readings in a window and after a tuning are baselines."""
HYBRIDS = ("rnope", "rnope_swa", "irope")
"""Encodings by layer that people train: rotated layers with layers without positions."""


@dataclass(frozen=True)
class Limits:
    """Facts that limit an answer. Seven points must hold for it to transfer to a larger model;
    their numbers are in brackets, and those that do not hold are named. No study holds point 4: the
    time on the hardware and servers of the user.

    num_seeds: of an encoding, for the task that has the fewest. num_tasks: generated ones.
    parameters, steps: of the models; steps is None if trials differ.
    fall_per_doubling: bits per byte that the last doubling of the steps saved; None if unknown.
    may_turn: bits of difference that another doubling may turn; None if unknown.
    taken: the encoding of the row to take; "" if there is none.
    moves_of_leads: by how many bits its leads moved with the last doubling, by the row behind it.
    rates_searched: each encoding has a learning rate of its own, chosen by validation. (1)
    knobs_searched: so has its own knob, the factor of its tables, RoPE's base, ALiBi's slopes or
        T5's scale. (1)
    has_retrieval: generated tasks ask for facts that are far away. (2)
    absent_baselines: baselines that people run and that are not among the rows: "window" for RoPE
        read in a window, "tuned" for RoPE after a short tuning, "hybrid". (3)
    num_sizes: number of sizes of the model. (5)
    bytes_per_parameter: bytes of training text for each parameter; None without a text. (6)
    far_context_saves: the most bits per byte that any row saves on far bytes by context from beyond
        the training length; None if not measured. (7)
    has_far: far bytes were measured.
    has_old_t5: its t5 is today's t5:unscaled=true.
    """

    num_seeds: int
    has_text: bool
    num_tasks: int
    parameters: float
    steps: int | None
    fall_per_doubling: float | None
    may_turn: float | None
    taken: str
    moves_of_leads: Mapping[str, float]
    rates_searched: bool
    knobs_searched: bool
    has_retrieval: bool
    absent_baselines: tuple[str, ...]
    num_sizes: int
    bytes_per_parameter: float | None
    far_context_saves: float | None
    has_far: bool
    has_old_t5: bool


def limits_of(study: Study) -> Limits:
    """Return the limits of a study with at least one finished trial."""
    trials = [result.config for result in study.finished]
    on_text = [result for result in study.finished if result.config.is_on_text]
    steps = {trial.steps for trial in trials}
    fall_per_doubling, may_turn = bits_that_may_turn(study) or (None, None)
    taken = ""
    moves: dict[str, float] = {}
    if on_text:
        judgement = judge(study)
        taken = judgement.places.encoding_of.get(judgement.taken or "", "")
        moves = moves_of_leads(study, judgement)
    searches_on_text = [check for check in study.rates if check.task == TEXT]
    return Limits(
        num_seeds=_fewest_usual_seeds(trials),
        has_text=bool(on_text),
        num_tasks=len(study.sequence_tasks),
        parameters=fmean(result.parameters for result in study.finished),
        steps=steps.pop() if len(steps) == 1 else None,
        fall_per_doubling=fall_per_doubling,
        may_turn=may_turn,
        taken=taken,
        moves_of_leads=moves,
        rates_searched=bool(searches_on_text),
        knobs_searched=any(check.plain_at is not None for check in searches_on_text),
        has_retrieval=bool(study.sequence_tasks),
        absent_baselines=_absent_baselines([(row.encoding, row.reading) for row in rows_of(study)]),
        num_sizes=len({(trial.width, trial.layers) for trial in trials}),
        bytes_per_parameter=_bytes_per_parameter(on_text),
        far_context_saves=_most_saved(study),
        has_far=near_and_far(study).far is not None,
        has_old_t5=any(t.encoding == "t5" and t.recipe <= LAST_UNSCALED_T5 for t in trials),
    )


def _bytes_per_parameter(on_text: Sequence[TrialResult]) -> float | None:
    """Return the bytes of training text for each parameter, the mean over trials; None if no trial
    says how many parameters its model has."""
    ratios = []
    for result in on_text:
        if result.parameters:
            trial = result.config
            num_bytes = trial.steps * trial.batch * trial.train_length
            ratios.append(num_bytes / result.parameters)
    return fmean(ratios) if ratios else None


def _most_saved(study: Study) -> float | None:
    """Return the most bits per byte that any row saves by far context; None if not measured."""
    uses = [context_use(rows) for rows in rows_by_name(study).values()]
    saved = [use.saved.value for use in uses if use is not None]
    return max(saved, default=None)


def _absent_baselines(rows: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return which baselines are not among the rows (encoding, reading)."""
    # The text has options after a colon, and a label settings in brackets.
    names = {(re.split(r":| \(", encoding)[0], reading) for encoding, reading in rows}
    absent = [reading for reading in ("window", "tuned") if (ROPE, reading) not in names]
    if not any(encoding in HYBRIDS or "/" in encoding for encoding, _ in names):
        absent.append("hybrid")
    return tuple(absent)


def _fewest_usual_seeds(trials: Sequence[TrialConfig]) -> int:
    """Return how many seeds an encoding usually has (the median over the encodings), for the task
    that has the fewest."""
    seeds_by_task: dict[str, Counter[str]] = {}
    for trial in trials:
        seeds_by_task.setdefault(trial.task, Counter())[trial.encoding] += 1
    return min(median_high(seeds.values()) for seeds in seeds_by_task.values())


def limit_sentences(limits: Limits) -> Iterator[str]:
    """Yield the sentences of the second line: the size of the study, and what of the seven points
    that must hold for a larger model was not tested."""
    yield f"{_size_of_study(limits)}: {_clause_on_longer_training(limits)}."
    if limits.has_text:
        yield f"Not tested: {join_names(_not_tested(limits))}."
        if limits.has_far:
            yield "Near and far losses are of different bytes."
        yield _sentence_on_far_context(limits)
    if limits.has_old_t5:
        yield "Its t5 is today's t5:unscaled=true."


def _size_of_study(limits: Limits) -> str:
    """Write seeds, texts, tasks, sizes and steps of a study."""
    seeds = number_word(limits.num_seeds).capitalize()
    parts = [f"{seeds} {'seed' if limits.num_seeds == 1 else 'seeds'}"]
    parts += ["one text"] if limits.has_text else []
    if limits.num_tasks:
        tasks = "task" if limits.num_tasks == 1 else "tasks"
        parts.append(f"{number_word(limits.num_tasks)} {tasks}")
    size = limits.parameters
    parts.append(f"{size / 1e6:.1f} M parameters" if size >= 5e4 else f"{size:,.0f} parameters")
    if limits.bytes_per_parameter is not None:
        parts.append(f"{limits.bytes_per_parameter:.2g} bytes a parameter")
    if limits.steps is not None:
        parts.append(f"{limits.steps:,} steps")
    return ", ".join(parts)


def _clause_on_longer_training(limits: Limits) -> str:
    """Write how much the loss still falls, and which differences could turn by then."""
    if limits.fall_per_doubling is None:
        return "what longer training changes was not measured"
    still = f"the loss still falls {limits.fall_per_doubling:.2f} bits per doubling of the steps"
    unknown = "what a full training does is not known"
    moved = sentences.clause_on_moved_leads(limits.taken, limits.moves_of_leads)
    if moved:
        still = f"{still}; {moved}"
    # Leads that fell are what another doubling may turn. Where none did, a general bound is left.
    if any(round(move, 2) < 0 for move in limits.moves_of_leads.values()):
        return f"{still}, and {unknown}"
    if limits.may_turn is None:
        return still
    return f"{still}; one more doubling may move leads by {limits.may_turn:.2f}, and {unknown}"


def _not_tested(limits: Limits) -> list[str]:
    """List what must hold for a larger model and was not tested."""
    baselines = {
        "window": "RoPE in a window",
        "tuned": "RoPE tuned at length",
        "hybrid": "hybrids with layers without positions",
    }
    parts = []
    if not limits.rates_searched:
        parts.append("rates, bases, slopes and scales of each encoding (--tune)")
    elif not limits.knobs_searched:
        parts.append("bases, slopes and scales")
    if not limits.has_retrieval:
        parts.append("finding facts far away")
    parts += [baselines[name] for name in limits.absent_baselines]
    if limits.num_sizes < 2:
        parts.append("another size")
    return [*parts, "documents kept apart", "your hardware and server"]


def _sentence_on_far_context(limits: Limits) -> str:
    """Write what context from beyond the training length saves."""
    if limits.far_context_saves is None:
        if limits.has_far:
            return "What far context saves was not measured in this run."
        return "Far tokens were not measured in this run."
    saved = max(limits.far_context_saves, 0.0)
    if saved < MARGIN:
        return (
            f"Far context saves at most {saved:.3f} bits here: far losses show what breaks, not "
            "what is used."
        )
    return f"Far context saves up to {saved:.2f} bits here."
