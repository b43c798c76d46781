"""A bias that depends on distance alone, through a view of one row per head: torch's CPU flash
kernel in query blocks that skip what the mask hides, and the bias's own gradient without n x n."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc.attend.kernels.cost import negligible
from posenc.attend.kernels.toeplitz_forward import forward
from posenc.attend.kernels.toeplitz_gradients import Block, kernel_gradients, table_gradients
from posenc.attend.problem import Call
from posenc.encoding.base import PositionEncoding, check_heads
from posenc.encoding.distance_bias import DistanceBias
from posenc.numbers.precision import at_least_float32

ROWS = 256
"""Queries per block: what a causal mask hides of a block is computed all the same."""


KEYS = 128
"""Keys whose distances to every 128th query are all distances there are."""


SAMPLED = 64
"""One row in so many of q and k is looked at before all of them: mostly it says that no bias is
negligible, as more rows would."""


WORTH = 8
"""Cutting pays from one in so many distances of a head: heads of one reach attend together."""


def refuse(call: Call) -> str | None:
    """Why this is no attention whose bias and mask are both a function of a run's distance."""
    if call.q.device.type != "cpu":
        return "CUDA's kernels would write the view out"
    if call.changes_scores and not is_distance_bias(call.encoding):
        return "it changes scores or values, which these kernels do not show"
    if call.mask is not None and not call.mask.exact:
        return "the mask is more than causality and a window"
    if call.mask is not None and call.mask_runs is None:
        return "the positions are not known to be consecutive"
    if call.changes_scores and distance_run(call) is None:
        return "the positions are not known to be consecutive"
    return None


def is_distance_bias(encoding: PositionEncoding) -> bool:
    """Whether `bias` is all that the encoding does to scores and values."""
    kind = type(encoding)
    return (
        isinstance(encoding, DistanceBias)
        and 4 not in encoding.places
        and kind.score_mod is DistanceBias.score_mod
        and encoding.pointwise
    )


def distance_run(call: Call) -> int | None:
    """The distance from the last query to the first key, where both are runs."""
    return None if call.runs is None else call.runs[0] + call.q_len - 1 - call.runs[1]


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    table = _table(call)
    blocks = []
    for start in range(0, call.q_len, ROWS):
        stop = min(start + ROWS, call.q_len)
        blocks.append((start, stop, *call.reach(start, stop)))
    if not (call.need_lse or call.needs_grad):
        return forward(call.q, call.k, call.v, table, call.scale, blocks)[0], None
    out, lse = _Attention.apply(call.q, call.k, call.v, table, call.scale, blocks)  # type: ignore[misc]
    visible = _visible(call, table.shape[1]) if call.need_lse else None
    if visible is not None and not call.every_row_sees_a_key:
        count = torch.nn.functional.pad(visible.cumsum(0), (1, 0))
        sees = (count[call.kv_len :] > count[: call.q_len]).flip(0)
        lse = lse.masked_fill(~sees, -torch.inf)  # the kernel gives 0
    return out, lse if call.need_lse else None


def _table(call: Call) -> Tensor:
    """The bias by falling distance, (num_heads, q_len + kv_len - 1), -inf where the mask hides it;
    entry m serves the m-th pair counted from the last query and the first key."""
    size = call.q_len + call.kv_len - 1
    runs = call.mask_runs
    nearest = -size if runs is None else runs[0] + call.q_len - 1 - runs[1]
    mask = call.mask
    causal = mask is not None and mask.causal and runs is not None
    # What is after the query is hidden by the mask, and not computed.
    computed = min(size, max(nearest + 1, 1)) if causal else size
    dtype = at_least_float32(call.q.dtype)
    if call.changes_scores:
        assert isinstance(call.encoding, DistanceBias)
        farthest = distance_run(call)
        assert farthest is not None
        # A few queries over a few keys have all these distances, which some methods compute faster
        # than one by one. Positions carry the precision that the bias is asked for.
        precise = torch.float64 if dtype == torch.float64 else torch.int64
        queries = farthest - KEYS * torch.arange(-(-computed // KEYS), dtype=precise)
        table = call.encoding(queries, torch.arange(KEYS, dtype=precise)).to(dtype)
        check_heads(call.encoding, table.shape[0], call.q)
        table = _without_negligible(call, table.flatten(1)[:, :computed], farthest)
    else:
        table = torch.zeros(call.q.shape[1], computed, dtype=dtype)
    table = torch.nn.functional.pad(table, (0, size - computed), value=-torch.inf)
    if mask is not None and causal and mask.window is None and nearest >= 0:
        return table  # nothing else is hidden
    visible = _visible(call, size)
    return table if visible is None else table.masked_fill(~visible, -torch.inf)


def _visible(call: Call, size: int) -> Tensor | None:
    """Which entries of the table the mask shows; None for all of them."""
    runs = call.mask_runs
    if call.mask is None or runs is None:
        return None
    distance = runs[0] + call.q_len - 1 - runs[1] - torch.arange(size)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if call.mask.causal:
        visible &= distance >= 0
    if call.mask.window is not None:
        visible &= distance.abs() < call.mask.window
    return visible


def _without_negligible(call: Call, table: Tensor, farthest: int) -> Tensor:
    """The table with -inf where no weight can reach what the dtype resolves, by far.

    The kernel's running softmax would spend its time on denormals there. No score is further from
    zero than the norms of q and k allow, and every row sees its own position.
    """
    own_first = farthest - call.q_len + 1  # the first query's own key
    certain = call.q.numel() > 0 and (call.mask is None or call.mask.exact)
    if not (certain and own_first >= 0 and farthest < min(call.kv_len, table.shape[1])):
        return table
    with torch.no_grad():
        lowest = table.amin(-1)
        for step in (SAMPLED, 1):
            norms = [
                torch.linalg.vector_norm(t[:, :, ::step], dim=-1, dtype=table.dtype).amax()
                for t in (call.q, call.k)
            ]
            spread = 2 * abs(call.scale) * norms[0] * norms[1]
            least = table[:, farthest] - spread + negligible(table.dtype)
            if bool((lowest >= least).all()):
                return table
        hidden = table < least[:, None]
        if WORTH * hidden.sum(-1).amax() < table.shape[1]:
            return table
    return table.masked_fill(hidden, -torch.inf)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, scale: float, blocks: list[Block]
    ) -> tuple[Tensor, Tensor]:
        table = table.contiguous()
        lse = table.new_empty(q.shape[:3])
        out, wide_q, wide_k, wide_v = forward(q, k, v, table, scale, blocks, lse)
        width, v_dim = q.shape[-1], v.shape[-1]
        ctx.save_for_backward(
            wide_q[..., :width], wide_k[..., :width], wide_v[..., :v_dim], table, out, lse
        )
        ctx.scale, ctx.blocks = scale, blocks
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grads
        q, k, v, table, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        plain = not ctx.needs_input_grad[3] and grad_lse is None and q.shape[-1] == v.shape[-1]
        if plain and q.shape[1] == k.shape[1]:
            return *kernel_gradients(q, k, v, table, out, lse, grad_out, ctx), None, None, None
        delta = (grad_out * out).sum(-1, dtype=lse.dtype)
        if grad_lse is not None:
            delta = delta - grad_lse
        d_q, d_k, d_v, d_table = table_gradients(q, k, v, table, lse, grad_out, delta, ctx)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_table, None, None
