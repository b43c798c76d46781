"""Random attentions, each against the reference in float64.

python -m tests.fuzz.attention CASES [SEED]    prints what was drawn, and every case that differs
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import posenc
from posenc import masks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("run", "offset", "scattered", "batched", "one row", "real")
MASKS = ("causal", "window", "padding", "documents", "prefix", "none")
IMPLS = ("auto", "auto", "blocks", "sdpa")
ROUNDINGS = {torch.float64: 1e4, torch.float32: 256, torch.bfloat16: 8, torch.float16: 16}
"""Allowed error in epsilons of the dtype, times the size of the values: q and k are rounded after
place 2, weights and sums are accumulated, half types round the output."""
AUTOCAST = 4
"""Times the error that the reference makes under autocast, or that of rounding the result."""
HALF_EPS = torch.finfo(torch.bfloat16).eps
NAMES = tuple(name for name in posenc.names() if not name.startswith(("sinusoidal", "learned")))


@dataclass(frozen=True)
class Case:
    """One draw; everything follows from the seed."""

    seed: int
    name: str
    dtype: torch.dtype
    layout: str
    mask: str
    impl: str
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    strided: bool
    gradients: bool
    prepared: bool
    """As a model prepares it, and called before: elsewhere, then where what is kept serves."""
    autocast: bool
    """To bfloat16, which rounds q, k, v, scores and weights of float32. How far that may go, the
    reference shows under it. Torch itself cannot join two tensors of float16 under it."""


def draw(seed: int) -> Case:
    dice = random.Random(seed)
    kv_heads = dice.choice((1, 2))
    kv_len = dice.choice((1, 2, 7, 33, 130))
    whole = dice.random() < 0.6
    drawn = Case(
        seed, dice.choice(NAMES), dice.choice(DTYPES), dice.choice(LAYOUTS), dice.choice(MASKS),
        dice.choice(IMPLS), dice.choice((1, 2, 3)), kv_heads * dice.choice((1, 2)), kv_heads,
        kv_len if whole else dice.choice((1, dice.randint(1, kv_len))), kv_len, dice.random() < 0.3,
        dice.random() < 0.4, dice.random() < 0.4, dice.random() < 0.2,
    )  # fmt: skip
    return replace(drawn, autocast=drawn.autocast and drawn.dtype != torch.float16)


def positions_of(case: Case, axes: int) -> Tensor:
    """(kv_len) or (batch, kv_len), with a last axis of components where there are several."""
    n, generator = case.kv_len, torch.Generator().manual_seed(case.seed)
    steps = {
        "run": torch.arange(n),
        "offset": torch.arange(n) + 5000,
        "scattered": torch.randperm(4 * n, generator=generator)[:n].sort().values,
        "batched": torch.stack([torch.arange(n) + 11 * row for row in range(case.batch)]),
        "one row": torch.arange(n)[None],
        "real": torch.arange(n).double() * 1.5,
    }[case.layout]
    if axes == 1:
        return steps
    return torch.stack([steps // (axis + 1) for axis in range(axes)], -1)


def mask_of(case: Case) -> masks.Mask | None:
    valid = torch.ones(case.batch, case.kv_len, dtype=torch.bool)
    valid[:, : case.kv_len // 3] = False
    ids = torch.arange(case.kv_len) // 5
    q_ids = ids[case.kv_len - case.q_len :]
    return {
        "causal": masks.causal,
        "window": masks.causal & masks.sliding_window(4),
        "padding": masks.causal & masks.padding(valid),
        "documents": masks.causal & masks.document(q_ids, ids),
        "prefix": masks.causal | masks.prefix(3),
        "none": None,
    }[case.mask]


def outcome(case: Case) -> str | None:
    """ "refused" with the reason where the library says no; None where results agree; else what
    differs."""
    torch.manual_seed(case.seed)
    shape = posenc.ModelShape(32, case.heads, case.kv_heads, 8, train_length=16)
    encoding = posenc.create(case.name, shape).for_layer(0).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
            parameter.copy_(parameter.to(case.dtype))
    if encoding.claims.causal_only and case.mask in ("none", "prefix"):
        return "refused: it is for causal attention"
    axes = encoding.claims.num_axes
    kv_positions = positions_of(case, axes)
    span = -1 if axes == 1 else -2
    start = case.kv_len - case.q_len
    q_positions = kv_positions.narrow(span, start, case.q_len)
    x = torch.randn(case.batch, case.kv_len, 32, dtype=torch.float64)
    state = encoding.state(x, kv_positions)
    inputs = [_values(case, heads, n) for heads, n in (
        (case.heads, case.q_len), (case.kv_heads, case.kv_len), (case.kv_heads, case.kv_len)
    )]  # fmt: skip
    own = posenc.create(case.name, shape).for_layer(0).to(case.dtype)
    own.load_state_dict(encoding.state_dict())

    def run(
        kind: posenc.PositionEncoding, tensors: list[Tensor], impl: str, ahead: int = 0
    ) -> list[Tensor]:
        leaves = [t.clone().requires_grad_(case.gradients) for t in tensors]
        leaves = [_laid_out(t, case.strided) for t in leaves]
        with torch.set_grad_enabled(case.gradients):
            out = posenc.attention(
                *leaves, kind, q_positions=q_positions + ahead, kv_positions=kv_positions,
                q_state=None if state is None else state[:, :, start:].detach(),
                kv_state=None if state is None else state.detach(),
                mask=mask_of(case), impl=impl,
            )  # fmt: skip
        assert isinstance(out, Tensor)
        if not case.gradients:
            return [out]
        # Signs, which no dtype rounds: both sides go back from the same gradient.
        signs = torch.randint(2, out.shape, generator=torch.Generator().manual_seed(case.seed))
        return [out, *torch.autograd.grad(out, leaves, (2 * signs - 1).to(out.dtype))]

    wide = [t.double() for t in inputs]
    try:
        want = run(encoding, wide, "reference")
        rounded = want
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            if case.autocast and case.dtype == torch.float32:
                rounded = run(own, inputs, "reference")
            if case.prepared:
                own = own.prepare(q_positions)
                run(own, inputs, case.impl, ahead=2)
                run(own, inputs, case.impl)
            got = run(own, inputs, case.impl)
    except (ValueError, TypeError) as error:
        return f"refused: {error}"
    both = zip(got, want, rounded, strict=True)
    for what, (a, b, c) in zip(("output", "q", "k", "v"), both, strict=False):
        size = max(1.0, b.abs().max().item())
        bound = ROUNDINGS[case.dtype] * torch.finfo(case.dtype).eps * size
        if rounded is not want:
            bound += AUTOCAST * max((c.double() - b).abs().max().item(), HALF_EPS * size)
        error = (a.double() - b).abs().max().item()
        if not error <= bound:
            return f"{what} off by {error:.2g} of {size:.2g}, allowed {bound:.2g}"
    return None


def _values(case: Case, heads: int, length: int) -> Tensor:
    return torch.randn(case.batch, heads, length, 8, dtype=torch.float64).to(case.dtype)


def _laid_out(t: Tensor, strided: bool) -> Tensor:
    """The same numbers; if `strided`, with channels that do not lie side by side."""
    return t.mT.contiguous().mT if strided else t


def main(cases: int, seed: int = 0) -> list[tuple[Case, str]]:
    torch.set_num_threads(1)
    counts, wrong = Counter[Any](), []
    for number in range(seed, seed + cases):
        case = draw(number)
        try:
            found = outcome(case)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        counts["agree" if found is None else "refused" if found[:7] == "refused" else "wrong"] += 1
        if found is not None and not found.startswith("refused"):
            wrong.append((case, found))
            print(case, found, flush=True)
        if (number + 1 - seed) % 10_000 == 0:
            print(f"{number + 1 - seed} done: {dict(counts)}", flush=True)
    print(f"{cases} attentions from seed {seed}: {dict(counts)}")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:]))))
