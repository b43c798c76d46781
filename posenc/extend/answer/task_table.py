"""List the methods' results at tasks and on short texts."""

import math

from posenc.extend.extension import Outcome
from posenc.extend.measure.tasks import Score

SHORT = "short texts"


def task_rows(outcome: Outcome) -> tuple[list[str], list[list[str]]]:
    """Return a header and a row per method. A row has the fraction of prompts answered exactly,
    with its interval and the loss of the answer, and the extra loss on short texts. Both are empty
    if nothing of this was measured."""
    evaluations, short = outcome.evaluations(), outcome.short_text()
    asked = list(dict.fromkeys(key for e in evaluations.values() for key in e.tasks))
    header = ["method", *(f"{task}, {length:,}" for task, length in asked)]
    rows = []
    for name, evaluation in evaluations.items():
        cells = []
        for key in asked:
            score = evaluation.tasks.get(key)
            cells.append("–" if score is None else _cell(score, outcome.counts(*key)))
        if short:
            rise = short.get(name)
            cells.append("–" if rise is None else _percent(rise.mean, rise.low, rise.high))
        rows.append([name, *cells])
    if short:
        header.append(SHORT)
    return (header, rows) if len(header) > 1 else ([], [])


def _cell(score: Score, counts: bool) -> str:
    exact = f"{score.exact.mean:.0%} ({score.exact.low:.0%}–{score.exact.high:.0%})"
    return f"{exact if counts else 'not learned'}, {score.loss.mean:.2f} nats"


def _percent(*rise: float) -> str:
    """Convert a rise of the loss and its interval, NaN for none, to one of the perplexity."""
    mean, low, high = (round(100 * math.expm1(min(each, 50.0)), 1) + 0.0 for each in rise)
    return f"{mean:+.1f} %" + ("" if math.isnan(low) else f" ({low:+.1f} to {high:+.1f})")
