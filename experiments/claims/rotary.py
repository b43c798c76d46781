"""Claims about RoPE and about stretching it."""

import math

import torch
from torch import Tensor

from experiments.claims.claim import OPEN, PARTLY, Group, Measured, amount
from posenc.encodings import NTK, Linear, NTKByParts, RoPE, YaRN, rope_frequencies

CLAIMS = Group()

_ROPE = "Su et al. 2021, arXiv:2104.09864, section 3.4"
_PI = "Chen et al. 2023, arXiv:2306.15595"
_YARN = "Peng et al. 2023, arXiv:2309.00071"
_DIM = 128
_BASE = 10000.0


def _vectors(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 1, count, _DIM, generator=generator, dtype=torch.float64)


def _score(rope: RoPE, q: Tensor, k: Tensor, q_position: int, kv_position: int) -> float:
    q, _ = rope(q, q, torch.tensor([q_position]))
    k, _ = rope(k, k, torch.tensor([kv_position]))
    return (q * k).sum().item()


def _frequencies(scaling) -> Tensor:
    return torch.tensor([float(f) for f in rope_frequencies(_DIM, 10000.0, scaling).inv_freq])


@CLAIMS.add("NTK-aware scaling for 2 times at head size 128 needs base 40,000")
def _ntk_base() -> Measured:
    found = 1 / rope_frequencies(_DIM, 10000.0, NTK(2.0)).inv_freq[1]
    base = float(found) ** (_DIM / 2)
    four = float(1 / rope_frequencies(_DIM, 10000.0, NTK(4.0)).inv_freq[1]) ** (_DIM / 2)
    return f"{base:,.0f} for 2 times; {four:,.0f} is for 4 times", base > 39_000


@CLAIMS.add("The score of (q_i, k_j) equals that of (q_j, k_i)")
def _exchanged() -> Measured:
    rope = RoPE(_DIM, interleaved=False)
    q, k = _vectors(2).split(1, dim=2)
    here, there = _score(rope, q, k, 20, 3), _score(rope, q, k, 3, 20)
    same = _score(rope, q, q, 20, 3) - _score(rope, q, q, 3, 20)
    text = (
        f"{here:.2f} against {there:.2f} at distance 17; with q = k they differ by {amount(same)}"
    )
    return text, abs(here - there) < 1e-9


@CLAIMS.add("RoPE scores depend on positions through the distance only", _ROPE)
def _distance_only() -> Measured:
    rope = RoPE(_DIM, interleaved=False)
    q, k = _vectors(2).split(1, dim=2)
    gap = max(
        abs(_score(rope, q, k, 20 + s, 3 + s) - _score(rope, q, k, 20, 3)) for s in (1, 100, 10**6)
    )
    return f"shifts of 1, 100 and 1,000,000 change it by {amount(gap)}", gap < 1e-6


@CLAIMS.add("RoPE scores decay with distance", _ROPE)
def _decay() -> Measured:
    rope = RoPE(_DIM, interleaved=False)
    k = _vectors(1)
    q, _ = rope(k, k, torch.tensor([-50]))  # a query that looks for what is 50 tokens back
    q_rows, k_rows = (t.expand(1, 1, 2048, _DIM) for t in (q, k))
    rotated, _ = rope(q_rows, q_rows, torch.arange(2048))
    scores = (rotated * k_rows).sum(-1)[0, 0]
    peak = int(scores.argmax())
    text = (
        f"the query R(-50) k has its largest score at distance {peak}: {scores[peak]:.0f}, "
        f"against {scores[0]:.0f} at distance 0. What decays is a bound on the sum of the pairs"
    )
    return text, peak == 0


@CLAIMS.add("Low dimensions of RoPE are low frequency")
def _slow_channels() -> Measured:
    rope = RoPE(_DIM, interleaved=False)
    q = torch.ones(1, 1, 1, _DIM, dtype=torch.float64)
    moved = (rope(q, q, torch.tensor([1]))[0] - q)[0, 0, 0].abs()
    slowest = sorted(moved.argsort()[:2].tolist())
    text = f"the slowest channels of the half-split layout are {slowest[0]} and {slowest[1]} of 128"
    return text, slowest == [0, 1]


@CLAIMS.add("The two RoPE layouts are interchangeable")
def _layouts() -> Measured:
    halves, pairs = (RoPE(_DIM, interleaved=i) for i in (False, True))
    q, k = _vectors(2).split(1, dim=2)
    gap = abs(_score(halves, q, k, 20, 3) - _score(pairs, q, k, 20, 3))
    order = [*range(0, _DIM, 2), *range(1, _DIM, 2)]
    moved = [t[..., order] for t in (q, k)]
    after = abs(_score(halves, moved[0], moved[1], 20, 3) - _score(pairs, q, k, 20, 3))
    text = f"scores differ by {gap:.2f}; after permuting the channels by {amount(after)}"
    return text, gap < 1e-6


def _truncated_by(factor: int, positions: Tensor) -> Tensor:
    return positions // factor


@CLAIMS.add("Position interpolation may truncate positions: p // s")
def _truncated() -> Measured:
    floored = _truncated_by(2, torch.arange(256)).unique().numel()
    exact = RoPE(_DIM, interleaved=False, scaling=Linear(2.0)).cos_sin(torch.arange(256))[0]
    apart = (exact.diff(dim=0).abs().amax(-1) > 1e-3).all()
    text = (
        f"256 tokens get {floored} positions with p // 2; with real-valued p / 2 "
        f"{'all neighbours differ' if apart else 'some neighbours agree'}"
    )
    return text, floored == 256


@CLAIMS.add("YaRN's code follows the ramp of its paper", _YARN)
def _yarn_ramps() -> Measured:
    worst = 1.0
    for factor, length in ((2.0, 2048), (16.0, 4096)):
        paper, code = _frequencies(NTKByParts(factor, length)), _frequencies(YaRN(factor, length))
        worst = max(worst, (code / paper).max().item(), (paper / code).max().item())
    return f"frequencies differ by up to {worst:.1f} times (16 times, from 4,096)", worst < 1.01


@CLAIMS.add("YaRN's temperature is t = 0.1 ln s + 1, applied once")
def _yarn_factor() -> Measured:
    factor = 16.0
    given = rope_frequencies(_DIM, 10000.0, YaRN(factor, 4096)).attention_factor
    sqrt = 0.1 * math.log(factor) + 1
    text = (
        f"at 16 times 0.1 ln s + 1 = {sqrt:.3f} is sqrt(1/t), so t = {1 / sqrt**2:.3f}; cos and "
        f"sin are both multiplied, and logits by {given**2:.3f}"
    )
    return text, math.isclose(given**2, sqrt)


@CLAIMS.add("YaRN's temperature acts on long inputs only")
def _yarn_always() -> Measured:
    q = _vectors(1)
    plain = RoPE(_DIM, interleaved=False)
    yarn = RoPE(_DIM, interleaved=False, scaling=YaRN(4.0, 4096))
    ratio = _score(yarn, q, q, 0, 0) / _score(plain, q, q, 0, 0)
    return f"at position 0 logits are multiplied by {ratio:.3f}", ratio == 1


@CLAIMS.add("YaRN stretches each period so that every pair completes at least one turn")
def _yarn_turns() -> Measured:
    length, factor = 4096, 16.0
    turns = _frequencies(YaRN(factor, length)) * length * factor / (2 * math.pi)
    short = int((turns < 1).sum())
    text = (
        f"at 16 times, {short} of {_DIM // 2} pairs still make less than one turn in the new length"
    )
    return text, short == 0


@CLAIMS.add("After 12 steps of 30 degrees positions repeat")
def _repeats() -> Measured:
    positions = torch.tensor([0, 12])
    step = math.pi / 6
    angles = step * _BASE ** (-torch.arange(4, dtype=torch.float64) / 4) * positions[:, None]
    gap = torch.remainder(angles[1] - angles[0], 2 * math.pi)
    back = int((torch.minimum(gap, 2 * math.pi - gap) < 1e-9).sum())
    first = 12 * step * _BASE ** (-1 / 4) * 180 / math.pi
    text = f"{back} of 4 pairs is back where it began; the second has turned by {first:.0f} degrees"
    return text, back == 4


@CLAIMS.add("RoPE extrapolates about 200 tokens", "Press et al. 2022, arXiv:2108.12409, section 2")
def _extrapolates() -> Measured:
    waves = 2 * math.pi / _frequencies(None)
    new = int((waves > 512).sum())
    text = (
        "it depends on the model, its data and its training length, and needs a trained one. "
        f"Trained on 512 tokens, {new} of {_DIM // 2} pairs reach angles at position 512 that they "
        "have never had. `posenc compare` measures the loss"
    )
    return text, OPEN


@CLAIMS.add("RoPE scores explode outside the training range", _PI)
def _explodes() -> Measured:
    inside, outside, size = _fitted_scores(2048)
    q, k = _vectors(2).split(1, dim=2)
    rope = RoPE(_DIM, interleaved=False)
    worst = max(abs(_score(rope, q, k, 2**i, 0)) for i in range(31))
    text = (
        f"the paper's experiment, weights of sines and cosines fitted to random scores: "
        f"{inside:.2f} at most below 2,048, {_two(outside)} up to 4,096, with weights of norm "
        f"{_two(size)}. Scores of given vectors stay below |q| |k|, whatever the distance: of "
        f"random ones {worst:.1f} at most up to 2^30, |q| |k| = {(q.norm() * k.norm()):.1f}"
    )
    return text, PARTLY if outside > 100 * inside else False


def _fitted_scores(length: int, ridge: float = 1e-8) -> tuple[float, float, float]:
    """Fit random scores inside a length; return the largest score inside and outside of it, and the
    norm of the weights. `ridge` keeps the fit to float32's digits."""
    frequencies = _BASE ** (-2 * torch.arange(_DIM // 2, dtype=torch.float64) / _DIM)
    angles = torch.arange(2 * length, dtype=torch.float64)[:, None] * frequencies
    waves = torch.cat([angles.cos(), angles.sin()], -1)
    wanted = torch.randn(length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(waves[:length], full_matrices=False)
    weights = vh.mT @ (s / (s**2 + ridge) * (u.mT @ wanted))
    scores = (waves @ weights).abs()
    return scores[:length].max().item(), scores[length:].max().item(), weights.norm().item()


def _two(number: float) -> str:
    """Return two digits, all that a badly conditioned fit reproduces on every machine."""
    return f"{float(f'{number:.2g}'):,.0f}"


def _extrapolation_bound(dim: int) -> Tensor:
    """Return 2 B(s) for distances s up to 4,096."""
    frequencies = _BASE ** (-2 * torch.arange(dim // 2, dtype=torch.float64) / dim)
    distance = torch.arange(1, 4097, dtype=torch.float64)[:, None]
    turning = torch.polar(torch.ones((), dtype=torch.float64), distance * frequencies)
    return 2 * turning.cumsum(-1).abs().sum(-1)


@CLAIMS.add("Interpolation's bound is about 600 times smaller than extrapolation's", _PI)
def _six_hundred() -> Measured:
    dim = 128
    interpolation = dim / (32 * math.log(10000.0))
    extrapolation = _extrapolation_bound(dim)
    low, mean = (extrapolation.min() / interpolation, extrapolation.mean() / interpolation)
    text = (
        f"2 B(s) over d / (32 ln 10000): at least {low:.0f}, on average {mean:.0f} times, for "
        "d = 128 and s up to 4,096. Both are worst-case bounds in units of max|h|: the small one "
        "bounds the deviation from a straight line between whole positions, the large one the "
        "score itself. Neither is a measured logit"
    )
    return text, PARTLY if low > 500 else False
