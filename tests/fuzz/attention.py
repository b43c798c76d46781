"""Random attentions, each against the reference in float64.

python -m tests.fuzz.attention CASES [SEED]    prints what was drawn, and every case that differs
"""

import random
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import posenc
from posenc import masks
from posenc.attend import choose
from posenc.attend.ways import blocks, key_rows, strips, strips_backward

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("run", "offset", "range", "scattered", "batched", "one row", "real", "packed")
MASKS = ("causal", "window", "padding", "documents", "prefix", "none")
NEEDS = ("nothing", "frozen", "gradients", "gradients", "parameters")
"""Who needs gradients: nobody, without grad mode; nobody, in grad mode; q, k, v and the parameters;
the parameters only."""
IMPLS = ("auto", "auto", "blocks", "sdpa")
ROUNDINGS = {torch.float64: 1e4, torch.float32: 256, torch.bfloat16: 8, torch.float16: 16}
"""Allowed error in epsilons of the dtype, times the size of the values: q and k are rounded after
place 2, weights and sums are accumulated, half types round the output."""
AUTOCAST = 4
"""Times the error that the reference makes under autocast, or that of rounding the result."""
PACKED = 5
"""Tokens of a packed document."""
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
    needs: str
    """One of NEEDS."""
    prepared: bool
    """As a model prepares it, and called before: elsewhere, then where what is kept serves."""
    autocast: bool
    """To bfloat16, which rounds all but float64: q, k, v, scores and weights. How far that may go,
    the reference shows under it. Torch itself cannot join two tensors of float16 under it."""
    small: bool
    """Blocks and strips of a few queries, as long sequences have many of them."""
    spoiled: bool
    """Memory that nobody has written holds NaN."""
    lse: bool
    """Also compare the log-sum-exp."""
    sinks: bool
    """Heads have a sink."""

    @property
    def gradients(self) -> bool:
        return self.needs in ("gradients", "parameters")


def draw(seed: int) -> Case:
    dice = random.Random(seed)
    kv_heads = dice.choice((1, 2))
    kv_len = dice.choice((0, 1, 2, 7, 33, 130))
    lengths = (kv_len, kv_len, kv_len, 0, 1, dice.randint(0, kv_len), kv_len + dice.randint(1, 9))
    drawn = Case(
        seed, dice.choice(NAMES), dice.choice(DTYPES), dice.choice(LAYOUTS), dice.choice(MASKS),
        dice.choice(IMPLS), dice.choice((1, 2, 3)), kv_heads * dice.choice((1, 2)), kv_heads,
        dice.choice(lengths), kv_len, dice.random() < 0.3, dice.choice(NEEDS),
        dice.random() < 0.4, dice.random() < 0.2, dice.random() < 0.5, dice.random() < 0.3,
        dice.random() < 0.3, dice.random() < 0.2,
    )  # fmt: skip
    return replace(drawn, autocast=drawn.autocast and drawn.dtype != torch.float16)


@contextmanager
def conditions(case: Case) -> Iterator[None]:
    """Run with small blocks and spoiled memory, where the case says so."""
    before = torch.are_deterministic_algorithms_enabled()
    try:
        if case.spoiled:
            torch.use_deterministic_algorithms(True, warn_only=True)
        if not case.small:
            yield
            return
        with (
            mock.patch.object(blocks, "block_rows", lambda problem: 16),
            mock.patch.multiple(choose, NEAR=2, SHORT=33),
            mock.patch.multiple(strips, ROWS=8, TOGETHER=32),
            mock.patch.multiple(strips_backward, ROWS=7, KEYS=9),
            mock.patch.object(key_rows, "FALL", {16: 64, 8: 128}),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def positions_of(case: Case, axes: int) -> tuple[Any, Any]:
    """Positions of queries and keys, (len) or (batch, len) or a range, with a last axis of
    components where there are several. Queries are the last of the longer side."""
    n, generator = max(case.q_len, case.kv_len), torch.Generator().manual_seed(case.seed)
    steps = {
        "run": torch.arange(n),
        "range": torch.arange(n),
        "offset": torch.arange(n) + 5000,
        "scattered": torch.randperm(4 * n, generator=generator)[:n].sort().values,
        "batched": torch.stack([torch.arange(n) + 11 * row for row in range(case.batch)]),
        "one row": torch.arange(n)[None],
        "real": torch.arange(n).double() * 1.5,
        "packed": torch.arange(n) % PACKED,
    }[case.layout]
    ends = slice(n - case.q_len, n), slice(n - case.kv_len, n)
    if case.layout == "range" and axes == 1:
        return tuple(range(end.start, end.stop) for end in ends)
    if axes == 1:
        return tuple(steps[..., end] for end in ends)
    components = torch.stack([steps // (axis + 1) for axis in range(axes)], -1)
    return tuple(components[..., end, :] for end in ends)


def mask_of(case: Case, kind: str) -> masks.Mask | None:
    valid = torch.ones(case.batch, case.kv_len, dtype=torch.bool)
    valid[:, : case.kv_len // 3] = False
    longer = max(case.q_len, case.kv_len)
    every = torch.arange(longer) // PACKED
    q_ids, ids = every[longer - case.q_len :], every[longer - case.kv_len :]
    return {
        "causal": masks.causal,
        "window": masks.causal & masks.sliding_window(4),
        "padding": masks.causal & masks.padding(valid),
        "documents": masks.causal & masks.document(q_ids, ids),
        "prefix": masks.causal | masks.prefix(3),
        "none": None,
    }[kind]


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
    q_positions, kv_positions = positions_of(case, axes)
    longer = max(case.q_len, case.kv_len)
    x = torch.randn(case.batch, longer, 32, dtype=torch.float64)
    known = q_positions if case.q_len == longer else kv_positions
    known = torch.arange(known.start, known.stop) if isinstance(known, range) else known
    state = encoding.state(x, known)
    inputs = [_values(case, heads, n) for heads, n in (
        (case.heads, case.q_len), (case.kv_heads, case.kv_len), (case.kv_heads, case.kv_len)
    )]  # fmt: skip
    own = posenc.create(case.name, shape).for_layer(0).to(case.dtype)
    own.load_state_dict(encoding.state_dict())
    for kind in (encoding, own):
        kind.requires_grad_(case.gradients)

    sinks = torch.randn(case.heads).to(case.dtype) if case.sinks else None

    def run(
        kind: posenc.PositionEncoding, tensors: list[Tensor], impl: str, ahead: int = 0,
        mask: str = case.mask,
    ) -> list[Tensor]:  # fmt: skip
        followed = case.needs == "gradients"
        leaves = [t.clone().requires_grad_(followed) for t in tensors]
        leaves = [_laid_out(t, case.strided) for t in leaves]
        if isinstance(q_positions, range):
            moved = range(q_positions.start + ahead, q_positions.stop + ahead)
        else:
            moved = q_positions + ahead
        with torch.set_grad_enabled(case.needs != "nothing"):
            results = posenc.attention(
                *leaves, kind, q_positions=moved, kv_positions=kv_positions,
                q_state=None if state is None else state[:, :, longer - case.q_len :].detach(),
                kv_state=None if state is None else state[:, :, longer - case.kv_len :].detach(),
                mask=mask_of(case, mask), impl=impl, return_lse=case.lse,
                sinks=None if sinks is None else sinks.to(leaves[0].dtype),
            )  # fmt: skip
        out, *lse = results if isinstance(results, tuple) else (results,)
        lse = [t.masked_fill(t == -torch.inf, 0) for t in lse]
        wanted = (leaves if followed else []) + list(kind.parameters())
        if not (wanted and out.requires_grad):  # a state is what depends on the others
            return [out, *lse]
        # Signs, which no dtype rounds: both sides go back from the same gradient.
        signs = torch.randint(2, out.shape, generator=torch.Generator().manual_seed(case.seed))
        signs = (2 * signs - 1).to(out.dtype)
        of = [out, *lse]
        found = torch.autograd.grad(
            of, wanted, [signs, *map(torch.ones_like, lse)], allow_unused=True
        )
        return [*of, *(t.new_zeros(()) if g is None else g for t, g in zip(wanted, found))]  # noqa: B905

    wide = [t.double() for t in inputs]
    try:
        want = run(encoding, wide, "reference")
        rounded = want
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            if case.autocast and case.dtype != torch.float64:
                rounded = run(own, inputs, "reference")
            if case.prepared:
                own = own.prepare(q_positions)
                run(own, inputs, case.impl, ahead=2)
                run(own, inputs, case.impl, mask="padding")
                run(own, inputs, case.impl)
            got = run(own, inputs, case.impl)
    except (ValueError, TypeError) as error:
        return f"refused: {error}"
    whats = ("output", *(("lse",) if case.lse else ()))
    whats += ("q", "k", "v") if case.needs == "gradients" else ()
    learned = [name for name, _ in encoding.named_parameters()]
    whats += tuple(learned)
    for what, a, b, c in zip(whats, got, want, rounded, strict=False):
        size = max(1.0, _largest(b))
        bound = ROUNDINGS[case.dtype] * torch.finfo(case.dtype).eps * size
        if what in learned:  # sums over all pairs, of terms that may cancel
            if case.dtype == torch.float16 and case.layout == "offset":
                continue  # a gradient of frequencies grows with the position, beyond its range
            bound *= max(1, case.batch * case.q_len)
            bound *= max(1.0, _largest(known.double()))  # angles grow with the position
        if rounded is not want:
            off = (c.double() - b).abs().max().item() if b.numel() else 0.0
            single = case.dtype == torch.float32
            bound += AUTOCAST * max(off, HALF_EPS * size) if single else off
        error = (a.double() - b).abs().max().item() if b.numel() else 0.0
        if not error <= bound:
            return f"{what} off by {error:.2g} of {size:.2g}, allowed {bound:.2g}"
    return None


def _largest(t: Tensor) -> float:
    return t.abs().max().item() if t.numel() else 0.0


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
            with conditions(case):
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
