"""Each mistake that people make is found by its check, and right modules fail none."""

import copy
import warnings

import pytest
import torch

from posenc.inspect.module.measurements import CHECKS, judge_subject
from posenc.inspect.module.subject import Subject, find_subject
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
    holds, said = CHECKS[check](subject)
    return holds, said


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
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_mistake_has_its_name(module_class, said):
    assert said in verdict_on(module_class)[1]


def test_a_module_that_takes_heads_for_tokens_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="takes the heads for tokens"):
        find_subject(mistakes.CountsHeads, "rotate")
