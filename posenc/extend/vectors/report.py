"""What was measured of a model without a head, as sections of the report and as plain numbers."""

from collections.abc import Iterator, Mapping
from typing import Any

from posenc.extend.measure.evaluation import Evaluation, VectorScores
from posenc.extend.variants import WINDOW
from posenc.extend.vectors.measurement import Movement, movement
from posenc.report.report import Block, Cell, Heading, Number, Section, Table, Value
from posenc.statistics.text_intervals import fraction_interval

VECTOR_TABLE_COLUMNS = ("method", "measure", "tokens", "value", "low", "high", "texts")
"""Headings of the rows of `vector_rows`."""


def vector_sections(evaluations: Mapping[str, Evaluation], train_length: int) -> Iterator[Section]:
    """Yield the sections on retrieval and on short texts. evaluations: by method, the unchanged
    model as "none"."""
    yield Section("Texts found by length", _retrieval_blocks(evaluations, train_length))
    yield Section("Vectors of short texts", _movement_blocks(evaluations, train_length))


def _retrieval_blocks(evaluations: Mapping[str, Evaluation], train_length: int) -> list[Block]:
    """Return an explanation and the table of texts found, by method and length."""
    scores = {name: _scores_of(evaluation) for name, evaluation in evaluations.items()}
    lengths = sorted(set().union(*(score.ranks for score in scores.values())))
    num_questions = len(next(iter(scores["none"].ranks.values())))
    explanation = (
        f"{num_questions} questions name a fact each, and as many texts of one length have it "
        "among other facts and text of yours. Found is a text whose vector is the nearest to its "
        f"question; chance finds one of {num_questions}."
    )
    header: list[str | Heading] = ["method"]
    for length in lengths:
        header.append(
            Heading(
                f"{length:,}", "tokens" if length <= train_length else "tokens, beyond training"
            )
        )
    rows = []
    for name, score in scores.items():
        row: list[Value] = [name]
        for length in lengths:
            row.append(_found_cell(score, length))
        rows.append(row)
    caption = "Fraction of texts found, by their length; in brackets a 95 % Wilson interval"
    return [explanation, Table(header, rows, caption, name="texts-found")]


def _found_cell(score: VectorScores, length: int) -> Value:
    """Return the cell of the fraction of texts found at one length."""
    if length not in score.ranks:
        return Cell("cannot", note="Its table of positions has no rows there.")
    ranks = score.ranks[length]
    low, high = fraction_interval(int((ranks == 1).sum()), len(ranks))
    return Number(score.share_found(length), low, high, ".0%")


def _movement_blocks(evaluations: Mapping[str, Evaluation], train_length: int) -> list[Block]:
    """Return an explanation and the table of how far vectors of short texts move, by method."""
    explanation = (
        f"Texts of {train_length:,} tokens, before and after. A cosine of 1 is the same vector: "
        "old and new ones can be compared. Ranks tell whether new vectors among themselves are "
        "still in the old order."
    )
    header = [
        "method",
        Heading("cosine", "with the old vector"),
        Heading("lowest", "cosine"),
        Heading("ranks", "Spearman's, of similarities"),
        Heading("nearest", "text is the same"),
    ]
    rows: list[list[Value]] = []
    for name, moved in movements(evaluations).items():
        rows.append(
            [
                name,
                Number(moved.cosine, format_spec=".4f"),
                Number(moved.lowest_cosine, format_spec=".4f"),
                Number(moved.rank_correlation, format_spec=".3f"),
                Number(moved.same_nearest, format_spec=".0%"),
            ]
        )
    caption = "Vectors of short texts against those of the unchanged model"
    return [explanation, Table(header, rows, caption, name="short-vectors")]


def movements(evaluations: Mapping[str, Evaluation]) -> dict[str, Movement]:
    """Return how far each method moves vectors of short texts, by its name; not of the unchanged
    model, of which WINDOW reads such texts whole, too."""
    unchanged = _scores_of(evaluations["none"])
    return {
        name: movement(unchanged.short_vectors, _scores_of(evaluation).short_vectors)
        for name, evaluation in evaluations.items()
        if name not in ("none", WINDOW)
    }


def vector_rows(
    evaluations: Mapping[str, Evaluation], train_length: int
) -> list[tuple[str, str, int, float, float | None, float | None, int]]:
    """Return a row for each number of the sections' tables, in the order of VECTOR_TABLE_COLUMNS.

    measure: texts_found, which has a 95 % interval (low, high), or a field of Movement, which has
    none. tokens: length of the texts. texts: their number.
    """
    rows: list[tuple[str, str, int, float, float | None, float | None, int]] = []
    for name, evaluation in evaluations.items():
        score = _scores_of(evaluation)
        for length, ranks in score.ranks.items():
            low, high = fraction_interval(int((ranks == 1).sum()), len(ranks))
            share = score.share_found(length)
            rows.append((name, "texts_found", length, share, low, high, len(ranks)))
    num_short_texts = len(_scores_of(evaluations["none"]).short_vectors)
    for name, moved in movements(evaluations).items():
        for measure, value in moved._asdict().items():
            rows.append((name, measure, train_length, value, None, None, num_short_texts))
    return rows


def facts_of_vectors(evaluation: Evaluation, unchanged: Evaluation) -> dict[str, Any]:
    """Return the measurements of one method as plain lists and dicts."""
    score = _scores_of(evaluation)
    moved = movement(_scores_of(unchanged).short_vectors, score.short_vectors)
    return {
        "short_texts": moved._asdict(),
        "texts_found": [
            {
                "length": length,
                "found": int((ranks == 1).sum()),
                "of": len(ranks),
                "mean_reciprocal_rank": float((1 / ranks).mean()),
            }
            for length, ranks in score.ranks.items()
        ],
        "seconds": evaluation.seconds,
    }


def _scores_of(evaluation: Evaluation) -> VectorScores:
    """Return what was measured of a model without a head."""
    assert evaluation.vectors is not None
    return evaluation.vectors
