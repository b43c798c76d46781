"""What tuning every encoding alike turned and saved, and what the limits of an answer say of it."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

from posenc.compare.judging.judgement import judge
from posenc.compare.judging.standing import MARGIN
from posenc.compare.reports.leaderboard import published_losses_on_code
from posenc.compare.results import RateCheck, Study
from posenc.compare.rows import Row, plain_name, row_name, rows_by_name, rows_of
from posenc.compare.trial.config import ENCODING_LR
from posenc.report.report import join_names, list_up_to_six
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


def bits_saved_by_setting(check: RateCheck) -> float | None:
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
    return bits_of_usual[best_rates] - bits_of_chosen[best_rates]


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
    yield from _sentences_on_table_rates(study)
    yield from _sentences_on_choices(study)


def _sentences_on_tunings(study: Study) -> Iterator[str]:
    """Yield the sentence on encodings whose short tuning at length made their weights worse than
    they are in a window without it, near or far, by more than MARGIN; nothing otherwise."""
    by_name = rows_by_name(study)
    unhelped_encodings = []
    for encoding in dict.fromkeys(row.encoding for row in rows_of(study)):
        tuned_rows = by_name.get(row_name(encoding, "tuned"))
        window_rows = by_name.get(row_name(encoding, "window"))
        if tuned_rows and window_rows and _is_worse(tuned_rows, window_rows):
            unhelped_encodings.append(encoding)
    if unhelped_encodings:
        yield sentence_on_tunings_without_gain(unhelped_encodings)


def _is_worse(tuned_rows: Sequence[Row], window_rows: Sequence[Row]) -> bool:
    """Return True if the mean loss over seeds of `tuned_rows` is higher by more than MARGIN than
    that of `window_rows`, at the training length or on far bytes."""
    longest_length = max(tuned_rows[0].trial.test_lengths)
    near_losses = [
        _mean_known(row.near.bits_per_byte for row in rows) for rows in (tuned_rows, window_rows)
    ]
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


def _mean_known(losses: Iterable[float | None]) -> float:
    """Return the mean of the losses that are known; nan if none is."""
    known_losses = [bits for bits in losses if bits is not None]
    return fmean(known_losses) if known_losses else math.nan


def sentence_on_tunings_without_gain(encodings: Sequence[str]) -> str:
    """Write which encodings are worse after their short tuning at length than in a window without.

    >>> sentence_on_tunings_without_gain(["rope"])
    'Tuned at length rope is worse than in a window; a longer tuning was not run.'
    """
    verb = "is" if len(encodings) == 1 else "are"
    return (
        f"Tuned at length {list_up_to_six(encodings)} {verb} worse than in a window; a longer "
        "tuning was not run."
    )


def _sentences_on_table_rates(study: Study) -> Iterator[str]:
    """Yield the sentence on how much faster than the model the tables and scalars of encodings
    learned, where a search chose a factor other than the default; nothing otherwise."""
    checks_on_text = [check for check in study.rates if check.task == TEXT]
    chosen_factors = {}
    for check in checks_on_text:
        best_try = check.best
        if best_try is not None and best_try.encoding_lr != ENCODING_LR:
            chosen_factors[check.encoding] = best_try.encoding_lr
    if chosen_factors:
        turned_pairs = pairs_turned_by_rates(checks_on_text)
        chosen_texts = {
            name_before_tuning(check)
            for check in checks_on_text
            if check.encoding in chosen_factors
        }
        of_chosen = [(a, b) for a, b in turned_pairs if a in chosen_texts]
        yield sentence_on_table_rates(chosen_factors, of_chosen)


def sentence_on_table_rates(
    chosen: Mapping[str, float], turned: Sequence[tuple[str, str]] = ()
) -> str:
    """Write how much faster than the model the search let tables and scalars of encodings learn.

    turned: pairs of encodings of which the second was ahead in the search with one rate for all.

    >>> sentence_on_table_rates({"t5": 80})
    'Tables learn faster than the model: t5 80 times.'
    """
    rates = join_names([f"{name} {factor:g} times" for name, factor in chosen.items()])
    ahead_of: dict[str, list[str]] = {}
    for behind, ahead in turned:
        ahead_of.setdefault(behind, []).append(ahead)
    clauses = []
    for behind, ahead in ahead_of.items():
        verb = "was" if len(ahead) == 1 else "were"
        clauses.append(f"{list_up_to_six(ahead)} {verb} ahead of {behind}")
    sentence = f"Tables learn faster than the model: {rates}."
    if clauses:
        clause = join_names(clauses)
        sentence += f" With one rate and the usual settings, {clause} (one seed)."
    return sentence


def _sentences_on_choices(study: Study) -> Iterator[str]:
    """Yield which encodings were not trained with their usual settings, as a search chose others,
    and what these saved; and, where the choices are recorded ones, what longer trainings show."""
    saved_by_settings = {}
    for check in study.rates:
        if check.task == TEXT:
            saved_bits = bits_saved_by_setting(check)
            if saved_bits is not None:
                saved_by_settings[name_before_tuning(check)] = saved_bits
    if saved_by_settings:
        yield sentence_on_chosen_settings(saved_by_settings)
    if study.rates_from:
        yield _sentence_on_leaderboard(study)


def sentence_on_chosen_settings(saved_bits: Mapping[str, float]) -> str:
    """Write what settings that a search chose saved, by the encoding with its usual setting, which
    was not trained in the study.

    >>> sentence_on_chosen_settings({"rope": 0.069})
    'Not run: the usual setting of rope; at the same rate the chosen saved 0.07 bits (one seed).'
    """
    encodings = list_up_to_six(saved_bits)
    savings = join_names([f"{bits:.2f}" for bits in saved_bits.values()])
    noun = "setting" if len(saved_bits) == 1 else "settings"
    return (
        f"Not run: the usual {noun} of {encodings}; at the same rate the chosen saved {savings} "
        "bits (one seed)."
    )


def _sentence_on_leaderboard(study: Study) -> str:
    """Write where longer trainings stand, and by how much the encoding to take is ahead of the
    others there, at the training length."""
    pointer = "Longer trainings: posenc leaderboard"
    judgement = judge(study)
    taken_encoding = judgement.places.encoding_of.get(judgement.taken or "", "")
    published_losses = published_losses_on_code()
    taken = plain_name(taken_encoding)
    if taken not in published_losses.means:
        return f"{pointer}."
    leads = []
    for encoding in dict.fromkeys(judgement.places.encoding_of.values()):
        other = plain_name(encoding)
        if other in published_losses.means and other != taken:
            lead = published_losses.means[other] - published_losses.means[taken]
            leads.append(f"{lead:+.2f} over {other}")
    if not leads:
        return f"{pointer}."
    return (
        f"{pointer}; after its {published_losses.steps:,} steps, with other settings, {taken}'s "
        f"lead is {join_names(leads)} at {published_losses.train_length} bytes."
    )
