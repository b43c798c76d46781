"""Check how exact positions are: all distinct, also in bfloat16, and right as far as stated."""

import inspect
import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc.inspect.module.errors import bound, distinct, error
from posenc.inspect.module.subject import Measured, Subject, modules_of
from posenc.report.page.failure import one_line

_NARROW = torch.bfloat16
_STILL = 1e-4
"""Radians by which no position of a head is rotated that rotates nothing."""
_ACTIVATIONS = {"x", "q", "k", "scores", "score", "dtype"}


def apart(subject: Subject) -> Measured:
    """Check that no two positions give the same rotation in float32. Angles that were rounded to
    half precision are coarse in every dtype, so comparing two dtypes would not show it."""
    if subject.view.kind == "bias":
        return None, "a bias may give several places the same"
    if subject.view.kind == "values":
        return _repeated(subject)
    seen = subject.see(subject.inputs(subject.length))
    counts = [distinct("rotation", part) for part in _rotating_parts(subject, seen)]
    have, count = min(counts, default=(len(seen), len(seen)))
    return have == count, f"{have:,} of {count:,} positions distinct in float32"


def _rotating_parts(subject: Subject, seen: Tensor) -> list[Tensor]:
    """Return each head of each side that rotates anything; for what has no heads, all of it."""
    if subject.view.how != "rotated content":
        return [seen]
    heads = subject.view.by_head(seen).flatten(1, 2).unbind(1)
    return [head for head in heads if (head * head[:1].conj()).angle().abs().max() > _STILL]


def _repeated(subject: Subject) -> Measured:
    """Check that no row of a table is that of an earlier place, as where numbers of 8 bits wrap."""
    count = min(subject.length, subject.stated or subject.length)
    seen = subject.see(subject.inputs(count))
    have, _ = distinct("values", seen)
    is_last = have < count and bool((seen[have:] == seen[-1]).all())
    if is_last and subject.stated is None:
        return None, f"{have:,} of {count:,} rows distinct, the last for all that follow"
    return have == count, f"{have:,} of {count:,} rows distinct in float32"


def activations(subject: Subject) -> Measured:
    """Compare results for bfloat16 activations with those for float32 activations."""
    if not subject.form.words & _ACTIVATIONS:
        return None, "takes no activations"
    exact = subject.see(subject.inputs(subject.length))
    rounded = subject.see(subject.inputs(subject.length, dtype=_NARROW))
    return _judged(subject, exact, rounded)


def cast(subject: Subject) -> Measured:
    """Check the same after module.bfloat16()."""
    if not any(modules_of(subject.module)):
        return None, "a function holds no numbers"
    exact = subject.see(subject.inputs(subject.length))
    inputs = subject.inputs(subject.length, dtype=_NARROW)
    return _judged(subject, exact, subject.see(inputs, subject.fresh().bfloat16()))


def _judged(subject: Subject, exact: Tensor, rounded: Tensor) -> Measured:
    """Hold what a module returns for bfloat16 to what it returns for float32: the error, and how
    many positions stay distinct."""
    kind = subject.view.kind
    off = error(kind, rounded, exact)
    allowed = bound(_NARROW)
    distinct_rounded, count = distinct(kind, rounded)
    distinct_at_best, _ = distinct(kind, exact, _NARROW)
    distinct_exact, _ = distinct(kind, exact)
    thing = "distances" if kind == "bias" else "positions"
    text = f"off by {off.said} (allowed {allowed:.2g}"
    text += " and that share)" if kind == "bias" else ")"
    text += f"; {distinct_rounded:,} of {count:,} {thing} distinct"
    if distinct_exact < count:
        text += f", {distinct_exact:,} in float32"
    elif distinct_rounded == distinct_at_best < count:
        text += ", as in any bfloat16"
    elif distinct_rounded < count:
        text += f", {distinct_at_best:,} as numbers of bfloat16"
    return off.worst <= allowed, text


BOUND = 2 * torch.finfo(torch.bfloat16).eps
"""Radians by which bfloat16 may round two cosines."""
UNSTATED = 2**16
"""Positions at which a module without a stated limit is judged."""
_MOST = 2**24
_STEP, _ROWS = 3, 8
_PROMISE = re.compile(r"exceed|longer than|beyond", re.I)
_KEEPS = re.compile(r"recomput|re-comput|rebuil|regenerat|recreat|grow|extend", re.I)


class _Far(NamedTuple):
    """What a module gives at far positions. right_to: the largest number of positions that was
    right. worst: the largest error up to the claimed number, NaN if one is. refusal: why a call up
    to that number failed, or ""."""

    right_to: int
    worst: float
    refusal: str = ""


def reach(subject: Subject) -> Measured:
    """Find up to where differences of positions rotate by the angle that they have at the start,
    and twice a position by twice its angle."""
    differences = _differences(subject)
    if differences is None:
        return _counted(subject)
    claimed = subject.stated or UNSTATED
    try:
        start = differences(0)
        near = _worse(_gap(differences(100), start), _error_of_twice(subject, 100))
    except Exception as failed:
        return None, f"cannot be asked for far positions: {one_line(failed)}"
    if not near <= BOUND:
        turns = subject.view.kind == "rotation" and "positions" in subject.form.words
        off_at_100 = f"at position 100 a difference is off by {near:.2g} from the same at 0"
        # Tables of places owe nothing to differences.
        return False if turns else None, off_at_100
    far = _try_far(subject, differences, start, claimed)
    if far.refusal:
        return None, f"right up to {far.right_to:,}; {far.refusal}"
    if math.isnan(far.worst) and not subject.stated:
        # As xPos, whose scales leave float32 far away.
        return None, f"right to {far.right_to:,}; no number at {claimed:,}, which it does not state"
    along, place = _along(subject, differences, start, min(subject.length, claimed))
    if not along <= BOUND and far.worst <= BOUND:
        return False, (
            f"a difference is off by {along:.2g} rad at position {place:,} from the same at 0 "
            f"(allowed {BOUND:.2g})"
        )
    return far.worst <= BOUND, _reach_in_words(far, claimed, is_stated=bool(subject.stated))


def _reach_in_words(far: _Far, claimed: int, *, is_stated: bool) -> str:
    """Return up to where a module is right, and how wrong it is at the claimed position."""
    and_more = " and more" if far.right_to == _MOST else ""
    limit = f"states {claimed:,}" if is_stated else f"states no limit, judged at {claimed:,}"
    return (
        f"right to {far.right_to:,}{and_more}; {limit}, off by {far.worst:.2g} rad "
        f"there (allowed {BOUND:.2g})"
    )


def _try_far(subject: Subject, differences: Any, start: Tensor, claimed: int) -> _Far:
    """Find up to how many positions the module is right: the claimed number and powers of two are
    tried, the smallest first, until one is wrong. Its error is the larger of two: of differences at
    its end, which must be those at the `start`, and of `_error_of_twice`."""
    right_to = 0
    worst = 0.0
    for last in sorted({*(2**i for i in range(8, 25)), claimed}):
        try:
            off = _worse(_gap(differences(last - _ROWS), start), _error_of_twice(subject, last - 1))
        except Exception as failed:
            if last <= claimed:
                return _Far(right_to, worst, f"{last:,} positions: {one_line(failed)}")
            break  # the module owes nothing there, as where a table ends
        if last <= claimed:
            worst = _worse(off, worst)
        if not off <= BOUND:
            break
        right_to = last
    return _Far(right_to, worst)


def _along(subject: Subject, differences: Any, start: Tensor, count: int) -> tuple[float, int]:
    """Return the largest error of a difference among the first `count` positions, and where it
    is."""
    if count <= _ROWS:
        return 0.0, 0
    moved = differences(0, count)
    off = (moved * start[:1].conj()).angle() if moved.is_complex() else moved - start[:1]
    by_place = off.abs() if off.ndim == 1 else off.abs().amax(-1)
    return by_place.max().item(), int(by_place.argmax())


def _counted(subject: Subject) -> Measured:
    """Judge a module that counts its positions itself, so that none far away can be asked for:
    twice a position must have twice its angle, up to the length of the checks."""
    if subject.view.kind != "rotation":
        return None, "a bias" if subject.view.kind == "bias" else "shows no angles"
    seen = subject.see(subject.inputs(subject.length))
    by_first = seen * seen[0].conj()
    half = (subject.length + 1) // 2
    worst = _gap(by_first[: 2 * half : 2], by_first[:half] ** 2)
    text = f"twice a position is off by {worst:.2g} rad from twice its angle"
    return worst <= BOUND, f"{text}, up to {subject.length:,} (allowed {BOUND:.2g})"


def _error_of_twice(subject: Subject, last: int) -> float:
    """Return how far the angle of position `last`, or the one before, is from twice the angle of
    half of it, in radians; 0 for a module that shows no angles."""
    if subject.view.kind != "rotation":
        return 0.0
    half = last // 2
    if subject.form.places_tokens:
        first, middle, end = subject.see(subject.inputs(torch.tensor([0, half, 2 * half])))
    else:
        counting = subject.form.counting()
        first, middle, end = (
            subject.see(subject.inputs(1, offset=start), form=counting)[0]
            for start in (0, half, 2 * half)
        )
    return _gap(end * first.conj(), (middle * first.conj()) ** 2)


def _worse(a: float, b: float) -> float:
    """Return the larger of two errors; NaN if one is."""
    return torch.tensor([a, b]).max().item()


def _gap(a: Tensor, b: Tensor) -> float:
    """Return the largest difference: of complex numbers that of their angles, in radians."""
    gap = (a * b.conj()).angle() if a.is_complex() else a - b
    return gap.abs().max().item()


def _differences(subject: Subject):
    """Return the effect of moving by three positions, by start: the rotation of each pair, or the
    cosine of two rows. None if there is nothing to compare."""
    counting = subject.form.counting()
    if subject.view.kind == "bias":
        return None
    placed = subject.form.places_tokens
    if not placed and (counting is None or "offset" not in counting.on_request):
        return None

    def differences(start: int, count: int = _ROWS) -> Tensor:
        if placed:
            rows = subject.see(subject.inputs(torch.arange(start, start + count)))
        else:
            rows = subject.see(subject.inputs(count, offset=start), form=counting)
        if subject.view.kind == "rotation":
            return rows[_STEP:] * rows[:-_STEP].conj()
        rows = torch.nn.functional.normalize(rows, dim=-1)
        return (rows[_STEP:] * rows[:-_STEP]).sum(-1)

    return differences


def beyond(subject: Subject) -> Measured:
    """Check that the module runs beyond its stated length if its own words say that it does."""
    if subject.limit is None:
        return None, f"no limit met up to {subject.length:,} tokens"
    limit = f"{subject.limit.tokens:,} tokens: {subject.limit.error}"
    words = " ".join(
        filter(None, map(inspect.getdoc, (type(subject.module), subject.module.forward)))
    )
    for sentence in re.split(r"(?<=[.;])\s+|\n\s*\n", words):
        promise = _KEEPS.search(sentence)
        if promise and _PROMISE.search(sentence):
            return False, f"its words promise “…{promise.group(0)}…” beyond it; {limit}"
    return None, f"ends at {subject.length:,}, and promises no more; {limit}"
