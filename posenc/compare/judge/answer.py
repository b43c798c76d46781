"""The two lines of a study: which encoding to use, and what the study cannot say.

Both are put together here from facts without words (`judgement.py`, `limits.py`, standings of
tasks); their sentences are in `posenc.compare.judge.sentences`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from posenc.compare.judge import sentences
from posenc.compare.judge.judgement import Judgement, judge, why_no_interval
from posenc.compare.judge.limits import limit_sentences, limits_of
from posenc.compare.judge.near_far import failed_trials, near_and_far
from posenc.compare.judge.served_by import SERVERS, servers_of
from posenc.compare.judge.standing import (
    Standing,
    metric_beyond,
    standing_of_task,
    standing_of_tasks,
)
from posenc.compare.judge.summary import has_learned, summarise, summarise_tasks
from posenc.compare.results import Study, with_labels
from posenc.compare.trial.config import ENCODING_LR
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
            *_sentences_on_table_rates(study),
            *_sentences_on_servers(study),
            *_sentences_on_exclusions(study),
        ]
    )


def _sentences_on_table_rates(study: Study) -> Iterator[str]:
    """Yield the sentence on the rates that a search chose for tables and scalars of encodings: who
    adds such an encoding to another trainer gets other losses without them."""
    chosen = {}
    for check in study.rates:
        best = check.best
        if check.task == TEXT and best is not None and best.encoding_lr != ENCODING_LR:
            chosen[check.encoding] = best.encoding_lr
    if chosen:
        yield sentences.sentence_on_table_rates(chosen)


def _sentences_on_servers(study: Study) -> Iterator[str]:
    """Yield the sentence on the servers without a decoder of the encoding to take, and on the best
    row that all of them run."""
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
    served = (row for row in standing.order if {*without} <= {*servers_of(encoding_of[row])})
    best_served = next(served, None)
    gap = None if best_served is None else standing.gap(best_served)
    yield sentences.sentence_on_servers(encoding, without, best_served, gap)


def _taken(judgement: Judgement) -> list[str]:
    """Return the row to take for both places and, where another is better near, that one."""
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
