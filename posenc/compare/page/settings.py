"""Tables of the learning rates that were tried and of every encoding's settings."""

from posenc.compare.results import RATE_FACTORS, RateCheck, Study, TrialResult
from posenc.report.page.table import Heading, Table


def rate_rows(study: Study) -> list[list[str]]:
    """Return the header and a row for each task and encoding; [] if no rates were checked."""
    if not study.rates:
        return []
    factors = [f"x{factor:g}" for factor in RATE_FACTORS]
    rows = [["task", "encoding", *factors, "taken"]]
    for check in study.rates:
        cells = []
        for tried in check.tried:
            loss = "failed" if tried.bits is None else f"{tried.bits:.3f}"
            cells.append(f"{tried.lr:g}: {loss}")
        rows.append([check.task, check.encoding, *cells, _describe_chosen_rate(check)])
    return rows


def _describe_chosen_rate(check: RateCheck) -> str:
    """Return the chosen rate, and a note if it is the lowest or highest tried."""
    if check.chosen is None:
        return "none trained"
    rates = sorted(t.lr for t in check.tried)
    edge = {rates[0]: f"{rates[0]:g}, the lowest tried"}
    edge[rates[-1]] = f"{rates[-1]:g}, the highest tried"
    return edge.get(check.chosen, f"{check.chosen:g}")


_OMITTED_KEYS = {"name", "class", "source", "parameters shared by", "num_heads", "head_dim"}
"""Keys of a spec that are left out: names in the code, and sizes of the model."""


def specs_table(study: Study) -> Table:
    """Return a row for each encoding, or for each task if its settings depend on the task."""
    specs: dict[str, dict[str, list[str | int | None]]] = {}
    for trial in study.finished:
        specs.setdefault(trial.config.encoding, {}).setdefault(
            trial.config.task, _setting_cells(trial)
        )
    rows = []
    for name, by_task in specs.items():
        first, *others = by_task.values()
        if all(spec == first for spec in others):
            rows.append([name, *first])
        else:
            rows += [[f"{name} on {task}", *spec] for task, spec in by_task.items()]
    header = [
        "encoding",
        Heading("own parameters", "trained"),
        Heading("shared by", "layers or heads"),
        "settings",
        "source",
    ]
    return Table(header, rows, cards=True)


def _setting_cells(trial: TrialResult) -> list[str | int | None]:
    """Return the cells of an encoding's settings: parameters, what shares them, its arguments, its
    source."""
    spec = {k: v for k, v in trial.spec.items() if k not in _OMITTED_KEYS and "<" not in v}
    settings = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in spec.items() if v != "None")
    shared = trial.spec.get("parameters shared by", "")
    return [trial.encoding_parameters, shared, settings, trial.spec.get("source")]
