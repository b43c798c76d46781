"""What rotating q and k costs, over a clone of the same tensors and beside the peers at hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from posenc.bench import measure
from posenc.queries_keys.rotate import rotate

HEADS, KV_HEADS = 32, 8
FLOOR = "clone"


def run(
    lengths: Sequence[int], head_dims: Sequence[int], repeats: int, backward: bool
) -> list[dict[str, Any]]:
    """Rows for 32 query heads and 8 key heads, heads inside tokens as projections leave them."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim in head_dims:
            for n in lengths:
                found += _one(n, head_dim, dtype, repeats, backward)
    return found


def _one(
    n: int, head_dim: int, dtype: torch.dtype, repeats: int, backward: bool
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    q, k = (torch.randn(1, n, h, head_dim, dtype=dtype).transpose(1, 2) for h in (HEADS, KV_HEADS))
    angle = torch.randn(n, head_dim // 2)
    cos, sin = angle.cos(), angle.sin()

    def ours(interleaved: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        def pair(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
            return (
                rotate(q, cos, sin, interleaved=interleaved),
                rotate(k, cos, sin, interleaved=interleaved),
            )

        return pair

    pairs: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
        FLOOR: lambda q, k: (q.clone(), k.clone()),
        "posenc half-split": ours(False),
        "posenc interleaved": ours(True),
    }
    if importlib.util.find_spec("transformers"):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        full_cos, full_sin = (torch.cat([t, t], -1)[None].to(dtype) for t in (cos, sin))
        pairs["transformers apply_rotary_pos_emb"] = lambda q, k: apply_rotary_pos_emb(
            q, k, full_cos, full_sin
        )
        want = pairs["transformers apply_rotary_pos_emb"](q, k)[0].float()
        got = pairs["posenc half-split"](q, k)[0].float()
        # The peer rounds cos, sin and products to bfloat16.
        tolerance = 1e-5 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    cases = {name: _case(pair, q, k, backward) for name, pair in pairs.items()}
    peaks = {name: measure.peak_bytes(case) for name, case in cases.items()}
    seconds = measure.interleaved(cases, repeats)
    shape = {
        "n": n, "head_dim": head_dim, "dtype": str(dtype).removeprefix("torch."),
        "pass": "fwd+bwd" if backward else "fwd",
    }  # fmt: skip
    ran = measure.rows("rope", shape, seconds, FLOOR, peaks)
    measure.show(ran)
    return ran


def _case(pair: Callable[..., Any], q: Tensor, k: Tensor, backward: bool) -> measure.Case:
    def case() -> None:
        with torch.set_grad_enabled(backward):
            outs = pair(q.detach().requires_grad_(backward), k.detach().requires_grad_(backward))
        if backward:
            torch.autograd.backward(outs, (q, k))

    return case
