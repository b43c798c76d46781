"""Check how exact positions are: all distinct, also in bfloat16, and right as far as stated."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from posenc.command_line.errors import one_line
from posenc.inspect.module.results import allowed_error, count_distinct, measure_errors
from posenc.inspect.module.stated import stated_docstrings
from posenc.inspect.module.subject import (
    Caution,
    CheckResult,
    Subject,
    modules_without_containers,
)

_NARROW_DTYPE = torch.bfloat16
_LEAST_ROTATION = 1e-4
"""Radians; a head that rotates no position by more rotates nothing."""
_ACTIVATION_ARGUMENTS = {"x", "q", "k", "scores", "score", "dtype"}
"""Arguments by which a module learns the dtype of activations."""


def judge_distinct_positions(subject: Subject) -> CheckResult:
    """Check that no two positions give the same rotation, or row, in float32. Angles that were
    rounded to half precision are coarse in every dtype, so comparing two dtypes would not show
    it."""
    if subject.reader.kind == "bias":
        return None, "a bias may give several places the same"
    if subject.reader.kind == "values":
        return _judge_distinct_rows(subject)
    result = subject.read_result(subject.make_inputs(subject.length))
    distinct_and_all = [
        count_distinct("rotation", part) for part in _rotating_parts(subject, result)
    ]
    num_distinct, count = min(distinct_and_all, default=(len(result), len(result)))
    return num_distinct == count, f"{num_distinct:,} of {count:,} positions distinct in float32"


def _rotating_parts(subject: Subject, result: Tensor) -> list[Tensor]:
    """Return each head (positions, pairs) of queries and keys that rotates anything; of cosines and
    sines, which have no heads, all."""
    if subject.reader.meaning != "rotated content":
        return [result]
    heads = subject.reader.by_head(result).flatten(1, 2).unbind(1)
    return [
        head for head in heads if (head * head[:1].conj()).angle().abs().max() > _LEAST_ROTATION
    ]


def _judge_distinct_rows(subject: Subject) -> CheckResult:
    """Check that no two rows are equal, as they are if positions are kept in 8 bits and wrap.

    No verdict (None) if the first rows differ and all later ones equal the last row, and the module
    states no number of positions: then it clamps positions by design.
    """
    count = min(subject.length, subject.stated_positions or subject.length)
    result = subject.read_result(subject.make_inputs(count))
    num_distinct, _ = count_distinct("values", result)
    repeats_last = num_distinct < count and bool((result[num_distinct:] == result[-1]).all())
    if repeats_last and subject.stated_positions is None:
        return None, f"{num_distinct:,} of {count:,} rows distinct, the last for all that follow"
    return num_distinct == count, f"{num_distinct:,} of {count:,} rows distinct in float32"


def judge_bfloat16_activations(subject: Subject) -> CheckResult:
    """Check that results for bfloat16 activations are those for float32, up to rounding."""
    if not subject.form.words & _ACTIVATION_ARGUMENTS:
        return None, "takes no activations"
    exact = subject.read_result(subject.make_inputs(subject.length))
    rounded = subject.read_result(subject.make_inputs(subject.length, dtype=_NARROW_DTYPE))
    return _judge_rounded_result(subject, exact, rounded)


def judge_bfloat16_module(subject: Subject) -> CheckResult | Caution:
    """Check that results after module.bfloat16() are those of the module in float32, up to
    rounding. If they are not, that is a caution: who loads weights in bfloat16 casts no buffers."""
    if not any(modules_without_containers(subject.module)):
        return None, "a function holds no numbers"
    exact = subject.read_result(subject.make_inputs(subject.length))
    inputs = subject.make_inputs(subject.length, dtype=_NARROW_DTYPE)
    rounded = subject.read_result(inputs, subject.make_copy().bfloat16())
    holds, text = _judge_rounded_result(subject, exact, rounded)
    if holds:
        return holds, text
    return Caution("it must stay in float32, because module.bfloat16() rounds its positions", text)


def _judge_rounded_result(subject: Subject, exact: Tensor, rounded: Tensor) -> CheckResult:
    """Check that `rounded`, the result in bfloat16, is as near to `exact`, the one in float32, as
    is allowed; the numbers also say how many positions stay distinct."""
    kind = subject.reader.kind
    errors = measure_errors(kind, rounded, exact)
    allowed = allowed_error(_NARROW_DTYPE)
    distinct_rounded, count = count_distinct(kind, rounded)
    distinct_at_best, _ = count_distinct(kind, exact, _NARROW_DTYPE)
    distinct_exact, _ = count_distinct(kind, exact)
    unit = "distances" if kind == "bias" else "positions"
    text = f"off by {errors.description} (allowed {allowed:.2g}"
    text += " and that share)" if kind == "bias" else ")"
    text += f"; {distinct_rounded:,} of {count:,} {unit} distinct"
    if distinct_exact < count:
        text += f", {distinct_exact:,} in float32"
    elif distinct_rounded == distinct_at_best < count:
        text += ", as in any bfloat16"
    elif distinct_rounded < count:
        text += f", {distinct_at_best:,} as numbers of bfloat16"
    return errors.worst <= allowed, text


_ALLOWED_ANGLE = 2 * torch.finfo(torch.bfloat16).eps
"""Radians by which bfloat16 may round two cosines. Rows that are no rotation are held to the same
number, as a difference of cosines."""
_CLAIM_IF_UNSTATED = 2**16
"""Positions up to which a module without a stated limit is judged; chosen, not derived."""
_POWERS_TRIED = [2**i for i in range(8, 25)]
_FARTHEST_TRIED = _POWERS_TRIED[-1]
"""Numbers of positions. From 2^24 on float32 skips integers."""
_STEP, _NUM_ROWS = 3, 8
"""Positions between the two that are compared, and positions read at each place; chosen."""
_WORDS_OF_EXCEEDING = re.compile(r"exceed|longer than|beyond", re.I)
_WORDS_OF_REBUILDING = re.compile(r"recomput|re-comput|rebuil|regenerat|recreat|grow|extend", re.I)
"""A docstring promises more than the limit if one of its sentences has a word of both patterns."""

StepEffect = Callable[..., Tensor]
"""Start and number of positions -> effect of moving by _STEP, see `_make_step_effect`."""


class _FarFindings(NamedTuple):
    """What was found when a module was called with more and more positions, up to at least the
    number that it claims.

    right_to: the largest number of positions tried at which its error was allowed; 0 for none.
    worst: the largest error, in radians, at the numbers tried up to the claimed one; NaN if one is
        NaN.
    wrong_at: the first number, up to the claimed one, at which the error is too large; None for
        none.
    refusal: why a call with at most the claimed number failed, which ended the trials; "" for none.
    """

    right_to: int
    worst: float
    wrong_at: int | None = None
    refusal: str = ""


def judge_far_positions(subject: Subject) -> CheckResult:
    """Check positions up to the number that the module states, or to _CLAIM_IF_UNSTATED: moving on
    by _STEP positions must have the same effect everywhere, and twice a position must have twice
    its angle."""
    step_effect = _make_step_effect(subject)
    if step_effect is None:
        return _judge_counted_positions(subject)
    claimed = subject.stated_positions or _CLAIM_IF_UNSTATED
    try:
        first_effect = step_effect(0)
        error_at_100 = _larger_error(
            _largest_difference(step_effect(100), first_effect), _error_of_doubling(subject, 100)
        )
    except Exception as failed:
        return None, f"cannot be asked for far positions: {one_line(failed)}"
    if not error_at_100 <= _ALLOWED_ANGLE:
        shows_rotation = subject.reader.kind == "rotation" and "positions" in subject.form.words
        text = f"at position 100 a difference is off by {error_at_100:.2g} from the same at 0"
        # A table of learned positions need not show differences.
        return False if shows_rotation else None, text
    far_findings = _try_far_positions(subject, step_effect, first_effect, claimed)
    if far_findings.refusal:
        return None, f"right up to {far_findings.right_to:,}; {far_findings.refusal}"
    if (
        far_findings.wrong_at is not None
        and math.isnan(far_findings.worst)
        and not subject.stated_positions
    ):
        # As xPos, whose scales leave float32 far away.
        return (
            None,
            f"right to {far_findings.right_to:,}; states no limit, no number at "
            f"{far_findings.wrong_at:,}",
        )
    nearby_error, worst_position = _largest_error_up_to(
        subject, step_effect, first_effect, min(subject.length, claimed)
    )
    if not nearby_error <= _ALLOWED_ANGLE and far_findings.worst <= _ALLOWED_ANGLE:
        return False, (
            f"a difference is off by {nearby_error:.2g} rad at position {worst_position:,} from "
            f"the same at 0 (allowed {_ALLOWED_ANGLE:.2g})"
        )
    return far_findings.worst <= _ALLOWED_ANGLE, _describe_far_positions(
        far_findings, claimed, is_stated=bool(subject.stated_positions)
    )


def _describe_far_positions(far_findings: _FarFindings, claimed: int, *, is_stated: bool) -> str:
    """Return a line of text on far positions: up to how many a module is right; what it claims; and
    its error, at the first number of positions that is wrong, or the largest up to the claim.

    claimed: number of positions that the module states, or if not `is_stated`, to which it is
        judged.
    """
    and_more = " and more" if far_findings.right_to == _FARTHEST_TRIED else ""
    limit_in_words = (
        f"states {claimed:,}" if is_stated else f"states no limit, judged to {claimed:,}"
    )
    place_in_words = (
        "up to there" if far_findings.wrong_at is None else f"at {far_findings.wrong_at:,}"
    )
    return (
        f"right to {far_findings.right_to:,}{and_more}; {limit_in_words}, off by "
        f"{far_findings.worst:.2g} rad {place_in_words} (allowed {_ALLOWED_ANGLE:.2g})"
    )


def _try_far_positions(
    subject: Subject, step_effect: StepEffect, first_effect: Tensor, claimed: int
) -> _FarFindings:
    """Find up to how many positions the module is right: the claimed number and powers of two are
    tried, the smallest first, until one is wrong.

    The error at a number is the larger of two: how far `step_effect` there is from `first_effect`,
    which is that at position 0; and `_error_of_doubling`.
    """
    right_to = 0
    worst = 0.0
    for num_positions in sorted({*_POWERS_TRIED, claimed}):
        try:
            error = _larger_error(
                _largest_difference(step_effect(num_positions - _NUM_ROWS), first_effect),
                _error_of_doubling(subject, num_positions - 1),
            )
        except Exception as failed:
            if num_positions <= claimed:
                refusal = f"{num_positions:,} positions: {one_line(failed)}"
                return _FarFindings(right_to, worst, refusal=refusal)
            break  # the module owes nothing there, as where a table ends
        if num_positions <= claimed:
            worst = _larger_error(error, worst)
        if not error <= _ALLOWED_ANGLE:
            return _FarFindings(
                right_to, worst, wrong_at=num_positions if num_positions <= claimed else None
            )
        right_to = num_positions
    return _FarFindings(right_to, worst)


def _largest_error_up_to(
    subject: Subject, step_effect: StepEffect, first_effect: Tensor, count: int
) -> tuple[float, int]:
    """Return how far, at most, `step_effect` among the first `count` positions is from
    `first_effect`, which is that at position 0; and the position with this error."""
    if count <= _NUM_ROWS:
        return 0.0, 0
    step_effects = step_effect(0, count)
    errors = (
        (step_effects * first_effect[:1].conj()).angle()
        if step_effects.is_complex()
        else step_effects - first_effect[:1]
    )
    errors_by_place = errors.abs() if errors.ndim == 1 else errors.abs().amax(-1)
    return errors_by_place.max().item(), int(errors_by_place.argmax())


def _judge_counted_positions(subject: Subject) -> CheckResult:
    """Judge a module that counts its positions itself, so that none far away can be asked for:
    twice a position must have twice its angle, up to the length of the checks."""
    if subject.reader.kind != "rotation":
        return None, "a bias" if subject.reader.kind == "bias" else "shows no angles"
    result = subject.read_result(subject.make_inputs(subject.length))
    turns_from_first = result * result[0].conj()
    half_length = (subject.length + 1) // 2
    worst = _largest_difference(
        turns_from_first[: 2 * half_length : 2], turns_from_first[:half_length] ** 2
    )
    text = f"twice a position is off by {worst:.2g} rad from twice its angle"
    return (
        worst <= _ALLOWED_ANGLE,
        f"{text}, up to {subject.length:,} (allowed {_ALLOWED_ANGLE:.2g})",
    )


def _error_of_doubling(subject: Subject, last_position: int) -> float:
    """Return how far the angle of the largest even position up to `last_position` is from twice
    the angle of half that position, in radians; 0 for a module that shows no angles."""
    if subject.reader.kind != "rotation":
        return 0.0
    half_position = last_position // 2
    if subject.form.takes_positions:
        first, middle, end = subject.read_result(
            subject.make_inputs(torch.tensor([0, half_position, 2 * half_position]))
        )
    else:
        counting_form = subject.form.without_positions()
        first, middle, end = (
            subject.read_result(subject.make_inputs(1, offset=start), form=counting_form)[0]
            for start in (0, half_position, 2 * half_position)
        )
    return _largest_difference(end * first.conj(), (middle * first.conj()) ** 2)


def _larger_error(a: float, b: float) -> float:
    """Return the larger of two errors; NaN if one is, where max() may ignore it."""
    return torch.tensor([a, b]).max().item()


def _largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference: of complex numbers that of their angles, in radians."""
    difference = (a * b.conj()).angle() if a.is_complex() else a - b
    return difference.abs().max().item()


def _make_step_effect(subject: Subject) -> StepEffect | None:
    """Return a function that measures the effect of moving by _STEP positions, for the rows after a
    start: the rotation of each pair (rows, pairs), or the cosine of two rows (rows). None if the
    module returns a bias, or cannot be asked for far positions."""
    counting_form = subject.form.without_positions()
    if subject.reader.kind == "bias":
        return None
    takes_positions = subject.form.takes_positions
    if not takes_positions and (
        counting_form is None or "offset" not in counting_form.optional_names
    ):
        return None

    def step_effect(start: int, count: int = _NUM_ROWS) -> Tensor:
        if takes_positions:
            rows = subject.read_result(subject.make_inputs(torch.arange(start, start + count)))
        else:
            rows = subject.read_result(subject.make_inputs(count, offset=start), form=counting_form)
        if subject.reader.kind == "rotation":
            return rows[_STEP:] * rows[:-_STEP].conj()
        rows = torch.nn.functional.normalize(rows, dim=-1)
        return (rows[_STEP:] * rows[:-_STEP]).sum(-1)

    return step_effect


def judge_promised_length(subject: Subject) -> CheckResult:
    """Check that the docstrings of a module that refuses long sequences do not promise that it
    grows beyond its limit."""
    if subject.refusal is None:
        return None, f"no limit met up to {subject.length:,} tokens"
    limit_in_words = f"{subject.refusal.num_tokens:,} tokens: {subject.refusal.message}"
    for sentence in re.split(r"(?<=[.;])\s+|\n\s*\n", stated_docstrings(subject)):
        promise = _WORDS_OF_REBUILDING.search(sentence)
        if promise and _WORDS_OF_EXCEEDING.search(sentence):
            return False, f"its words promise “…{promise.group(0)}…” beyond it; {limit_in_words}"
    return None, f"ends at {subject.length:,}, and promises no more; {limit_in_words}"
