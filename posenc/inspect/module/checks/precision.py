"""Check that all positions differ, also with activations or the module itself in bfloat16."""

import torch
from torch import Tensor

from posenc.inspect.module.build import Function, ScoreMod
from posenc.inspect.module.errors import bound, distinct, error
from posenc.inspect.module.subject import Measured, Subject

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
