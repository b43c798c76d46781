"""The answer of `posenc leaderboard`: which encoding for what, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from posenc.compare.judging import sentences
from posenc.compare.judging.judgement import (
    TIED,
    Choice,
    Judgement,
    judge,
    most_served_then_cheapest,
)
from posenc.compare.judging.standing import Standing, standing_of_tasks
from posenc.compare.results import Study
from posenc.compare.rows import EqualTime, rows_of
from posenc.report.report import join_names, number_word
from posenc.tasks.registry import TEXT


def which_for_what(studies: Mapping[str, Study], largest: Study | None = None) -> str:
    """Return in words which row to take for short context, for long context and for tasks, each
    with what it costs; a row whose training time is unknown is not named.

    studies: by the name of their text. largest: one of the largest models, whose answer follows
        those on texts.

    If the texts are of one recipe and some rows are tied for the best on all of them, one of these
    is named; otherwise one row for each text, as its study's own answer has it. Of tasks the
    encoding with the best mean rank is named.
    """
    text_studies = {
        name: text_study
        for name, study in studies.items()
        if (text_study := study.of_task(TEXT)).finished
    }
    judgements = {name: judge(text_study) for name, text_study in text_studies.items()}
    judgements = {
        name: judgement for name, judgement in judgements.items() if judgement.near is not None
    }
    is_one_recipe = _is_one_recipe(text_studies)
    lines = []
    near_choices = {
        name: judgement.near for name, judgement in judgements.items() if judgement.near
    }
    far_choices = {name: judgement.far for name, judgement in judgements.items() if judgement.far}
    for use, choices in (("Short context", near_choices), ("Long context", far_choices)):
        if choices:
            lines.append(_line_for_use(use, choices, judgements, is_one_recipe))
    if largest is not None:
        lines.append(_line_for_largest(largest))
    task_standings = {name: standing_of_tasks(study) for name, study in studies.items()}
    standings = {
        name: standing for name, standing in task_standings.items() if standing is not None
    }
    if standings:
        lines.append(_line_for_tasks(standings, studies))
    return " ".join(lines)


def _is_one_recipe(text_studies: Mapping[str, Study]) -> bool:
    """Return True if studies differ in the text only."""
    neutral_values = {"encoding": "", "seed": 0, "source": ""}
    trials_and_choices = {(study.trials[0], bool(study.rates)) for study in text_studies.values()}
    recipes = {
        replace(t, lr=0.0 if is_rate_chosen else t.lr, **neutral_values)
        for t, is_rate_chosen in trials_and_choices
    }
    without_text = {replace(trial, corpus="") for trial in recipes}
    return len(recipes) == len(text_studies) and len(without_text) == 1


def _line_for_use(
    use: str,
    choices: Mapping[str, Choice],
    judgements: Mapping[str, Judgement],
    is_one_recipe: bool,
) -> str:
    """Return the line of a use: one row for all texts or, if none will do, one for each."""
    first_judgement = judgements[next(iter(choices))]
    encoding_of = first_judgement.places.encoding_of
    tied_everywhere = set.intersection(*(set(choice.tied) for choice in choices.values()))
    tied_in_all = [name for name in next(iter(choices.values())).tied if name in tied_everywhere]
    are_decided = not any(choice.why_no_interval for choice in choices.values())
    if is_one_recipe and tied_in_all and are_decided:
        taken_names = [
            most_served_then_cheapest(tied_in_all, first_judgement.places, first_judgement.cost)
        ]
    else:
        taken_names = [choice.taken for choice in choices.values()]
    cost_in_words = _cost_in_words(
        encoding_of.get(taken_names[0], taken_names[0]), _relative_costs(first_judgement.cost)
    )
    if cost_in_words is None:
        return _no_cost(use)
    return _write_line_for_use(use, choices, taken_names, cost_in_words)


def _relative_costs(equal_time: EqualTime | None) -> Mapping[str, float]:
    """Return seconds a step by encoding, as multiples of the cheapest one's; {} if unknown."""
    return {} if equal_time is None else equal_time.costs


def _cost_in_words(encoding: str, costs: Mapping[str, float]) -> str | None:
    """Return the training time of an encoding against the fastest, in words; None if unknown.

    costs: training time by encoding, in any unit.
    """
    if encoding not in costs:
        return None
    cheapest = min(costs, key=lambda name: costs[name])
    return _cost_clause(encoding, costs[encoding] / costs[cheapest], cheapest)


def _seconds_on_tasks(study: Study) -> dict[str, float]:
    """Return the mean training time of each encoding's trials on tasks; {} if a time is missing, if
    an encoding lacks a trial that another has, or if trials ran on different processors."""
    results = [result for result in study.finished if not result.config.is_on_text]
    processors = set()
    seconds_by_encoding: dict[str, list[float]] = {}
    trials_by_encoding: dict[str, set[tuple[str, int]]] = {}
    for result in results:
        if result.timing is None or not result.timing.train_seconds > 0:
            return {}
        processors.add(result.timing.processor)
        seconds_by_encoding.setdefault(result.config.encoding, []).append(
            result.timing.train_seconds
        )
        task_and_seed = (result.config.task, result.config.seed)
        trials_by_encoding.setdefault(result.config.encoding, set()).add(task_and_seed)
    have_the_same_trials = (
        len({frozenset(trials_of_encoding) for trials_of_encoding in trials_by_encoding.values()})
        == 1
    )
    if len(processors) != 1 or not have_the_same_trials:
        return {}
    return {name: fmean(trial_seconds) for name, trial_seconds in seconds_by_encoding.items()}


def _line_for_tasks(standings: Mapping[str, Standing], studies: Mapping[str, Study]) -> str:
    """Return the line on tasks, with the cost of the first of each study."""
    use = "Copying and recall"
    costs_in_words = []
    for name, standing in standings.items():
        cost = _cost_in_words(standing.order[0], _seconds_on_tasks(studies[name]))
        if cost is None:
            return _no_cost(use)
        costs_in_words.append(cost)
    return _write_line_for_tasks(use, list(standings.values()), costs_in_words)


def _write_line_for_use(
    use: str, choices: Mapping[str, Choice], taken_names: Sequence[str], cost_in_words: str
) -> str:
    """Write one line of the leaderboard: what to take for a use, how it stands on each text, and
    what it costs.

    choices: by the name of the text. taken: one row for all texts, or one for each.
    """
    name_of_text = {
        text_name: taken_names[min(i, len(taken_names) - 1)] for i, text_name in enumerate(choices)
    }
    losses = [f"{choice.loss_of_row[name_of_text[text]]:.2f}" for text, choice in choices.items()]
    names_in_words = join_names(list(dict.fromkeys(taken_names)))
    standing_in_words = _standing_on_texts(choices, name_of_text)
    where = next(iter(choices.values())).where
    return (
        f"{use}, {where}: {names_in_words} ({standing_in_words}; {join_names(losses)} bits; "
        f"{cost_in_words})."
    )


def _line_for_largest(study: Study) -> str:
    """Return the line on the largest models: what to take near and far, and how it stands.

    Raises: ValueError for a study without losses near and far.
    """
    judgement = judge(study.of_task(TEXT))
    if judgement.near is None or judgement.far is None:
        raise ValueError("The study of the largest models has no losses near and far.")
    parameters = min(row.parameters for row in rows_of(study))
    count = number_word(len(study.encodings))
    parts = [
        f"{choice.taken} for {context} context ({_standing_in_few_words(choice, choice.taken)}, "
        f"{choice.loss_of_row[choice.taken]:.2f} bits)"
        for context, choice in (("short", judgement.near), ("long", judgement.far))
    ]
    return f"Of {count} at {parameters / 1e6:.1f} M parameters: {join_names(parts)}."


def _standing_on_texts(choices: Mapping[str, Choice], name_of_text: Mapping[str, str]) -> str:
    """Write how a row stands on each text: `leads on code and novel`, or `tied with one other on
    code and three on novel`.

    choices, name_of_text: the choice and the taken row by the name of the text.
    """
    if len(choices) == 1:
        ((text, choice),) = choices.items()
        return _standing_in_few_words(choice, name_of_text[text])
    if all(_is_tied(choice) for choice in choices.values()):
        return _ties_on_texts({text: len(choice.tied) - 1 for text, choice in choices.items()})
    texts_by_standing: dict[str, list[str]] = {}
    for text, choice in choices.items():
        standing = _standing_in_few_words(choice, name_of_text[text])
        texts_by_standing.setdefault(standing, []).append(text)
    return "; ".join(
        f"{standing} on {join_names(texts)}" for standing, texts in texts_by_standing.items()
    )


def _ties_on_texts(count_by_text: Mapping[str, int]) -> str:
    """Write `tied with six others on code and seven on novel`.

    count_by_text: how many others a row is tied with, by the name of the text.
    """
    texts_by_count: dict[int, list[str]] = {}
    for text, count in count_by_text.items():
        texts_by_count.setdefault(count, []).append(text)
    parts = []
    for count, texts in texts_by_count.items():
        tie = number_word(count) if parts else _tied_with(count)
        parts.append(f"{tie} on {join_names(texts)}")
    return join_names(parts)


def _is_tied(choice: Choice) -> bool:
    """Return True for rows whose differences have intervals, and none is significant."""
    return not choice.why_no_interval and choice.certainty == TIED


def _standing_in_few_words(choice: Choice, name: str) -> str:
    """Write how a row stands, without the names of the others."""
    if choice.why_no_interval:
        return "not decided"
    if choice.certainty != TIED:
        return sentences.clause_on_standing(choice, name)
    return _tied_with(len(choice.tied) - 1)


def _tied_with(count: int) -> str:
    """Write `tied with three others`."""
    return f"tied with {number_word(count)} {'other' if count == 1 else 'others'}"


def _no_cost(use: str) -> str:
    """Write that nothing is named for a use, because training time is unknown."""
    return f"{use}: none is named, because its training time was not measured."


def _cost_clause(name: str, ratio: float, cheapest: str) -> str:
    """Write what a row costs: `1.4 times nope's training time`."""
    if name == cheapest or ratio < 1.05:
        return "about the least training time"
    return f"{ratio:.1f} times {cheapest}'s training time"


def _write_line_for_tasks(
    use: str, standings: Sequence[Standing], costs_in_words: Sequence[str]
) -> str:
    """Write the line of the leaderboard on tasks: the best mean rank of each study."""
    parts = []
    for standing, cost_in_words in zip(standings, costs_in_words, strict=True):
        first = standing.order[0]
        rank_in_words = f"mean rank {standing.mean(first):.2f} over {standing.where}"
        num_tied = len(standing.first_tier) - 1
        if standing.pairs.least_significant_gap == math.inf:
            rank_in_words = f"not decided, {rank_in_words}"
        elif num_tied:
            rank_in_words = f"{_tied_with(num_tied)}, {rank_in_words}"
        parts.append(f"{first} ({rank_in_words}; {cost_in_words})")
    return f"{use}: {join_names(parts)}."
