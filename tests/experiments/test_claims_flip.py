"""Every claim's check can come out the other way: with one thing changed, its verdict changes."""

import math
from types import SimpleNamespace

import pytest
import torch

from experiments.claims import biases, context, embeddings, masking, rotary, sizes
from experiments.claims.__main__ import GROUPS
from posenc import masks
from posenc.encodings.queries_keys.rope import RoPE
from posenc.encodings.scores.alibi import ALiBi
from posenc.encodings.scores.fox import FoX
from posenc.encodings.scores.t5 import T5Bias
from posenc.frequencies.scalings.registry import NTK, NTKByParts
from posenc.frequencies.scalings.scaling import rope_frequencies

pytestmark = pytest.mark.nightly


class Still:
    """A RoPE that turns nothing, whatever its layout."""

    def __init__(self, *args, **options):
        pass

    def __call__(self, q, k, positions):
        return q, k


class Absolute(Still):
    """A rotation whose angle grows with the square of the position."""

    def __call__(self, q, k, positions):
        turn = RoPE(q.shape[-1], interleaved=False)
        return turn(q, k, positions**2)


class FirstSlow(Still):
    """Moves all channels but the first two."""

    def __call__(self, q, k, positions):
        moved = q + 1
        moved[..., :2] = q[..., :2]
        return moved, k


class NoisySines:
    """A table that no rotation turns into itself."""

    def __init__(self, dim):
        noise = torch.randn(2**18, dim, generator=torch.Generator().manual_seed(0))
        self.noise = noise.double()
        self.exact_frequencies = SimpleNamespace(inv_freq=[0.5**i for i in range(dim // 2)])

    def vectors(self, positions, dtype):
        return self.noise[positions]


def slow_rows(dim, count):
    """One slow pair: neighbours nearly equal, similarity falling all the way."""
    angle = torch.arange(count, dtype=torch.float64)[:, None] * 0.01
    return torch.cat([angle.cos(), angle.sin()], -1)


def buckets(rule):
    """A T5 whose buckets follow another rule of the distance."""

    class Other(T5Bias):
        def bucket(self, distance):
            return torch.tensor([rule(d) for d in distance.tolist()])

    return Other


def other_logarithm(distance):
    if distance < 16:
        return distance
    return min(31, 16 + math.floor(math.log(distance) / math.log(128) * 16 + 1e-9))


def other_rounding(distance):
    if distance < 16:
        return distance
    return min(31, 16 + round(math.log(distance / 16) / math.log(8) * 16))


class Scaled(T5Bias):
    def scale(self, head_dim):
        return head_dim**-0.5


class PlainSlopes(ALiBi):
    def __init__(self, num_heads, **options):
        super().__init__(num_heads, **options)
        self.slopes = tuple(2 ** (-8 * h / num_heads) for h in range(1, num_heads + 1))


class Misprint(ALiBi):
    def __init__(self, num_heads, **options):
        super().__init__(num_heads, **options)
        self.slopes = (2 ** -(2 ** -math.log2(num_heads + 3)), *self.slopes[1:])


class Learned(ALiBi):
    def __init__(self, num_heads, **options):
        super().__init__(num_heads, **options)
        self.extra = torch.nn.Parameter(torch.ones(num_heads))


class Rewards(ALiBi):
    def bias(self, distance):
        return -super().bias(distance)


def sided(num_heads, **options):
    return ALiBi(num_heads, form="left_right")


class OtherGate(FoX):
    def state(self, x, positions, past=None):
        return 2 * super().state(x, positions, past)


def unscaled(dim, base, scaling):
    found = rope_frequencies(dim, base, scaling)
    return SimpleNamespace(
        inv_freq=found.inv_freq, attention_factor=(0.1 * math.log(16) + 1) ** 0.5
    )


def fast(scaling):
    return torch.ones(64, dtype=torch.float64)


def ridged(length):
    return 0.9, 1.1, 2.0


def visible(*index):
    return torch.ones(512, 512, dtype=torch.bool)


def small_table(rows, embed_dim):
    return torch.nn.Embedding(482, embed_dim)


FLIPS = {
    "have cosine 0.99": (embeddings, "_rows", slow_rows, "true"),
    "falls steadily": (embeddings, "_rows", slow_rows, "true"),
    "sinusoidal encoding are low": (
        embeddings,
        "Sinusoidal",
        lambda dim: SimpleNamespace(exact_frequencies=SimpleNamespace(inv_freq=[0.1, 1.0])),
        "true",
    ),
    "is a rotation of PE(p)": (embeddings, "Sinusoidal", NoisySines, "false"),
    "product of two sinusoidal": (embeddings, "Sinusoidal", NoisySines, "false"),
    "512 x 768": (embeddings, "Learned", small_table, "true"),
    "needs base 40,000": (rotary, "NTK", lambda factor: NTK(2 * factor), "true"),
    "equals that of (q_j, k_i)": (rotary, "RoPE", Still, "true"),
    "through the distance only": (rotary, "RoPE", Absolute, "false"),
    "scores decay": (rotary, "RoPE", Still, "true"),
    "dimensions of RoPE": (rotary, "RoPE", FirstSlow, "true"),
    "layouts are interchangeable": (rotary, "RoPE", Still, "true"),
    "may truncate": (rotary, "_truncated_by", lambda factor, p: p / factor, "true"),
    "ramp of its paper": (rotary, "YaRN", NTKByParts, "true"),
    "applied once": (rotary, "rope_frequencies", unscaled, "true"),
    "long inputs only": (rotary, "YaRN", NTKByParts, "true"),
    "at least one turn": (rotary, "_frequencies", fast, "true"),
    "12 steps of 30": (rotary, "_BASE", 1.0, "true"),
    "scores explode": (rotary, "_fitted_scores", ridged, "false"),
    "about 600 times": (rotary, "_extrapolation_bound", lambda dim: torch.ones(9), "false"),
    "to distance 128 and beyond": (biases, "T5Bias", buckets(lambda d: min(d, 128)), "true"),
    "32 exact": (biases, "T5Bias", buckets(lambda d: min(abs(d), 32)), "true"),
    "goes to the past": (biases, "T5Bias", buckets(lambda d: 17 if d > 0 else 1), "true"),
    "ln(x) / ln(128)": (biases, "T5Bias", buckets(other_logarithm), "true"),
    "rounds to the nearest": (biases, "T5Bias", buckets(other_rounding), "true"),
    "T5 divides": (biases, "T5Bias", Scaled, "true"),
    "has its own table": (biases, "_tables_of_t5", lambda: list(range(6)), "true"),
    "2^(-8h/12)": (biases, "ALiBi", PlainSlopes, "true"),
    "slopes are learned": (biases, "ALiBi", Learned, "true"),
    "+m (i - j)": (biases, "ALiBi", Rewards, "true"),
    "2^-(2^-log2(H + 3))": (biases, "ALiBi", Misprint, "true"),
    "Symmetric ALiBi": (biases, "ALiBi", sided, "true"),
    "on the key alone": (biases, "_in_bfloat16", lambda bias: bias, "true"),
    "one number per query": (biases, "_get_alibi_biases", lambda at: at[:, None] * at, "true"),
    "CABLE": (biases, "FoX", OtherGate, "false"),
    "to tell order": (masking.masks, "causal", None, "false"),
    "from two layers on": (masking.masks, "causal", None, "false"),
    "of full rank": (masking.masks, "causal", None, "false"),
    "half the context": (masking.masks, "causal", visible, "false"),
    "get no gradient": (masking.masks, "padding", lambda valid: masks.causal, "false"),
    "minus infinity": (masking, "_MINUS", -math.inf, "true"),
    "meets new angles there": (context, "_new_angles", lambda f, trained, n: 3, "true"),
    "first token draws": (context, "_SINK_MASK", None, "true"),
    "low ones content": (context, "_BASE", 1e12, "true"),
    "base of 27,000": (context, "_first_negative", lambda base, length: None, "false"),
    "leaves the slowest": (context, "_rotated", lambda dim: torch.tensor([6.0, dim**2]), "true"),
    "among rotary ones": (context, "RoPE", lambda dim, interleaved: None, "true"),
    "91 M": (sizes, "_bert", lambda: (109_500_000, 18_500_000), "true"),
    "16.59": (sizes, "RETOLD", None, "cannot be checked here"),
    "stride 256": (sizes, "RETOLD", None, "cannot be checked here"),
    "52.50": (sizes, "RETOLD", None, "cannot be checked here"),
}


def verdict(claim) -> str:
    holds = claim.measure()[1]
    return holds if isinstance(holds, str) else ("true" if holds else "false")


CLAIMS = [claim for claims in GROUPS.values() for claim in claims]


@pytest.mark.parametrize("part", FLIPS)
def test_a_changed_thing_changes_the_verdict(part, monkeypatch):
    (claim,) = [claim for claim in CLAIMS if part in claim.claim]
    module, name, changed, wanted = FLIPS[part]
    before = verdict(claim)
    if name == "RETOLD":
        told = sizes.RETOLD[claim.claim]
        monkeypatch.setitem(sizes.RETOLD, claim.claim, told._replace(printed=told.said))
    else:
        monkeypatch.setattr(module, name, changed)
    assert verdict(claim) == wanted != before


def test_every_claim_is_here_or_cannot_be_checked():
    flipped = {claim.claim for claim in CLAIMS for part in FLIPS if part in claim.claim}
    assert all(verdict(c) == "cannot be checked here" for c in CLAIMS if c.claim not in flipped)
