"""The answer of the leaderboard: which encoding for what, a line for each use."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from posenc.compare.judge import sentences
from posenc.compare.judge.judgement import (
    TIED,
    Choice,
    Judgement,
    judge,
    most_served_then_cheapest,
)
from posenc.compare.judge.standing import Standing, standing_of_tasks
from posenc.compare.page.numbers import facts_of
from posenc.compare.results import Study, with_labels
from posenc.compare.rows import EqualTime
from posenc.report.report import join_names
from posenc.tasks.registry import TEXT


def facts_of_leaderboard(studies: Mapping[str, Study]) -> dict[str, Any]:
    """Return the facts of the leaderboard: "answer", which encoding to use for what by all studies,
    and "studies", with `facts_of` each by its name."""
    by_name = {name: facts_of(with_labels(study)) for name, study in studies.items()}
    return {"answer": which_for_what(studies), "studies": by_name}


def which_for_what(studies: Mapping[str, Study]) -> str:
    """Return in words which row to take for short context, for long context and for tasks, each
    with what it costs; a row whose training time is unknown is not named.

    studies: by the name of their text.

    If the texts are of one recipe and some rows are tied for the best on all of them, one of these
    is named; otherwise one row for each text, as its study's own answer has it. Of tasks the
    encoding with the best mean rank is named.
    """
    texts = {
        name: text for name, study in studies.items() if (text := study.of_task(TEXT)).finished
    }
    judged = {name: judge(text) for name, text in texts.items()}
    judged = {name: judgement for name, judgement in judged.items() if judgement.near is not None}
    is_one_recipe = _is_one_recipe(texts)
    lines = []
    near = {name: judgement.near for name, judgement in judged.items() if judgement.near}
    far = {name: judgement.far for name, judgement in judged.items() if judgement.far}
    for use, choices in (("Short context", near), ("Long context", far)):
        if choices:
            lines.append(_line_for_use(use, choices, judged, is_one_recipe))
    ranked = {name: standing_of_tasks(study) for name, study in studies.items()}
    standings = {name: standing for name, standing in ranked.items() if standing is not None}
    if standings:
        lines.append(_line_for_tasks(standings, studies))
    return " ".join(lines)


def _is_one_recipe(texts: Mapping[str, Study]) -> bool:
    """Return True if studies differ in the text only."""
    own = {"encoding": "", "seed": 0, "source": ""}
    trials = {(study.trials[0], bool(study.rates)) for study in texts.values()}
    recipes = {replace(t, lr=0.0 if chosen else t.lr, **own) for t, chosen in trials}
    without_text = {replace(trial, corpus="") for trial in recipes}
    return len(recipes) == len(texts) and len(without_text) == 1


def _line_for_use(
    use: str,
    choices: Mapping[str, Choice],
    judged: Mapping[str, Judgement],
    is_one_recipe: bool,
) -> str:
    """Return the line of a use: one row for all texts or, if none will do, one for each."""
    first = judged[next(iter(choices))]
    encoding_of = first.places.encoding_of
    in_all = set.intersection(*(set(choice.tied) for choice in choices.values()))
    tied_in_all = [name for name in next(iter(choices.values())).tied if name in in_all]
    are_decided = not any(choice.why_no_interval for choice in choices.values())
    if is_one_recipe and tied_in_all and are_decided:
        taken = [most_served_then_cheapest(tied_in_all, encoding_of, first.cost)]
    else:
        taken = [choice.taken for choice in choices.values()]
    costs = _cost_in_words(encoding_of.get(taken[0], taken[0]), _costs_of(first.cost))
    if costs is None:
        return _no_cost(use)
    return _write_line_for_use(use, choices, taken, costs)


def _costs_of(cost: EqualTime | None) -> Mapping[str, float]:
    """Return seconds a step by encoding, as multiples of the cheapest one's; {} if unknown."""
    return {} if cost is None else cost.costs


def _cost_in_words(encoding: str, costs: Mapping[str, float]) -> str | None:
    """Return the training time of an encoding against the fastest, in words; None if unknown.

    costs: training time by encoding, in any unit.
    """
    if encoding not in costs:
        return None
    cheapest = min(costs, key=lambda name: costs[name])
    return _cost_of(encoding, costs[encoding] / costs[cheapest], cheapest)


def _seconds_on_tasks(study: Study) -> dict[str, float]:
    """Return the mean training time of each encoding's trials on tasks; {} if a time is missing, if
    an encoding lacks a trial that another has, or if trials ran on different processors."""
    results = [result for result in study.finished if not result.config.is_on_text]
    processors = set()
    seconds: dict[str, list[float]] = {}
    trials: dict[str, set[tuple[str, int]]] = {}
    for result in results:
        if result.timing is None or not result.timing.train_seconds > 0:
            return {}
        processors.add(result.timing.processor)
        seconds.setdefault(result.config.encoding, []).append(result.timing.train_seconds)
        trial = (result.config.task, result.config.seed)
        trials.setdefault(result.config.encoding, set()).add(trial)
    have_the_same_trials = len({frozenset(of_encoding) for of_encoding in trials.values()}) == 1
    if len(processors) != 1 or not have_the_same_trials:
        return {}
    return {name: fmean(of_trials) for name, of_trials in seconds.items()}


def _line_for_tasks(standings: Mapping[str, Standing], studies: Mapping[str, Study]) -> str:
    """Return the line on tasks, with the cost of the first of each study."""
    use = "Copying and recall"
    costs = []
    for name, standing in standings.items():
        cost = _cost_in_words(standing.order[0], _seconds_on_tasks(studies[name]))
        if cost is None:
            return _no_cost(use)
        costs.append(cost)
    return _write_line_for_tasks(use, list(standings.values()), costs)


def _write_line_for_use(
    use: str, choices: Mapping[str, Choice], taken: Sequence[str], cost: str
) -> str:
    """Write one line of the leaderboard: what to take for a use, how it stands on each text, and
    what it costs.

    choices: by the name of the text. taken: one row for all texts, or one for each.
    """
    parts = []
    for i, (text, choice) in enumerate(choices.items()):
        name = taken[min(i, len(taken) - 1)]
        on_text = "" if len(choices) == 1 else f" on {text}"
        bits_in_words = f"{choice.bits[name]:.2f} bits{on_text}"
        parts.append(f"{_standing_in_few_words(choice, name)}, {bits_in_words}")
    names_in_words = join_names(list(dict.fromkeys(taken)))
    return f"{use}: {names_in_words} ({'; '.join(parts)}; {cost})."


def _standing_in_few_words(choice: Choice, name: str) -> str:
    """Write how a row stands, without the names of the others."""
    if choice.why_no_interval:
        return "not decided"
    if choice.certainty != TIED:
        return sentences.clause_on_standing(choice, name)
    return _tied_with(len(choice.tied) - 1)


def _tied_with(count: int) -> str:
    """Write `tied with three others`."""
    return f"tied with {sentences.number_word(count)} {'other' if count == 1 else 'others'}"


def _no_cost(use: str) -> str:
    """Write that nothing is named for a use, because training time is unknown."""
    return f"{use}: none is named, because its training time was not measured."


def _cost_of(name: str, times: float, cheapest: str) -> str:
    """Write what a row costs: `1.4 times nope's training time`."""
    if name == cheapest or times < 1.05:
        return "least training time"
    return f"{times:.1f} times {cheapest}'s training time"


def _write_line_for_tasks(use: str, standings: Sequence[Standing], costs_of: Sequence[str]) -> str:
    """Write the line of the leaderboard on tasks: the best mean rank of each study."""
    parts = []
    for standing, cost in zip(standings, costs_of, strict=True):
        first = standing.order[0]
        rank = f"mean rank {standing.mean(first):.2f} over {standing.where}"
        count = len(standing.first_tier) - 1
        if standing.pairs.least_significant_gap == math.inf:
            rank = f"not decided, {rank}"
        elif count:
            rank = f"{_tied_with(count)}, {rank}"
        parts.append(f"{first} ({rank}; {cost})")
    return f"{use}: {join_names(parts)}."
