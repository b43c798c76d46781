"""Wrong encodings, each of which the contract or a golden value must reject: proof that the tests
can see."""

from collections.abc import Callable

import pytest
import torch

from posenc import PositionEncoding, masks
from posenc.encodings.embeddings.learned import Learned
from posenc.encodings.embeddings.sinusoidal import Sinusoidal
from posenc.encodings.numerics import slopes_and_buckets as bias_numbers
from posenc.encodings.queries_keys.rope import RoPE
from posenc.encodings.scores.alibi import ALiBi
from posenc.frequencies.scalings import yarn
from posenc.frequencies.scalings.registry import Linear
from posenc.testing import CHECKS, maker, verdicts
from posenc.testing.contract import every_check
from tests import test_masks
from tests.encodings.base import planted
from tests.encodings.queries_keys import test_rope, test_rope_scaling
from tests.encodings.scores import test_alibi
from tests.golden_values import Case, cases

MISTAKES = {
    "no_option_is_ignored": "ThetaMissingFromTheCache ThetaIgnored",
    "bfloat16_is_precise_far_out": "AnglesInTheInputsType KeyOnlyALiBi OutputInFloat32",
    "decoding_matches_prefill": "CentredPerCall FirstPositionIsAlwaysZero DistanceBetweenIndices"
    " CentredPerCallInEvaluation ReadsTheNextKeyInLongTexts",
    "moved_keys_are_made_anew": "MovesKeysTheOtherWay LeavesMovedKeys LeavesMovedValues",
    "shift_invariance_as_claimed": "CentredPerCall PositionsTruncated",
    "padding_is_invisible": "CountedFromTheShape",
    "packing_is_invisible": "CountedFromTheShape",
    "permutation_invariance_as_claimed": "FirstPositionIsAlwaysZero DistanceBetweenIndices",
    "rows_are_independent": "LongestRowDecides",
    "cache_safety_as_claimed": "LongestRowDecides",
    "positions_survive_a_cast": "FrequenciesInABuffer",
    "meta_construction_materialises": "FrequenciesInABuffer NeverReset",
    "float32_is_never_halved": "RoundedBias",
    "bfloat16_is_precise_at_far_distances": "DistanceInTheParametersType",
    "works_or_refuses_beyond_training": "SilentlyWrapped",
    "blind_rows_give_zeros": "NotANumberWhereNothingIsSeen",
    "the_future_is_invisible": "PeeksAhead PeeksAheadInEvaluation ReadsTheNextKeyInLongTexts",
    "earlier_calls_leave_no_trace": "RemembersTheLongest KeptByShape",
    "inputs_are_not_written_to": "ScalesInPlace",
    "device_follows_input": "ReadsValues",
    "outputs_are_finite": "NotANumberAtItself",
    "gradients_are_finite": "RootAtZero",
    "gradients_are_right": "Detached",
    "float32_is_precise": "KeyOnlyThirds",
    "float16_is_precise": "KeyOnlyThirds",
    "float64_is_kept": "AlwaysFloat32",
    "order_is_seen_without_a_mask": "BlindToOrder",
    "places_as_claimed": "ClaimsTooMuch ValuesInSecret",
    "own_scale_as_claimed": "ScalesInSecret DoublesItsQueries DoublesAndTurnsByOrder"
    " HotAfterTraining ClaimsAScale",
    "additive_as_claimed": "PeeksAhead SumsByItsWord",
    "claims_have_their_types": "ClaimsByANumber",
    "state_dict_round_trip": "DrawnAndForgotten",
    "instances_share_nothing": "LastInstanceDecides",
    "wrong_shapes_are_named": "IgnoresHeadDim",
    "masks_are_optional": "NeedsAMask",
    "frozen_parameters_change_nothing": "NewMemoryWhereFrozen",
    "inference_mode_changes_nothing": "NewMemoryInInference",
    "inputs_need_no_gradient": "TrainsWithItsInputsAlone",
    "compiles_without_recompiling_per_length": "BranchesOnValues",
    "exports_with_any_length": "BranchesOnValues",
}
"""What must be rejected by each check, from planted.py."""
CONTROLS = [
    (getattr(planted, name), check) for check, names in MISTAKES.items() for name in names.split()
]


def test_every_check_has_a_mistake_that_it_must_reject():
    assert set(MISTAKES) == set(every_check())


@pytest.mark.parametrize(("wrong", "check"), CONTROLS)
def test_the_contract_rejects(wrong: type[PositionEncoding], check: str):
    assert failure(wrong, check) is not None


@pytest.mark.parametrize("check", sorted(CHECKS))
@pytest.mark.parametrize("right", [planted.Rotary, ALiBi, Learned, Sinusoidal])
def test_the_contract_accepts_what_is_right(right: type[PositionEncoding], check: str):
    assert failure(right, check) is None


def test_turning_by_order_is_no_scale():
    assert failure(planted.TurnsByOrder, "own_scale_as_claimed") is None


def failure(cls: type[PositionEncoding], check: str) -> str | None:
    (verdict,) = verdicts(maker(cls), {check: every_check()[check]})
    return verdict.failure


def assert_rejected(test: Callable[[Case], None], method: str) -> None:
    """Fail unless at least one recorded case of `method` makes the suite's own test fail."""
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

    monkeypatch.setattr(bias_numbers, "alibi_slopes", plain)
    assert ALiBi(12).slopes[0] == pytest.approx(0.63, abs=1e-3), "attention-gym's"
    assert_rejected(test_alibi.test_slopes_equal_the_authors, "alibi_slopes")


def test_golden_values_reject_a_reward_for_the_future(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(test_alibi, "ALiBi", planted.FutureRewarded)
    assert_rejected(test_alibi.test_symmetric_form, "alibi_symmetric")


def test_golden_values_reject_an_inverted_yarn_ramp(monkeypatch: pytest.MonkeyPatch):
    ramp = yarn._ramp
    monkeypatch.setattr(yarn, "_ramp", lambda *a: [1 - r for r in ramp(*a)])
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
