"""A place that a class acts at and does not claim would never be called: the class is refused."""

import pytest

import posenc
from posenc import Claims

NOWHERE = Claims(source="an example")


@pytest.mark.parametrize(
    ("method", "places"),
    [
        ("embed", "1"),
        ("transform", "2"),
        ("term", "3 or 4"),
        ("transform_values", "4"),
        ("transform_output", "4"),
    ],
)
def test_a_place_that_is_not_claimed_is_refused(method, places):
    own = {"claims": NOWHERE, method: lambda self, *given: None}
    message = f"Mine overrides {method} without claiming place {places}: it would never be called"
    with pytest.raises(TypeError, match=message):
        type("Mine", (posenc.PositionEncoding,), own)
    mixin = type("Mixin", (), {method: own[method]})
    with pytest.raises(TypeError, match=message):
        type("Mine", (mixin, posenc.PositionEncoding), {"claims": NOWHERE})


def test_claims_may_not_leave_out_what_is_inherited():
    with pytest.raises(TypeError, match="overrides term without claiming place 3 or 4"):
        type("Mine", (posenc.ALiBi,), {"claims": Claims(places=(2,), source="an example")})
    assert type("Mine", (posenc.ALiBi,), {})(2).claims.places == (3,)
