"""What a config means where it says a thing twice."""

from posenc.runtimes.meaning import differing_keys


def test_a_null_type_is_no_type():
    older = {"type": "linear", "rope_type": None, "factor": 2.0}
    assert differing_keys(older, {"rope_type": "linear", "factor": 2.0}, {}) == []
    assert differing_keys(older, {"rope_type": "yarn", "factor": 2.0}, {}) == ["rope_type"]
