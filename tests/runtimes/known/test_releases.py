"""What was recorded of single releases of transformers decides what is said of them."""

import json
from importlib import resources
from itertools import pairwise

import pytest

from posenc.runtimes.known import RUNTIMES, releases
from posenc.runtimes.known.releases import (
    Release,
    is_missing,
    recorded_releases,
    releases_around,
    unread_words,
    version_spoken_of,
)
from tests.doctor.oracles import facts as oracle

ROW = "transformers-5"
CONFIG = {"model_type": "llama", "num_hidden_layers": 2}


@pytest.fixture
def recorded(monkeypatch):
    """Two releases: llama is in both, qwen2 came with the second, and yarn of the first is not as
    posenc knows it."""
    table = (
        Release("5.2.0", frozenset({"llama"}), {"llama": ["yarn"]}),
        Release("5.23.0", frozenset({"llama", "qwen2"}), {}),
        Release("5.24.1", frozenset({"llama", "qwen2", "phi"}), {}),
    )
    monkeypatch.setattr(releases, "recorded_releases", lambda line: table if line == 5 else ())


def known(config: dict, version: str | None = None) -> str:
    return RUNTIMES[ROW](config, None, version).known


def test_a_release_answers_for_itself_and_for_none_between(recorded):
    around = {
        "5.2": ["5.2.0"],
        "5.2.0": ["5.2.0"],
        "5.9": ["5.2.0", "5.23.0"],
        "5.0": ["5.2.0"],
        "5.24": ["5.24.1"],
        "5.30": ["5.24.1"],
    }
    for version, expected in around.items():
        assert [release.version for release in releases_around(ROW, version)] == expected
    assert releases_around("vllm", "0.33") == [] == releases_around("transformers-4", "4.57")


def test_a_family_is_missing_where_no_release_around_has_it(recorded):
    assert is_missing("qwen2", ROW, "5.2")
    assert not is_missing("qwen2", ROW, "5.9")  # it may have come in between
    assert not is_missing("qwen2", ROW, "5.23")
    assert not is_missing("nobody_has_heard_of_it", ROW, "5.2")  # nor do the others have it
    assert known({**CONFIG, "model_type": "qwen2"}, "5.2") == "no model"
    assert known({**CONFIG, "model_type": "qwen2"}) == "yes"


def test_what_a_release_answered_otherwise_is_not_known(recorded):
    yarn = {**CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    for version, expected in (("5.2", "unknown"), ("5.9", "unknown"), ("5.23", "yes")):
        assert known(yarn, version) == expected
        assert known(CONFIG, version) == "yes"
    said = RUNTIMES[ROW](yarn, None, "5.9").error
    assert said is not None and "5.2.0 computes something else than posenc knows" in said
    assert unread_words("llama", ROW, "5.9") == {"5.2.0": ["yarn"]}


def test_a_family_that_is_younger_than_what_was_read_is_spoken_of_in_its_first_release(recorded):
    for name, expected in (("llama", "5.23.0"), ("qwen2", "5.23.0"), ("phi", "5.24.1")):
        assert version_spoken_of(name, ROW, "0") == expected
    assert version_spoken_of("llama", ROW, "5.24") == "5.24"
    assert RUNTIMES[ROW]({**CONFIG, "model_type": "phi"}).version == "5.24.1"


def test_recorded_releases_differ_in_their_classes():
    five = recorded_releases(5)
    versions = [release.version for release in five]
    assert versions[:3] == ["5.2.0", "5.12.1", "5.23.0"]
    for older, newer in pairwise(five):
        assert "llama" in older.model_types and newer.model_types - older.model_types
    assert "axk1" in five[2].model_types - five[1].model_types


@pytest.mark.parametrize(
    ("config", "version"),
    [
        ({"model_type": "minimax_m2", "rotary_dim": 64}, "5.12"),
        ({"model_type": "gpt_neox", "rope_parameters": {"rope_type": "default"}}, "5.2"),
        ({"model_type": "bamba", "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "5.12"),
    ],
)
def test_what_was_mended_later_is_not_said_of_an_earlier_release(config, version):
    assert known(config, version) == "unknown"
    assert known(config, "5.23") == known({"model_type": config["model_type"]}, version) == "yes"


def test_families_of_a_later_release_are_known():
    """Recorded by asking 5.24.0 of each of them."""
    for name, channels in (("exaone", 128), ("sarvam_moe", 64), ("apertus1p5_text", 128)):
        got = RUNTIMES[ROW]({"model_type": name})
        assert got.version == "5.24" and got.known == "yes"
        assert 2 * len(got.rotations["all"].inv_freq) == channels
        assert known({"model_type": name}, "5.12") == "no model"
    text = {"model_type": "llama", "rope_theta": 5e5, "head_dim": 64}
    wrapped = {"model_type": "granite_speech", "text_config": text}
    assert RUNTIMES[ROW](wrapped).rotations == RUNTIMES[ROW](text).rotations
    assert RUNTIMES["vllm"](wrapped).known == "unknown"  # it has code of its own for it


def test_recording_one_release_keeps_the_others(tmp_path, monkeypatch):
    kept = [*recorded_releases(4), *recorded_releases(5)]
    path = tmp_path / "releases.json"
    monkeypatch.setattr(oracle, "RELEASES", path)
    oracle.write_releases(reversed(kept))
    packaged = resources.files("posenc.runtimes.known").joinpath("releases.json")
    assert path.read_text(encoding="utf-8") == packaged.read_text(encoding="utf-8")
    recorded = {release.version for release in kept}
    assert recorded >= {"5.2.0", "5.12.1", "5.23.0", "5.24.0"}
    later = kept[-1].model_types - {"llama"} | {"new"}
    oracle.write_releases([*kept, Release("5.99.0", later, {"qwen2": ["yarn"]})])
    entry = json.loads(path.read_text(encoding="utf-8"))["5.99.0"]
    assert entry == {"came": ["new"], "went": ["llama"], "unread": {"qwen2": ["yarn"]}}


def test_a_language_model_is_asked_inside_of_a_class_that_takes_no_other():
    classes = {
        "any_outer": {"text": "qwen2", "text_key": "text_config", "any": True},
        "outer": {"text": "qwen2", "text_key": "text_config", "any": False},
        "qwen2": {"keys": ["vocab_size"]},
    }
    inner = {"model_type": "qwen2", "hidden_size": 64}
    outer = {"model_type": "outer", "text_config": inner}
    assert oracle.in_outer_class(inner, classes) == outer
    assert oracle.in_outer_class({"model_type": "llama"}, classes) == {"model_type": "llama"}
