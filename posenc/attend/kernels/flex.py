"""FlexAttention, compiled, with the encoding's own score_mod and a block mask."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc.attend.kernels import toeplitz
from posenc.attend.kernels.cost import Cost
from posenc.attend.problem import Call
from posenc.encoding.distance_bias import DistanceBias
from posenc.numbers.precision import at_least_float32
from posenc.terms.term import ScoreMod

BLOCK = 128
"""FlexAttention's block of queries and of keys."""


def refuse(call: Call) -> str | None:
    device = call.q.device.type
    if torch.compiler.is_compiling():
        return "it compiles by itself and does not nest"
    if call.dropout_p:
        return "dropout is honoured by reference and blockwise alone"
    if 4 in call.encoding.places:
        return "place 4 must see the weights"
    if not call.encoding.pointwise:
        return "place 3 must see whole rows"
    if call.q.dtype == torch.float64:
        return "it takes float32, bfloat16 and float16"
    if device == "cpu" and call.needs_grad:
        return "FlexAttention has no backward pass on the CPU"
    if device == "cpu" and call.need_lse:
        return "FlexAttention gives no log-sum-exp on the CPU"
    if device not in ("cpu", "cuda"):
        return f"it runs on CPU and CUDA, not on {device}"
    return None


def cost(call: Call) -> Cost:
    heads = call.q.shape[1]
    table = 4 * heads * (call.q_len + call.kv_len) if _is_run(call) else 0
    if call.changes_scores and isinstance(call.encoding, DistanceBias) and not table:
        table = 4 * heads * call.q_len * call.kv_len
    return Cost("O(visible blocks)", table + call.q_len * call.kv_len // BLOCK**2 * 8)


def _is_run(call: Call) -> bool:
    return toeplitz.is_distance_bias(call.encoding) and toeplitz.distance_run(call) is not None


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    grad = call.needs_grad
    with torch.set_grad_enabled(grad):
        mod = _score_mod(call)
        out = _compiled(call.q.device.type)(
            call.q, call.k, call.v, score_mod=mod, block_mask=_block_mask(call), scale=call.scale,
            enable_gqa=call.q.shape[1] != call.k.shape[1], return_lse=call.need_lse,
        )  # fmt: skip
    out, lse = out if call.need_lse else (out, None)
    return out.to(call.q.dtype), lse


def _score_mod(call: Call) -> ScoreMod | None:
    """The encoding's own; for a distance bias over a run, a table of one row per head in its
    place."""
    if not call.changes_scores:
        return None
    if not _is_run(call):
        return call.score_mod(0, call.q_len)
    assert isinstance(call.encoding, DistanceBias)
    farthest = toeplitz.distance_run(call)
    assert farthest is not None
    steps = torch.arange(call.q_len + call.kv_len - 1, device=call.q.device)
    table = call.encoding.bias(farthest - steps).to(at_least_float32(call.q.dtype))
    last_query = call.q_len - 1

    def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[head, last_query - q_idx + kv_idx]

    return mod


def _block_mask(call: Call) -> Any:
    if call.mask is None:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    mask = call.mask
    assert call.first_key == 0
    assert mask.q_positions is not None
    one_row = mask.exact and mask.q_positions.ndim == 1  # no batch row differs
    return create_block_mask(
        mask, None if one_row else call.q.shape[0], None, call.q_len, call.kv_len,
        device=call.q.device,
    )  # fmt: skip


@functools.cache
def _compiled(device: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # For any length, Inductor (torch 2.13) writes C++ for the CPU that does not compile.
    return torch.compile(flex_attention, dynamic=False if device == "cpu" else None)
