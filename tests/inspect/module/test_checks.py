"""Every check says yes to a right module and no to one with the mistake that it looks for."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn

from posenc.inspect.module.measurements import CHECKS, judge_subject
from posenc.inspect.module.subject import find_subject, stated_max_positions
from tests.compilers import compiles_each_number
from tests.inspect.module import mistakes, planted

ACTIVATIONS = "bfloat16 activations keep positions"
CAST = "module.bfloat16() keeps positions"
HISTORY = "earlier calls leave no trace"
GROWTH = "a position keeps its values as the sequence grows"
ALONE = "a token alone is the token in its sequence"
STILL = "position 0 leaves content as it is"
PAIRS = "pairs of channels are rotated"
SHIFT = "scores depend on distance only"
FREQUENCIES = "frequencies are those of its base and width"
PAST = "keys before a query differ by distance"
UNTOUCHED = "what it is given stays as it is"
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
    planted.CosSin: {
        STILL,
        PAIRS,
        UNTOUCHED,
        APART,
        ACTIVATIONS,
        CAST,
        HISTORY,
        GROWTH,
        ALONE,
        BESIDE,
        REACH,
        GRAPHS,
    },
    planted.Turned: {
        STILL,
        PAIRS,
        SHIFT,
        UNTOUCHED,
        APART,
        ACTIVATIONS,
        CAST,
        HISTORY,
        GROWTH,
        ALONE,
        ALIKE,
        REACH,
        GRAPHS,
    },
    planted.Tutorial: {UNTOUCHED, REACH, APART, ACTIVATIONS, CAST, HISTORY, GROWTH, GRAPHS},
    planted.Table: {
        UNTOUCHED,
        APART,
        ACTIVATIONS,
        CAST,
        HISTORY,
        GROWTH,
        ALONE,
        BESIDE,
        START,
        GRAPHS,
    },
    planted.Alibi: {PAST, ACTIVATIONS, CAST, HISTORY, GROWTH, ALONE, SLOPES, GRAPHS},
    planted.CachedKeys: {
        STILL,
        PAIRS,
        SHIFT,
        UNTOUCHED,
        REACH,
        APART,
        ACTIVATIONS,
        CAST,
        HISTORY,
        GROWTH,
        ALONE,
        ALIKE,
        GRAPHS,
    },
    planted.ByCounts: {PAST, CAST, HISTORY, GROWTH, GRAPHS},
    planted.Rebuilt: {
        STILL,
        PAIRS,
        SHIFT,
        UNTOUCHED,
        REACH,
        APART,
        ACTIVATIONS,
        CAST,
        HISTORY,
        GROWTH,
        GRAPHS,
    },
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
    planted.HalfAngles: {APART, REACH, FREQUENCIES, SHIFT},
    planted.MixedLayouts: {REACH, PAIRS, SHIFT},
    planted.KeysByHalves: {ALIKE},
    planted.KeysOneLater: {ALIKE, STILL},
    planted.IgnoresPositions: {USED},
}


def subject_of(module):
    """The module called in the way of its class."""
    return find_subject(lambda: copy.deepcopy(module).eval(), module.returns, width=module.width)


def checked(module_class) -> dict[str, tuple[bool | None, str]]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = judge_subject(subject_of(module_class()))
    # A note is found, too: the module is right under a condition only.
    return {v.check: (False if v.note else v.holds, v.measured) for v in found}


@pytest.mark.quick(3)
@pytest.mark.parametrize("module_class", RIGHT, ids=lambda c: c.__name__)
def test_right_modules_get_yes_and_no_no(module_class):
    found = checked(module_class)
    assert {check for check, (holds, _) in found.items() if holds} == RIGHT[module_class]
    assert not {check: said for check, (holds, said) in found.items() if holds is False}


@pytest.mark.quick(5)
@pytest.mark.parametrize("module_class", WRONG, ids=lambda c: c.__name__)
def test_each_mistake_is_found(module_class):
    found = checked(module_class)
    wrong = WRONG[module_class]
    if module_class in (planted.Recentred, planted.Counts) and not compiles_each_number():
        wrong = wrong - {GRAPHS}  # a number that the module keeps costs no graph there
    assert {check for check, (holds, _) in found.items() if holds is False} == wrong


def test_every_check_is_seen_both_ways():
    """BEYOND has no yes: what a module does not refuse, it does not promise in vain."""
    yes, no = set().union(*RIGHT.values()), set().union(*WRONG.values())
    yes |= {FREQUENCIES, mistakes.ROWS, mistakes.WINDOW}  # tests/inspect/module/test_mistakes.py
    no |= set(mistakes.MISTAKES.values())
    assert yes == set(CHECKS) - {BEYOND} and no == {*CHECKS, USED}


def test_a_bias_counts_within_its_rows_in_logits():
    """By key alone 0.5 * 1023 has steps of 2 in bfloat16; by distance the same rounding hides where
    nothing has weight."""
    _, said = CHECKS[ACTIVATIONS](subject_of(planted.ByKey()))
    assert "4 logits within a row, weights by 0." in said
    holds, said = CHECKS[ACTIVATIONS](subject_of(planted.Alibi()))
    assert holds and "513 of 1,024 distances distinct, as in any bfloat16" in said


def test_lengths_are_those_that_the_module_can_do():
    assert subject_of(planted.Table(rows=300)).length == 300
    found = subject_of(planted.Tutorial(max_len=77))
    assert found.length == 77 and found.refusal is not None and found.refusal.num_tokens == 78


def test_a_flag_states_no_number_of_positions():
    """True is an int in Python."""
    module = planted.Table(rows=300)
    module.max_length = True
    assert stated_max_positions(module) == 300


def by_heads(queries, keys):
    """A module that turns each head of queries and keys by what the functions make of positions."""

    class ByHeads(nn.Module):
        width, returns = 16, "rotate"

        def forward(self, q, k, positions):
            heads = torch.arange(q.shape[1])[:, None]
            places = positions.double().expand(q.shape[1], -1)
            turned = (
                planted.turn(x, side(places, heads)[..., None].float() * planted.frequencies(16))
                for x, side in ((q, queries), (k, keys))
            )
            return tuple(turned)

    return ByHeads()


def plain(places, heads):
    return places


ONE_HEAD = {
    "keys of half of the heads are not rotated": (plain, lambda p, h: p * (h < 4), ALIKE),
    "keys of the last head are one later": (plain, lambda p, h: p + (h == 7), ALIKE),
    "queries of one head go backwards": (lambda p, h: p * (1 - 2.0 * (h == 5)), plain, ALIKE),
    "keys of one head stop at 500": (plain, lambda p, h: p.where(h != 3, p.clamp(max=500)), ALIKE),
    "keys are wrong from 500 to 600": (plain, lambda p, h: p + ((p > 500) & (p < 600)), ALIKE),
    "each head begins elsewhere": (lambda p, h: p + h, lambda p, h: p + h, STILL),
    "one head counts again from 512": (
        lambda p, h: p.where(h != 6, p % 512),
        lambda p, h: p.where(h != 6, p % 512),
        APART,
    ),
    "one head jumps at 700": (
        lambda p, h: p + (h == 2) * (p > 700),
        lambda p, h: p + (h == 2) * (p > 700),
        REACH,
    ),
    "one head is stretched far away": (
        lambda p, h: p.where(h != 1, p.clamp(max=900)),
        lambda p, h: p.where(h != 1, p.clamp(max=900)),
        SHIFT,
    ),
}


@pytest.mark.parametrize("name", ONE_HEAD)
def test_a_mistake_in_any_head_and_at_any_judged_place_is_found(name):
    queries, keys, check = ONE_HEAD[name]
    holds, said = CHECKS[check](subject_of(by_heads(queries, keys)))
    assert holds is False, said


def drifting(start, stated=None):
    """A module that turns every position beyond `start` three percent too little."""
    module = by_heads(*[lambda p, h: p - 0.03 * (p - start).clamp(min=0)] * 2)
    if stated is not None:
        module.max_position_embeddings = stated
    return module


def test_an_error_at_far_positions_is_said_where_it_was_measured():
    holds, said = CHECKS[REACH](subject_of(drifting(400, stated=4096)))
    assert holds is False
    assert re.fullmatch(
        r"right to 256; states 4,096, off by \S+ rad at 512 \(allowed 0\.016\)", said
    )
    holds, said = CHECKS[REACH](subject_of(drifting(400)))
    assert holds is False
    assert re.match(
        r"right to 256; states no limit, judged to 65,536, off by \S+ rad at 512 ", said
    )
    # Wrong beyond what it states only: the error is the largest of those before.
    holds, said = CHECKS[REACH](subject_of(drifting(5000, stated=4096)))
    assert holds is True
    assert re.match(r"right to 4,096; states 4,096, off by \S+ rad up to there ", said)


def test_an_angle_that_is_no_number_is_said_where_it_was_met():
    never_a_number = [lambda p, h: p.where(p < 1500, torch.nan)] * 2
    holds, said = CHECKS[REACH](subject_of(by_heads(*never_a_number)))
    assert holds is None and said == "right to 1,024; states no limit, no number at 2,048"


RIGHT_HEADS = {
    "all alike": plain,
    "each head slower": lambda p, h: p / 2.0**h,
    "heads without positions": lambda p, h: p * (h % 2),
    "only the last head rotates": lambda p, h: p * (h == 7),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", RIGHT_HEADS)
def test_heads_that_differ_on_purpose_are_not_accused(name):
    side = RIGHT_HEADS[name]
    subject = subject_of(by_heads(side, side))
    left_out = {GRAPHS, ACTIVATIONS, HISTORY}  # which read no single head
    found = {check: CHECKS[check](subject) for check in CHECKS if check not in left_out}
    assert not {check: said for check, (holds, said) in found.items() if holds is False}
    assert found[ALIKE][0] and found[SHIFT][0] and found[STILL][0] and found[PAIRS][0]


def test_another_layout_in_the_keys_of_one_head_is_found():
    class OneHead(planted.Turned):
        def forward(self, q, k, positions):
            queries, keys = super().forward(q, k, positions)
            angle = positions[..., None].float() * planted.frequencies(16)
            a, b = k[:, 5].chunk(2, dim=-1)
            halves = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
            return queries, keys.index_copy(1, torch.tensor([5]), torch.cat(halves, -1)[:, None])

    holds, said = CHECKS[ALIKE](subject_of(OneHead()))
    assert holds is False and "other pairs of channels" in said
