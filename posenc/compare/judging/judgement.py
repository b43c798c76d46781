"""What a study says, without words: which row to take, how sure that is, and what speaks against
it. Its sentences stand in `sentences.py`."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import stdev
from typing import NamedTuple

from posenc.compare.judging.context_use import (
    ContextUse,
    context_use,
)
from posenc.compare.judging.near_far import Places, near_and_far
from posenc.compare.judging.served_by import num_servers
from posenc.compare.judging.standing import MARGIN, Standing
from posenc.compare.judging.summary import bits_saved_by_doubling
from posenc.compare.results import Study, kept_by_study
from posenc.compare.rows import EqualTime, Row, at_equal_time, row_name, rows_by_name
from posenc.statistics.seed_intervals import Gap, significance_level
from posenc.tasks.registry import TEXT

MIN_BREAKING_BITS = 0.1
"""Bits by which far bytes are worse with all context than with near context, of an encoding that is
said to break: chosen."""
USE, LEADS, TIED = "use", "leads", "tied"
"""How sure a choice is. USE: its lead over every other encoding is outside the interval, above
MARGIN, and above what twice the steps may change. LEADS: all but the last. TIED: neither."""
MAX_BITS_IN_CONTENTION = 0.25
"""Bits above the lowest near loss up to which an encoding may come first with more steps: chosen.
"""
MAX_NUM_LEADS = 4
"""Largest number of leads whose move with the last doubling of the steps is said: chosen."""
MAX_SAME_COST_RATIO = 1.1
"""Ratio of training times up to which two encodings cost the same: chosen."""


class RowBehind(NamedTuple):
    """Hold a row that is behind the best, and by how many bits per byte."""

    name: str
    gap: Gap


class ByteTable(NamedTuple):
    """Hold what a table of bytes, without a model, has on the training text.

    order: bytes that it counts together, 1 for single bytes and 2 for pairs.
    bits: its loss in bits per byte.
    """

    order: int
    bits: float


@dataclass(frozen=True)
class Choice:
    """Say which row to take in one place.

    where: the place in words.
    certainty: USE, LEADS or TIED.
    taken: the row to take: the leader, or of the tied ones the one that most servers run and that
        takes the least time.
    tied: all rows that cannot be told apart from the best, `taken` among them, best mean first; one
        row of each encoding.
    loss_of_row: the mean loss of each of them, in bits per byte.
    behind: the best row of another encoding that is behind; None if there is none.
    drift_bits: bits that twice the steps may move the lead, None if unknown.
    why_no_interval: why no difference has an interval; None if they have.
    text_may_turn: the interval of the lead over `behind` over windows of the text includes 0.
    """

    where: str
    certainty: str
    taken: str
    tied: tuple[str, ...]
    loss_of_row: Mapping[str, float]
    behind: RowBehind | None = None
    drift_bits: float | None = None
    why_no_interval: str | None = None
    text_may_turn: bool = False


@dataclass(frozen=True)
class OwnComparison:
    """Compare an encoding of the user's own with one that was named beside it, in one place.

    verdict: "better", "worse" or "tied"; "" if the difference has no interval.
    """

    own_row: str
    other_row: str
    where: str
    gap: Gap
    verdict: str


@dataclass(frozen=True)
class Judgement:
    """What the text of a study says.

    near, far: the choices in both places; None where no row has a number.
    taken: the one row to take for both; None if there is no choice.
    unbeaten_table: a table of bytes that predicts the text at least as well as every model, and
        then there is no choice; None if some model is better.
    only_encoding: the encoding, if only one has rows; None if there are more.
    own_comparisons: the user's own encodings against all others, by place.
    cost: what training took; None if it was not measured on one processor.
    context: how many bytes of context `taken` uses; None without far bytes.
    lead: the lead near over the best other encoding, by how much context a byte has; None if no
        encoding leads there, or losses by position are unknown.
    broken: the encodings that break beyond the training length when they are read as trained: by
        how many bits per byte their loss on far bytes exceeds that of the same bytes with near
        context.
    held_in_window: those of `broken` that do not break in a window: the same difference of the same
        weights in it, at most MARGIN.
    window_length: keys that a query sees in a window; 0 if no row was read so.
    """

    places: Places
    near: Choice | None = None
    far: Choice | None = None
    taken: str | None = None
    unbeaten_table: ByteTable | None = None
    only_encoding: str | None = None
    own_comparisons: tuple[OwnComparison, ...] = ()
    cost: EqualTime | None = None
    context: ContextUse | None = None
    broken: Mapping[str, float] = field(default_factory=dict)
    held_in_window: Mapping[str, float] = field(default_factory=dict)
    window_length: int = 0
    longest_length: int = 0

    @property
    def choices(self) -> list[Choice]:
        """Return the choices that there are, near first."""
        return [choice for choice in (self.near, self.far) if choice is not None]


@kept_by_study
def judge(study: Study) -> Judgement:
    """Judge the trials of a study on text: which row to take at the training length and beyond it,
    how sure that is, what breaks, and what it costs."""
    text_study = study.of_task(TEXT)
    places = near_and_far(text_study)
    own_comparisons = tuple(_compare_own_with_others(text_study, places))
    common_fields = {"places": places, "own_comparisons": own_comparisons}
    if places.near is None:
        return Judgement(**common_fields)
    table = _byte_table_that_no_model_beats(text_study, places.near)
    if table is not None:
        return Judgement(**common_fields, unbeaten_table=table)
    encodings = {places.encoding_of[name] for name in places.near.order}
    if len(encodings) == 1:
        return Judgement(**common_fields, only_encoding=encodings.pop())
    cost = at_equal_time(text_study)
    drift = DriftOfLeads(bits_saved_by_doubling(text_study), places)
    near = choose(places.near, places, drift, cost)
    far = None if places.far is None else choose(places.far, places, drift, cost)
    taken = _row_for_both_places(near, far, places, cost)
    by_name = rows_by_name(text_study)
    context = None if far is None else context_use(by_name[taken])
    broken = _broken_encodings(by_name)
    return Judgement(
        **common_fields,
        near=near,
        far=far,
        taken=taken,
        cost=cost,
        context=context,
        broken=broken,
        held_in_window=_held_in_window(broken, by_name),
        window_length=max(trial.test_window for trial in text_study.trials),
        longest_length=max(text_study.trials[0].test_lengths),
    )


def _broken_encodings(by_name: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """Return the encodings that break when read as trained, see `Judgement`: for certain, by the
    interval over windows of the text, and by more than MIN_BREAKING_BITS.

    by_name: the rows of a study, with each seed.
    """
    broken = {}
    for name, rows in by_name.items():
        use = context_use(rows) if rows[0].reading == "trained" else None
        if use is None:
            continue
        lost_bits = -use.saved.value
        if lost_bits > MIN_BREAKING_BITS and lost_bits > use.saved.half_width:
            broken[name] = lost_bits
    return broken


def _held_in_window(
    broken: Iterable[str], by_name: Mapping[str, Sequence[Row]]
) -> dict[str, float]:
    """Return which broken encodings hold in a window, with the bits per byte by which their loss on
    far bytes exceeds that with near context there, at most MARGIN.

    by_name: the rows of a study, with each seed.
    """
    held = {}
    for name in broken:
        rows = by_name.get(row_name(name, "window"))
        use = context_use(rows) if rows else None
        if use is not None and -use.saved.value <= MARGIN:
            held[name] = -use.saved.value
    return held


class DriftOfLeads:
    """Estimate how much a lead may change when the steps are doubled: as much as the last doubling
    changed it, and at least the root mean square over the pairs of encodings in contention.

    has_rivals: at least two encodings are in contention.
    usual_bits: that root mean square, in bits per byte; 0 without rivals.
    """

    def __init__(self, saved_bits: Mapping[str, float], places: Places) -> None:
        """saved_bits: bits that the last doubling saved, by encoding."""
        self.saved_bits = saved_bits
        self.encoding_of = places.encoding_of
        close_names = []
        near = places.near
        if near is not None:
            max_near_loss = near.mean(near.order[0]) + MAX_BITS_IN_CONTENTION
            close_names = [
                n for n in near.order if n in saved_bits and near.mean(n) <= max_near_loss
            ]
        # A difference of two has sqrt(2) times the standard deviation of one.
        self.has_rivals = len(close_names) > 1
        self.usual_bits = 0.0
        if self.has_rivals:
            self.usual_bits = math.sqrt(2) * stdev([saved_bits[name] for name in close_names])

    def of(self, leader: str, other: str) -> float | None:
        """Return by how many bits the lead of one row over another may change; None if the last
        doubling is unknown for one of them."""
        leader_saved_bits = self.saved_bits.get(self.encoding_of.get(leader, leader))
        other_saved_bits = self.saved_bits.get(self.encoding_of.get(other, other))
        if leader_saved_bits is None or other_saved_bits is None:
            return None
        return max(self.usual_bits, abs(other_saved_bits - leader_saved_bits))

    def least_lead_to_use(self, leader: str, other: str) -> float | None:
        """Return the bits by which a row must lead another to be called the one to use: the larger
        of what another doubling of the steps may change the lead by, and of what the last doubling
        saved the leader (while a doubling saves more than the lead, training is early). None if the
        last doubling is unknown for one of them."""
        drift_bits = self.of(leader, other)
        if drift_bits is None:
            return None
        return max(drift_bits, self.saved_bits[self.encoding_of.get(leader, leader)])


def choose(
    standing: Standing, places: Places, drift: DriftOfLeads, cost: EqualTime | None
) -> Choice:
    """Return the row to take in one place, and how sure that is. Rows of one encoding are no
    rivals, and one with failed trials is never sure."""
    encoding_of = places.encoding_of
    tied_rows = _one_of_each_encoding(standing.contenders, encoding_of)
    no_interval_reason = why_no_interval(standing)
    if len(tied_rows) == 1 and no_interval_reason is None:
        return _choose_leader(standing, places, drift)
    # Without an interval nothing tells the tied apart, and the lowest loss is the best guess.
    taken = (
        most_served_then_cheapest(tied_rows, places, cost)
        if no_interval_reason is None
        else standing.order[0]
    )
    tied_encodings = {encoding_of[name] for name in tied_rows}
    return Choice(
        where=standing.where,
        certainty=TIED,
        taken=taken,
        tied=tied_rows,
        loss_of_row={name: standing.mean(name) for name in tied_rows},
        behind=_best_behind(standing, _rows_of_other_encodings(standing, places, tied_encodings)),
        why_no_interval=no_interval_reason,
    )


def _choose_leader(standing: Standing, places: Places, drift: DriftOfLeads) -> Choice:
    """Return the choice of the first row of a place, where all rows of other encodings are
    certainly behind it."""
    leader = standing.order[0]
    encoding = places.encoding_of[leader]
    rivals = _rows_of_other_encodings(standing, places, {encoding})
    drift_by_row = {name: drift.of(leader, name) for name in rivals}
    lead_holds = all(_leads_enough(standing, drift, leader, name) for name in rivals)
    has_no_failures = encoding not in places.failure_counts
    row_behind = _best_behind(standing, rivals)
    gap_over_windows = None
    if row_behind is not None:
        gap_over_windows = standing.gaps_over_windows.get((row_behind.name, leader))
    return Choice(
        where=standing.where,
        certainty=USE if lead_holds and has_no_failures else LEADS,
        taken=leader,
        tied=(leader,),
        loss_of_row={leader: standing.mean(leader)},
        behind=row_behind,
        drift_bits=None if row_behind is None else drift_by_row[row_behind.name],
        text_may_turn=gap_over_windows is not None and not gap_over_windows.significant,
    )


def _leads_enough(standing: Standing, drift: DriftOfLeads, leader: str, other: str) -> bool:
    """Return True if the leader is ahead by more than twice the steps are expected to change; False
    also where that is unknown."""
    least_lead = drift.least_lead_to_use(leader, other)
    return least_lead is not None and standing.gap(other, leader).value > least_lead


def _rows_of_other_encodings(
    standing: Standing, places: Places, encodings: Collection[str]
) -> list[str]:
    """Return the rows of a standing that are of none of these encodings, best mean first."""
    return [name for name in standing.order if places.encoding_of[name] not in encodings]


def _best_behind(standing: Standing, beaten_rows: Sequence[str]) -> RowBehind | None:
    """Return the first of the beaten rows and by how much it is behind; None if there is none."""
    return RowBehind(beaten_rows[0], standing.gap(beaten_rows[0])) if beaten_rows else None


def _one_of_each_encoding(names: Sequence[str], encoding_of: Mapping[str, str]) -> tuple[str, ...]:
    """Return the first row of each encoding, in the given order."""
    first_row_of: dict[str, str] = {}
    for name in names:
        first_row_of.setdefault(encoding_of[name], name)
    return tuple(first_row_of.values())


def most_served_then_cheapest(
    tied_rows: Sequence[str], places: Places, cost: EqualTime | None
) -> str:
    """Return the row that most servers run; of several the one that takes the least time, if by
    more than MAX_SAME_COST_RATIO for certain; of several the best mean."""
    encoding_of = places.encoding_of
    servers_of_row = {name: num_servers(places.text_of_row(name)) for name in tied_rows}
    most_servers = max(servers_of_row.values())
    most_served_rows = [name for name in tied_rows if servers_of_row[name] == most_servers]
    if cost is None:
        return most_served_rows[0]
    costs = cost.costs
    timed_rows = [name for name in most_served_rows if encoding_of[name] in costs]
    if not timed_rows:
        return most_served_rows[0]
    cheapest_row = min(timed_rows, key=lambda name: costs[encoding_of[name]])
    for name in timed_rows:
        if cost.ratio(encoding_of[name], encoding_of[cheapest_row]).lowest <= MAX_SAME_COST_RATIO:
            return name
    return cheapest_row


def _row_for_both_places(
    near: Choice, far: Choice | None, places: Places, cost: EqualTime | None
) -> str:
    """Return the row to take for both places: one that is tied or leads in both; else the choice on
    far bytes, as the loss near never differs by as much as where an encoding breaks."""
    if far is None:
        return near.taken
    if near.why_no_interval or far.why_no_interval:
        return far.tied[0]
    rows_in_both = [name for name in far.tied if places.near_row_of.get(name, name) in near.tied]
    if not rows_in_both:
        return far.taken
    if far.taken in rows_in_both:
        return far.taken
    return most_served_then_cheapest(rows_in_both, places, cost)


def _byte_table_that_no_model_beats(text_study: Study, near: Standing) -> ByteTable | None:
    """Return the table of single bytes, or else of byte pairs, whose loss no model is below; None
    if models are below both, or where no table was counted."""
    lowest_loss = near.mean(near.order[0])
    if text_study.corpus is None:
        return None
    for order, bits in enumerate(text_study.corpus.bits_of_tables, 1):
        if bits is not None and not lowest_loss < bits:
            return ByteTable(order, bits)
    return None


def _compare_own_with_others(text_study: Study, places: Places) -> Iterator[OwnComparison]:
    """Yield each encoding of the user's own against each other one, in each place."""
    own_encodings = [
        name
        for name in text_study.encodings
        if any(trial.code for trial in text_study.trials if trial.encoding == name)
    ]
    other_encodings = [name for name in text_study.encodings if name not in own_encodings]
    for standing in places.all:
        row_of = {places.encoding_of[name]: name for name in reversed(standing.order)}
        for name in own_encodings:
            for other in other_encodings:
                if name in row_of and other in row_of:
                    yield _compare_own_with(standing, row_of[name], row_of[other])


def _compare_own_with(standing: Standing, name: str, other: str) -> OwnComparison:
    """Return the comparison of two rows in one place."""
    gap = standing.gap(name, other)
    verdict = "tied"
    if gap.half_width == math.inf:
        verdict = ""
    elif (name, other) in standing.worse_pairs:
        verdict = "worse"
    elif (other, name) in standing.worse_pairs:
        verdict = "better"
    return OwnComparison(name, other, standing.where, gap, verdict)


def why_no_interval(standing: Standing) -> str | None:
    """Return why no difference in a standing can be significant and what to do; None if intervals
    exist."""
    pairs = standing.pairs
    if pairs.least_significant_gap < math.inf or len(pairs.names) < 2:
        return None
    max_num_seeds = max(map(len, pairs.values.values()))
    if len(set().union(*pairs.values.values())) < 2:
        return "one seed has no interval: take --seeds 3"
    if pairs.level is None:
        # With the most seeds of the table, fewer than 99, there is a level.
        num_needed_seeds = next(
            num_seeds
            for num_seeds in range(2, 99)
            if significance_level(pairs.kind_of_values, len(pairs.names), num_seeds)
        )
        # Some encoding has as many seeds as that already: what is missing is trials of the others.
        if pairs.degrees_of_freedom < 1 or num_needed_seeds <= max_num_seeds:
            return "they have too few seeds in common: run the same seeds of all"
        return f"{max_num_seeds} seeds cannot decide this: take --seeds {num_needed_seeds}"
    # There are seeds enough, so it is the spread that is missing: its interval would have no width
    # and call any difference significant, where one trial was run several times, say.
    return "the seeds differ alike to the last digit, and copies are no evidence"


def bits_that_may_turn(study: Study) -> float | None:
    """Return the root mean square by which twice the steps may change differences of encodings in
    contention; None with fewer than two of them, or if it is unknown what a doubling saves."""
    saved_bits = bits_saved_by_doubling(study)
    drift = DriftOfLeads(saved_bits, near_and_far(study))
    return max(drift.usual_bits, MARGIN) if drift.has_rivals else None


def moves_of_leads(judgement: Judgement, saved_bits: Mapping[str, float]) -> dict[str, float]:
    """Return by how many bits per byte the leads of the row to take moved with the last doubling of
    the steps, by row: its leads over the best rows of other encodings, at most MAX_NUM_LEADS,
    nearest first. Positive if a lead grew.

    With what the doubling saved the taken encoding, and the other one,

        move = saved - saved of the other

    Rows that are tied with the taken one are left out, as are all where the doubling is unknown.

    saved_bits: what the last half of the steps, or their doubling, saved, by encoding.
    """
    choice, standing = judgement.far, judgement.places.far
    if choice is None:
        choice, standing = judgement.near, judgement.places.near
    if choice is None or standing is None or judgement.taken is None:
        return {}
    encoding_of = judgement.places.encoding_of
    tied_encodings = {encoding_of[name] for name in choice.tied}
    rows_behind = _rows_of_other_encodings(standing, judgement.places, tied_encodings)
    rivals = _one_of_each_encoding(rows_behind, encoding_of)[:MAX_NUM_LEADS]
    taken_encoding = encoding_of[judgement.taken]
    if taken_encoding not in saved_bits or taken_encoding not in tied_encodings:
        return {}
    return {
        name: saved_bits[taken_encoding] - saved_bits[encoding_of[name]]
        for name in rivals
        if encoding_of[name] in saved_bits
    }


def certainty_on_task(standing: Standing) -> str:
    """Return how sure the first of a task is: what more steps change is not measured there."""
    return LEADS if standing.verdict(standing.order[0]) == "best" else TIED
