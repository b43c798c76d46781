"""The table of learning rates that were tried."""

from __future__ import annotations

from posenc.compare.results import FACTORS, RateCheck, Study

TITLE = "Learning rates, by the loss on validation data like that of training"
MEANING = (
    "Each rate was tried with one seed. Bits per byte or target are on validation data of the "
    "training length; longer lengths were not measured in these trials, so they had no influence "
    "on the choice. If the chosen rate is the lowest or the highest tried, a better one may lie "
    "beyond."
)


def rate_rows(study: Study) -> list[list[str]]:
    """Return the header and a row for each task and encoding; [] if no rates were checked."""
    if not study.rates:
        return []
    rows = [["task", "encoding", *(f"x{factor:g}" for factor in FACTORS), "taken"]]
    for each in study.rates:
        cells = [f"{t.lr:g}: {'failed' if t.bits is None else f'{t.bits:.3f}'}" for t in each.tried]
        rows.append([each.task, each.encoding, *cells, _taken(each)])
    return rows


def _taken(check: RateCheck) -> str:
    """Return the chosen rate, and a note if it is the lowest or highest tried."""
    if check.chosen is None:
        return "none trained"
    rates = sorted(t.lr for t in check.tried)
    edge = {rates[0]: ", the lowest tried", rates[-1]: ", the highest tried"}
    return f"{check.chosen:g}{edge.get(check.chosen, '')}"
