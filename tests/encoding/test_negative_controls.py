"""Wrong encodings, each of which the contract or a golden value must reject: proof that the tests
can see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from posenc import ModelShape, PositionEncoding, masks
from posenc.embeddings.learned import Learned
from posenc.embeddings.sinusoidal import Sinusoidal
from posenc.encoding.claims import Claims
from posenc.numbers import biases as bias_numbers
from posenc.queries_keys.rope import RoPE
from posenc.queries_keys.rope_scaling import Linear, yarn
from posenc.queries_keys.rotation.rotate import rotate
from posenc.scores.alibi import ALiBi
from posenc.terms.dense import Dense
from posenc.terms.term import Term
from posenc.terms.tokens import Tokens
from tests import test_masks
from tests.checks import CHECKS, modules
from tests.golden_values import Case, cases
from tests.queries_keys import test_rope, test_rope_scaling
from tests.scores import test_alibi

WRONG = Claims(places=(3,), source="nobody, 2026", causal_only=True)


def moved(tokens: Tokens, positions: Tensor) -> Tokens:
    return replace(tokens, positions=positions)


class Rotary(RoPE):
    """A RoPE to plant mistakes in, buildable from a shape."""

    def __init__(self, head_dim: int, rope_theta: float = 10000.0, *, interleaved: bool = False):
        super().__init__(head_dim, rope_theta, interleaved=interleaved)


class ThetaIgnored(Rotary):
    def __init__(self, head_dim: int, rope_theta: float = 10000.0, *, interleaved: bool = False):
        super().__init__(head_dim, 10000.0, interleaved=interleaved)


class ThetaMissingFromTheCache(Rotary):
    """Equinox: tables of all instances in one dictionary, keyed by the size."""

    shared: dict = {}  # noqa: RUF012 - the mistake

    def cos_sin(self, positions: Tensor, dtype: torch.dtype = torch.float32):
        key = (self.head_dim, dtype, positions.shape, tuple(positions.flatten().tolist()))
        if key not in self.shared:
            self.shared[key] = super().cos_sin(positions, dtype)
        return self.shared[key]

    def prepare(self, positions: Tensor, length: int | None = None) -> PositionEncoding:
        return self


class AnglesInTheInputsType(Rotary):
    """rotary-embedding-torch: positions are made in q's dtype."""

    def transform(self, q, k):
        return super().transform(*(moved(t, t.positions.to(t.x.dtype)) for t in (q, k)))


class CentredPerCall(Rotary):
    """xPos of rotary-embedding-torch: the origin is the middle of whatever is passed."""

    def transform(self, q, k):
        return super().transform(moved(q, q.positions - k.positions.double().mean()), k)


class FirstPositionIsAlwaysZero(Rotary):
    """Positions are counted from the shape of the input."""

    def transform(self, q, k):
        return super().transform(*(moved(t, torch.arange(t.x.shape[2])) for t in (q, k)))


class LongestRowDecides(Rotary):
    """Dynamic scaling that reads the length off the batch."""

    def transform(self, q, k):
        stretch = k.positions.max() // 25 + 1
        return super().transform(*(moved(t, t.positions / stretch) for t in (q, k)))


class PositionsTruncated(Rotary):
    """Position interpolation in whole numbers: neighbours share a position."""

    def transform(self, q, k):
        return super().transform(*(moved(t, t.positions // 4) for t in (q, k)))


class FrequenciesInABuffer(PositionEncoding):
    """`.to(bfloat16)` rounds inv_freq, and a meta device leaves it empty."""

    claims = Claims(places=(2,), source="nobody, 2026")

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def transform(self, q, k):
        rotated = []
        for tokens in (q, k):
            angle = tokens.positions[..., None] * self.inv_freq
            rotated.append(rotate(tokens.x, angle.cos(), angle.sin(), interleaved=False))
        return tuple(rotated)


class KeyOnlyALiBi(PositionEncoding):
    """BLOOM: slope * key position, in the model's dtype."""

    claims = WRONG

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slopes = bias_numbers.slopes(num_heads)

    def term(self, q, k):
        slopes = torch.tensor(self.slopes, dtype=q.x.dtype)

        def bias(q_part, k_part):
            row = slopes[:, None] * k_part.positions.to(slopes.dtype)
            return row[:, None].expand(-1, len(q_part), -1)

        return Dense(q, k, bias)


class FutureRewarded(ALiBi):
    """attention-gym: (key - query) * slope without a mask claims to serve encoders."""

    def bias(self, distance: Tensor) -> Tensor:
        return -super().bias(distance.abs()) * distance.sign()


class DistanceBetweenIndices(PositionEncoding):
    """FlexAttention's examples: the distance is q_idx - kv_idx, whatever the positions are."""

    claims = WRONG

    def term(self, q, k):
        return ByIndex(q, k)


class ByIndex(Term):
    def add(self, scores, rows, keys, mask):
        i = torch.arange(rows.start, rows.stop)[:, None]
        return scores - 0.5 * (i - torch.arange(keys.start, keys.stop)).abs()


class CountedFromTheShape(Sinusoidal):
    """The first token passed is always token 0."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().embed(x, torch.arange(x.shape[1]))


class SilentlyWrapped(Learned):
    """Beyond the table, start again."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().embed(x, positions % self.claims.max_positions)


class OutputInFloat32(Sinusoidal):
    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table(positions)


class NotANumberWhereNothingIsSeen(PositionEncoding):
    """-inf in every place of a row: softmax gives 0 / 0."""

    claims = WRONG

    def term(self, q, k):
        return NormalisedRows(q, k)


class NormalisedRows(Term):
    additive, reads_mask = False, True

    def add(self, scores, rows, keys, mask):
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1).log()


class PeeksAhead(PositionEncoding):
    """A score that depends on the last key of all."""

    claims = replace(WRONG, needs_raw_k=True)

    def term(self, q, k):
        return TimesTheLastKey(q, k)


class TimesTheLastKey(Term):
    additive = False

    def add(self, scores, rows, keys, mask):
        return scores * self.k.x[:, :, -1].sum(-1)[..., None, None]


class RemembersTheLongest(Rotary):
    """A table that grows with the longest call, and stays."""

    longest = 0

    def transform(self, q, k):
        type(self).longest = max(type(self).longest, k.x.shape[2])
        stretch = max(1.0, self.longest / 24)
        return super().transform(*(moved(t, t.positions / stretch) for t in (q, k)))


class ReadsValues(Rotary):
    """Looks at the positions: a device would have to be waited for."""

    def transform(self, q, k):
        assert int(k.positions.max()) >= 0
        return super().transform(q, k)


class RoundedBias(ALiBi):
    """A table of biases kept in bfloat16, whatever the model computes in."""

    def bias(self, distance: Tensor) -> Tensor:
        return super().bias(distance).bfloat16().float()


class DistanceInTheParametersType(ALiBi):
    """A module in bfloat16 counts distances in bfloat16: beyond 256 neighbours share one."""

    def __init__(self, num_heads: int) -> None:
        super().__init__(num_heads)
        self.one = nn.Parameter(torch.ones(()))

    def bias(self, distance: Tensor) -> Tensor:
        return super().bias(distance.to(self.one.dtype)) * self.one


class NeverReset(Learned):
    """The constructor draws the weights, and nothing draws them again."""

    def __init__(self, max_positions: int, embed_dim: int) -> None:
        super().__init__(max_positions, embed_dim)
        nn.init.normal_(self.weight, std=0.02)

    def reset_parameters(self) -> None:
        pass


CONTROLS = [
    (ThetaMissingFromTheCache, "no_option_is_ignored"),
    (ThetaIgnored, "no_option_is_ignored"),
    (AnglesInTheInputsType, "bfloat16_is_precise_far_out"),
    (CentredPerCall, "decoding_matches_prefill"),
    (CentredPerCall, "shift_invariance_as_claimed"),
    (FirstPositionIsAlwaysZero, "decoding_matches_prefill"),
    (CountedFromTheShape, "padding_is_invisible"),
    (CountedFromTheShape, "packing_is_invisible"),
    (FirstPositionIsAlwaysZero, "permutation_invariance_as_claimed"),
    (LongestRowDecides, "rows_are_independent"),
    (LongestRowDecides, "cache_safety_as_claimed"),
    (PositionsTruncated, "shift_invariance_as_claimed"),
    (FrequenciesInABuffer, "positions_survive_a_cast"),
    (FrequenciesInABuffer, "meta_construction_materialises"),
    (NeverReset, "meta_construction_materialises"),
    (RoundedBias, "float32_is_never_halved"),
    (DistanceInTheParametersType, "bfloat16_is_precise_at_far_distances"),
    (KeyOnlyALiBi, "bfloat16_is_precise_far_out"),
    (DistanceBetweenIndices, "permutation_invariance_as_claimed"),
    (DistanceBetweenIndices, "decoding_matches_prefill"),
    (SilentlyWrapped, "works_or_refuses_beyond_training"),
    (OutputInFloat32, "bfloat16_is_precise_far_out"),
    (NotANumberWhereNothingIsSeen, "blind_rows_give_zeros"),
    (PeeksAhead, "the_future_is_invisible"),
    (RemembersTheLongest, "earlier_calls_leave_no_trace"),
    (ReadsValues, "device_follows_input"),
]


@pytest.mark.parametrize(("wrong", "check"), CONTROLS)
def test_the_contract_rejects(wrong: type[PositionEncoding], check: str):
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        run(wrong, check)


@pytest.mark.parametrize("check", sorted({check for _, check in CONTROLS}))
@pytest.mark.parametrize("right", [Rotary, ALiBi, Learned, Sinusoidal])
def test_the_contract_accepts_what_is_right(right: type[PositionEncoding], check: str):
    run(right, check)


def run(cls: type[PositionEncoding], check: str) -> None:
    def make(shape: ModelShape, **options) -> PositionEncoding:
        return cls.from_shape(shape, **options)

    if check == "no_option_is_ignored":
        modules.assert_no_option_is_ignored(make, frozenset({"init_std"}))
    else:
        CHECKS[check](make)


def assert_rejected(test: Callable[[Case], None], method: str) -> None:
    """At least one recorded case of the method fails the suite's own test."""
    rejected = 0
    for parameter in cases(method):
        (case,) = parameter.values
        if case is None:
            pytest.skip(f"no golden values of {method}")
        try:
            test(case)
        except AssertionError:
            rejected += 1
    assert rejected, f"{method}: no case rejects it"


@pytest.mark.parametrize("method", ["rope_half_split", "rope_interleaved"])
def test_golden_values_reject_the_other_layout(method: str, monkeypatch: pytest.MonkeyPatch):
    def swapped(*args, interleaved: bool) -> RoPE:
        return RoPE(*args, interleaved=not interleaved)

    monkeypatch.setattr(test_rope, "RoPE", swapped)
    test = {"rope_half_split": test_rope.test_half_split}.get(method, test_rope.test_interleaved)
    assert_rejected(test, method)


def test_golden_values_reject_an_ignored_theta(monkeypatch: pytest.MonkeyPatch):
    def ignored(head_dim: int, rope_theta: float, **options) -> RoPE:
        return RoPE(head_dim, **options)

    monkeypatch.setattr(test_rope, "RoPE", ignored)
    assert_rejected(test_rope.test_half_split, "rope_half_split")


def test_golden_values_reject_slopes_for_powers_of_two_only(monkeypatch: pytest.MonkeyPatch):
    def plain(num_heads: int, bias_max: float = 8.0) -> tuple[float, ...]:
        return tuple(2 ** (-bias_max * h / num_heads) for h in range(1, num_heads + 1))

    monkeypatch.setattr(bias_numbers, "slopes", plain)
    assert ALiBi(12).slopes[0] == pytest.approx(0.63, abs=1e-3), "attention-gym's"
    assert_rejected(test_alibi.test_slopes_equal_the_authors, "alibi_slopes")


def test_golden_values_reject_a_reward_for_the_future(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(test_alibi, "ALiBi", FutureRewarded)
    assert_rejected(test_alibi.test_symmetric_form, "alibi_symmetric")


def test_golden_values_reject_an_inverted_yarn_ramp(monkeypatch: pytest.MonkeyPatch):
    ramp = yarn.ramp
    monkeypatch.setattr(yarn, "ramp", lambda *a: [1 - r for r in ramp(*a)])
    for method in ("scaling_yarn_hf", "scaling_yarn_repo"):
        assert_rejected(test_rope_scaling.test_yarn, method)


@pytest.mark.parametrize("shift", [-1, 1])
def test_golden_values_reject_a_shifted_window(shift: int, monkeypatch: pytest.MonkeyPatch):
    window = masks.sliding_window
    monkeypatch.setattr(masks, "sliding_window", lambda size: window(size + shift))
    assert_rejected(test_masks.test_sliding_window_is_gemmas, "mask_gemma_sliding")
    assert_rejected(test_masks.test_masks_are_hugging_faces, "mask_hf")


def test_interpolation_at_truncated_positions_is_not_interpolation():
    """Position interpolation by whole-number division: four neighbours share one position."""
    q = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    positions = torch.arange(8)
    right = RoPE(8, interleaved=False, scaling=Linear(4.0))(q, q, positions)[0]
    real = RoPE(8, interleaved=False)(q, q, positions / 4)[0]
    truncated = RoPE(8, interleaved=False)(q, q, positions // 4)[0]
    torch.testing.assert_close(right, real, rtol=0, atol=1e-12)
    assert (right - truncated).abs().max() > 0.1


def test_a_statistic_would_not_see_the_wrong_layout():
    """Why golden values are whole tensors: pairs laid out as halves have the same mean and sum."""
    q = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16)
    right, _ = RoPE(8, interleaved=True)(q, q, positions)
    wrong = right.unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(right.sum(), wrong.sum())
    assert right.max() == wrong.max() and not torch.equal(right, wrong)
