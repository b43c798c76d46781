"""Dense scores and a plain softmax: defines what is correct. Any encoding, any dtype, all
gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.kernels.cost import Cost
from posenc.attend.problem import Call


def refuse(call: Call) -> str | None:
    return None


def cost(call: Call) -> Cost:
    batch, heads = call.q.shape[:2]
    scores = batch * heads * call.q_len * call.kv_len * max(4, call.q.element_size())
    return Cost("O(q_len * kv_len)", 2 * scores)


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    return attend(call, 0, call.q_len)


def attend(call: Call, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """Attention of queries start .. stop to all keys: out, and log-sum-exp where the call needs
    it."""
    scores = call.scores(start, stop)
    visible = call.visible(start, stop)
    if visible is not None:
        # The lowest finite number, not -inf: a row that sees no key must not become NaN on the way
        # to zero.
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    lse = scores.logsumexp(-1) if call.need_lse else None
    if visible is not None and not call.every_row_sees_a_key:
        weights = weights.masked_fill(~visible, 0)
        if lse is not None:
            lse = lse.masked_fill(~visible.any(-1), -torch.inf)
    if call.dropout_p:
        weights = F.dropout(weights, call.dropout_p)
    return call.combine(weights, start, stop), lse
