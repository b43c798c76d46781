"""Check how exact positions are: all distinct, also in bfloat16, and right as far as stated."""

import inspect
import re

import torch
from torch import Tensor

from posenc.inspect.module.build import Function, ScoreMod
from posenc.inspect.module.errors import bound, distinct, error
from posenc.inspect.module.subject import Measured, Subject
from posenc.report.page.failure import one_line

_NARROW = torch.bfloat16
_ACTIVATIONS = {"content", "q", "k", "scores", "dtype"}


def apart(subject: Subject) -> Measured:
    """Check that no two positions give the same rotation in float32. Angles that were rounded to
    half precision are coarse in every dtype, so comparing two dtypes would not show it."""
    if subject.view.kind != "rotation":
        return None, "a bias or a table may give several places the same"
    have, count = distinct("rotation", subject.see(subject.inputs(subject.length)))
    return have == count, f"{have:,} of {count:,} positions distinct in float32"


def activations(subject: Subject) -> Measured:
    """Compare results for bfloat16 activations with those for float32 activations."""
    if not subject.form.roles & _ACTIVATIONS:
        return None, "takes no activations"
    exact = subject.see(subject.inputs(subject.length))
    rounded = subject.see(subject.inputs(subject.length, dtype=_NARROW))
    return _judged(subject, exact, rounded)


def cast(subject: Subject) -> Measured:
    """Check the same after module.bfloat16()."""
    if isinstance(subject.module, (Function, ScoreMod)):
        return None, "a function holds no numbers"
    exact = subject.see(subject.inputs(subject.length))
    inputs = subject.inputs(subject.length, dtype=_NARROW)
    return _judged(subject, exact, subject.see(inputs, subject.fresh().bfloat16()))


def _judged(subject: Subject, exact: Tensor, rounded: Tensor) -> Measured:
    kind = subject.view.kind
    found, allowed = error(kind, rounded, exact), bound(_NARROW)
    have, count = distinct(kind, rounded)
    could, _ = distinct(kind, exact, _NARROW)
    thing = "distances" if kind == "bias" else "positions"
    text = f"off by {found.said} (allowed {allowed:.2g}"
    text += " and that share)" if kind == "bias" else ")"
    kept = f"; {have:,} of {count:,} {thing} distinct"
    own, _ = distinct(kind, exact)
    if own < count:
        kept += f", {own:,} in float32"
    elif have < count:
        kept += f", {could:,} as numbers of bfloat16" if could != have else ", as in any bfloat16"
    return found.worst <= allowed, text + kept


BOUND = 2 * torch.finfo(torch.bfloat16).eps
"""Radians by which bfloat16 may round two cosines."""
UNSTATED = 2**16
"""Positions at which a module without a stated limit is judged."""
_MOST = 2**24
_STEP, _ROWS = 3, 8
_PROMISE = re.compile(r"exceed|longer than|beyond", re.I)
_KEEPS = re.compile(r"recomput|re-comput|rebuil|regenerat|recreat|grow|extend", re.I)


def reach(subject: Subject) -> Measured:
    """Find up to where differences of positions rotate by the angle that they have at the start."""
    differences = _differences(subject)
    if differences is None:
        return None, "shows no angles" if subject.view.kind != "bias" else "a bias"
    claimed = subject.stated or UNSTATED
    try:
        start = differences(0)
        near = _gap(differences(100), start)
        if not near <= BOUND:
            turns = subject.view.kind == "rotation" and "positions" in subject.form.roles
            said = f"at position 100 a difference is off by {near:.2g} from the same at 0"
            return False if turns else None, said  # tables of places owe nothing to differences
    except Exception as failed:
        return None, f"cannot be asked for far positions: {one_line(failed)}"
    good, worst = 0, 0.0
    for last in sorted({*(2**i for i in range(8, 25)), claimed}):
        try:
            off = _gap(differences(last - _ROWS), start)
        except Exception as failed:  # a table ends somewhere
            if last <= claimed:
                return None, f"right up to {good:,}; {last:,} positions: {one_line(failed)}"
            break
        if last <= claimed:
            worst = off if not worst >= off else worst  # NaN stays
        if not off <= BOUND:
            break
        good = last
    said = f"states {claimed:,}" if subject.stated else f"states no limit, judged at {claimed:,}"
    return worst <= BOUND, (
        f"right to {good:,}{' and more' if good == _MOST else ''}; {said}, off by {worst:.2g} rad "
        f"there (allowed {BOUND:.2g})"
    )


def _gap(a: Tensor, b: Tensor) -> float:
    gap = (a * b.conj()).angle() if a.is_complex() else a - b
    return gap.abs().max().item()


def _differences(subject: Subject):
    """Return the effect of moving by three positions, by start: the rotation of each pair, or the
    cosine of two rows. None if there is nothing to compare."""
    counting = subject.form.without_positions()
    if subject.view.kind == "bias":
        return None
    placed = "positions" in subject.form.roles
    if not placed and (counting is None or "offset" not in {*counting.optional, *counting.roles}):
        return None

    def differences(start: int) -> Tensor:
        if placed:
            rows = subject.see(subject.inputs(torch.arange(start, start + _ROWS)))
        else:
            rows = subject.see(subject.inputs(_ROWS, offset=start), form=counting)
        if subject.view.kind == "rotation":
            return rows[_STEP:] * rows[:-_STEP].conj()
        rows = torch.nn.functional.normalize(rows, dim=-1)
        return (rows[_STEP:] * rows[:-_STEP]).sum(-1)

    return differences


def beyond(subject: Subject) -> Measured:
    """Check that the module runs beyond its stated length if its own words say that it does."""
    if subject.limit is None:
        return None, f"no limit met up to {subject.length:,} tokens"
    said = f"{subject.limit.tokens:,} tokens: {subject.limit.error}"
    words = " ".join(
        filter(None, map(inspect.getdoc, (type(subject.module), subject.module.forward)))
    )
    for sentence in re.split(r"(?<=[.;])\s+|\n\s*\n", words):
        promise = _KEEPS.search(sentence)
        if promise and _PROMISE.search(sentence):
            return False, f"its words promise “…{promise.group(0)}…” beyond it; {said}"
    return None, f"ends at {subject.length:,}, and promises no more; {said}"
