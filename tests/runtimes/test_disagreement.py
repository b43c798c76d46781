"""Why a result differs from the one meant, in words."""

from dataclasses import replace

from posenc.runtimes.computed_positions import (
    ComputedPositions,
    LayerRotation,
    name_of_further_rotation,
)
from posenc.runtimes.disagreement import disagreement

MEANT = ComputedPositions(
    rotations={"all": LayerRotation((1.0, 0.01))}, softmax_scale=0.5, without_rotation=(1, 3)
)


def test_layers_are_named_that_rotate_or_rest_against_the_meaning():
    assert disagreement(MEANT, MEANT) == ""
    all_rotate = replace(MEANT, without_rotation=())
    assert disagreement(all_rotate, MEANT) == "the layers [1, 3] rotate, and are not meant to"
    assert disagreement(MEANT, all_rotate) == "the layers [1, 3] do not rotate, and are meant to"


def test_a_number_that_differs_is_told_with_the_one_meant():
    slower = replace(MEANT, rotations={"all": LayerRotation((1.0, 0.005))})
    assert disagreement(slower, MEANT) == (
        "pair 1 rotates by 0.005 radians per position, 0.01 is meant"
    )
    unknown = replace(MEANT, softmax_scale=float("nan"))
    assert disagreement(unknown, MEANT) == "the softmax scale is nan, 0.5 is meant"


def test_a_kind_is_not_taken_for_another_whose_name_begins_alike():
    """Zaya has the kinds hybrid and hybrid_sliding, whose bases differ."""
    slow, fast = LayerRotation((1.0, 0.005)), LayerRotation((1.0, 0.01))
    split = {
        "hybrid": slow,
        name_of_further_rotation("hybrid", 4): fast,
        "hybrid_sliding": fast,
    }
    computed = replace(MEANT, rotations=split)
    assert computed.rotations_of_kind("hybrid") == [slow, fast]
    assert computed.rotations_of_kind("hybrid_sliding") == [fast]
    both = replace(MEANT, rotations={"hybrid": slow, "hybrid_sliding": fast})
    assert disagreement(both, both) == ""
