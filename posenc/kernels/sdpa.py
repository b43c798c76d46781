"""torch's own kernels, where nothing needs to see the scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional as F

from posenc.kernels.cost import Cost
from posenc.positions import run_start

if TYPE_CHECKING:
    from posenc.host import Call


def refuse(call: Call) -> str | None:
    if call.dropout_p:
        return "dropout is honoured by reference and blockwise alone"
    if call.changes_scores:
        return "it changes scores or values, which these kernels do not show"
    if call.need_lse:
        return "torch gives no log-sum-exp"
    return None


def cost(call: Call) -> Cost:
    dense_mask = 0 if call.mask is None or is_plain_causal(call) else call.q_len * call.kv_len
    return Cost("O(q_len * kv_len)", dense_mask)


def run(call: Call) -> tuple[Tensor, None]:
    causal = is_plain_causal(call)
    visible = None if causal else call.visible(0, call.q_len)
    if visible is not None:
        # Every axis in full, else torch falls back to its dense path.
        visible = visible.expand(*visible.shape[:-2], call.q_len, call.kv_len)
    width, v_dim = call.q.shape[-1], call.v.shape[-1]
    v = F.pad(call.v, (0, width - v_dim)) if v_dim < width else call.v
    out = F.scaled_dot_product_attention(
        call.q, call.k, v, attn_mask=visible, is_causal=causal, scale=call.scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )  # fmt: skip
    if visible is not None and not call.every_row_sees_a_key:
        out = out.masked_fill(~visible.any(-1, keepdim=True), 0)
    return out[..., :v_dim], None


def is_plain_causal(call: Call) -> bool:
    """Whether the mask is what is_causal means: queries and keys are the same run of positions."""
    mask = call.mask
    if (
        mask is None
        or not (mask.exact and mask.causal and mask.window is None)
        or call.q_len != call.kv_len
    ):
        return False
    assert mask.q_positions is not None and mask.kv_positions is not None
    q_start = run_start(mask.q_positions)
    same = mask.q_positions is mask.kv_positions
    return q_start is not None and (same or q_start == run_start(mask.kv_positions))
