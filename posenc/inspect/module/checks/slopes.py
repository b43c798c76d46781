"""Check that the slopes of linear biases are those of ALiBi."""

import torch
from torch import Tensor

from posenc.encodings import ALiBi
from posenc.inspect.module.subject import Measured, Subject

_CLOSE = 1e-3


def slopes(subject: Subject) -> Measured:
    """Compare with the authors' slopes, and with 2^(-8h/H), which is theirs for powers of two."""
    if subject.view.kind != "bias":
        return None, "no bias"
    bias = subject.see(subject.inputs(min(64, subject.length)))
    last = bias[:, -1]
    steps = last.diff(dim=-1)
    found = steps[:, -1]
    if not (steps - found[:, None]).abs().le(_CLOSE * found.abs()[:, None] + 1e-9).all():
        return None, "no straight line"
    if not (found > 0).all():
        return None, "does not fall with distance"
    count = len(found)
    ahead = _ahead(bias)
    authors = torch.tensor(ALiBi(count).slopes, dtype=torch.float64)
    plain = 2.0 ** (-8 * torch.arange(1, count + 1, dtype=torch.float64) / count)
    shown = ", ".join(f"{slope:.3g}" for slope in found[:3].tolist())
    if _equal(found, authors):
        return True, f"{count} heads: {shown}, ...{ahead}"
    if _equal(found, plain):
        want = ", ".join(f"{slope:.3g}" for slope in authors[:3].tolist())
        return False, f"{count} heads: {shown}, ...; the authors' {want}, ...{ahead}"
    return None, f"slopes of its own: {shown}, ...{ahead}"


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() <= _CLOSE * b).all())


def _ahead(bias: Tensor) -> str:
    if bias.shape[1] == 1 or not (gain := (bias[:, 0, -1] - bias[:, 0, 0]).max().item()) > 0:
        return ""
    return f"; keys ahead are rewarded, by {gain:.3g} logits at {bias.shape[-1] - 1}: causal only"
