"""Make a study of a table of losses, as if its trials had been compare's.

What the table does not have stays unknown. What would make its numbers incomparable is refused.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

from posenc.compare.judging.answer import conclude
from posenc.compare.reports.loss_table import LossRow, LossTable
from posenc.compare.results import FORMAT, Study, Timing, TrainingPoint, TrialResult
from posenc.compare.rows import row_name
from posenc.compare.scores import (
    READINGS,
    FarScore,
    LengthScore,
    PositionScore,
    Reading,
    mean_loss_at_positions,
)
from posenc.compare.sources import GivenTable
from posenc.compare.trial.config import TrialConfig
from posenc.lazy import installed_version
from posenc.report.report import join_names

NO_LOSS = "the table has no loss there"
"""Why an encoding has no loss at a length that others have."""
NO_MEAN = "the table has no mean loss there"
"""Why there is none at a length of which the table has losses at some positions only."""
MAX_RATIO_OF_SIZES = 1.5
"""Ratio of parameters up to which models of two encodings count as equal, apart from what the
encodings themselves have: chosen."""

_T = TypeVar("_T", int, float)
_Trials = dict[tuple[str, int], list[LossRow]]
"""The rows of each trial, by encoding and seed."""


def studies_of_table(
    table: LossTable, trained_length: int | None, command: str
) -> dict[int, Study]:
    """Return the study of a table by number of parameters, the smallest first; of a table without
    sizes, or with one for each encoding, one study, by 0.

    trained_length: the length of training windows; None for the shortest of the table.
    Raises: ValueError, one sentence, for rows that cannot be judged.
    """
    _check_no_duplicates(table)
    rows_by_size: dict[int, list[LossRow]] = {}
    are_of_several_sizes = _has_several_sizes(table)
    for row in table.rows:
        size = row.size if are_of_several_sizes and row.size else 0
        rows_by_size.setdefault(size, []).append(row)
    length = _train_length(table, trained_length)
    studies = {}
    for size in sorted(rows_by_size):
        table_of_size = table._replace(rows=tuple(rows_by_size[size]))
        study = _study(table_of_size, length, trained_length is not None, len(rows_by_size))
        studies[size] = conclude(replace(study, command=command))
    return studies


def _check_no_duplicates(table: LossTable) -> None:
    """Raise ValueError if two rows differ in nothing but their place in the file, their loss and
    their seconds."""
    first_place: dict[object, str] = {}
    for row in table.rows:
        key = row._replace(place="", bits=0.0, seconds=None)
        if key in first_place:
            raise ValueError(
                f"{row.place}: {_in_words(row)} is there twice, first in {first_place[key]}."
            )
        first_place[key] = row.place.rpartition(", ")[2]


def _in_words(row: LossRow) -> str:
    """Return what a row is the loss of: `rope, seed 0, length 512`."""
    parts = [row.encoding, f"seed {row.seed}", f"length {row.length:,}"]
    if row.reading != "trained":
        parts.append(f"reading {row.reading}")
    if row.position is not None:
        parts.append(f"position {row.position:,}")
    return ", ".join(parts)


def _has_several_sizes(table: LossTable) -> bool:
    """Return True if every encoding has the same two sizes or more.

    Raises: ValueError for sizes that differ between encodings, or are missing in some rows.
    """
    sizes_of: dict[str, set[int | None]] = {}
    for row in table.rows:
        sizes_of.setdefault(row.encoding, set()).add(row.size)
    all_sizes = set().union(*sizes_of.values())
    if all_sizes == {None}:
        return False
    if None in all_sizes:
        raise ValueError(f"{table.name}: some rows have a size and some have none.")
    known_sizes = {size for size in all_sizes if size is not None}
    if all(len(sizes) == 1 for sizes in sizes_of.values()):
        if max(known_sizes) > MAX_RATIO_OF_SIZES * min(known_sizes):
            raise ValueError(
                f"{table.name}: its encodings have models of {min(known_sizes):,} to "
                f"{max(known_sizes):,} parameters, whose losses do not compare."
            )
        return False
    for encoding, sizes in sizes_of.items():
        if sizes != all_sizes:
            sizes_in_words = join_names(f"{size:,}" for size in sorted(known_sizes))
            raise ValueError(
                f"{table.name}: {encoding} lacks one of the sizes {sizes_in_words}; models of one "
                "size have the same number, without what the encoding adds."
            )
    return True


def _train_length(table: LossTable, trained_length: int | None) -> int:
    """Return the length of training windows. Raises: ValueError if the table lacks it."""
    lengths = sorted({row.length for row in table.rows})
    if trained_length is None:
        return lengths[0]
    if trained_length not in lengths:
        lengths_in_words = join_names(f"{length:,}" for length in lengths)
        raise ValueError(
            f"--trained-length must be one of the table's lengths, {lengths_in_words}, got "
            f"{trained_length:,}."
        )
    return trained_length


def _study(table: LossTable, train_length: int, length_was_given: bool, num_sizes: int) -> Study:
    """Return the study of the rows of models of one size, without its verdict.

    num_sizes: sizes that the whole table has.
    """
    test_lengths = tuple(sorted({row.length for row in table.rows if row.length >= train_length}))
    trials = _group_by_trial(
        row for row in table.rows if row.length >= train_length or not math.isfinite(row.bits)
    )
    _check_seeds(table.name, trials)
    _check_row_names(table)
    finished_trials = {key: rows for key, rows in trials.items() if _failure(rows) is None}
    _check_what_trials_have(table.name, finished_trials, train_length, max(test_lengths))
    steps = _common_steps(table.name, finished_trials)
    results = []
    for (encoding, seed), rows_of_trial in trials.items():
        config = _config(encoding, seed, test_lengths, steps, table.unit.per)
        results.append(_result(rows_of_trial, config))
    notes = _notes(table, train_length, length_was_given, steps)
    columns = tuple(sorted(table.columns))
    return Study(
        format=FORMAT,
        command="",
        started="",
        versions={"posenc": installed_version("posenc")},
        hardware={},
        corpus=None,
        trials=tuple(result.config for result in results),
        results=tuple(results),
        table=GivenTable(table.name, table.unit.words, columns, notes, num_sizes),
    )


def _notes(
    table: LossTable, train_length: int, length_was_given: bool, steps: int
) -> tuple[str, ...]:
    """Return the sentences on how a table was read."""
    notes = []
    if table.unit.words.startswith("nats"):
        notes.append(
            f"The losses of {table.name} are taken as {table.unit.words}, and shown in bits."
        )
    if not length_was_given:
        notes.append(
            f"The shortest length, {train_length:,}, is taken as that of training; if it is not: "
            "--trained-length."
        )
    shorter_lengths = sorted({row.length for row in table.rows if row.length < train_length})
    if shorter_lengths:
        lengths_in_words = join_names(f"{length:,}" for length in shorter_lengths)
        notes.append(f"Losses at {lengths_in_words}, below the training length, are left out.")
    earlier_rows = [row for row in table.rows if row.steps is not None and row.steps < steps]
    if any(row.length > train_length for row in earlier_rows):
        notes.append("Of losses before the last step, those at the training length are read.")
    return tuple(notes)


def _group_by_trial(rows: Iterable[LossRow]) -> _Trials:
    """Return the rows of each trial, by encoding and seed, in the order of the table."""
    trials: _Trials = {}
    for row in rows:
        trials.setdefault((row.encoding, row.seed), []).append(row)
    return trials


def _check_seeds(name: str, trials: _Trials) -> None:
    """Raise ValueError unless there are two encodings, with the same two seeds or more."""
    seeds_of: dict[str, set[int]] = {}
    for encoding, seed in trials:
        seeds_of.setdefault(encoding, set()).add(seed)
    if len(seeds_of) < 2:
        raise ValueError(f"{name} has one encoding, {next(iter(seeds_of))}: a second is needed.")
    all_seeds = set().union(*seeds_of.values())
    if len(all_seeds) < 2:
        raise ValueError(
            f"{name} has one seed, of which no difference has an interval: train with two or more."
        )
    for encoding, seeds in seeds_of.items():
        missing_seeds = sorted(all_seeds - seeds)
        if missing_seeds:
            raise ValueError(
                f"{name}: {encoding} lacks seed {missing_seeds[0]}, which another encoding has; of "
                "a trial that failed write a row whose loss is nan."
            )


def _check_row_names(table: LossTable) -> None:
    """Raise ValueError if two rows of the page would have one name: an encoding "rope in a window"
    beside the encoding "rope", read in a window."""
    encodings_and_readings = dict.fromkeys((row.encoding, row.reading) for row in table.rows)
    first_of: dict[str, tuple[str, str]] = {}
    for encoding, reading in encodings_and_readings:
        name = row_name(encoding, reading)
        first = first_of.setdefault(name, (encoding, reading))
        if first != (encoding, reading):
            raise ValueError(
                f"{table.name}: two rows would be named {name!r}: {encoding} as {reading}, and "
                f"{first[0]} as {first[1]}. Rename one encoding."
            )


def _failure(rows: Sequence[LossRow]) -> str | None:
    """Return why a trial failed, which is its first loss that is no number; None if it did not."""
    for row in rows:
        if not math.isfinite(row.bits):
            after = "" if row.steps is None else f" after {row.steps:,} steps"
            return f"the loss at {row.length:,} is {row.bits}{after}"
    return None


class _Tested(NamedTuple):
    """Hold what the rows of a trial are losses of, in one reading, after its last step: lengths of
    whole windows, and lengths with positions."""

    lengths: frozenset[int]
    lengths_by_position: frozenset[tuple[int, int]]


def _tested(rows: Sequence[LossRow]) -> dict[str, _Tested]:
    """Return what a trial was tested on, by reading."""
    last_rows = _last_rows(rows)
    tested = {}
    for reading in {row.reading for row in last_rows}:
        rows_of_reading = [row for row in last_rows if row.reading == reading]
        tested[reading] = _Tested(
            frozenset(row.length for row in rows_of_reading if row.position is None),
            frozenset(
                (row.length, row.position) for row in rows_of_reading if row.position is not None
            ),
        )
    return tested


def _check_what_trials_have(
    name: str, trials: _Trials, train_length: int, longest_length: int
) -> None:
    """Raise ValueError unless the seeds of an encoding have losses of the same, in each reading one
    at the training length; and unless all that are tested at the longest length have far losses, or
    none has.

    trials: those that did not fail.
    """
    first_of: dict[str, tuple[int, dict[str, _Tested]]] = {}
    for (encoding, seed), rows in trials.items():
        tested = _tested(rows)
        first_seed, tested_of_first = first_of.setdefault(encoding, (seed, tested))
        if tested != tested_of_first:
            raise ValueError(
                f"{name}: {encoding} has other rows with seed {seed} than with seed {first_seed}: "
                f"{_first_difference(tested, tested_of_first)}."
            )
        for reading in ("trained", *tested):
            if reading not in tested or not _has_length(tested[reading], train_length):
                raise ValueError(
                    f"{name}: {encoding}, seed {seed}, has no loss as {reading} at the training "
                    f"length {train_length:,}."
                )
    if longest_length > train_length:
        tested_of_row = {
            row_name(encoding, reading): tested
            for encoding, (_, by_reading) in first_of.items()
            for reading, tested in by_reading.items()
        }
        _check_far_losses(name, tested_of_row, longest_length, longest_length - train_length)


def _check_far_losses(
    name: str, tested_of_row: Mapping[str, _Tested], longest_length: int, first_position: int
) -> None:
    """Raise ValueError if only some rows that are tested at the longest length have losses from
    the first position of far tokens on."""
    with_far: list[str] = []
    without_far: list[str] = []
    for row, tested in tested_of_row.items():
        lengths = {*tested.lengths, *(length for length, _ in tested.lengths_by_position)}
        if (longest_length, first_position) in tested.lengths_by_position:
            with_far.append(row)
        elif longest_length in lengths:
            without_far.append(row)
    if with_far and without_far:
        raise ValueError(
            f"{name}: at length {longest_length:,}, {with_far[0]} has losses by position from "
            f"{first_position:,} on, and {without_far[0]} has none from there."
        )


def _has_length(tested: _Tested, length: int) -> bool:
    """Return True if there is a mean loss at a length, or losses from its first position on."""
    return length in tested.lengths or (length, 0) in tested.lengths_by_position


def _first_difference(tested: Mapping[str, _Tested], other: Mapping[str, _Tested]) -> str:
    """Return in words what only one of two trials was tested on."""
    for reading in READINGS:
        lengths, positions = tested.get(reading, _Tested(frozenset(), frozenset()))
        other_lengths, other_positions = other.get(reading, _Tested(frozenset(), frozenset()))
        for length in sorted(lengths ^ other_lengths):
            return f"only one of them has length {length:,} as {reading}"
        for length, position in sorted(positions ^ other_positions):
            return f"only one of them has position {position:,} of length {length:,} as {reading}"
    return "they differ"


def _last_rows(rows: Sequence[LossRow]) -> list[LossRow]:
    """Return the rows of a trial after its last step; all if steps are not given."""
    last_step = max((row.steps or 0) for row in rows)
    return [row for row in rows if (row.steps or 0) == last_step]


def _common_steps(name: str, trials: _Trials) -> int:
    """Return the steps of all trials; 0 if they are not given. Raises: ValueError if they differ,
    or are given in some rows only."""
    steps_of = {}
    for (encoding, seed), rows in trials.items():
        has_steps = {row.steps is not None for row in rows}
        if len(has_steps) > 1:
            raise ValueError(
                f"{name}: some rows of {encoding}, seed {seed}, have steps and some have none."
            )
        steps_of[f"{encoding}, seed {seed},"] = max((row.steps or 0) for row in rows)
    if not steps_of:
        return 0
    longest = max(steps_of, key=steps_of.__getitem__)
    shortest = min(steps_of, key=steps_of.__getitem__)
    if steps_of[longest] != steps_of[shortest]:
        raise ValueError(
            f"{name}: {shortest} ends after {steps_of[shortest]:,} steps and {longest} after "
            f"{steps_of[longest]:,}, whose losses do not compare; of a trial that failed write a "
            "row whose loss is nan."
        )
    return steps_of[longest]


def _config(
    encoding: str, seed: int, test_lengths: tuple[int, ...], steps: int, loss_is_per: str
) -> TrialConfig:
    """Return the config of a trial of which nothing else is known. loss_is_per: "token" or
    "byte"."""
    unknown_numbers = dict.fromkeys(("batch", "width", "layers", "heads", "kv_heads"), 0)
    unknown_texts = dict.fromkeys(("corpus", "device", "precision", "torch"), "")
    return TrialConfig(
        encoding=encoding,
        seed=seed,
        train_length=test_lengths[0],
        test_lengths=test_lengths,
        steps=steps,
        lr=0.0,
        recipe=0,
        # Losses per byte are of a text whose bytes somebody counted.
        tokenizer="of the table" if loss_is_per == "byte" else "",
        **unknown_numbers,
        **unknown_texts,
    )


def _result(rows: Sequence[LossRow], config: TrialConfig) -> TrialResult:
    """Return the result of a trial. rows: all that the table has of it."""
    failure = _failure(rows)
    if failure is not None:
        return TrialResult(config, reason=failure)
    last_rows = _last_rows(rows)
    rows_of_reading = {
        reading: [row for row in last_rows if row.reading == reading] for reading in READINGS
    }
    trained = rows_of_reading.pop("trained")
    readings = [
        Reading(name, _length_scores(rows, config, only_known=True), _far_scores(rows, config))
        for name, rows in rows_of_reading.items()
        if rows
    ]
    by_length = _length_scores(trained, config)
    return TrialResult(
        config,
        parameters=_only_value(rows, "size", [row.size for row in rows]) or 0,
        training=_curve(rows, config, by_length[0]),
        by_length=by_length,
        by_position=_position_scores(trained),
        timing=_timing(last_rows),
        far=_far_scores(trained, config),
        readings=tuple(readings),
    )


def _length_scores(
    rows: Sequence[LossRow], config: TrialConfig, only_known: bool = False
) -> tuple[LengthScore, ...]:
    """Return the mean losses of a trial in one reading, at each test length.

    rows: of that reading, after the last step. only_known: leave out lengths without a loss.
    """
    scores = []
    for length in config.test_lengths:
        rows_at_length = [row for row in rows if row.length == length]
        bits = _mean_loss(rows_at_length, length)
        if bits is not None:
            scores.append(LengthScore(length, bits))
        elif not only_known:
            scores.append(LengthScore(length, None, NO_MEAN if rows_at_length else NO_LOSS))
    return tuple(scores)


def _mean_loss(rows: Sequence[LossRow], length: int) -> float | None:
    """Return the mean loss over windows of a length; None if it is not known.

    rows: one of the whole window, or those of its positions.
    """
    for row in rows:
        if row.position is None:
            return row.bits
    return mean_loss_at_positions(_runs(rows, length), 0, length)


def _runs(rows: Sequence[LossRow], length: int) -> tuple[PositionScore, ...]:
    """Return the losses by position at one length: each row is the mean from its position to that
    of the next row, and the last row to the end of the window."""
    bits_of_position = {row.position: row.bits for row in rows if row.position is not None}
    starts = sorted(bits_of_position)
    return tuple(
        PositionScore(start, stop, bits_of_position[start])
        for start, stop in pairwise([*starts, length])
    )


def _position_scores(rows: Sequence[LossRow]) -> tuple[PositionScore, ...]:
    """Return the losses by position inside the longest window that has them."""
    rows_by_position = [row for row in rows if row.position is not None]
    if not rows_by_position:
        return ()
    longest_length = max(row.length for row in rows_by_position)
    at_longest = [row for row in rows_by_position if row.length == longest_length]
    return _runs(at_longest, longest_length)


def _far_scores(rows: Sequence[LossRow], config: TrialConfig) -> tuple[FarScore, ...]:
    """Return the loss of the last train_length tokens of the longest windows, if the table has
    losses at just these positions."""
    longest_length = max(config.test_lengths)
    if longest_length == config.train_length:
        return ()
    runs = _runs([row for row in rows if row.length == longest_length], longest_length)
    far = mean_loss_at_positions(runs, longest_length - config.train_length, longest_length)
    return () if far is None else (FarScore(longest_length, far, None),)


def _curve(
    rows: Sequence[LossRow], config: TrialConfig, near: LengthScore
) -> tuple[TrainingPoint, ...]:
    """Return the curve of losses at the training length while training, if the table has earlier
    steps. near: the score at the training length after the last step."""
    bits_of_step = {
        row.steps: row.bits
        for row in rows
        if row.steps is not None
        and row.length == config.train_length
        and row.reading == "trained"
        and row.position is None
    }
    if near.bits_per_byte is not None:
        bits_of_step[config.steps] = near.bits_per_byte
    if len(bits_of_step) < 2:
        return ()
    return tuple(TrainingPoint(step, None, bits_of_step[step]) for step in sorted(bits_of_step))


def _timing(rows: Sequence[LossRow]) -> Timing | None:
    """Return the seconds of training; None if they are not given. Those of the tuned reading have
    the tuning on top. rows: after the last step."""
    seconds_of_reading = {}
    for reading in READINGS:
        values = [row.seconds for row in rows if row.reading == reading]
        seconds_of_reading[reading] = _only_value(rows, "seconds", values)
    seconds = seconds_of_reading["trained"]
    if seconds is None:
        return None
    tuning_seconds = (seconds_of_reading["tuned"] or seconds) - seconds
    return Timing(0.0, seconds, 0.0, tuning_seconds=max(0.0, tuning_seconds))


def _only_value(rows: Sequence[LossRow], column: str, values: Iterable[_T | None]) -> _T | None:
    """Return the only value of a trial in a column; None if it has none.

    rows: of the trial. Raises: ValueError for several values.
    """
    known_values = {value for value in values if value is not None}
    if len(known_values) > 1:
        raise ValueError(
            f"{_in_words(rows[0])}, has more than one value of {column}: "
            f"{join_names(map(str, sorted(known_values)))}."
        )
    return known_values.pop() if known_values else None
