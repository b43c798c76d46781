"""Check how far positions are right, and what happens beyond a module's stated length."""

import inspect
import re

import torch
from torch import Tensor

from posenc.inspect.module.subject import Measured, Subject, one_line

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
