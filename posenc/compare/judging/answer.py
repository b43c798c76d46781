"""The two lines of a study: which encoding to use, and what the study cannot say.

The first is put together here, from facts without words (`judgement.py`, standings of tasks) and
the sentences of `sentences.py`. The second is that of `limits.py`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from posenc.compare.judging import sentences
from posenc.compare.judging.judgement import (
    Judgement,
    certainty_on_task,
    judge,
    why_no_interval,
)
from posenc.compare.judging.limits import limits_in_words
from posenc.compare.judging.near_far import count_failed_trials
from posenc.compare.judging.standing import (
    Standing,
    metric_beyond,
    standing_of_task,
    standing_of_tasks,
)
from posenc.compare.judging.summary import has_learned, summarise, summarise_tasks
from posenc.compare.judging.units import sentence_on_units, units_of
from posenc.compare.results import Study, kept_by_study, with_labels
from posenc.tasks.registry import TEXT


class Answer(NamedTuple):
    """Hold the recommendation in words and what it says.

    row_names: the rows to take, without repetition.
    certainties: how sure each choice is, USE, LEADS or TIED: near bytes, far bytes, then tasks.
    """

    text: str
    row_names: list[str]
    certainties: list[str]


def conclude(study: Study) -> Study:
    """Return the study with its summaries, its recommendation and its limits."""
    labelled_study = with_labels(study)
    text_study = labelled_study.of_task(TEXT)
    study = replace(
        study,
        summary=summarise(text_study) if text_study.trials else (),
        tasks=summarise_tasks(labelled_study),
    )
    labelled_study = replace(labelled_study, summary=study.summary)
    units = units_of(study)
    names = labelled_study.encodings
    limits = units.write(limits_in_words(labelled_study), names)
    loss_unit = units.bits if study.table is None else study.table.loss_unit
    limits = f"{limits} {sentence_on_units(loss_unit)}".rstrip()
    recommendation = units.write(answer(labelled_study), names)
    return replace(study, recommendation=recommendation, limits=limits)


def answer(study: Study) -> str:
    """Return the recommendation: which row to take and how sure that is, or why there is none."""
    return answer_and_choices(study).text


@kept_by_study
def answer_and_choices(study: Study) -> Answer:
    """Return the recommendation and what it says to take.

    What failed and what was not checked comes first, then the user's own encodings, then the row
    to take. None of these is ever left out.
    """
    failure_counts = count_failed_trials(study)
    if not study.finished:
        return Answer(sentences.sentence_without_results(failure_counts), [], [])
    judgement = judge(study) if any(r.config.task == TEXT for r in study.finished) else None
    parts = list(sentences.sentences_on_failures(failure_counts))
    if study.unchecked:
        parts.append(sentences.sentence_on_unchecked(study.unchecked))
    overall_standing = standing_of_tasks(study) if any(map(has_learned, study.finished)) else None
    row_names: list[str] = []
    certainties: list[str] = []
    if judgement is not None:
        parts += sentences.sentences_on_own(judgement.own_comparisons)
        text_sentences = list(sentences.sentences_on_text(judgement))
        if not text_sentences and judgement.places.near is None:
            text_sentences = _sentences_on_nothing_running(study)
        parts += text_sentences
        row_names += _rows_to_take(judgement)
        certainties += [choice.certainty for choice in judgement.choices]
    for standing, metric in _standings_of_tasks(study, overall_standing):
        parts.append(sentences.sentence_on_task(standing, metric, why_no_interval(standing)))
        if len(standing.order) > 1:
            row_names.append(standing.order[0])
            certainties.append(certainty_on_task(standing))
    parts += _sentences_on_unlearned_tasks(study, overall_standing)
    text = " ".join(parts)
    return Answer(text, [*dict.fromkeys(row_names)], certainties)


def _rows_to_take(judgement: Judgement) -> list[str]:
    """Return the names of the rows to take: the one for both places and, where another is better
    for near bytes, that one too; [] if there is no choice."""
    if judgement.taken is None:
        return []
    near, far = judgement.near, judgement.far
    if near is None or far is None:
        return [judgement.taken]
    near_row = judgement.places.near_row_of.get(judgement.taken, judgement.taken)
    return [judgement.taken] if near_row in near.tied else [judgement.taken, near.taken]


def _sentences_on_nothing_running(study: Study) -> list[str]:
    """Return the sentence on encodings that run at no tested length."""
    names = [name for name in study.of_task(TEXT).encodings if name not in study.unchecked]
    return [sentences.sentence_on_running_nowhere(names)] if names else []


def _standings_of_tasks(
    study: Study, overall_standing: Standing | None
) -> Iterator[tuple[Standing, str]]:
    """Yield the standing over all tasks or, if there is none, that of each task that some trial has
    learned, with what its numbers are in words."""
    if overall_standing is not None:
        yield overall_standing, f"mean rank over {overall_standing.where}"
        return
    for task in study.sequence_tasks:
        task_study = study.of_task(task)
        standing = standing_of_task(study, task)
        if standing is not None and any(map(has_learned, task_study.finished)):
            yield standing, metric_beyond(task, task_study.trials[0].train_length)


def _sentences_on_unlearned_tasks(study: Study, overall_standing: Standing | None) -> list[str]:
    """Return a sentence for each task that no trial has learned, where tasks are not ranked."""
    if overall_standing is not None:
        return []
    unlearned_sentences = []
    for task in study.sequence_tasks:
        finished_results = study.of_task(task).finished
        if finished_results and not any(map(has_learned, finished_results)):
            unlearned_sentences.append(sentences.sentence_on_unlearned_task(task))
    return unlearned_sentences
