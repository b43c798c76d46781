"""The forward pass of a bias that depends only on the distance, by torch's flash kernel."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from posenc.attend.kernels.toeplitz_gradients import Block, hankel, rows_in_memory

GROUP = 1024
"""Queries that attend together to the keys which all of them see: from 768 on torch's kernel works
on 256 at a time, else on 64."""
SHORT_BIAS = 256
"""Up to this many queries, which are one block, the bias is written out: 2 MB for 8 heads."""
HEADS, SHORT = 4, 4096
"""Heads that attend together where more than SHORT queries do. All heads at once are faster and
take more memory: two thirds of the output at 4096 queries."""


def heads_at_once(heads: int, q_len: int) -> int:
    return heads if q_len <= SHORT else min(heads, HEADS)


def forward(
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
    q, k, v = (rows_in_memory(t) for t in (q, k, v))
    table = table.contiguous()
    if v_dim != width:  # the kernel wants one width
        v = torch.nn.functional.pad(v, (0, max(0, width - v_dim)))
        q, k = (torch.nn.functional.pad(t, (0, max(0, v_dim - width))) for t in (q, k))
    batch, heads, q_len = q.shape[:3]
    if (
        len(blocks) == 1 and q_len <= SHORT_BIAS
    ):  # turning q and the output round costs more than writing the bias out
        _, _, first, last = blocks[0]
        out, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k[:, :, first:last], v[:, :, first:last],
            attn_mask=hankel(table, q_len, blocks[0]).flip(2), scale=scale,
        )  # fmt: skip
        if lse is not None:
            lse.copy_(part_lse)
        return out[..., :v_dim], q, k, v
    # Heads inside tokens, as the kernel itself writes, so that joining heads costs no copy.
    out = q.new_empty(batch, q_len, heads, v_dim).transpose(1, 2)
    grouped = k.shape[1] != heads
    falling = torch.arange(max(GROUP, blocks[0][1]) - 1, -1, -1)

    def reverse(mine: slice, start: int, stop: int) -> Tensor:
        return q[:, mine, start:stop].flip(2)

    def attend(reversed_q: Tensor, mine: slice, block: Block) -> tuple[Tensor, Tensor]:
        """Results of the block's queries in falling order, and their log-sum-exp."""
        *_, first, last = block
        theirs = slice(None) if grouped else mine
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            reversed_q, k[:, theirs, first:last], v[:, theirs, first:last],
            attn_mask=hankel(table[mine], q_len, block), scale=scale,
        )  # fmt: skip

    def write(mine: slice, start: int, stop: int, part: Tensor, part_lse: Tensor) -> None:
        order = falling[start - stop :]  # takes half the time of flip and a copy
        torch.index_select(part[..., :v_dim], 2, order, out=out[:, mine, start:stop])
        if lse is not None:
            lse[:, mine, start:stop] = part_lse.flip(2)

    finite = table.detach().numpy() > -np.inf
    common = _common(finite) if q.dtype == table.dtype else None
    if common is None:
        hidden = [0] * heads if grouped else finite.argmax(-1).tolist()
        for start, stop, first, last in blocks:
            for head, above, near in _heads_of_one_reach(hidden, q_len, (start, stop, first, last)):
                mine = slice(head, above)
                reversed_q = reverse(mine, start, stop)
                write(mine, start, stop, *attend(reversed_q, mine, (start, stop, near, last)))
        return out, q, k, v

    def together(mine: slice, inside: list[Block], common: int) -> None:
        """Blocks of queries side by side: first the keys that all of them see, then each its own.
        What the first query sees, less one key, so that every query has one left."""
        begin, end = inside[0][0], inside[-1][1]
        seen = min(max(common - q_len + begin, 0), max(block[3] for block in inside))
        reversed_q = reverse(mine, begin, end)
        far = attend(reversed_q, mine, (begin, end, 0, seen)) if seen else None
        for start, stop, _, last in inside:
            here = slice(end - stop, end - start)
            parts = []
            if far is not None:
                parts.append([t[:, :, here] for t in far])
            if seen < last:
                parts.append(attend(reversed_q[:, :, here], mine, (start, stop, seen, last)))
            write(mine, start, stop, *_merge(parts))

    at_once = heads if grouped else heads_at_once(heads, q_len)
    for mine in (slice(head, head + at_once) for head in range(0, heads, at_once)):
        for begin in range(0, q_len, GROUP):
            together(mine, [b for b in blocks if begin <= b[0] < begin + GROUP], common)
    return out, q, k, v


def _common(finite: np.ndarray) -> int | None:
    """How many entries from the first on are finite in all heads, where no other is in any."""
    counts = finite.sum(-1)
    count = int(counts[0])
    return count if (counts == count).all() and finite[:, :count].all() else None


def _merge(parts: list) -> tuple[Tensor, Tensor]:
    """Attention over disjoint sets of keys, joined."""
    if len(parts) == 1:
        return parts[0]
    (far, far_lse), (near, near_lse) = parts
    share = torch.sigmoid(far_lse - near_lse).unsqueeze(-1)
    return torch.lerp(near, far, share.to(near.dtype)), torch.logaddexp(far_lse, near_lse)


def _heads_of_one_reach(hidden: list[int], q_len: int, block: Block) -> list[tuple[int, int, int]]:
    """(head, above, first): heads head .. above look at no key before `first`, in steps of 128,
    where the first `hidden` entries of a head's row in the table are -inf."""
    start, _, first, last = block
    offset = q_len - start - 1 + first  # the entry of the block's first query and first key
    if not any(hidden):
        return [(0, len(hidden), first)]
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
