"""How far a study agrees with published tables: which table, which order, how sure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from statistics import fmean

from posenc.compare.results import Study
from posenc.compare.trial import CAUSAL
from posenc.statistics.agreement import Rho, separated_pairs, sign_agreement, spearman

NEAR = 0.05
"""How far a published length may lie from the multiple of the training length that we tested."""

HEADER = ("published table", "length", "encodings", "Spearman", "exact p", "pairs that agree")
MEANING = (
    "Lengths are multiples of the length trained at. Spearman's correlation is over the encodings "
    "in common, with the p-value of all their orders: 4 encodings cannot reach p < 0.083. The last "
    "column counts pairs that the publication tells apart beyond its own seeds, and of these the "
    "ones that come in the same order here; tables of one seed have none."
)


@dataclass(frozen=True)
class Agreement:
    """A study against one published table at one multiple of the training length."""

    table: str
    source: str
    multiple: int
    encodings: tuple[str, ...]
    rho: Rho | None
    agreeing: int
    pairs: int


def agreements(study: Study) -> list[Agreement]:
    """Against every published table that has two encodings of the study or more; by the texts that
    its trials have, so that a label changes nothing."""
    if any(trial.objective != CAUSAL for trial in study.trials):
        return []  # the tables are of the next token
    tables = json.loads(resources.files("posenc.compare").joinpath("published.json").read_bytes())
    return [found for table in tables for found in _against(table, study)]


def rows(found: list[Agreement]) -> Iterator[list[str]]:
    """As words, one row each, and a last one with the sum of the pairs beyond x1."""
    for each in found:
        rho, p = ("–", "–") if each.rho is None else (f"{each.rho.value:.2f}", f"{each.rho.p:.3f}")
        pairs = f"{each.agreeing} of {each.pairs}" if each.pairs else "–"
        names = f"{len(each.encodings)}: {' '.join(each.encodings)}"
        yield [f"{each.table}, {each.source}", f"x{each.multiple}", names, rho, p, pairs]
    agreeing = sum(each.agreeing for each in found if each.multiple > 1)
    pairs = sum(each.pairs for each in found if each.multiple > 1)
    if pairs:
        share = f"{agreeing} of {pairs} ({agreeing / pairs:.2f})"
        yield ["all tables beyond the trained length", "", "", "", "", share]


def _against(table: dict, study: Study) -> Iterator[Agreement]:
    train = study.trials[0].train_length
    for length in study.trials[0].test_lengths:
        if length % train:
            continue
        multiple = length // train
        column = _column(table, multiple)
        ours = _means(study, length)
        if column is None:
            continue
        theirs = {n: row[column] for n, row in table["means"].items() if row[column] is not None}
        shared = [name for name in ours if name in theirs]
        if len(shared) < 2:
            continue
        deviations = {n: row[column] for n, row in table["deviations"].items() if n in shared}
        known = {name: theirs[name] for name in shared}
        agreeing, pairs = sign_agreement(ours, separated_pairs(known, deviations, table["seeds"]))
        yield Agreement(
            f"{table['name']} ({table['model']})",
            table["source"],
            multiple,
            tuple(shared),
            spearman({name: ours[name] for name in shared}, known),
            agreeing,
            pairs,
        )


def _column(table: dict, multiple: int) -> int | None:
    wanted = multiple * table["train_length"]
    near = [i for i, n in enumerate(table["lengths"]) if abs(n - wanted) <= NEAR * wanted]
    return min(near, key=lambda i: abs(table["lengths"][i] - wanted), default=None)


def _means(study: Study, length: int) -> dict[str, float]:
    """Mean loss of posenc's own encodings; a file or module of the user's is none of them."""
    found: dict[str, list[float]] = {}
    for result in study.finished:
        config = result.config
        if config.code or config.encoding in study.unchecked:
            continue
        for score in result.by_length:
            if score.length == length and score.bits_per_byte is not None:
                found.setdefault(config.encoding, []).append(score.bits_per_byte)
    return {name: fmean(values) for name, values in found.items()}
