"""What a position encoding adds to attention, over torch's causal attention without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc import masks
from posenc.bench import measure
from posenc.encoding import ModelShape, PositionEncoding
from posenc.host import attention
from posenc.registry import create

HEADS, HEAD_DIM = 8, 64
FLOOR = "sdpa causal, no bias"


def run(
    names: Sequence[str], lengths: Sequence[int], repeats: int, backward: bool
) -> list[dict[str, Any]]:
    """Rows for each encoding at each length: 1 x 8 heads x n x 64, float32, causal."""
    found = []
    for n in lengths:
        torch.manual_seed(0)
        q, k, v, grad = (torch.randn(1, HEADS, n, HEAD_DIM) for _ in range(4))
        shape = ModelShape(HEADS * HEAD_DIM, HEADS, train_length=n)
        cases: dict[str, measure.Case] = {FLOOR: _plain(q, k, v, grad, backward)}
        for name in names:
            encoding = create(name, shape).for_layer(0)
            cases[name] = _encoded(q, k, v, grad, encoding, backward)
        peaks = {name: measure.peak_bytes(case) for name, case in cases.items()}
        seconds = measure.interleaved(cases, repeats)
        ran = measure.rows(
            "bias",
            {"n": n, "dtype": "float32", "pass": "fwd+bwd" if backward else "fwd"},
            seconds,
            FLOOR,
            peaks,
        )
        measure.show(ran)
        found += ran
    return found


def _leaves(tensors: Sequence[Tensor], backward: bool) -> list[Tensor]:
    return [t.detach().requires_grad_(backward) for t in tensors]


def _plain(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, backward: bool) -> measure.Case:
    def case() -> None:
        leaves = _leaves((q, k, v), backward)
        with torch.set_grad_enabled(backward):
            out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
        if backward:
            out.backward(grad)

    return case


def _encoded(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, encoding: PositionEncoding, backward: bool
) -> measure.Case:
    n = q.shape[2]
    positions = torch.arange(n)
    x = torch.randn(1, n, HEADS * HEAD_DIM)
    state = encoding.token_state(x, positions)
    state = None if state is None else state.detach()

    def call(inputs: list[Tensor], impl: str) -> Tensor:
        q, k, v = inputs
        out = attention(
            q, k, v, encoding, q_positions=positions[: q.shape[2]],
            kv_positions=positions[: q.shape[2]], mask=masks.causal, impl=impl,
            q_state=None if state is None else state[:, :, : q.shape[2]],
            kv_state=None if state is None else state[:, :, : q.shape[2]],
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out

    with torch.no_grad():  # right before fast: in float32, sums in another order
        few = [t[:, :, :700] for t in (q, k, v)]
        torch.testing.assert_close(
            call(few, "auto"), call(few, "reference"),
            rtol=1e-3, atol=1e-4,
        )  # fmt: skip

    def case() -> None:
        leaf_q, leaf_k, leaf_v = _leaves((q, k, v), backward)
        for parameter in encoding.parameters():
            parameter.grad = None
        with torch.set_grad_enabled(backward):
            out = attention(
                leaf_q, leaf_k, leaf_v, encoding, q_positions=positions, kv_positions=positions,
                mask=masks.causal, q_state=state, kv_state=state,
            )  # fmt: skip
        if backward:
            assert isinstance(out, Tensor)
            out.backward(grad)

    return case
