"""The numbers of a study, by the names that programs read."""

import math
from pathlib import Path
from typing import Any

from posenc.compare.judge.answer import answer_and_choices
from posenc.compare.judge.context_use import context_use
from posenc.compare.judge.near_far import standings
from posenc.compare.judge.standing import Standing, standing_of_task, standing_of_tasks
from posenc.compare.results import Study
from posenc.compare.rows import rows_by_name
from posenc.tasks.registry import TASKS, TEXT


def facts_of(study: Study, folder: Path | None = None) -> dict[str, Any]:
    """Return the answer of a study and the numbers behind it; a number is None if unknown.

    folder: where its page and study.json lie, if they are kept. "use" lists the encodings that the
    answer says to use. "places" has one item for all tasks, for near and for far bytes of the text,
    and for each task. "context" says of each row of the text how much context it uses.
    """
    choices = answer_and_choices(study)
    content = {
        "answer": study.recommendation,
        "cannot_say": study.limits,
        "use": choices.rows,
        "sure": choices.certainties,
        "places": _standing_objects(study),
        "context": _context_objects(study),
        "trials": {
            "planned": len(study.trials),
            "finished": len(study.finished),
            "reused": _reused_trials(study),
            "failed": {result.config.folder: result.reason for result in study.failed},
        },
    }
    for name, file in (("report", "report.html"), ("study", "study.json")):
        if folder is not None and (folder / file).is_file():
            content[name] = str(folder / file)
    return content


def _standing_objects(study: Study) -> list[dict[str, Any]]:
    """Return the standing over all tasks, at each length of the text, and on each task."""
    places = []
    overall = standing_of_tasks(study)
    if overall is not None:
        places.append(_standing_object(overall, "mean rank"))
    text = study.of_task(TEXT)
    if text.finished:
        places += [_standing_object(standing, "bits per byte") for standing in standings(text)]
    for task in study.sequence_tasks:
        standing = standing_of_task(study, task)
        if standing is not None:
            places.append(_standing_object(standing, TASKS[task].metric))
    return places


def _context_objects(study: Study) -> dict[str, dict[str, Any]]:
    """Return, by row of the text, how many bytes of context it uses, see ContextUse; rows whose far
    bytes were not measured are left out."""
    objects = {}
    for name, rows in rows_by_name(study).items():
        use = context_use(rows)
        if use is not None:
            objects[name] = {
                "more_than": use.more_than,
                "at_most": use.at_most,
                "windows": [use.near, use.longest],
                "saved": use.saved.value,
                "half_over_windows": _finite_or_none(use.saved.half_width),
            }
    return objects


def _reused_trials(study: Study) -> dict[str, dict[str, str | None]]:
    """Return, by a trial's folder, which other run trained it, and on which processor."""
    reused = {}
    for result in study.finished:
        timing = result.timing
        if timing and timing.reused_from:
            reused[result.config.folder] = {
                "from": timing.reused_from,
                "processor": timing.processor or None,
            }
    return reused


def _standing_object(standing: Standing, unit: str) -> dict[str, Any]:
    """Return a standing as one object of "places": the first encodings, and each encoding, best
    first, with its differences from the first one.

    unit: of the numbers, in words.
    """
    return {
        "where": standing.where,
        "unit": unit,
        "higher_is_better": standing.higher_is_better,
        "level": standing.pairs.level,
        "least_difference": _finite_or_none(standing.least_significant_gap),
        "first": list(standing.contenders),
        "encodings": [_encoding_object(standing, name) for name in standing.order],
    }


def _encoding_object(standing: Standing, name: str) -> dict[str, Any]:
    """Return one encoding of a standing: its numbers, and its difference from the first one, which
    has None there."""
    first = standing.order[0]
    seeds = sorted(standing.pairs.values[name].items())
    minus_first = None
    half_over_seeds = None
    half_over_windows = None
    if name != first:
        gap = standing.gap(name)
        minus_first = gap.value
        half_over_seeds = _finite_or_none(gap.half_width)
        over_windows = standing.gaps_over_windows.get((name, first))
        if over_windows is not None:
            half_over_windows = _finite_or_none(over_windows.half_width)
    return {
        "encoding": name,
        "mean": standing.mean(name),
        "seeds": {str(seed): value for seed, value in seeds},
        "minus_first": minus_first,
        "half_over_seeds": half_over_seeds,
        "half_over_windows": half_over_windows,
        "verdict": standing.verdict(name),
        "tier": standing.tier(name),
    }


def _finite_or_none(number: float) -> float | None:
    """Return a number that is finite; None for another, which JSON lacks."""
    return number if math.isfinite(number) else None
