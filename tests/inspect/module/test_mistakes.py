"""Each mistake that people make is found by its check, and right modules fail none."""

import copy
import warnings

import pytest
import torch

from posenc.inspect.module.load import FunctionModule
from posenc.inspect.module.measurements import CHECKS, ModuleSheet, judge_subject, report_of
from posenc.inspect.module.subject import Caution, Subject, find_subject
from tests.inspect.module import mistakes


@pytest.fixture(autouse=True)
def deprecations_are_not_ours():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def subject_of(module_class) -> Subject:
    module, heads = module_class().eval(), getattr(module_class, "heads", mistakes.HEADS)
    return find_subject(
        lambda: copy.deepcopy(module), module.returns, width=module.width, num_heads=heads
    )


@torch.no_grad()
def verdict_on(module_class) -> tuple[bool | None, str]:
    """What the check says that is to find the mistake of this class."""
    subject, check = subject_of(module_class), mistakes.MISTAKES[module_class]
    if check == mistakes.USED:  # judged before the others, which then do not apply
        verdict = judge_subject(subject)[0]
        return verdict.holds, verdict.measured
    found = CHECKS[check](subject)
    return (False, found.measured) if isinstance(found, Caution) else found


@pytest.mark.quick(1)
@pytest.mark.parametrize("module_class", mistakes.RIGHT, ids=lambda c: c.__name__)
def test_a_right_module_fails_no_check(module_class):
    found = {v.check: (v.holds, v.measured) for v in judge_subject(subject_of(module_class))}
    cast = {mistakes.CAST, mistakes.ACTIVATIONS}  # bfloat16 rounds learned rows as they are
    wrong = {check: said for check, (holds, said) in found.items() if holds is False}
    assert not {check: said for check, said in wrong.items() if check not in cast}, wrong
    assert found[mistakes.FREQUENCIES][0] is (module_class in mistakes.OF_THEIR_BASE or None)


@pytest.mark.quick(4)
@pytest.mark.parametrize("module_class", mistakes.MISTAKES, ids=lambda c: c.__name__)
def test_a_mistake_is_found_by_its_check(module_class):
    holds, said = verdict_on(module_class)
    assert holds is False, said


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("module_class", "said"),
    [
        (mistakes.NoMinus, "as in rotate_half without its minus"),
        (mistakes.Exchanged, "cosines and sines are exchanged"),
        (mistakes.OtherBase, "they are those of base 1000"),
        (mistakes.OtherWidth, "a width of 128 instead of 64"),
        (mistakes.PartWithFrequenciesOfAll, "a width of 64 instead of 32"),
        (mistakes.FromOne, "they begin at i = 1"),
        (mistakes.Halved, "they are 0.5 times those"),
        (mistakes.OnePair, "pair 17, from 0, turns 1.005 times as fast"),
        (mistakes.PairsExchanged, "pairs have each other's frequencies"),
        (mistakes.SinusoidsOfOtherBase, "they are those of base 1000"),
        (mistakes.CoarseFrequencies, "rounded to bfloat16"),
        (mistakes.AlibiOneHead, "head 3, from 0, has 0.06375, not 0.0625"),
        (mistakes.AlibiEarlierTooFar, "of every earlier key is one too large"),
        (mistakes.AlibiCoarse, "distances are rounded"),
        (mistakes.AlibiGrows, "the sign: distance is rewarded"),
        (mistakes.T5Backwards, "the sign of the distance is exchanged"),
        (mistakes.InPlace, "writes into q"),
        (mistakes.PositionsInPlace, "writes into positions"),
        (mistakes.AlibiOfBothSides, "states attention to both sides, and rewards keys ahead"),
        (mistakes.AlibiOfBothSidesInWords, "states attention to both sides"),
        (mistakes.T5Coarse, "gives 27 of the 64 nearest keys the bias of another distance"),
        (mistakes.T5OneTooFar, "distances are one too large"),
        (mistakes.T5SidesExchanged, "earlier keys take the rows of later ones"),
        (mistakes.T5OneHalf, "both sides take the first half of the rows"),
        (mistakes.T5OfDecoder, "for both sides, to distance 128, though it states the other"),
        (mistakes.WindowOneMore, "sees 17 keys, its own included; states a window of 16"),
        (mistakes.WindowShorterInDecoding, "alone sees 15 keys, and 16 in its sequence"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_mistake_has_its_name(module_class, said):
    assert said in verdict_on(module_class)[1]


def test_a_module_that_takes_heads_for_tokens_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="takes the heads for tokens"):
        find_subject(mistakes.CountsHeads, "rotate")


def test_a_function_states_a_base_by_its_default_and_by_a_number_of_its_file():
    """A function has no attributes: what it states stands in its signature and beside it."""

    def by_default(positions, base=500000.0):
        angles = positions[:, None] * 1e4 ** (-torch.arange(0, 64, 2) / 64)
        return angles.cos(), angles.sin()

    def by_name(positions):
        return by_default(positions, float(BASE))

    for function in (by_default, by_name):
        subject = find_subject(lambda f=function: FunctionModule(f).eval(), "cos-sin")
        holds, said = CHECKS[mistakes.FREQUENCIES](subject)
        assert holds is False and "states base 500000 for 32 pairs" in said


BASE = 500000
GROWTH = "a position keeps its values as the sequence grows"


def note_on(module_class, check: str) -> str:
    """The note of a check on the module; "" if it has none."""
    (verdict,) = (v for v in judge_subject(subject_of(module_class)) if v.check == check)
    return verdict.note


class WindowOfEarlierKeys(mistakes.Window):
    """As in FlexAttention's example."""

    seen = 17


class AlibiByDifference(mistakes.Alibi):
    """As attention-gym's: keys ahead are hidden by a mask elsewhere."""

    distances = mistakes.AlibiOfBothSides.distances


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module_class", "check", "note"),
    [
        (WindowOfEarlierKeys, mistakes.WINDOW, "17 keys, its own included"),
        (AlibiByDifference, mistakes.SLOPES, "for causal attention only"),
        (mistakes.BufferOfFrequencies, mistakes.CAST, "must stay in float32"),
        (mistakes.XPosFromTheMiddle, GROWTH, "must keep its keys unrotated"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_right_under_a_condition_has_a_note(module_class, check, note):
    assert note in note_on(module_class, check)


@pytest.mark.slow
def test_what_is_right_under_a_condition_is_not_accused():
    window, alibi = map(subject_of, (WindowOfEarlierKeys, AlibiByDifference))
    verdicts = judge_subject(window) + judge_subject(alibi)
    assert not [verdict for verdict in verdicts if verdict.holds is False]


def test_a_condition_stands_in_the_headline():
    verdicts = judge_subject(subject_of(AlibiByDifference))
    sheet = ModuleSheet("a.py:A", "A", "A(n)", "bias", 64, verdicts)
    assert "checks that apply pass. Note: for causal attention only" in report_of(sheet).headline
