"""The cost of rotating q and k, compared with cloning them and with other installed libraries."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posenc.bench import measure, rope_peers
from posenc.bench.rope_peers import Pair
from posenc.queries_keys.rope import RoPE
from posenc.queries_keys.rotation.rotate import rotate_together
from posenc.terms.tokens import Tokens

FLOOR = "clone"
COMPILED = "torch.compile of the plain function"


def measure_rotation(
    lengths: Sequence[int],
    head_dims: Sequence[int],
    repeats: int,
    backward: bool,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    compiled: bool = False,
) -> list[dict[str, Any]]:
    """Rows for q and k of one sequence, in the memory layout that projections produce. `compiled`
    adds Inductor, which takes seconds for every shape."""
    found = []
    for dtype in dtypes:
        for head_dim in head_dims:
            for n in lengths:
                torch.manual_seed(0)
                q, k = (
                    torch.randn(1, n, h, head_dim).to(dtype).transpose(1, 2)
                    for h in (heads, kv_heads)
                )
                found += _one(q, k, repeats, backward, compiled)
    return found


def _one(
    q: Tensor, k: Tensor, repeats: int, backward: bool, compiled: bool
) -> list[dict[str, Any]]:
    n, head_dim = q.shape[-2:]
    angle = rope_peers.angles(n, head_dim)
    cos, sin = angle.cos().float(), angle.sin().float()
    positions = torch.arange(n)

    def ours(interleaved: bool) -> Pair:
        rope = RoPE(head_dim, interleaved=interleaved)
        return lambda q, k: rope.transform(Tokens(q, positions), Tokens(k, positions))

    pairs = {
        FLOOR: lambda q, k: (q.clone(), k.clone()),
        "posenc half-split": ours(False),
        "posenc interleaved": ours(True),
    }
    for name, peer in rope_peers.rotation_peers(n, head_dim, q.dtype).items():
        if _agrees(name, peer.rotate(q, k)[0], ours(peer.interleaved)(q, k)[0]):
            pairs[name] = peer.rotate
    if compiled:
        torch.compiler.reset()
        pairs[COMPILED] = torch.compile(
            lambda q, k: rotate_together((q, k), cos, sin, interleaved=False)
        )
    cases = {name: _case(pair, q, k, backward) for name, pair in pairs.items()}
    columns = {
        "n": n, "heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": head_dim,
        "dtype": str(q.dtype).removeprefix("torch."), "pass": "fwd+bwd" if backward else "fwd",
    }  # fmt: skip
    return measure.measured_rows("rope", columns, cases, FLOOR, repeats)


def _agrees(name: str, got: Tensor, want: Tensor) -> bool:
    """Whether a peer rotates as we do: its float32 angles are off by 1e-3 at 16k, and it may round
    every product to bfloat16."""
    off = (got.float() - want.float()).abs().max().item()
    agrees = off < (2e-2 if got.dtype == torch.float32 else 0.15)
    if not agrees:
        print(f"rope       {name}: off by {off:.2g}, so not timed", file=sys.stderr)
    return agrees


def _case(pair: Pair, q: Tensor, k: Tensor, backward: bool) -> measure.Case:
    def case() -> None:
        with torch.set_grad_enabled(backward):
            outs = pair(q.detach().requires_grad_(backward), k.detach().requires_grad_(backward))
        if backward:
            torch.autograd.backward(outs, (q, k))

    return case
