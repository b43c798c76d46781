"""Claims about the embeddings: sinusoidal and learned."""

import math

import torch
from torch import Tensor

from experiments.claims.claim import Group, Measured, amount
from posenc.encodings import Learned, Sinusoidal

CLAIMS = Group()

_SINUSOIDAL = "Vaswani et al. 2017, arXiv:1706.03762, section 3.5"


def _rows(dim: int, count: int) -> Tensor:
    return Sinusoidal(dim).vectors(torch.arange(count), torch.float64)


@CLAIMS.add("Adjacent sinusoidal encodings of width 512 have cosine 0.99")
def _neighbours() -> Measured:
    rows = _rows(512, 2)
    cosine = torch.cosine_similarity(rows[0], rows[1], dim=0).item()
    gap = (rows[0] - rows[1]).norm().item()
    text = f"{cosine:.4f}; the two are {gap:.3f} apart, their norm is {rows[0].norm():.0f}"
    return text, round(cosine, 2) >= 0.99


@CLAIMS.add("Sinusoidal similarity falls steadily with distance")
def _monotone() -> Measured:
    rows = _rows(64, 101)
    cosine = torch.cosine_similarity(rows[:1], rows, dim=1)
    text = f"at width 64: {cosine[64]:.2f} at distance 64, {cosine[100]:.2f} at distance 100"
    return text, bool((cosine.diff() <= 0).all())


@CLAIMS.add("Low dimensions of the sinusoidal encoding are low frequency")
def _low_dimensions() -> Measured:
    waves = [2 * math.pi / float(f) for f in Sinusoidal(512).exact_frequencies.inv_freq]
    text = f"period of the first pair {waves[0]:.2f} tokens, of the last {waves[-1]:,.0f}"
    return text, waves[0] > waves[-1]


@CLAIMS.add("PE(p + k) is a rotation of PE(p) that depends on k alone", _SINUSOIDAL)
def _rotation() -> Measured:
    encoding, shift = Sinusoidal(64), 37
    positions = torch.tensor([0, 5, 1000, 123_456])
    here, there = (encoding.vectors(p, torch.float64) for p in (positions, positions + shift))
    sin, cos = here[:, 0::2], here[:, 1::2]
    angle = shift * torch.tensor(
        [float(f) for f in encoding.exact_frequencies.inv_freq], dtype=torch.float64
    )
    turned = torch.stack(
        [sin * angle.cos() + cos * angle.sin(), cos * angle.cos() - sin * angle.sin()], dim=-1
    ).flatten(-2)
    error = (turned - there).abs().max().item()
    return f"one matrix for all positions, off by {amount(error)}", error < 1e-9


@CLAIMS.add(
    "The product of two sinusoidal encodings depends on the distance alone, and not on its sign",
    _SINUSOIDAL,
)
def _products() -> Measured:
    rows = _rows(64, 300)
    a, b = rows[:200] @ rows[50], rows[50:250] @ rows[100]
    same = (a[20] - b[20]).abs().item()
    mirrored = (rows[100] @ rows[90] - rows[100] @ rows[110]).abs().item()
    text = f"shifted pairs differ by {amount(same)}, past from future by {amount(mirrored)}"
    return text, same < 1e-9 and mirrored < 1e-9


@CLAIMS.add("A learned table of 512 x 768 costs 0.37 M parameters")
def _table_size() -> Measured:
    with torch.device("meta"):
        table = Learned(512, embed_dim=768)
    count = sum(p.numel() for p in table.parameters())
    return f"{count:,} parameters, {count / 1e6:.2f} M", round(count / 1e6, 2) == 0.37
