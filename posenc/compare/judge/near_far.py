"""The two places that an answer judges: near bytes and far bytes, each as a Standing of rows."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import NamedTuple

from posenc.compare.judge.standing import (
    FAR_SPREAD,
    MARGIN,
    NEAR_SPREAD,
    Standing,
    Values,
    mean_loss_by_window,
    order_by_standings,
    standing_of_task,
    standing_of_tasks,
)
from posenc.compare.results import Study, TrialResult
from posenc.compare.rows import Row, row_name, rows_of
from posenc.compare.scores import READINGS
from posenc.compare.trial.config import CAUSAL, TrialConfig
from posenc.statistics.seed_intervals import PairwiseComparison
from posenc.tasks.registry import TEXT

STEADY_LEVEL = 0.036
"""Significance level at which the first of a place must lead by its own seeds alone; chosen by
simulated studies (experiments/judged.py)."""
NUM_NEAREST_RIVALS = 3
"""Number of rivals, the nearest ones, with which the seeds of the first are compared."""


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
    failed: how many trials on text failed, of how many, by encoding. An encoding with failed trials
        is not judged, unless all have some.
    why_no_far: why there are no far bytes; "" if there are.
    """

    near: Standing | None
    far: Standing | None
    encoding_of: Mapping[str, str]
    near_row_of: Mapping[str, str]
    unjudged_far_loss: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    why_no_far: str = ""

    @property
    def all(self) -> list[Standing]:
        """Return the standings that there are, near first."""
        return [standing for standing in (self.near, self.far) if standing is not None]


def near_and_far(study: Study) -> Places:
    """Return the two standings of the text of a study."""
    text = study.of_task(TEXT)
    if not text.trials:
        return Places(None, None, {}, {}, why_no_far="there is no text")
    failed = failed_trials(text)
    rows = _rows_that_count(text, failed)
    positions = {_encoding_and_seed(result.config): result for result in text.finished}
    far_losses: dict[str, Values] = {}  # by encoding, row and seed
    encoding_of: dict[str, str] = {}
    for row in rows:
        encoding_of[row.name] = row.encoding
        bits = far_loss(row, positions[_encoding_and_seed(row.trial)])
        if bits is not None:
            far_losses.setdefault(row.encoding, {}).setdefault(row.name, {})[row.seed] = bits
    judged = {encoding: _simplest_row(encoding, by_row) for encoding, by_row in far_losses.items()}
    near_losses, near_row_of = _near_losses(rows, judged)
    far_of_judged = {name: far_losses[encoding][name] for encoding, name in judged.items()}
    unjudged_far_loss = {
        name: fmean(seeds.values())
        for encoding, by_row in far_losses.items()
        for name, seeds in by_row.items()
        if name != judged[encoding]
    }
    near = _standing(near_losses, _near_place_in_words(text), rows, is_far=False)
    far = _standing(far_of_judged, far_place_in_words(text), rows, is_far=True)
    near, far = _with_own_spread_of_first(near, far, near_row_of)
    why_no_far = "" if far else _why_no_far(text, rows)
    return Places(near, far, encoding_of, near_row_of, unjudged_far_loss, failed, why_no_far)


def places_of(near: Values, far: Values, margin: float = MARGIN) -> Places:
    """Return the places of plain losses, in bits per byte by encoding and seed: every encoding as
    trained.

    >>> near = {"t5": {0: 1.88, 1: 1.89}, "rope": {0: 2.00, 1: 1.96}}
    >>> places_of(near, {}).near.order
    ('t5', 'rope')
    """
    standings = []
    for losses, prior in ((near, NEAR_SPREAD), (far, FAR_SPREAD)):
        pairs = PairwiseComparison(losses, "text", prior=prior)
        standings.append(Standing("", pairs, margin=margin) if losses else None)
    names = {name: name for name in (*near, *far)}
    near_standing, far_standing = _with_own_spread_of_first(standings[0], standings[1], names)
    return Places(near_standing, far_standing, names, names)


def far_loss(row: Row, result: TrialResult) -> float | None:
    """Return the bits per byte of a row on the last train_length bytes of each longest window; None
    if they were not measured or the row cannot run there.

    Results of before these bytes were kept have losses by position, whose last ones are the same
    bytes.
    """
    longest = max(row.trial.test_lengths)
    if longest in row.far_by_length:
        return row.far_by_length[longest].far
    first = longest - row.trial.train_length
    buckets = [bucket for bucket in result.by_position if bucket.start >= first]
    are_the_same_bytes = (
        row.reading == "trained"
        and row.trial.objective == CAUSAL
        and first >= row.trial.train_length
        and bool(buckets)
        and (buckets[0].start, buckets[-1].stop) == (first, longest)
    )
    if row.far_by_length or not are_the_same_bytes:
        return None
    sizes = [bucket.stop - bucket.start for bucket in buckets]
    total = sum(b.bits_per_byte * size for b, size in zip(buckets, sizes, strict=True))
    return total / sum(sizes)


def failed_trials(study: Study) -> dict[str, tuple[int, int]]:
    """Return how many trials failed, and of how many planned ones, by encoding; only encodings with
    a failed trial."""
    planned = Counter(trial.encoding for trial in study.trials)
    failed = Counter(result.config.encoding for result in study.failed)
    return {name: (count, planned[name]) for name, count in failed.items()}


def standings(study: Study) -> list[Standing]:
    """Return the standings on near and on far bytes, where a row has a number."""
    return near_and_far(study).all


def best_first(study: Study) -> list[str]:
    """Return the encodings, best first on far bytes; those without far bytes come later."""
    places = near_and_far(study)
    names = order_by_standings(study, reversed(places.all))
    encodings = dict.fromkeys(places.encoding_of.get(name, name) for name in names)
    return [name for name in encodings if name in study.encodings]


def standing_by_column(study: Study) -> dict[str, Standing]:
    """Return the standing of each column of the table of tasks: "all" tasks, the text near and far,
    each task."""
    columns: dict[str, Standing | None] = {"all": standing_of_tasks(study)}
    text = study.of_task(TEXT)
    if text.trials:
        columns |= {standing.where: standing for standing in standings(text)}
    for task in study.sequence_tasks:
        columns[task] = standing_of_task(study, task)
    return {key: standing for key, standing in columns.items() if standing is not None}


def far_place_in_words(study: Study) -> str:
    """Return the words for the far bytes of a text: `the last 128 of 1,024 bytes`."""
    config = study.trials[0]
    return f"the last {config.train_length:,} of {max(config.test_lengths):,} bytes"


def _near_place_in_words(study: Study) -> str:
    """Return the words for the bytes at the training length: `128 bytes`."""
    return f"{study.trials[0].train_length:,} bytes"


def _rows_that_count(text: Study, failed: Mapping[str, tuple[int, int]]) -> list[Row]:
    """Return the rows of encodings that pass the contract and have no failed trial; if all have
    one, those with failed trials too."""
    checked = [row for row in rows_of(text) if row.encoding not in text.unchecked]
    whole = [row for row in checked if row.encoding not in failed]
    return whole or checked


def _encoding_and_seed(config: TrialConfig) -> tuple[str, int]:
    """Return encoding and seed, which no two trials on text of a study share."""
    return config.encoding, config.seed


def _simplest_row(encoding: str, by_row: Values) -> str:
    """Return the name of the row that stands for an encoding on far bytes: of the readings, the
    first whose mean is within MARGIN of the lowest."""
    means = {name: fmean(seeds.values()) for name, seeds in by_row.items()}
    lowest = min(means.values())
    names = [row_name(encoding, reading) for reading in READINGS]
    return next(name for name in names if name in means and means[name] <= lowest + MARGIN)


def _near_losses(
    rows: Sequence[Row], judged: Mapping[str, str]
) -> tuple[dict[str, dict[int, float]], dict[str, str]]:
    """Return the near losses by row and seed, and the name of the near row of each judged far row.

    Every encoding enters as trained; a judged row with other near losses, as after a tuning, enters
    beside it.
    """
    losses: Values = {}
    for row in rows:
        bits = row.near.bits_per_byte if row.trial.train_length in row.score_by_length else None
        if bits is not None:
            losses.setdefault(row.name, {})[row.seed] = bits
    near_row_of = {}
    for encoding, name in judged.items():
        is_same = losses.get(name) == losses.get(encoding)
        near_row_of[name] = encoding if is_same else name
    as_trained = {row.encoding for row in rows}
    entering = as_trained | set(near_row_of.values())
    return {name: seeds for name, seeds in losses.items() if name in entering}, near_row_of


def _standing(losses: Values, where: str, rows: Iterable[Row], is_far: bool) -> Standing | None:
    """Return the standing of these losses, with intervals over windows if all rows have those."""
    if not losses:
        return None
    by_window: dict[str, list[Sequence[float]]] = {}
    for row in rows:
        if row.name not in losses:
            continue
        score = row.far_by_length.get(max(row.trial.test_lengths)) if is_far else row.near
        by_window.setdefault(row.name, []).append(score.windows if score else ())
    pairs = PairwiseComparison(losses, "text", prior=FAR_SPREAD if is_far else NEAR_SPREAD)
    return Standing(where, pairs, by_window=mean_loss_by_window(by_window), margin=MARGIN)


def _with_own_spread_of_first(
    near: Standing | None, far: Standing | None, near_row_of: Mapping[str, str]
) -> tuple[Standing | None, Standing | None]:
    """Return both standings with `half_by_own_seeds` set: half of an interval of the lead of the
    first row, from its own seeds alone.

    An interval pooled over all encodings is too narrow for one whose seeds vary much more than
    those of the others, and with few seeds such a one is first by luck. Its spread is taken over
    both places, each in units of what is expected there, so that seeds that are alike by chance in
    one place do not hide it:

        half = t(0.036; sum of seeds - 1) * expected * sqrt(mean of (spread / expected)^2 / seeds)
    """
    far_name = {there: name for name, there in near_row_of.items()}
    steady_near, steady_far = near, far
    if near is not None:
        first = near.order[0]
        spreads = [_spread_of_lead(near, first), _spread_of_lead(far, far_name.get(first))]
        steady_near = replace(near, half_by_own_seeds=_half_by_own_seeds(near, spreads))
    if far is not None:
        first = far.order[0]
        spreads = [_spread_of_lead(far, first), _spread_of_lead(near, near_row_of.get(first))]
        steady_far = replace(far, half_by_own_seeds=_half_by_own_seeds(far, spreads))
    return steady_near, steady_far


class _Spread(NamedTuple):
    """Hold a standard deviation over seeds, in units of the expected one, and its degrees of
    freedom."""

    relative: float
    freedom: int


def _spread_of_lead(standing: Standing | None, name: str | None) -> _Spread | None:
    """Return how much a row's lead varies between seeds: of its leads over the NUM_NEAREST_RIVALS
    nearest other rows, the one that varies least, as the others vary by their rivals' own seeds.
    None with fewer than two common seeds, or for a row that is not in the standing."""
    if standing is None or name not in standing.order or standing.pairs.prior is None:
        return None
    values = standing.pairs.values
    means = standing.pairs.means
    rivals = [other for other in values if other != name]
    spreads = []
    for other in sorted(rivals, key=lambda other: abs(means[other] - means[name]))[
        :NUM_NEAREST_RIVALS
    ]:
        common = values[name].keys() & values[other].keys()
        leads = [values[other][seed] - values[name][seed] for seed in common]
        if len(leads) > 1:
            spreads.append(_Spread(stdev(leads) / standing.pairs.prior.spread, len(leads) - 1))
    return min(spreads, default=None)


def _half_by_own_seeds(standing: Standing, spreads: Sequence[_Spread | None]) -> float:
    """Return half of the interval of the first row of a standing, from its spreads in this place
    and the other one, see `_with_own_spread_of_first`; inf where there is none in this place."""
    if spreads[0] is None or standing.pairs.prior is None:
        return math.inf
    from scipy import special

    known = [spread for spread in spreads if spread is not None]
    freedom = sum(spread.freedom for spread in known)
    variance = fmean(spread.relative**2 for spread in known)
    quantile = float(special.stdtrit(freedom, 1 - STEADY_LEVEL / 2))
    count = spreads[0].freedom + 1
    return quantile * standing.pairs.prior.spread * math.sqrt(variance / count)


def _why_no_far(text: Study, rows: Sequence[Row]) -> str:
    """Return why no row has a loss on far bytes."""
    config = text.trials[0]
    if max(config.test_lengths) <= config.train_length:
        return "no longer length was tested"
    if rows and not any(row.far_by_length for row in rows):
        return "far tokens were not measured in this run"
    return "no encoding runs there"
