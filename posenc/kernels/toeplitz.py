"""A bias that depends on distance alone, through a view of one row per head: torch's CPU flash
kernel in query blocks that skip what the mask hides, and the bias's own gradient without n x n."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc.call import Call
from posenc.encoding import DistanceBias, PositionEncoding, at_least_float32
from posenc.kernels.cost import negligible
from posenc.kernels.toeplitz_gradients import Block, hankel, kernel_gradients, table_gradients


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


def block_rows(call: Call) -> int:
    """Queries per call of the kernel. What a causal mask hides of a block is computed all the same,
    so few; but from 768 on the kernel works on 256 at a time, else on 64, which pays in long
    rows."""
    return 256 if call.kv_len < 6144 else 768


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    table, sees = _table(call)
    blocks = []
    rows = block_rows(call)
    for start in range(0, call.q_len, rows):
        stop = min(start + rows, call.q_len)
        blocks.append((start, stop, *call.reach(start, stop)))
    if not (call.need_lse or call.needs_grad):
        return _forward(call.q, call.k, call.v, table, call.scale, blocks)[0], None
    out, lse = _Attention.apply(call.q, call.k, call.v, table, call.scale, blocks)  # type: ignore[misc]
    if call.need_lse and sees is not None and not call.every_row_sees_a_key:
        lse = lse.masked_fill(~sees, -torch.inf)  # the kernel gives 0
    return out, lse if call.need_lse else None


def _table(call: Call) -> tuple[Tensor, Tensor | None]:
    """The bias by falling distance, (num_heads, q_len + kv_len - 1), -inf where the mask hides it;
    entry m serves the m-th pair counted from the last query and the first key. And which queries
    see a key."""
    size = call.q_len + call.kv_len - 1
    runs = call.mask_runs
    nearest = -size if runs is None else runs[0] + call.q_len - 1 - runs[1]
    causal = call.mask is not None and call.mask.causal and runs is not None
    # What is after the query is hidden by the mask, and not computed.
    steps = torch.arange(min(size, max(nearest + 1, 1)) if causal else size)
    dtype = at_least_float32(call.q.dtype)
    if call.changes_scores:
        assert isinstance(call.encoding, DistanceBias)
        farthest = distance_run(call)
        assert farthest is not None
        distance = farthest - steps
        # The distance carries the precision that the bias is asked for.
        distance = distance.double() if dtype == torch.float64 else distance
        table = _without_negligible(call, call.encoding.bias(distance).to(dtype), farthest)
    else:
        table = torch.zeros(call.q.shape[1], len(steps), dtype=dtype)
    table = torch.nn.functional.pad(table, (0, size - len(steps)), value=-torch.inf)
    if call.mask is None or runs is None:
        return table, None
    distance = nearest - torch.arange(size)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if call.mask.causal:
        visible &= distance >= 0
    if call.mask.window is not None:
        visible &= distance.abs() < call.mask.window
    count = torch.nn.functional.pad(visible.cumsum(0), (1, 0))
    sees = (count[call.kv_len :] > count[: call.q_len]).flip(0)
    return table.masked_fill(~visible, -torch.inf), sees


def _without_negligible(call: Call, table: Tensor, farthest: int) -> Tensor:
    """The table with -inf where no weight can reach what the dtype resolves, by far.

    The kernel's running softmax would spend its time on denormals there. No score is further from
    zero than the norms of q and k allow, and every row sees its own position.
    """
    own_first = farthest - call.q_len + 1  # the first query's own key
    visible = call.mask is None or call.mask.exact
    if not (visible and own_first >= 0 and farthest < min(call.kv_len, table.shape[1])):
        return table
    with torch.no_grad():
        lowest = negligible(table.dtype)
        if bool((table.amin(-1) > table[:, farthest] + lowest).all()):
            return table
        norms = [
            torch.linalg.vector_norm(t, dim=-1, dtype=table.dtype).amax() for t in (call.q, call.k)
        ]
        spread = 2 * abs(call.scale) * norms[0] * norms[1]
        least = table[:, farthest, None] - spread + lowest
    return table.masked_fill(table < least, -torch.inf)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    scale: float,
    blocks: list[Block],
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, and q, k and v as the kernel saw them; `lse` is filled in."""
    width, v_dim = q.shape[-1], v.shape[-1]
    if v_dim != width:  # the kernel wants one width
        v = torch.nn.functional.pad(v, (0, max(0, width - v_dim)))
        q, k = (torch.nn.functional.pad(t, (0, max(0, v_dim - width))) for t in (q, k))
    # Heads inside tokens, as the kernel itself writes, so that joining heads costs no copy.
    batch, heads, q_len = q.shape[:3]
    out = q.new_empty(batch, q_len, heads, v_dim).transpose(1, 2)
    hidden = [0] * heads
    if k.shape[1] == heads:
        hidden = torch.isfinite(table).int().argmax(-1).tolist()
    for start, stop, first, last in blocks:
        falling = torch.arange(stop - start - 1, -1, -1)  # half the time of flip and a copy
        for head, above, near in _heads_of_one_reach(hidden, q_len, (start, stop, first, last)):
            mine = slice(head, above if k.shape[1] == heads else None)
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, mine, start:stop].index_select(2, falling),
                k[:, mine, near:last], v[:, mine, near:last],
                attn_mask=hankel(table[mine], q_len, (start, stop, near, last)), scale=scale,
            )  # fmt: skip
            torch.index_select(part[..., :v_dim], 2, falling, out=out[:, mine, start:stop])
            if lse is not None:
                lse[:, mine, start:stop] = part_lse.flip(2)
    return out, q, k, v


def _heads_of_one_reach(hidden: list[int], q_len: int, block: Block) -> list[tuple[int, int, int]]:
    """(head, above, first): heads head .. above look at no key before `first`, in steps of 128,
    where the first `hidden` entries of a head's row in the table are -inf."""
    start, _, first, last = block
    offset = q_len - start - 1 + first  # the entry of the block's first query and first key
    firsts = [
        first + min(max(0, (m - offset) // 128 * 128), (last - first - 1) // 128 * 128)
        for m in hidden
    ]
    groups = []
    for head, near in enumerate(firsts):
        if groups and groups[-1][2] == near:
            groups[-1] = (groups[-1][0], head + 1, near)
        else:
            groups.append((head, head + 1, near))
    return groups


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, scale: float, blocks: list[Block]
    ) -> tuple[Tensor, Tensor]:
        table = table.contiguous()
        lse = table.new_empty(q.shape[:3])
        out, wide_q, wide_k, wide_v = _forward(q, k, v, table, scale, blocks, lse)
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
