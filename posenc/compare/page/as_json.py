"""The answer of a study and its numbers, as JSON."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc.compare.judge.answer import answer_and_use
from posenc.compare.judge.standing import Standing, standing_of_task, standing_of_tasks, standings
from posenc.compare.judge.uses import which_for_what
from posenc.compare.page.rows import verdict_of
from posenc.compare.results import Study, with_labels
from posenc.tasks.known import TASKS, TEXT


def answer_json(study: Study, folder: Path | None = None) -> str:
    """Return the answer of a study and its numbers, see `answer_object`, as JSON text."""
    return json_text(answer_object(study, folder))


def leaderboard_object(boards: Mapping[str, Study], home: Path | None = None) -> dict[str, Any]:
    """Return the JSON object of the leaderboard: "answer", which encoding to use for what by all
    studies, and "studies", with `answer_object` each by its name.

    home: a folder with a subfolder of that name for each, if they are kept.
    """
    studies = {
        name: answer_object(with_labels(study), home and home / name)
        for name, study in boards.items()
    }
    return {"answer": which_for_what(boards), "studies": studies}


def json_text(content: dict[str, Any]) -> str:
    """Return content as JSON text; letters beyond ASCII are not escaped."""
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)


def answer_object(study: Study, folder: Path | None = None) -> dict[str, Any]:
    """Return what becomes one JSON object; a number is None if unknown.

    Its "use" lists the encodings that the answer says to use. "places" has one item for all tasks,
    for each tested length of the text, and for each task.
    """
    content = {
        "answer": study.recommendation,
        "cannot_say": study.limits,
        "use": answer_and_use(study)[1],
        "places": _standing_objects(study),
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
    first, with its differences from the first. unit: unit of the numbers, in words."""
    pairs = standing.pairs
    first = standing.order[0]
    return {
        "where": standing.where,
        "unit": unit,
        "higher_is_better": standing.higher,
        "level": pairs.level,
        "least_difference": _finite_or_none(standing.least_significant_gap),
        "first": list(standing.first),
        "encodings": [
            {
                "encoding": name,
                "mean": standing.mean(name),
                "seeds": {str(seed): value for seed, value in sorted(pairs.values[name].items())},
                "minus_first": None if name == first else standing.gap(name).value,
                "half_over_seeds": _finite_or_none(standing.gap(name).half)
                if name != first
                else None,
                "half_over_windows": _finite_or_none(standing.windows[name, first].half)
                if (name, first) in standing.windows
                else None,
                "verdict": verdict_of(standing, name),
                "tier": standing.tier(name),
            }
            for name in standing.order
        ],
    }


def _finite_or_none(number: float) -> float | None:
    """Return a number that is finite; None for another, which JSON lacks."""
    return number if math.isfinite(number) else None
