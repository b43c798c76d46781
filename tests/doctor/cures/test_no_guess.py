"""--fix writes no guess: it refuses what the file does not say, and marks what it takes."""

import json

import pytest

from tests.doctor.threads import BASE

LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LAYERS = ["sliding_attention", "full_attention"]
UNTYPED = [
    {"factor": 2.0},
    {"factor": 2.0, "rope_type": None},
    {"factor": "2.0"},
    {"factor": 4, "original_max_position_embeddings": 1024},
    {"factor": 4, "beta_fast": 32},
    {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
    {"factor": 4, **LISTS},
    LISTS,
    {"alpha": 4.0},
    {"full_attention": {"factor": 2.0, "rope_theta": 1e4}},
]


@pytest.fixture
def fixed(tmp_path, call):
    """Return what --fix prints for a config, and whether a copy is there."""

    def fix(**keys):
        path, out = tmp_path / "config.json", tmp_path / "out"
        path.write_text(json.dumps({**BASE, "rope_theta": 10000.0, **keys}))
        code, said, told = call("doctor", path, "--fix", "--out", out)
        return code, said + told, out.exists(), call("doctor", path)[1]

    return fix


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rope", UNTYPED, ids=str)
def test_no_type_is_guessed(rope, name, fixed):
    code, told, written, judged = fixed(**{name: rope})
    assert code == 2 and not written and "rope_type" in told and "Write the" in told
    assert "writes a mended copy" not in judged or "factor" not in rope


@pytest.mark.parametrize("rope", [{"factor": 1.0}, {"factor": None}], ids=str)
def test_nothing_that_stretches_needs_no_type(rope, fixed):
    code, told, written, _ = fixed(rope_scaling=rope)
    assert code == 0 and written, told


def test_two_original_lengths_are_not_made_one(fixed):
    code, told, written, _ = fixed(rope_scaling=YARN, original_max_position_embeddings=2048)
    assert code == 2 and not written and "2048 at the top level and 1024 in rope_scaling" in told
    assert fixed(rope_scaling=YARN, original_max_position_embeddings=1024)[2]


@pytest.mark.parametrize(
    "rope, words",
    [
        ({**YARN, "factor": "4"}, "factor is the string '4'; 4 is taken"),
        ({**YARN, "attn_factor": 0.8}, "attn_factor 0.8 is taken as a multiple"),
        ({"type": "ntk", "factor": 4.0}, "type 'ntk' is taken as a base of 48760.5"),
        (
            {"rope_type": "yarn", "factor": 4.0},
            "original_max_position_embeddings is missing; 4096 is taken",
        ),
    ],
)
def test_what_is_taken_is_said_by_the_fix_as_by_the_judge(rope, words, fixed):
    _, told, written, judged = fixed(rope_scaling=rope)
    assert written and f"assumed: {words}" in told and f"assumed: {words}" in judged
    assert "assumed" not in fixed(rope_scaling=YARN)[3]
