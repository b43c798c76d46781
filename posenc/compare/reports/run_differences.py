"""Differences between two runs that are no single study, such as those of two recipes or of two
versions of an encoding: each encoding of the second run minus the same one of the first."""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from posenc.compare.judging.near_far import far_place_in_words, places_of
from posenc.compare.judging.sentences import with_interval
from posenc.compare.judging.standing import MARGIN, NumbersBySeed
from posenc.compare.judging.units import units_of
from posenc.compare.page.numbers import csv_text
from posenc.compare.results import Study, with_labels
from posenc.compare.rows import Row, rows_by_name
from posenc.compare.trial.config import TrialConfig
from posenc.report.report import Facts, Heading, Number, Report, Section, Table, list_up_to_six

_TEST_FIELDS = (
    *("corpus", "tokenizer", "vocabulary", "document_end"),
    *("objective", "num_windows", "recipe"),
)
"""Fields of a trial that decide what a loss at some length is a mean of."""
HOW_TO_READ = (
    "Each difference is that of the means over the seeds that both runs have, of equal tests on "
    "the same text. ± is half of a 95 % interval that holds for all differences together: the rows "
    "of both runs are compared as those of one study, by a least-squares fit of rows and seeds and "
    "the studentized range. Lower and higher are certain, and by more than 0.02 bits."
)


class _Place(NamedTuple):
    """Losses that two runs both have: words for where, the loss of a row there (None for none), and
    whether its spread over seeds is that of near bytes."""

    where: str
    loss_of: Callable[[Row], float | None]
    is_near: bool


@dataclass(frozen=True)
class Difference:
    """The loss of a row in the second run minus that in the first.

    row: its name in both. where: which losses, in words. losses: the two means over `seeds`.
    value, half_width: of the difference; the half-width is inf if it is unknown.
    in_words: the difference with its interval.
    verdict: "lower" or "higher" if that is certain, "not told apart", or "" without an interval.
    """

    row: str
    where: str
    losses: tuple[float, float]
    seeds: tuple[int, ...]
    value: float
    half_width: float
    in_words: str
    verdict: str


def differences_of_runs(runs: Sequence[tuple[Path, Study]]) -> list[Difference]:
    """Return the differences of all rows that two runs share, see the module.

    runs: two folders with their studies.
    Raises: ValueError for losses that cannot be subtracted: of other texts or tests, or without a
    row and seed in common.
    """
    studies = [with_labels(study) for _, study in runs]
    first_trial, second_trial = (_first_trial_on_text(study) for study in studies)
    if first_trial is None or second_trial is None:
        raise ValueError("one of them has no losses on a text")
    for name in _TEST_FIELDS:
        values = getattr(first_trial, name), getattr(second_trial, name)
        if values[0] != values[1]:
            raise ValueError(
                f"their losses are of different tests ({name} {values[0]} and {values[1]})"
            )
    differences = [
        difference
        for place in _common_places(studies, first_trial, second_trial)
        for difference in _differences_at(place, studies)
    ]
    if not differences:
        raise ValueError("they have no encoding and seed in common")
    return differences


def _first_trial_on_text(study: Study) -> TrialConfig | None:
    """Return the first trial on text of a study; None if it has none."""
    return next((trial for trial in study.trials if trial.is_on_text), None)


def _common_places(
    studies: Sequence[Study], first_trial: TrialConfig, second_trial: TrialConfig
) -> list[_Place]:
    """Return near and far of both runs if these are the same; otherwise the windows of the shortest
    and of the longest length that both have."""
    train_length = first_trial.train_length
    unit = first_trial.length_unit
    if train_length == second_trial.train_length:
        places = [_Place(f"{train_length:,} {unit}", _loss_at(train_length), is_near=True)]
        longest_length = max(first_trial.test_lengths)
        if longest_length == max(second_trial.test_lengths) > train_length:
            where = far_place_in_words(studies[0])
            places.append(_Place(where, _far_loss_at(longest_length), is_near=False))
        return places
    shared_lengths = sorted({*first_trial.test_lengths} & {*second_trial.test_lengths})
    lengths_to_show = dict.fromkeys([*shared_lengths[:1], *shared_lengths[-1:]])
    return [
        _Place(f"windows of {length:,} {unit}", _loss_at(length), is_near=False)
        for length in lengths_to_show
    ]


def _loss_at(length: int) -> Callable[[Row], float | None]:
    """Return the function that gives the mean loss of a row over windows of this length."""

    def loss_of(row: Row) -> float | None:
        score = row.score_by_length.get(length)
        return None if score is None else score.bits_per_byte

    return loss_of


def _far_loss_at(longest_length: int) -> Callable[[Row], float | None]:
    """Return the function that gives the loss of a row on far targets of the longest windows."""

    def loss_of(row: Row) -> float | None:
        score = row.far_by_length.get(longest_length)
        return None if score is None else score.far

    return loss_of


def _differences_at(place: _Place, studies: Sequence[Study]) -> list[Difference]:
    """Return the differences of one place, in the order of the first run's rows."""
    first_losses, second_losses = (_losses_by_row(place, study) for study in studies)
    values: NumbersBySeed = {}
    seeds_of_row = {}
    for name, losses in first_losses.items():
        shared_seeds = tuple(sorted(losses.keys() & second_losses.get(name, {}).keys()))
        if shared_seeds:
            seeds_of_row[name] = shared_seeds
            values[_name_in_run(0, name)] = {seed: losses[seed] for seed in shared_seeds}
            values[_name_in_run(1, name)] = {
                seed: second_losses[name][seed] for seed in shared_seeds
            }
    if not values:
        return []
    places = places_of(values, {}) if place.is_near else places_of({}, values)
    (standing,) = places.all
    differences = []
    for name, seeds in seeds_of_row.items():
        first_name, second_name = _name_in_run(0, name), _name_in_run(1, name)
        gap = standing.pairs.gap(second_name, first_name)
        losses = fmean(values[first_name].values()), fmean(values[second_name].values())
        differences.append(
            Difference(
                row=name,
                where=place.where,
                losses=losses,
                seeds=seeds,
                value=gap.value,
                half_width=gap.half_width,
                in_words=with_interval(gap),
                verdict=_verdict(gap.value, gap.half_width),
            )
        )
    return differences


def _losses_by_row(place: _Place, study: Study) -> NumbersBySeed:
    """Return the losses of a run in a place, by row and seed."""
    losses: NumbersBySeed = {}
    for name, rows in rows_by_name(study).items():
        for row in rows:
            loss = place.loss_of(row)
            if loss is not None:
                losses.setdefault(name, {})[row.seed] = loss
    return losses


def _name_in_run(number: int, row: str) -> str:
    """Return the name of a row of the first run, 0, or the second, 1, among those of both."""
    return f"{number}: {row}"


def _verdict(value: float, half_width: float) -> str:
    """Return what a difference says, see Difference.verdict."""
    if half_width == math.inf:
        return ""
    if not abs(value) > max(half_width, MARGIN):
        return "not told apart"
    return "lower" if value < 0 else "higher"


def report_of_differences(
    runs: Sequence[tuple[Path, Study]],
    differences: Sequence[Difference],
    recipes: Mapping[str, str],
) -> Report:
    """Return the report of the differences between two runs.

    recipes: what differs in their recipes, in words by name.
    """
    first_folder, second_folder = (str(folder) for folder, _ in runs)
    units = units_of(runs[0][1])
    answers = {str(folder): study.recommendation for folder, study in runs}
    header = [
        "row",
        "where",
        Heading(first_folder, units.bits),
        Heading(second_folder, units.bits),
        Heading("difference", f"{second_folder} minus {first_folder}"),
        "verdict",
        Heading("seeds", "of both"),
    ]
    table_rows = [
        [
            difference.row,
            difference.where,
            *(Number(loss, format_spec=".3f") for loss in difference.losses),
            _cell_of_difference(difference),
            difference.verdict or "no interval",
            len(difference.seeds),
        ]
        for difference in differences
    ]
    return Report(
        "Differences between two runs",
        _headline(second_folder, differences),
        {
            "answer": _headline(second_folder, differences),
            "cannot_say": _limits(differences),
            "answers": answers,
            "recipes": dict(recipes),
            "differences": [_fact_of(difference) for difference in differences],
        },
        [
            Section("Differences", [Table(header, table_rows, as_cards=True, name="differences")]),
            Section("", [HOW_TO_READ], is_detail=True),
            Section("What differs in the recipes", [Facts(recipes)]),
            Section("Answers", [Facts(answers)]),
            Section(
                "",
                [f"posenc report {shlex.join([first_folder, second_folder])}"],
                is_detail=True,
            ),
        ],
        f"{second_folder} against {first_folder}.",
        _limits(differences),
    )


def _cell_of_difference(difference: Difference) -> Number:
    """Return the cell of a difference with its interval, if it has one."""
    half_width = difference.half_width
    half_width_text = "" if half_width == math.inf else f" ± {half_width:.3f}"
    return Number(difference.value, format_spec="+.3f", unit=half_width_text)


def _headline(second_folder: str, differences: Sequence[Difference]) -> str:
    """Return the sentence on the differences that are certain."""
    if not any(difference.verdict for difference in differences):
        return "Not decided: one seed has no interval. Take runs with the same two seeds or more."
    parts = []
    for verdict in ("lower", "higher"):
        found = [difference for difference in differences if difference.verdict == verdict]
        if found:
            rows_in_words = list_up_to_six(
                f"{difference.row} {difference.in_words} at {difference.where}"
                for difference in found
            )
            parts.append(f"{verdict} losses in {second_folder}: {rows_in_words}")
    num_open = sum(difference.verdict not in ("lower", "higher") for difference in differences)
    if num_open == len(differences):
        return "No difference is both certain and larger than 0.02 bits."
    if num_open:
        parts.append(f"{num_open} of {len(differences)} differences are not told apart")
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}."


def _limits(differences: Sequence[Difference]) -> str:
    """Return what the differences do not say."""
    seed_counts = sorted({len(difference.seeds) for difference in differences})
    counts_in_words = " to ".join(map(str, dict.fromkeys([seed_counts[0], seed_counts[-1]])))
    seeds_in_words = "seed" if seed_counts == [1] else "seeds"
    return (
        f"One text and {counts_in_words} {seeds_in_words} of both runs. All that differs in the "
        "recipes differs at once."
    )


def _fact_of(difference: Difference) -> dict[str, Any]:
    """Return a difference for other programs; None for a half-width that is unknown."""
    half_width = difference.half_width
    return {
        "row": difference.row,
        "where": difference.where,
        "losses": list(difference.losses),
        "difference": difference.value,
        "half_over_seeds": half_width if math.isfinite(half_width) else None,
        "seeds": list(difference.seeds),
        "verdict": difference.verdict,
    }


def csv_of_runs(runs: Sequence[tuple[Path, Study]]) -> str:
    """Return results.csv with the rows of both runs, told apart by the columns of their recipe."""
    texts = [csv_text(with_labels(study)) for _, study in runs]
    _, _, rows_of_second_run = texts[1].partition("\n")
    return texts[0] + rows_of_second_run
