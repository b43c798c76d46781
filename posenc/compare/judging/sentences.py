"""The sentences of an answer. Those of its limits stand in `limits.py`, and those that say how to
read a page in `posenc.compare.page`."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from posenc.compare.judging.context_use import ContextUse
from posenc.compare.judging.judgement import (
    LEADS,
    MARGIN,
    TIED,
    USE,
    ByteTable,
    Choice,
    Judgement,
    OwnComparison,
)
from posenc.compare.judging.standing import Standing
from posenc.compare.rows import CostRatio, EqualTime
from posenc.report.report import join_names, list_up_to_six, number_word
from posenc.statistics.seed_intervals import Gap

MIN_DEARER_RATIO = 1.2
"""Ratio of training times from which the answer says what an encoding costs: chosen."""
MAX_NAMED = 8
"""Number of tied encodings that the answer names; of more it names seven and counts the others."""


def sentences_on_text(judgement: Judgement) -> Iterator[str]:
    """Yield the sentences of the answer on a text: first the one that names what to take. Nothing
    is yielded where no row has a loss at the training length."""
    places = judgement.places
    if judgement.unbeaten_table is not None and places.near is not None:
        yield _sentence_on_too_early(places.near, judgement.unbeaten_table)
    elif judgement.only_encoding is not None:
        yield _sentence_on_only_encoding(places.all, judgement.only_encoding)
    elif judgement.near is not None:
        yield from _sentences_on_choices(judgement, judgement.near)
        yield from _sentences_beside_choices(judgement, judgement.near)


def _sentences_on_choices(judgement: Judgement, near: Choice) -> Iterator[str]:
    """Yield which row to take, near and far. near: the judgement's choice there."""
    far = judgement.far
    if far is None:
        yield _sentence_on_one_place(near)
        yield f"Of longer texts nothing is said: {judgement.places.why_no_far}."
    elif _choices_are_the_same(near, far, judgement):
        yield _sentence_on_both_places(near, far)
    else:
        yield from _sentences_on_different_choices(near, far, judgement)


def _sentences_beside_choices(judgement: Judgement, near: Choice) -> Iterator[str]:
    """Yield what to know beside the row to take: what other text may turn, what breaks, how much
    context is used, and what training costs."""
    for choice in judgement.choices:
        if choice.text_may_turn and choice.behind:
            place = with_preposition(choice.where)
            yield f"In other windows of this text {choice.behind.name} may be ahead {place}."
    if judgement.broken and judgement.far is not None:
        yield _sentence_on_breaking(judgement, near.where, judgement.longest_length)
    if judgement.context is not None and judgement.context.saved.half_width < math.inf:
        yield sentence_on_context(judgement.taken or "", judgement.context)
    if judgement.cost is not None:
        yield from _sentences_on_cost(judgement.cost, judgement)


def _sentence_on_breaking(judgement: Judgement, near_place: str, longest_length: int) -> str:
    """Write which encodings break when read as trained, what far context costs them, and which of
    them hold in a window. near_place: the training length in words."""
    broken, held = judgement.broken, judgement.held_in_window
    context = f"context of {longest_length:,} bytes"
    cost_texts = [f"{name} {bits:.2f}" for name, bits in broken.items()]
    if len(broken) == 1:
        name, bits = next(iter(broken.items()))
        sentence = (
            f"Read as trained, {name} breaks beyond {near_place}: {context} costs it "
            f"{bits:.2f} bits"
        )
    else:
        sentence = (
            f"Read as trained, some break beyond {near_place}: {context} costs them bits: "
            f"{list_up_to_six(cost_texts)}"
        )
    if not held:
        return f"{sentence}."
    signed_texts = [f"{name} {round(bits, 2) + 0.0:+.2f}" for name, bits in held.items()]
    if len(broken) == 1:
        clause = f"it costs {round(next(iter(held.values())), 2) + 0.0:+.2f}"
    else:
        clause = f"it costs {list_up_to_six(signed_texts)}"
    return f"{sentence}; in a window of {judgement.window_length:,} bytes {clause}."


def _sentence_on_too_early(near: Standing, table: ByteTable) -> str:
    """Write that no model is better than a table of bytes."""
    table_in_words = "byte frequencies" if table.order == 1 else "a table of byte pairs"
    lowest_loss, highest_loss = near.mean(near.order[0]), near.mean(near.order[-1])
    if len(near.order) == 1:
        subject = f"{near.order[0]} ({lowest_loss:.2f} bits per byte) is"
    else:
        all_of_them = "both" if len(near.order) == 2 else f"all {number_word(len(near.order))}"
        subject = f"{all_of_them} ({lowest_loss:.2f} to {highest_loss:.2f} bits per byte) are"
        if not highest_loss > table.bits:  # all are equal to the table's, or one is NaN
            subject = f"{near.order[0]} ({lowest_loss:.2f} bits per byte), the lowest, is"
    table_text = f"{table_in_words} ({table.bits:.2f})"
    return f"Too early to tell: {subject} no better than {table_text}. Give more --steps."


def _sentence_on_only_encoding(standings: Sequence[Standing], name: str) -> str:
    """Write the losses of the only encoding."""
    loss_texts = [f"{s.mean(s.order[0]):.2f} {with_preposition(s.where)}" for s in standings]
    return f"{name} is the only encoding: {join_names(loss_texts)} (bits per byte). Add another."


def _choices_are_the_same(near: Choice, far: Choice, judgement: Judgement) -> bool:
    """Return True if one sentence can say both choices: the same row, as surely, or the same tied
    ones."""
    near_row_of = judgement.places.near_row_of
    near_tied = {near_row_of.get(name, name) for name in far.tied}
    return (
        near.certainty == far.certainty and near_tied == set(near.tied) and not near.why_no_interval
    )


def _sentence_on_both_places(near: Choice, far: Choice) -> str:
    """Write the sentence on two choices that are the same."""
    near_losses = f"{_losses_in_words(near)} {with_preposition(near.where)}"
    far_losses = f"{_losses_in_words(far)} {with_preposition(far.where)}"
    opening = (
        _clause_on_tied(far)
        if far.certainty == TIED
        else _capitalise_unless_name(_clause_on_leader(far))
    )
    return f"{opening}: {near_losses} and {far_losses}."


def _sentence_on_one_place(choice: Choice) -> str:
    """Write the sentence on a choice in one place."""
    if choice.why_no_interval:
        return _sentence_on_undecided([choice])
    sentence = (
        _clause_on_tied(choice)
        if choice.certainty == TIED
        else _capitalise_unless_name(_clause_on_leader(choice))
    )
    return f"{sentence}: {_losses_in_words(choice)} {with_preposition(choice.where)}."


def _sentences_on_different_choices(
    near: Choice, far: Choice, judgement: Judgement
) -> Iterator[str]:
    """Yield the sentences on two choices that differ: the row to take for both, how it stands in
    each, and what is better for near bytes alone."""
    taken_row = judgement.taken
    if near.why_no_interval or far.why_no_interval:
        yield _sentence_on_undecided([near, far])
        return
    # `taken_row` is a row of the far place. If it is only read in another way than the encoding as
    # trained, its near losses stand under the encoding's own name.
    near_taken_row = judgement.places.near_row_of.get(taken_row or "", taken_row)
    far_clause = _clause_with_losses(far, taken_row)
    if near_taken_row in near.tied:
        near_clause = _clause_with_losses(near, near_taken_row)
        closing_clause = (
            "; any of the tied that your stack runs will do"
            if near.certainty == far.certainty
            else ""
        )
        yield f"Take {taken_row}: {near_clause} and {far_clause}{closing_clause}."
        return
    yield f"Take {taken_row}: {far_clause}."
    near_only_clause = _clause_on_tied(near) if near.certainty == TIED else _clause_on_leader(near)
    yield f"For texts of {near.where} only, {near_only_clause}: {_losses_in_words(near)}."


def _clause_with_losses(choice: Choice, name: str | None) -> str:
    """Write how a row stands in a place, and the losses there:
    `leads at 128 bytes (2.36 bits; alibi +0.12 ± 0.03)`."""
    place = with_preposition(choice.where)
    return f"{clause_on_standing(choice, name)} {place} ({_losses_in_brackets(choice)})"


def clause_on_standing(choice: Choice, name: str | None) -> str:
    """Write how a row stands in a place: first, or tied with which others."""
    if choice.certainty == USE:
        return "leads"
    if choice.certainty == LEADS:
        return "leads after this training"
    others = [other for other in choice.tied if other != name]
    shown = others
    if len(choice.tied) > MAX_NAMED:
        shown = [*others[: MAX_NAMED - 2], f"{number_word(len(others) - MAX_NAMED + 2)} others"]
    return f"tied with {join_names(shown)}"


def _sentence_on_undecided(choices: Sequence[Choice]) -> str:
    """Write that no difference has an interval, and what has the lowest loss meanwhile."""
    row_to_take = choices[-1].tied[0]
    loss_texts = []
    for choice in choices:
        leader = choice.tied[0]
        name = "" if leader == row_to_take else f"{leader} "
        loss = choice.loss_of_row[leader]
        loss_texts.append(f"{name}{loss:.2f} {with_preposition(choice.where)}")
    reason = next(choice.why_no_interval for choice in choices if choice.why_no_interval)
    lowest = join_names(loss_texts)
    return f"Not decided, {reason}. Take {row_to_take} until then, the lowest: {lowest}."


def with_preposition(where: str) -> str:
    """Return a place with its preposition: `at 128 bytes`, `on the last 128 of 1,024 bytes`."""
    return f"on {where}" if where.startswith("the last") else f"at {where}"


def _capitalise_unless_name(sentence: str) -> str:
    """Return a sentence with a capital, unless it begins with the name of an encoding."""
    openings = ("use ", "not ")
    return sentence[0].upper() + sentence[1:] if sentence.startswith(openings) else sentence


def _clause_on_leader(choice: Choice) -> str:
    """Write "use X" or "X leads after this training"."""
    if choice.certainty == USE:
        return f"use {choice.taken}"
    return f"{choice.taken} leads after this training"


def _clause_on_tied(choice: Choice) -> str:
    """Write that encodings are tied, and which of them to take."""
    names = _rows_to_name(choice)
    if len(names) < len(choice.tied):
        names.append(f"{number_word(len(choice.tied) - len(names))} others")
    return f"{join_names(names)} are tied: take the one that your stack runs, else {choice.taken}"


def _losses_in_words(choice: Choice) -> str:
    """Write the losses of the best, and by how much the next one is behind: `2.36 bits (alibi
    +0.12 ± 0.03)`."""
    bits, _, behind_text = _losses_in_brackets(choice).partition("; ")
    return f"{bits} ({behind_text})" if behind_text else bits


def _losses_in_brackets(choice: Choice) -> str:
    """Write the same for use in brackets: `2.36 bits; alibi +0.12 ± 0.03`."""
    losses = choice.loss_of_row.values()
    lowest, highest = f"{min(losses):.2f}", f"{max(losses):.2f}"
    bits = lowest if lowest == highest else f"{lowest} to {highest}"
    if choice.behind is None:
        return f"{bits} bits"
    other, gap = choice.behind
    return f"{bits} bits; {other} {with_interval(gap)}"


def sentence_on_context(name: str, use: ContextUse) -> str:
    """Write how many bytes of context a row uses, and what the longest window saves.

    >>> use = ContextUse(64, 256, 128, 512, Gap(0.12, 0.02))
    >>> sentence_on_context("t5", use)
    't5 uses more than 64 and at most 256 bytes of context, where more than 0.02 bits count; 512 \
save 0.12 ± 0.02 against 128.'
    """
    longest = f"{use.longest_length:,}"
    bits_in_words = with_interval(use.saved)[1:]  # without its sign, which the verb says
    if abs(use.saved.value) <= use.saved.half_width:
        signed_bits = with_interval(Gap(-use.saved.value, use.saved.half_width))
        evidence = (
            f"{longest} and {use.near_length:,} do not differ significantly over windows "
            f"({signed_bits})"
        )
    else:
        verb = "save" if use.saved.value >= 0 else "cost"
        evidence = f"{longest} {verb} {bits_in_words} against {use.near_length:,}"
    used_range = range_of_context(use)
    if not used_range:
        question = f"Whether {name} uses more than {use.near_length:,} bytes of context"
        return f"{question} is open: {evidence}."
    # Not if far context costs much, as where an encoding breaks.
    changes_nothing = abs(use.saved.value) + use.saved.half_width < MARGIN
    conclusion = ": near context gives its loss on far bytes" if changes_nothing else ""
    return (
        f"{name} uses {used_range} bytes of context, where more than {MARGIN:g} bits count; "
        f"{evidence}{conclusion}."
    )


def range_of_context(use: ContextUse) -> str:
    """Write the range of the context that a row uses: `more than 64 and at most 256`; "" if it is
    open."""
    bounds = []
    if use.more_than:
        bounds.append(f"more than {use.more_than:,}")
    if use.at_most is not None:
        bounds.append(f"at most {use.at_most:,}")
    return " and ".join(bounds)


def _sentences_on_cost(cost: EqualTime, judgement: Judgement) -> Iterator[str]:
    """Yield what the rows that the answer names cost, and who is first at equal training time."""
    encoding_of = judgement.places.encoding_of
    chosen = encoding_of.get(judgement.taken or "", "")
    yield from _sentences_on_dear_encodings(cost, judgement, chosen)
    if chosen in cost.step_seconds and cost.mean_losses:
        yield from _sentences_on_equal_time(cost, chosen)


def _sentences_on_dear_encodings(
    cost: EqualTime, judgement: Judgement, chosen: str
) -> Iterator[str]:
    """Yield what the encoding to take costs, against the cheapest, and what the others that the
    answer names cost, against the one to take. chosen: the encoding to take."""
    ratio = cost.known_ratio(chosen, cost.cheapest)
    if ratio is not None and _is_dearer(ratio):
        yield f"Here {chosen} costs {times_in_words(ratio)} times {cost.cheapest}'s training time."
    named_rows: list[str] = []
    for choice in judgement.choices:
        named_rows += _rows_to_name(choice)
    encoding_of = judgement.places.encoding_of
    for other in dict.fromkeys(encoding_of[name] for name in named_rows):
        ratio = cost.known_ratio(other, chosen)
        if ratio is not None and _is_dearer(ratio):
            yield f"Here {other} costs {times_in_words(ratio)} times {chosen}'s training time."


def _sentences_on_equal_time(cost: EqualTime, chosen: str) -> Iterator[str]:
    """Yield which encoding is ahead of the one to take after equally long training; nothing if none
    is for certain. chosen: the encoding to take."""
    loss_of = cost.mean_losses
    leader = next(iter(loss_of))
    if chosen not in loss_of:
        yield f"At equal time {leader} is ahead: {chosen} had not been validated by then."
    elif cost.is_ahead(leader, chosen, MARGIN):
        losses_text = f"{loss_of[leader]:.2f} against {loss_of[chosen]:.2f} bits"
        yield f"At equal time {leader} is ahead ({losses_text})."


def _is_dearer(ratio: CostRatio) -> bool:
    """Return True if the answer says what an encoding costs: it is slower for certain, and by
    enough to matter."""
    return ratio.estimate >= MIN_DEARER_RATIO and ratio.lowest > 1


def times_in_words(ratio: CostRatio) -> str:
    """Write a ratio of training times with its range, `1.4 (1.3 to 1.6)`; without a range that
    rounding shows, `1.4`."""
    estimate, lowest, highest = (f"{number:.1f}" for number in ratio)
    return estimate if lowest == highest else f"{estimate} ({lowest} to {highest})"


def _rows_to_name(choice: Choice) -> list[str]:
    """Return the tied rows that the answer names."""
    if len(choice.tied) <= MAX_NAMED:
        return list(choice.tied)
    others = [name for name in choice.tied if name != choice.taken]
    return [choice.taken, *others[: MAX_NAMED - 2]]


def sentence_on_task(standing: Standing, metric: str, why_no_interval: str | None) -> str:
    """Write who is first in a task or over all tasks, and how sure that is.

    metric: what its numbers are, in words: `exact match on copy beyond 20 symbols`.
    why_no_interval: why no difference has an interval; None if they have.
    """
    first = standing.order[0]
    score_text = f"{standing.mean(first):.2f} {metric}"
    if len(standing.order) == 1:
        return f"{first} is the only encoding: {score_text}. Add another."
    best = "highest" if standing.higher_is_better else "lowest"
    second = standing.order[1]
    if why_no_interval:
        gap_text = with_sign(standing.gap(second))
        return (
            f"Not decided, {why_no_interval}; take {first} until then: {best} {metric} "
            f"({standing.mean(first):.2f}; {second} {gap_text})."
        )
    tied_rows = [name for name in standing.first_tier if name != first]
    if tied_rows:
        names = list_up_to_six([first, *tied_rows])
        return f"{names} are tied in {metric}, {first} has the {best} ({standing.mean(first):.2f})."
    gap_text = with_interval(standing.gap(second))
    return (
        f"{first} leads after this training: {best} {metric} ({standing.mean(first):.2f}; "
        f"{second} {gap_text})."
    )


def sentence_on_unlearned_task(task: str) -> str:
    """Write that nothing is said of a task."""
    return f"No trial has learned {task}, so nothing is said of it: give more --steps."


def sentence_without_results(counts: Mapping[str, tuple[int, int]]) -> str:
    """Write the answer of a study without a finished trial.

    counts: how many trials failed, of how many planned ones, by encoding.
    """
    if counts and all(failed == planned for failed, planned in counts.values()):
        return f"No trial has finished: all trials of {list_up_to_six(counts)} failed."
    if counts:
        return f"No trial has finished, and {list_up_to_six(counts)} failed."
    return "No trial has finished."


def sentence_on_unchecked(names: Iterable[str]) -> str:
    """Write the warning of encodings that fail the contract."""
    unique = list(dict.fromkeys(names))
    fail_phrase = "it fails" if len(unique) == 1 else "they fail"
    return f"The losses of {list_up_to_six(unique)} mean nothing: {fail_phrase} a check."


def sentence_on_running_nowhere(names: Sequence[str]) -> str:
    """Write which encodings run at no tested length."""
    return f"{list_up_to_six(names)} can run at no tested length."


def sentences_on_failures(counts: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    """Yield the sentence on failed trials, which begins the answer."""
    failure_texts = [f"{name} {failed} of {planned}" for name, (failed, planned) in counts.items()]
    if failure_texts:
        yield f"Failed trials: {list_up_to_six(failure_texts)}; not judged."


def sentences_on_own(pairs: Sequence[OwnComparison]) -> Iterator[str]:
    """Yield a sentence for each of the user's own encodings: better than which others, tied with
    which, worse than which, in each place; with the difference from the nearest of the better and
    of the worse."""
    for name in dict.fromkeys(pair.own_row for pair in pairs):
        of_name = [pair for pair in pairs if pair.own_row == name]
        clauses = []
        for where in dict.fromkeys(pair.where for pair in of_name):
            pairs_here = [pair for pair in of_name if pair.where == where]
            clauses.append(f"{_clause_on_own(pairs_here)} {with_preposition(where)}")
        yield f"{name}: {'; '.join(clauses)}."


def _clause_on_own(pairs: Sequence[OwnComparison]) -> str:
    """Write how an encoding of the user's own stands against others in one place."""
    parts = []
    phrases = {"better": "better than", "tied": "tied with", "worse": "worse than"}
    for verdict, phrase in phrases.items():
        of_verdict = sorted(
            (pair for pair in pairs if pair.verdict == verdict), key=lambda p: abs(p.gap.value)
        )
        if of_verdict:
            nearest = of_verdict[0]
            others = [pair.other_row for pair in of_verdict[1:]]
            nearest_text = f"{nearest.other_row} ({with_interval(nearest.gap)})"
            parts.append(f"{phrase} {list_up_to_six([nearest_text, *others])}")
    unsure = [f"{with_sign(p.gap)} from {p.other_row}" for p in pairs if not p.verdict]
    if unsure:
        parts.append(f"without an interval {list_up_to_six(unsure)}")
    return ", ".join(parts)


def with_sign(gap: Gap) -> str:
    """Return a difference as text with its sign, with three decimals if it is below 0.01."""
    digits = 2 if abs(gap.value) >= 0.01 else 3
    return f"{round(gap.value, digits) + 0.0:+.{digits}f}"  # no -0.000


def with_interval(gap: Gap) -> str:
    """Return a difference and its half interval as text, `+0.02 ± 0.01`, with a third decimal where
    two do not show whether the interval excludes 0; without one, the difference alone."""
    if gap.half_width == math.inf:
        return with_sign(gap)
    closest_number = min(abs(gap.value), gap.half_width, abs(abs(gap.value) - gap.half_width))
    digits = 2 if closest_number >= 0.01 else 3
    return f"{gap.value:+.{digits}f} ± {gap.half_width:.{digits}f}"
