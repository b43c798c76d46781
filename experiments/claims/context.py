"""Claims about long contexts: new angles, what each frequency is for, layers without positions."""

import math
from itertools import count

import torch
from torch import Tensor

from experiments.claims.claim import PARTLY, Group, Measured, amount
from experiments.claims.masking import weights_of
from posenc import masks
from posenc.attend.attention_layer import Attention
from posenc.encodings import Proportional, RoPE, rope_frequencies
from posenc.masks import Mask

CLAIMS = Group()

_BARBERO = "Barbero et al. 2025, arXiv:2410.06205"
_MEN = "Men et al. 2024, arXiv:2405.14591"
_DIM = 128
_BASE = 10000.0


def _frequencies(
    base: float, scaling: Proportional | None = None, rotary_dim: int = _DIM
) -> Tensor:
    found = rope_frequencies(rotary_dim, base, scaling).inv_freq
    return torch.tensor([float(f) for f in found], dtype=torch.float64)


def _new_angles(frequencies: Tensor, trained: int, length: int) -> int:
    """Count the pairs that reach angles within `length` tokens that no distance in training had:
    those that had not finished a turn."""
    turn = 2 * math.pi
    seen = (frequencies * (trained - 1)).clamp(max=turn)
    return int(((frequencies * (length - 1)).clamp(max=turn) > seen).sum())


@CLAIMS.add(
    "Long inputs are read badly because RoPE meets new angles there",
    "told of the context rot of Hong et al. 2025 (Chroma)",
)
def _rot() -> Measured:
    frequencies = _frequencies(500_000.0)  # Llama 3.1's base, and the length it was trained to
    trained = 131_072
    found = [_new_angles(frequencies, trained, length) for length in (8192, trained, 2 * trained)]
    text = (
        f"with base 500,000 and {trained:,} trained tokens {found[0]} of 64 pairs meet new "
        f"angles within 8,192 tokens, {found[1]} within {trained:,}, {found[2]} within twice as "
        "many: what is lost inside the trained length has another cause"
    )
    return text, bool(found[0] or found[1])


def _keys_share(mask: Mask | None, scores: Tensor) -> float:
    """Return how much more attention the first key gets than the mean key, over all queries."""
    return (weights_of(scores, mask).mean(0)[0] * scores.shape[2]).item()


@CLAIMS.add(
    "The first token draws attention because of its position encoding",
    "told of attention sinks; Xiao et al. 2023, arXiv:2309.17453",
)
def _sinks() -> Measured:
    q = torch.zeros(1, 1, 512, 8, dtype=torch.float64)  # no content, no positions
    causal, free = _keys_share(_SINK_MASK, q), _keys_share(None, q)
    text = (
        f"512 tokens without positions and with equal scores: the first key gets {causal:.1f} "
        f"times the mean key's weight under a causal mask, {free:.1f} times without: every query "
        "sees it, and the first few see little else. How far training makes it a sink is another "
        "question"
    )
    return text, causal < 1.5


_SINK_MASK = masks.causal


def _keeps(frequencies: Tensor, distance: int) -> float:
    """Return the lowest mean cosine, up to a distance, of pairs with equal content."""
    steps = torch.arange(distance, dtype=torch.float64)[:, None]
    return (steps * frequencies).cos().mean(-1).min().item()


@CLAIMS.add("RoPE's high frequencies carry position, its low ones content", _BARBERO)
def _high_and_low() -> Measured:
    frequencies = _frequencies(_BASE)
    fast, slow = frequencies[:16], frequencies[-16:]
    step = [(1 - f.cos()).mean().item() for f in (fast, slow)]
    near, far = _keeps(slow, 1024), _keeps(slow, 32_768)
    text = (
        "a score of 1 for one distance falls by the next one to "
        f"{1 - step[0]:.2f} in the fastest quarter of 64 pairs and by {step[1]:.1g} in the "
        f"slowest. Equal content keeps {near:.2f} of its score up to 1,024 tokens there, and "
        f"sinks to {far:.2f} within 32,768: the slow pairs hold content only in short contexts"
    )
    if not step[0] > 1000 * step[1]:
        return text, False
    return text, True if far > 0.8 else PARTLY


def _first_negative(base: float, length: int) -> int | None:
    """Return the first distance at which sum_i cos(m w_i) is negative; None up to the length. From
    there on, keys that resemble the query score below random ones."""
    frequencies = _frequencies(base)
    sums = (torch.arange(length, dtype=torch.float64)[:, None] * frequencies).cos().sum(-1)
    below = (sums < 0).nonzero()
    return int(below[0]) if len(below) else None


@CLAIMS.add("A context of 4,096 tokens needs a RoPE base of 27,000 at least", _MEN)
def _base_bound() -> Measured:
    length = 4096
    smallest = next(b for i in count() if _first_negative(b := 5000 * 1.005**i, length) is None)
    fails = _first_negative(_BASE, length)
    text = (
        f"the smallest base, in steps of 0.5 %, whose sum of cosines stays above zero for head "
        f"size 128 is {smallest:,.0f}; with 10,000 it is "
        f"{'never' if fails is None else f'first below at distance {fails:,}'}. It bounds where "
        "likeness still pays for random vectors, not what a trained model reads"
    )
    return text, 0.9 < smallest / 27_000 < 1.1


def _rotated(rotary_dim: int) -> Tensor:
    """Return the wavelengths of partial rotary, in tokens."""
    return 2 * math.pi / _frequencies(_BASE, rotary_dim=rotary_dim)


@CLAIMS.add("Partial rotary leaves the slowest frequencies out")
def _partial() -> Measured:
    whole, part = _rotated(_DIM), _rotated(_DIM // 4)
    cut = _frequencies(_BASE, Proportional(0.25))
    last = 2 * math.pi / cut[cut > 0].min().item()
    text = (
        f"a quarter of 128 channels rotated: wavelengths from {part[0]:.1f} to {part[-1]:,.0f} "
        f"tokens, of all channels {whole[0]:.1f} to {whole[-1]:,.0f}: the same range in fewer "
        f"steps. p-RoPE, which keeps the fastest quarter, ends at {last:,.0f}"
    )
    return text, bool(part[-1] < 0.1 * whole[-1])


@torch.no_grad()
def _order_seen(first: RoPE | None) -> float:
    """Return how far the last token's output of a layer without positions moves when the tokens
    before it are permuted. first: the encoding of a layer below, if there is one."""
    torch.manual_seed(0)
    below, above = (Attention(32, 4).double() for _ in range(2))
    x = torch.randn(1, 12, 32, dtype=torch.float64)
    order = torch.tensor([3, 0, 7, 1, 10, 5, 2, 9, 4, 8, 6, 11])

    def last(tokens: Tensor) -> Tensor:
        if first is not None:
            tokens = tokens + below(tokens, torch.arange(12), mask=masks.causal, encoding=first)
        return above(tokens, torch.arange(12), mask=masks.causal)[:, -1]

    return (last(x) - last(x[:, order])).abs().max().item()


@CLAIMS.add(
    "A layer without positions among rotary ones cannot tell order",
    "told of the NoPE layers of Llama 4, SmolLM3 and Command A",
)
def _nope_layers() -> Measured:
    alone, above = _order_seen(None), _order_seen(RoPE(8, interleaved=False))
    text = (
        f"other orders of the tokens before move its last output by {amount(alone)} if it stands "
        f"alone, by {amount(above)} above a rotary layer, whose states it reads"
    )
    return text, PARTLY if alone < 1e-9 < above else alone < 1e-9
