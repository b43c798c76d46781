"""What was tried to tune each encoding, and which order it turns."""

from collections.abc import Iterator, Sequence

from posenc.compare.rates import pairs_turned_by_tuning
from posenc.compare.results import RATE_FACTORS, RateCheck, RateTried, Study
from posenc.report.report import Block, Section
from posenc.report.table import Heading, Number, Table, Value

_HOW_TUNED = (
    "Each encoding had equally many trials with one seed: rates, settings of its own knob, then "
    "the best of both together, and more where an edge won. They were judged on validation "
    "data of the training length; longer lengths were not measured, so they had no influence."
)
_HOW_RATES_WERE_TRIED = (
    "Each rate was tried with one seed. Bits per byte or target are on validation data of the "
    "training length; longer lengths were not measured in these trials, so they had no influence "
    "on the choice. If the chosen rate is the lowest or the highest tried, a better one may lie "
    "beyond."
)


def tuning_sections(study: Study) -> Iterator[Section]:
    """Yield the sections of a study whose learning rates, or also settings, were chosen."""
    if any(check.plain_at is not None for check in study.rates):
        yield Section("Tuning", [*_tuning_blocks(study)])
        yield Section("", [_HOW_TUNED], detail=True)
    else:
        yield Section("Learning rates", [_rate_table(study.rates)])
        yield Section("", [_HOW_RATES_WERE_TRIED], detail=True)


def _tuning_blocks(study: Study) -> Iterator[Block]:
    """Yield what a search of rates and settings chose for each encoding, and which order would be
    another with one rate and the usual settings for all."""
    header = [
        "encoding",
        Heading("trials", "of the search"),
        "setting taken",
        Heading("learning rate", "of the model"),
        Heading("rate of tables", "in multiples of it"),
        Heading("tuned", "bits per byte, validation"),
        Heading("one rate for all", "and the usual setting"),
        Heading("edges that won", "beyond which may be better"),
    ]
    rows = [_tuning_row(check) for check in study.rates]
    yield Table(header, rows, "Every encoding is tuned alike.", cards=True, name="tuning")
    if study.rates_from:
        yield f"This run did not search: the choices are recorded, from {study.rates_from}."
    turned = pairs_turned_by_tuning(study.rates)
    if turned:
        pairs = "; ".join(f"{b} before {a}" for a, b in turned)
        yield f"One rate for all would turn the order of the search's trials: {pairs}."
    else:
        yield "One rate for all would give the search's trials the same order."


def _tuning_row(check: RateCheck) -> list[Value]:
    """Return the row of an encoding in the table of the search."""
    plain = None if check.plain_bits is None else Number(check.plain_bits, form=".3f")
    best = check.best
    if best is None or best.bits is None:
        return [check.encoding, len(check.tried), "none trained", None, None, None, plain, None]
    return [
        check.encoding,
        len(check.tried),
        best.encoding or check.encoding,
        f"{best.lr:g}",
        f"{best.encoding_lr:g}",
        Number(best.bits, form=".3f"),
        plain,
        ", ".join(check.edges) or "none",
    ]


def _rate_table(rates: Sequence[RateCheck]) -> Table:
    """Return the learning rates that were tried, a row for each task and encoding."""
    factors = [f"x{factor:g}" for factor in RATE_FACTORS]
    rows = []
    for check in rates:
        cells = [_tried_text(tried) for tried in check.tried]
        rows.append([check.encoding, check.task, *cells, _chosen_text(check)])
    caption = "Learning rates, by the loss on validation data like that of training."
    header = ["encoding", "task", *factors, "taken"]
    return Table(header, rows, caption, name="learning-rates")


def _tried_text(tried: RateTried) -> str:
    """Return a rate and the loss of its trial."""
    loss = "failed" if tried.bits is None else f"{tried.bits:.3f}"
    return f"{tried.lr:g}: {loss}"


def _chosen_text(check: RateCheck) -> str:
    """Return the chosen rate, and a note if it is the lowest or highest tried."""
    if check.chosen is None:
        return "none trained"
    rates = [tried.lr for tried in check.tried]
    if check.chosen == max(rates):
        return f"{check.chosen:g}, the highest tried"
    if check.chosen == min(rates):
        return f"{check.chosen:g}, the lowest tried"
    return f"{check.chosen:g}"
