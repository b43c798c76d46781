"""Blocks that read a table by distance through skewed views give what reading it pair by pair
gives."""

import pytest
import torch

import posenc
from posenc import masks
from posenc.attend.ways import blocks

HEADS, HEAD_DIM, EMBED = 2, 8, 16
ENCODINGS = {
    "shaw": lambda: posenc.Shaw(HEAD_DIM, max_distance=5),
    "deberta": lambda: posenc.DeBERTa(EMBED, HEADS, max_distance=9),
    "deberta, buckets": lambda: posenc.DeBERTa(EMBED, HEADS, max_distance=30, num_buckets=8),
    "deberta, the paper's index": lambda: posenc.DeBERTa(
        EMBED, HEADS, max_distance=9, paper_p2c=True
    ),
    "transformer_xl": lambda: posenc.TransformerXL(EMBED, HEADS, HEAD_DIM),
    "transformer_xl, clamped": lambda: posenc.TransformerXL(EMBED, HEADS, HEAD_DIM, clamp_len=11),
    "composed": lambda: posenc.Compose(
        posenc.RoPE(HEAD_DIM, interleaved=False), posenc.Shaw(HEAD_DIM, max_distance=5)
    ),
}
LAYOUTS = {
    "causal": (torch.arange(150), torch.arange(150), masks.causal),
    "all pairs": (torch.arange(150), torch.arange(150), None),
    "window": (torch.arange(150), torch.arange(150), masks.causal & masks.sliding_window(40)),
    "later queries": (torch.arange(300, 340), torch.arange(90), masks.causal),
    "earlier queries": (torch.arange(40), torch.arange(100, 190), None),
    "scattered": (torch.arange(50) * 2, torch.arange(100).flip(0), masks.causal),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ENCODINGS)
def test_blocks_equal_the_reference(name, layout, monkeypatch):
    monkeypatch.setattr(blocks, "rows_per_block", lambda call: 16)
    torch.manual_seed(0)
    encoding = ENCODINGS[name]().double()
    for parameter in encoding.parameters():
        parameter.data = torch.randn_like(parameter)
    q_positions, kv_positions, mask = LAYOUTS[layout]
    kv_positions = q_positions if layout in ("causal", "all pairs", "window") else kv_positions
    q, k, v = (
        torch.randn(2, HEADS, len(p), HEAD_DIM, dtype=torch.float64, requires_grad=True)
        for p in (q_positions, kv_positions, kv_positions)
    )
    leaves = [q, k, v, *encoding.parameters()]

    def run(impl: str) -> torch.Tensor:
        return posenc.attention(  # type: ignore[return-value]
            q,
            k,
            v,
            encoding,
            q_positions=q_positions,
            kv_positions=kv_positions,
            mask=mask,
            impl=impl,
        )

    want, got = run("reference"), run("blocks")
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        torch.testing.assert_close(run("blocks"), want, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(want)
    ours, theirs = (torch.autograd.grad((t * weight).sum(), leaves) for t in (got, want))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
