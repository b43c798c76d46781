"""The two places that an answer judges: near bytes and far bytes, each as a Standing of rows."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from posenc.compare.judging.standing import (
    FAR_PRIOR,
    MARGIN,
    NEAR_PRIOR,
    NumbersBySeed,
    Standing,
    mean_loss_by_window,
    order_by_standings,
    standing_of_task,
    standing_of_tasks,
    with_own_spread_of_first,
)
from posenc.compare.results import Study, TrialResult, kept_by_study
from posenc.compare.rows import Row, row_name, rows_of
from posenc.compare.scores import READINGS, mean_loss_at_positions
from posenc.compare.trial.config import CAUSAL, TrialConfig
from posenc.statistics.seed_intervals import PairwiseComparison
from posenc.tasks.registry import TEXT


@dataclass(frozen=True)
class Places:
    """Rows of a study by what is judged. An encoding enters with one row in each place.

    near: bits per byte at the training length; far: of the last train_length bytes of each longest
        window. None where no row has a number.
    encoding_of: the encoding of each row, by the row's name.
    near_row_of: the name in `near` of each row in `far`: a row that is only read in another way has
        the near loss of the row as trained.
    unjudged_far_loss: mean far loss of the rows that are not judged, by name: each encoding enters
        with the first of READINGS that is within MARGIN of its best.
    failure_counts: how many trials on text failed, of how many, by encoding. An encoding with
        failed trials is not judged, unless all have some.
    why_no_far: why there are no far bytes; "" if there are.
    text_of: the text of each encoding, which is named by a label here if it has one.
    """

    near: Standing | None
    far: Standing | None
    encoding_of: Mapping[str, str]
    near_row_of: Mapping[str, str]
    unjudged_far_loss: Mapping[str, float] = field(default_factory=dict)
    failure_counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    why_no_far: str = ""
    text_of: Mapping[str, str] = field(default_factory=dict)

    def text_of_row(self, row: str) -> str:
        """Return the text of a row's encoding; its name where a table has no texts."""
        encoding = self.encoding_of.get(row, row)
        return self.text_of.get(encoding, encoding)

    @property
    def all(self) -> list[Standing]:
        """Return the standings that there are, near first."""
        return [standing for standing in (self.near, self.far) if standing is not None]


@kept_by_study
def near_and_far(study: Study) -> Places:
    """Return the two standings of the text of a study."""
    text_study = study.of_task(TEXT)
    if not text_study.trials:
        return Places(None, None, {}, {}, why_no_far="there is no text")
    failure_counts = count_failed_trials(text_study)
    rows = _rows_that_count(text_study, failure_counts)
    result_by_encoding_and_seed = {
        _encoding_and_seed(result.config): result for result in text_study.finished
    }
    far_losses: dict[str, NumbersBySeed] = {}  # by encoding, row and seed
    encoding_of: dict[str, str] = {}
    for row in rows:
        encoding_of[row.name] = row.encoding
        loss = far_loss(row, result_by_encoding_and_seed[_encoding_and_seed(row.trial)])
        if loss is not None:
            far_losses.setdefault(row.encoding, {}).setdefault(row.name, {})[row.seed] = loss
    judged_row_of = {
        encoding: _simplest_row(encoding, by_row) for encoding, by_row in far_losses.items()
    }
    near_losses, near_row_of = _near_losses(rows, judged_row_of)
    judged_far_losses = {
        name: far_losses[encoding][name] for encoding, name in judged_row_of.items()
    }
    unjudged_far_loss = {
        name: fmean(loss_by_seed.values())
        for encoding, by_row in far_losses.items()
        for name, loss_by_seed in by_row.items()
        if name != judged_row_of[encoding]
    }
    near = _standing(near_losses, _near_place_in_words(text_study), rows, is_far=False)
    far = _standing(judged_far_losses, far_place_in_words(text_study), rows, is_far=True)
    near, far = with_own_spread_of_first(near, far, near_row_of)
    why_no_far = "" if far else _why_no_far(text_study, rows)
    return Places(
        near,
        far,
        encoding_of,
        near_row_of,
        unjudged_far_loss,
        failure_counts,
        why_no_far,
        _texts_of_encodings(text_study),
    )


def places_of(near: NumbersBySeed, far: NumbersBySeed, margin: float = MARGIN) -> Places:
    """Return the places of plain losses, in bits per byte by encoding and seed: every encoding as
    trained.

    >>> near = {"t5": {0: 1.88, 1: 1.89}, "rope": {0: 2.00, 1: 1.96}}
    >>> places_of(near, {}).near.order
    ('t5', 'rope')
    """
    standings = []
    for losses, prior in ((near, NEAR_PRIOR), (far, FAR_PRIOR)):
        pairs = PairwiseComparison(losses, "text", prior=prior)
        standings.append(Standing("", pairs, margin=margin) if losses else None)
    own_name_of = {name: name for name in (*near, *far)}
    near_standing, far_standing = with_own_spread_of_first(standings[0], standings[1], own_name_of)
    return Places(near_standing, far_standing, own_name_of, own_name_of)


def far_loss(row: Row, result: TrialResult) -> float | None:
    """Return the bits per byte of a row on the last train_length bytes of each longest window; None
    if they were not measured or the row cannot run there.

    Results of before these bytes were kept have losses by position, whose last ones are the same
    bytes.
    """
    longest_length = max(row.trial.test_lengths)
    if longest_length in row.far_by_length:
        return row.far_by_length[longest_length].far
    first_position = longest_length - row.trial.train_length
    last_positions_are_far_bytes = (
        row.reading == "trained"
        and row.trial.objective == CAUSAL
        and first_position >= row.trial.train_length
    )
    if row.far_by_length or not last_positions_are_far_bytes:
        return None
    return mean_loss_at_positions(result.by_position, first_position, longest_length)


def count_failed_trials(study: Study) -> dict[str, tuple[int, int]]:
    """Return how many trials failed, and of how many planned ones, by encoding; only encodings with
    a failed trial."""
    planned_counts = Counter(trial.encoding for trial in study.trials)
    failed_counts = Counter(result.config.encoding for result in study.failed)
    return {
        encoding: (count, planned_counts[encoding]) for encoding, count in failed_counts.items()
    }


def standings(study: Study) -> list[Standing]:
    """Return the standings on near and on far bytes, where a row has a number."""
    return near_and_far(study).all


def encodings_best_first(study: Study) -> list[str]:
    """Return the encodings, best first on far bytes; those without far bytes come later."""
    places = near_and_far(study)
    names = order_by_standings(study, reversed(places.all))
    encodings = dict.fromkeys(places.encoding_of.get(name, name) for name in names)
    return [name for name in encodings if name in study.encodings]


def standing_by_column(study: Study) -> dict[str, Standing]:
    """Return the standing of each column of the table of tasks: "all" tasks, the text near and far,
    each task."""
    standing_of_column: dict[str, Standing | None] = {"all": standing_of_tasks(study)}
    text_study = study.of_task(TEXT)
    if text_study.trials:
        standing_of_column |= {standing.where: standing for standing in standings(text_study)}
    for task in study.sequence_tasks:
        standing_of_column[task] = standing_of_task(study, task)
    return {
        column: standing for column, standing in standing_of_column.items() if standing is not None
    }


def far_place_in_words(study: Study) -> str:
    """Return the words for the far bytes of a text: `the last 128 of 1,024 bytes`."""
    config = study.trials[0]
    longest_length = max(config.test_lengths)
    return f"the last {config.train_length:,} of {longest_length:,} {config.length_unit}"


def _near_place_in_words(study: Study) -> str:
    """Return the words for the bytes at the training length: `128 bytes`."""
    config = study.trials[0]
    return f"{config.train_length:,} {config.length_unit}"


def _rows_that_count(text_study: Study, failure_counts: Mapping[str, tuple[int, int]]) -> list[Row]:
    """Return the rows of encodings that pass the contract and have no failed trial; if all have
    one, those with failed trials too."""
    checked_rows = [row for row in rows_of(text_study) if row.encoding not in text_study.unchecked]
    complete_rows = [row for row in checked_rows if row.encoding not in failure_counts]
    return complete_rows or checked_rows


def _texts_of_encodings(text_study: Study) -> dict[str, str]:
    """Return the text of each encoding that its results name; tables of other programs name
    none."""
    return {
        result.config.encoding: result.spec["name"]
        for result in text_study.finished
        if "name" in result.spec
    }


def _encoding_and_seed(config: TrialConfig) -> tuple[str, int]:
    """Return encoding and seed, which no two trials on text of a study share."""
    return config.encoding, config.seed


def _simplest_row(encoding: str, by_row: NumbersBySeed) -> str:
    """Return the name of the row that stands for an encoding on far bytes: of the readings, the
    first whose mean is within MARGIN of the lowest."""
    means = {name: fmean(loss_by_seed.values()) for name, loss_by_seed in by_row.items()}
    lowest_mean = min(means.values())
    names = [row_name(encoding, reading) for reading in READINGS]
    return next(name for name in names if name in means and means[name] <= lowest_mean + MARGIN)


def _near_losses(
    rows: Sequence[Row], judged_row_of: Mapping[str, str]
) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Return the near losses by row and seed, and the name of the near row of each judged far row.

    Every encoding enters as trained; a judged row with other near losses, as after a tuning, enters
    beside it.
    """
    losses: NumbersBySeed = {}
    for row in rows:
        loss = row.near.bits_per_byte if row.trial.train_length in row.score_by_length else None
        if loss is not None:
            losses.setdefault(row.name, {})[row.seed] = loss
    near_row_of = {}
    for encoding, name in judged_row_of.items():
        near_losses_are_equal = losses.get(name) == losses.get(encoding)
        near_row_of[name] = encoding if near_losses_are_equal else name
    trained_names = {row.encoding for row in rows}
    entering_names = trained_names | set(near_row_of.values())
    return {
        name: loss_by_seed for name, loss_by_seed in losses.items() if name in entering_names
    }, near_row_of


def _standing(
    losses: NumbersBySeed, where: str, rows: Iterable[Row], is_far: bool
) -> Standing | None:
    """Return the standing of these losses, with intervals over windows if all rows have those."""
    if not losses:
        return None
    window_losses: dict[str, list[Sequence[float]]] = {}
    for row in rows:
        if row.name not in losses:
            continue
        score = row.far_by_length.get(max(row.trial.test_lengths)) if is_far else row.near
        window_losses.setdefault(row.name, []).append(score.windows if score else ())
    pairs = PairwiseComparison(losses, "text", prior=FAR_PRIOR if is_far else NEAR_PRIOR)
    return Standing(where, pairs, window_losses=mean_loss_by_window(window_losses), margin=MARGIN)


def _why_no_far(text_study: Study, rows: Sequence[Row]) -> str:
    """Return why no row has a loss on far bytes."""
    config = text_study.trials[0]
    if max(config.test_lengths) <= config.train_length:
        return "no longer length was tested"
    if text_study.table is not None:
        first_position = max(config.test_lengths) - config.train_length
        return (
            f"the table has no losses by position from {first_position:,} on at length "
            f"{max(config.test_lengths):,}"
        )
    if rows and not any(row.far_by_length for row in rows):
        return "far tokens were not measured in this run"
    return "no encoding runs there"
