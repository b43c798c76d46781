"""The settings of every encoding of a study, as they ran."""

from __future__ import annotations

from posenc.compare.results import Study, TrialResult
from posenc.report.page.table import Heading, Table

_SAID_ELSEWHERE = {"name", "class", "source", "parameters shared by", "num_heads", "head_dim"}
"""Keys of a spec that need no words here: how it is called in the code, and the model's sizes."""


def specs_table(study: Study) -> Table:
    """A row for each encoding; for each task where its settings follow the task's length."""
    found: dict[str, dict[str, list[str | int | None]]] = {}
    for trial in study.finished:
        found.setdefault(trial.config.encoding, {}).setdefault(trial.config.task, _spec(trial))
    rows = []
    for name, by_task in found.items():
        first, *others = by_task.values()
        if all(each == first for each in others):
            rows.append([name, *first])
        else:
            rows += [[f"{name} on {task}", *each] for task, each in by_task.items()]
    header = [
        "encoding",
        Heading("own parameters", "what it learns itself"),
        Heading("shared by", "who uses them"),
        "settings",
        "source",
    ]
    return Table(header, rows)


def _spec(trial: TrialResult) -> list[str | int | None]:
    spec = {k: v for k, v in trial.spec.items() if k not in _SAID_ELSEWHERE and "<" not in v}
    settings = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in spec.items() if v != "None")
    shared = trial.spec.get("parameters shared by", "")
    return [trial.encoding_parameters, shared, settings, trial.spec.get("source")]
