"""Every check says yes to a right module and no to one with the mistake that it looks for."""

import warnings

import pytest
import torch

from posenc.inspect.module.find import find_subject
from posenc.inspect.module.sheet import CHECKS, verdicts
from tests.inspect.module import planted

ACTIVATIONS = "bfloat16 activations keep positions"
CAST = "module.bfloat16() keeps positions"
HISTORY = "earlier calls leave no trace"
GROWTH = "a position keeps its values as the sequence grows"
ALONE = "a token alone is the token in its sequence"
APART = "positions stay distinct"
ALIKE = "queries and keys are rotated alike"
BESIDE = "a row does not depend on the batch's farthest"
START = "its own start moves its positions"
REACH = "positions are right as far as it states"
BEYOND = "it runs beyond its length if it claims to"
SLOPES = "slopes of ALiBi are the authors'"
GRAPHS = "one compiled graph works for all lengths"
USED = "positions that it takes are used"

RIGHT = {
    planted.CosSin: {APART, ACTIVATIONS, CAST, HISTORY, GROWTH, ALONE, BESIDE, REACH, GRAPHS},
    planted.Turned: {APART, ACTIVATIONS, CAST, HISTORY, GROWTH, ALONE, ALIKE, REACH, GRAPHS},
    planted.Tutorial: {APART, ACTIVATIONS, CAST, HISTORY, GROWTH, GRAPHS},
    planted.Table: {ACTIVATIONS, CAST, HISTORY, GROWTH, ALONE, BESIDE, START, GRAPHS},
    planted.Alibi: {ACTIVATIONS, CAST, HISTORY, GROWTH, ALONE, SLOPES, GRAPHS},
    planted.CachedKeys: {APART, ACTIVATIONS, CAST, HISTORY, GROWTH, ALONE, ALIKE, GRAPHS},
    planted.ByCounts: {CAST, HISTORY, GROWTH, GRAPHS},
    planted.Rebuilt: {APART, ACTIVATIONS, CAST, HISTORY, GROWTH, GRAPHS},
}
WRONG = {
    planted.MadeInDtype: {ACTIVATIONS, CAST},
    planted.PoisonedCache: {ACTIVATIONS, CAST, HISTORY},
    planted.StalePositions: {HISTORY},
    planted.OwnCentre: {ALONE, GROWTH},
    planted.Recentred: {HISTORY, GROWTH, GRAPHS},
    planted.CastFrequencies: {CAST},
    planted.NoBatch: {START},
    planted.WrongOffset: {START},
    planted.KeyedOnShape: {HISTORY, GRAPHS},
    planted.FollowsLongest: {GROWTH, BESIDE, REACH},
    planted.FirstRow: {BESIDE},
    planted.FarStated: {REACH},
    planted.ByKey: {ACTIVATIONS, CAST},
    planted.EndsEarly: {BEYOND},
    planted.PlainSlopes: {SLOPES},
    planted.Counts: {GRAPHS},
    planted.HalfAngles: {APART, REACH},
    planted.MixedLayouts: {REACH},
    planted.KeysByHalves: {ALIKE},
    planted.KeysOneLater: {ALIKE},
    planted.IgnoresPositions: {USED, ALONE},
}


def checked(module_class) -> dict[str, tuple[bool | None, str]]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = verdicts(find_subject(module_class().eval()))
    return {verdict.check: (verdict.holds, verdict.measured) for verdict in found}


@pytest.mark.parametrize("module_class", RIGHT, ids=lambda c: c.__name__)
def test_right_modules_get_yes_and_no_no(module_class):
    found = checked(module_class)
    assert {check for check, (holds, _) in found.items() if holds} == RIGHT[module_class]
    assert not {check: said for check, (holds, said) in found.items() if holds is False}


@pytest.mark.parametrize("module_class", WRONG, ids=lambda c: c.__name__)
def test_each_mistake_is_found(module_class):
    found = checked(module_class)
    assert {check for check, (holds, _) in found.items() if holds is False} == WRONG[module_class]


def test_every_check_is_seen_both_ways():
    """BEYOND has no yes: what a module does not refuse, it does not promise in vain."""
    yes, no = set().union(*RIGHT.values()), set().union(*WRONG.values())
    assert yes == set(CHECKS) - {BEYOND} and no == {*CHECKS, USED}


def test_cosines_and_sines_of_different_widths_are_not_judged():
    with pytest.raises(ValueError, match="returns cosines and sines of 7 and 8 channels"):
        find_subject(planted.OtherWidths())


def test_a_bias_counts_within_its_rows_in_logits():
    """By key alone 0.5 * 1023 has steps of 2 in bfloat16; by distance the same rounding hides where
    nothing has weight."""
    assert "4 logits within a row, weights by 0." in checked(planted.ByKey)[ACTIVATIONS][1]
    holds, said = checked(planted.Alibi)[ACTIVATIONS]
    assert holds and "513 of 1,024 distances distinct, as in any bfloat16" in said


def test_lengths_are_those_that_the_module_can_do():
    assert find_subject(planted.Table(rows=300)).length == 300
    found = find_subject(planted.Tutorial(max_len=77))
    assert found.length == 77 and found.limit is not None and found.limit.tokens == 78
