"""What tuning every encoding alike turned and saved, and what the limits of an answer say of it."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from posenc.compare.judging.judgement import judge
from posenc.compare.judging.standing import MARGIN
from posenc.compare.reports.leaderboard import PublishedLosses, published_losses_on_code
from posenc.compare.results import RateCheck, Study
from posenc.compare.rows import Row, plain_name, row_name, rows_by_name, rows_of
from posenc.report.report import join_names, list_up_to_six, number_word
from posenc.tasks.registry import TEXT

Pairs = list[tuple[str, str]]
"""Pairs (a, b) of encodings, by their texts with the usual settings: `a` is ahead after tuning
alike, and `b` where less is tuned."""


def pairs_turned_by_tuning(checks: Iterable[RateCheck], margin: float = 0.0) -> Pairs:
    """Return the pairs of which `b` is ahead with the recipe's rates and the usual settings. Both
    leads are above `margin` bits, among the trials of a search."""
    losses = {name_before_tuning(check): (_best_bits(check), check.plain_bits) for check in checks}
    return _turned_pairs(losses, margin)


def pairs_turned_by_rates(checks: Iterable[RateCheck], margin: float = 0.0) -> Pairs:
    """Return the pairs of which `b` is ahead with the usual settings and one learning rate for all
    parameters, tables among them. Both leads are above `margin` bits."""
    losses = {
        name_before_tuning(check): (_best_bits(check), check.one_rate_bits) for check in checks
    }
    return _turned_pairs(losses, margin)


def name_before_tuning(check: RateCheck) -> str:
    """Return the text of an encoding with its usual setting, without what a search chose."""
    if check.plain_at is None:
        return check.encoding
    return check.tried[check.plain_at].encoding or check.encoding


class SavingOfSetting(NamedTuple):
    """Hold how many bits a chosen setting saved against the usual one, both at one rate `lr`."""

    bits: float
    lr: float


def saving_of_setting(check: RateCheck) -> SavingOfSetting | None:
    """Return how many bits the setting that a search chose saved against the encoding's usual one,
    at the rates at which the usual one was best of those that both were tried with; None if the
    usual one was chosen, or they share no rates."""
    if check.plain_at is None or check.best is None:
        return None
    usual_setting = check.tried[check.plain_at].encoding
    chosen_setting = check.best.encoding
    if chosen_setting == usual_setting:
        return None
    bits_of_usual: dict[tuple[float, float], float] = {}
    bits_of_chosen: dict[tuple[float, float], float] = {}
    for attempt in check.tried:
        if attempt.bits is None or not math.isfinite(attempt.bits):
            continue
        rates = attempt.lr, attempt.encoding_lr
        if attempt.encoding == usual_setting:
            bits_of_usual[rates] = attempt.bits
        elif attempt.encoding == chosen_setting:
            bits_of_chosen[rates] = attempt.bits
    shared_rates = bits_of_usual.keys() & bits_of_chosen.keys()
    if not shared_rates:
        return None
    best_rates = min(shared_rates, key=bits_of_usual.__getitem__)
    return SavingOfSetting(bits_of_usual[best_rates] - bits_of_chosen[best_rates], best_rates[0])


def _best_bits(check: RateCheck) -> float | None:
    """Return the loss of what was chosen; None if nothing could be trained."""
    return None if check.best is None else check.best.bits


def _turned_pairs(
    losses: Mapping[str, tuple[float | None, float | None]], margin: float
) -> list[tuple[str, str]]:
    """Return the pairs of names (a, b) in which `a` has the lower first loss and `b` the lower
    second one, both by more than `margin`. Names without one of the losses are left out."""
    known = {}
    for name, (first, second) in losses.items():
        if first is not None and second is not None:
            known[name] = (first, second)
    turned = []
    for a, b in itertools.permutations(known, 2):
        lead_of_a = known[b][0] - known[a][0]
        lead_of_b = known[a][1] - known[b][1]
        if lead_of_a > margin and lead_of_b > margin:
            turned.append((a, b))
    return turned


def sentences_on_tuning(study: Study) -> Iterator[str]:
    """Yield the sentences of the limits on how encodings were tuned: short tunings at length that
    did not help, rates of tables, and settings that a search chose."""
    yield from _sentences_on_tunings(study)
    checks_on_text = [check for check in study.rates if check.task == TEXT]
    if any(check.plain_at is not None for check in checks_on_text):
        yield from _sentences_on_table_rates(checks_on_text)
        yield from _sentences_on_one_rate(checks_on_text)
        yield from _sentences_on_settings(checks_on_text, study)


def _sentences_on_tunings(study: Study) -> Iterator[str]:
    """Yield the sentence on encodings whose short tuning at length made their weights worse than
    they are in a window without it, near or far, by more than MARGIN; nothing otherwise."""
    by_name = rows_by_name(study)
    losses_near = {}
    for encoding in dict.fromkeys(row.encoding for row in rows_of(study)):
        tuned_rows = by_name.get(row_name(encoding, "tuned"))
        window_rows = by_name.get(row_name(encoding, "window"))
        if tuned_rows and window_rows and _is_worse(tuned_rows, window_rows):
            losses_near[encoding] = _mean_near(tuned_rows) - _mean_near(window_rows)
    if losses_near:
        trial = rows_of(study)[0].trial  # all trials of a study are tuned alike
        yield sentence_on_tunings_without_gain(
            losses_near, trial.tune_steps, max(trial.test_lengths)
        )


def _is_worse(tuned_rows: Sequence[Row], window_rows: Sequence[Row]) -> bool:
    """Return True if the mean loss over seeds of `tuned_rows` is higher by more than MARGIN than
    that of `window_rows`, at the training length or on far bytes."""
    longest_length = max(tuned_rows[0].trial.test_lengths)
    near_losses = [_mean_near(rows) for rows in (tuned_rows, window_rows)]
    far_losses = [
        _mean_known(
            row.far_by_length[longest_length].far
            for row in rows
            if longest_length in row.far_by_length
        )
        for rows in (tuned_rows, window_rows)
    ]
    # A missing loss is nan, which is higher than none.
    return near_losses[0] > near_losses[1] + MARGIN or far_losses[0] > far_losses[1] + MARGIN


def _mean_near(rows: Sequence[Row]) -> float:
    """Return the mean loss of rows at the training length; nan if none is known."""
    return _mean_known(row.near.bits_per_byte for row in rows)


def _mean_known(losses: Iterable[float | None]) -> float:
    """Return the mean of the losses that are known; nan if none is."""
    known_losses = [bits for bits in losses if bits is not None]
    return fmean(known_losses) if known_losses else math.nan


def sentence_on_tunings_without_gain(
    losses_near: Mapping[str, float], num_steps: int, longest_length: int
) -> str:
    """Write which encodings are worse after their short tuning at length than in a window without.

    losses_near: bits per byte by which the tuning raised the loss at the training length.

    >>> sentence_on_tunings_without_gain({"rope": 0.045}, 100, 1024)
    'The tuning (100 steps at 1,024 bytes, plain RoPE by YaRN) left rope worse than in a window, \
at the training length by 0.04: that judges this recipe, not how far it can be extended.'
    """
    costs = list_up_to_six([f"{bits:.2f}" for bits in losses_near.values()])
    return (
        f"The tuning ({num_steps:,} steps at {longest_length:,} bytes, plain RoPE by YaRN) left "
        f"{list_up_to_six(losses_near)} worse than in a window, at the training length by {costs}: "
        "that judges this recipe, not how far it can be extended."
    )


def _sentences_on_table_rates(checks: Sequence[RateCheck]) -> Iterator[str]:
    """Yield how much faster than the model the tables and scalars of each encoding that has any
    learned, and what the next best factor of the search reached at the same rate."""
    clauses = []
    for check in checks:
        best_try = check.best
        if best_try is None or best_try.bits is None:
            continue
        # Only of an encoding with tables other factors are tried.
        bits_by_factor = {}
        for attempt in check.tried:
            is_alike = (attempt.encoding, attempt.lr) == (best_try.encoding, best_try.lr)
            is_finite = attempt.bits is not None and math.isfinite(attempt.bits)
            if is_alike and is_finite and attempt.encoding_lr != best_try.encoding_lr:
                bits_by_factor[attempt.encoding_lr] = attempt.bits
        if bits_by_factor:
            bits, factor = min((bits, factor) for factor, bits in bits_by_factor.items())
            clauses.append(
                f"{name_before_tuning(check)}'s {best_try.encoding_lr:g} times "
                f"({factor:g} times: {bits - best_try.bits:+.2f} bits)"
            )
    if clauses:
        yield f"Tables and slopes learn faster than the model: {list_up_to_six(clauses)}."


def _sentences_on_one_rate(checks: Sequence[RateCheck]) -> Iterator[str]:
    """Yield which encodings the search had ahead of one that is ahead after tuning alike, with the
    usual settings and one rate for all parameters; nothing if the order is the same."""
    ahead_of: dict[str, list[str]] = {}
    for behind, ahead in pairs_turned_by_rates(checks):
        ahead_of.setdefault(behind, []).append(ahead)
    bits_of = {name_before_tuning(check): check.one_rate_bits for check in checks}
    rates = {check.tried[check.plain_at].lr for check in checks if check.plain_at is not None}
    rate_text = f" of {rates.pop():g}" if len(rates) == 1 else ""
    clauses = []
    for behind, ahead in ahead_of.items():
        known_bits = [bits for name in ahead if (bits := bits_of[name]) is not None]
        least, most = f"{min(known_bits):.2f}", f"{max(known_bits):.2f}"
        range_text = least if least == most else f"{least} to {most}"
        clauses.append(
            f"{behind} was behind {list_up_to_six(ahead)} ({bits_of[behind]:.2f} against "
            f"{range_text} bits)"
        )
    if clauses:
        yield (
            f"With one rate{rate_text} for all parameters and the usual settings, "
            f"{join_names(clauses)} in the search (one seed){_untried_in_words(checks)}."
        )


def _untried_in_words(checks: Sequence[RateCheck]) -> str:
    """Return the clause on encodings whose chosen rate was not tried for all parameters, tables
    among them, with the usual setting: `; at t5's chosen rate that was not tried`; "" if none."""
    untried = []
    for check in checks:
        if check.plain_at is None or check.best is None or check.one_rate_bits is None:
            continue
        usual_setting = check.tried[check.plain_at].encoding
        has_tables = len({attempt.encoding_lr for attempt in check.tried}) > 1
        is_tried = any(
            (attempt.encoding, attempt.lr) == (usual_setting, check.best.lr)
            and (attempt.encoding_lr == 1 or not has_tables)
            for attempt in check.tried
        )
        if not is_tried:
            untried.append(name_before_tuning(check))
    if not untried:
        return ""
    return f"; at the rates chosen for {list_up_to_six(untried)} that was not tried"


def _sentences_on_settings(checks: Sequence[RateCheck], study: Study) -> Iterator[str]:
    """Yield which encodings were not trained with their usual settings, as a search chose others,
    what these saved, and which leads hang on that."""
    saved_by_encoding = {}
    leads_at_stake = []
    rates = set()
    near = judge(study).places.near
    for check in checks:
        saving = saving_of_setting(check)
        if saving is None:
            continue
        saved_bits = saving.bits
        rates.add(f"{saving.lr:g}")
        name = name_before_tuning(check)
        saved_by_encoding[name] = saved_bits
        if near is None or check.encoding not in near.order:
            continue
        beaten = [
            other
            for other in near.order
            if (other, check.encoding) in near.worse_pairs
            and near.mean(other) - near.mean(check.encoding) < saved_bits
        ]
        if beaten:
            leads_at_stake.append(
                f"{name}'s {saved_bits:.2f} are more than its lead over {list_up_to_six(beaten)}: "
                "with its usual setting it may be behind"
            )
    if saved_by_encoding:
        yield sentence_on_chosen_settings(saved_by_encoding, sorted(rates), leads_at_stake)


def sentence_on_chosen_settings(
    saved_bits: Mapping[str, float], rates: Sequence[str], leads_at_stake: Sequence[str]
) -> str:
    """Write what settings that a search chose saved, by the encoding with its usual setting, which
    was not trained in the study. rates: at which both were tried. leads_at_stake: leads that are
    smaller than that, in words.

    >>> sentence_on_chosen_settings({"rope": 0.069}, ["0.004"], [])
    'Not run: the usual setting of rope; the chosen, for the training length only, saved 0.07 bits \
at rate 0.004 (one seed).'
    """
    encodings = list_up_to_six(saved_bits)
    savings = join_names([f"{bits:.2f}" for bits in saved_bits.values()])
    noun = "setting" if len(saved_bits) == 1 else "settings"
    stake = f"; {join_names(leads_at_stake)}" if leads_at_stake else ""
    return (
        f"Not run: the usual {noun} of {encodings}; the chosen, for the training length only, "
        f"saved {savings} bits at rate {join_names(rates)} (one seed){stake}."
    )


def sentences_on_longer_trainings(study: Study) -> Iterator[str]:
    """Yield what the leaderboard's longer trainings say of the order of a study with recorded
    choices, whose steps are few; nothing of other studies."""
    if study.rates_from:
        yield _sentence_on_leaderboard(study)


def _sentence_on_leaderboard(study: Study) -> str:
    """Write by how much the encoding to take is ahead in longer trainings, at the training length,
    and which others are in another order there."""
    pointer = "Longer trainings: posenc leaderboard"
    judgement = judge(study)
    places = judgement.places
    taken = plain_name(places.encoding_of.get(judgement.taken or "", ""))
    near_rows = places.near.order if places.near is not None else ()
    order_here = list(dict.fromkeys(plain_name(places.encoding_of[name]) for name in near_rows))
    try:
        published = published_losses_on_code()
    except ValueError:  # a damaged file of this installation must not cost a study its answer
        return f"{pointer}."
    known = [name for name in order_here if name in published.means]
    others = [name for name in known if name != taken]
    if taken not in known or not others:
        return f"{pointer}."
    not_run = [name for name in order_here if name not in published.means]
    not_run_clause = f"; {join_names(not_run)} not run" if not_run else ""
    leads = [_published_lead_in_words(published, taken, name) for name in others]
    turned = _pairs_turned_there(published, known)
    turned_clause = f", and {join_names(turned)}" if turned else ""
    return (
        "Do not carry these leads to longer trainings. The leaderboard has them "
        f"({published.steps:,} steps, {published.train_length} bytes of code, settings chosen for "
        f"them, {number_word(published.num_seeds)} seeds{not_run_clause}): there {taken}'s leads "
        f"are {join_names(leads)}{turned_clause}."
    )


def _published_lead_in_words(published: PublishedLosses, leader: str, other: str) -> str:
    """Write a lead of the leaderboard, and whether it is significant."""
    lead = published.means[other] - published.means[leader]
    remark = "" if published.is_significant(leader, other) else " (not significant)"
    return f"{lead:.2f} over {other}{remark}"


def _pairs_turned_there(published: PublishedLosses, order_here: Sequence[str]) -> list[str]:
    """Write which pairs of encodings are in another order on the leaderboard, significantly.

    order_here: encodings that the leaderboard has, best first in this study.
    """
    return [
        f"{worse_here} is ahead of {better_here}"
        for better_here, worse_here in itertools.combinations(order_here, 2)
        if published.means[worse_here] < published.means[better_here]
        and published.is_significant(worse_here, better_here)
    ]
