"""A rotation from a config, from a path, and of a family that posenc does not know."""

import json
import os

import pytest

import posenc

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "rope_theta": 5e5,
    "max_position_embeddings": 512,
}
MINE = {**LLAMA, "model_type": "mymodel"}


def test_a_path_of_the_file_or_of_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    want = repr(posenc.RoPE.from_config(LLAMA))
    for path in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert repr(posenc.RoPE.from_config(path)) == want


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "nothing is downloaded"),
        ("[1]", "expected a JSON object, got a list"),
        ("{", "not valid JSON"),
        ('{"a": 1' + " " * (9 << 20) + "}", "expected at most"),
        ('{"rope_theta": 1, "rope_theta": 2}', "given twice"),
    ],
)
def test_a_file_that_is_no_config(tmp_path, content, said):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        posenc.RoPE.from_config(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="no file"):
        posenc.RoPE.from_config(tmp_path)


@pytest.mark.parametrize("config", [None, 3, [LLAMA], posenc.RoPE, object()])
def test_what_is_no_config(config):
    with pytest.raises(
        TypeError, match=r"^RoPE.from_config: config must be a dict, a config of tr"
    ):
        posenc.RoPE.from_config(config)


def test_an_unknown_family_is_answered_by_the_line_that_builds_it():
    said = (
        r"^RoPE\.from_config: model_type 'mymodel' is unknown\. Build it: "
        r"posenc\.RoPE\(16, rope_theta=500000\.0, interleaved=\.\.\.\)\.$"
    )
    with pytest.raises(ValueError, match=said):
        posenc.RoPE.from_config(MINE)


@pytest.mark.parametrize(
    "config",
    [
        MINE,
        {**MINE, "rope_scaling": None},
        {**MINE, "rope_scaling": {"type": "default"}},
        {
            **MINE,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
        {**MINE, "head_dim": 16, "hidden_size": None},
        {key: value for key, value in MINE.items() if key != "model_type"},
    ],
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_an_unknown_family_with_a_plain_rotation_is_built(config, interleaved):
    rope = posenc.RoPE.from_config(config, interleaved=interleaved)
    assert (rope.head_dim, rope.rope_theta, rope.interleaved) == (16, 5e5, interleaved)
    assert rope.rotary_dim == 16 and rope.scaling is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "It also has rope_scaling, which"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, "also has rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "It also has partial_rotary_factor"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 8}, "kv_lora_rank, qk_rope_head_dim"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"rope_theta": None}, r"rope_theta=\.\.\., interleaved=False"),
        ({"rope_theta": float("nan")}, r"rope_theta=\.\.\."),
        ({"rope_theta": True}, r"rope_theta=\.\.\."),
        ({"hidden_size": 65}, r"posenc\.RoPE\(head_dim, "),
        ({"text_config": {}}, "text_config"),
    ],
)
def test_what_an_unknown_family_leaves_open_is_not_guessed(more, said):
    with pytest.raises(ValueError, match=rf"^RoPE\.from_config: model_type 'mymodel' .*{said}"):
        posenc.RoPE.from_config({**MINE, **more}, interleaved=False)


def test_a_family_that_rotates_nothing():
    with pytest.raises(ValueError, match=r"^RoPE\.from_config: mamba2 has no rotary positions\.$"):
        posenc.RoPE.from_config({**MINE, "model_type": "mamba2"}, interleaved=False)


def test_a_layout_that_contradicts_the_family():
    assert not posenc.RoPE.from_config(LLAMA, interleaved=False).interleaved
    with pytest.raises(ValueError, match="this model has interleaved=False, got True"):
        posenc.RoPE.from_config(LLAMA, interleaved=True)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rope_theta": -1}, "rope_theta must be a finite number above 0, got -1"),
        ({"rope_theta": 0}, "rope_theta must be a finite number above 0, got 0"),
        ({"rope_theta": float("nan")}, "rope_theta must be a finite number above 0, got nan"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -5.0}}, "above 0, got -5.0"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be a dict, such as .* got 'yarn'"),
        ({"rope_parameters": [4.0]}, r"rope_parameters must be a dict, such as .* got \[4.0\]"),
        ({"rope_scaling": {"rope_type": "foo", "factor": 2.0}}, "rope_type 'foo' is not one that"),
        ({"rope_scaling": {"type": "bar", "factor": 2.0}}, "rope_type 'bar' is not one that"),
    ],
)
def test_rotary_keys_that_mean_nothing_are_answered(keys, said):
    with pytest.raises(ValueError, match=rf"^RoPE\.from_config: .*{said}"):
        posenc.RoPE.from_config({**LLAMA, **keys})


SIZES_OF_AUDIO = {"hidden_size": 64, "num_attention_heads": 4}
AUDIO = {
    "whisper": ({"d_model": 80}, "posenc.Sinusoidal(80, order='fairseq')"),
    "wav2vec2-conformer": (
        {"position_embeddings_type": "relative"},
        "posenc.TransformerXL(64, 4, 16, interleaved=True)",
    ),
    "wav2vec2-bert": (
        {"position_embeddings_type": "relative_key", "left_max_position_embeddings": 5},
        "posenc.Shaw(16, max_distance=5, max_future=8, values=False)",
    ),
}


@pytest.mark.parametrize("family", AUDIO)
def test_audio_encoders_without_a_rotation_are_answered_by_the_line_that_builds_them(family):
    keys, line = AUDIO[family]
    with pytest.raises(ValueError, match="has no rotary positions in its attention") as refused:
        posenc.RoPE.from_config({"model_type": family, **SIZES_OF_AUDIO, **keys})
    assert line in str(refused.value)
    assert isinstance(eval(line), posenc.PositionEncoding | posenc.Sinusoidal)


@pytest.mark.parametrize("family", ["wav2vec2-conformer", "wav2vec2-bert"])
def test_a_rotation_before_queries_and_keys_is_said(family):
    config = {"model_type": family, **SIZES_OF_AUDIO, "position_embeddings_type": "rotary"}
    with pytest.raises(ValueError, match="before queries and keys are made of it"):
        posenc.RoPE.from_config(config)
