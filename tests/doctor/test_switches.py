"""Frequencies that change with the length: who says so, and two checkpoints that differ beyond."""

import json

import pytest

from posenc.doctor.command import Options
from posenc.doctor.compare_files import lengths_around_switches
from posenc.runtimes.known import RUNTIMES
from tests.doctor.judging import run

PLAIN = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 300,
    "rms_norm_eps": 1e-05,
}
SHORT, LONG = [1.0] * 8, [1.0, 1.1, 1.4, 2.0, 2.8, 3.5, 3.9, 4.0]


def dynamic(factor):
    return {**PLAIN, "rope_scaling": {"rope_type": "dynamic", "factor": factor}}


def longrope(short, long, original=4096):
    lists = {"short_factor": short, "long_factor": long, "factor": 4.0}
    outer = {"max_position_embeddings": 16384, "original_max_position_embeddings": original}
    return {**PLAIN, **outer, "rope_scaling": {"rope_type": "longrope", **lists}}


@pytest.mark.parametrize(
    "runtime, config, expected",
    [
        ("transformers-4", dynamic(2.0), "length"),
        ("transformers-5", dynamic(2.0), "length"),
        ("mlx-lm", dynamic(2.0), "length"),
        ("vllm", dynamic(2.0), "static"),
        ("transformers-5", longrope(SHORT, LONG), "length"),
        ("transformers-5", longrope(SHORT, LONG, original=16384), "length"),
        ("transformers-4", longrope(SHORT, LONG, original=16384), "length"),
        ("transformers-5", longrope(LONG, LONG), "static"),
        ("transformers-4", PLAIN, "static"),
    ],
)
def test_switch_says_whether_the_numbers_change_at_any_length_admitted(runtime, config, expected):
    emulate = RUNTIMES[runtime]
    got = {n: emulate(config, n).rotations for n in (2, 4096, 4097, 8192, 16385, 40000)}
    if runtime != "vllm":  # which is started for one length
        changes = any(layers != got[2] for layers in got.values())
        assert changes == (expected == "length")
    assert emulate(config, None).switch == expected


SETTINGS = {
    "dynamic": {"factor": 4.0},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "longrope": {
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
}
FAMILIES = {"llama": "LlamaForCausalLM", "phi3": "Phi3ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@pytest.mark.parametrize("original", [1024, 4096, 16384])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_no_runtime_is_called_static_whose_numbers_change(runtime, kind, family, original):
    config = {**PLAIN, "model_type": family, "architectures": [FAMILIES[family]], "head_dim": 16}
    if family == "phi3":
        config["original_max_position_embeddings"] = original
    config["rope_scaling"] = {"rope_type": kind, **SETTINGS[kind]}
    answers = [RUNTIMES[runtime](config, n) for n in (4, 1024, 1025, 4096, 4097, 16385, 40000)]
    computed = [answer for answer in answers if answer.is_known and answer.error is None]
    if any(answer.rotations != computed[0].rotations for answer in computed):
        assert {answer.switch for answer in computed} != {"static"}


def two(tmp_path, first, second, **options):
    paths = []
    for name, config in (("a.json", first), ("b.json", second)):
        (tmp_path / name).write_text(json.dumps(config))
        paths.append(tmp_path / name)
    return run(Options(tuple(paths), **options))


@pytest.mark.parametrize("other", [PLAIN, dynamic(8.0)])
def test_two_that_agree_up_to_the_trained_length_differ_beyond(other, tmp_path):
    """One token beyond, the base is 10000 * (2 * 4097 / 4096 - 1) ** (16 / 14)."""
    said, code = two(tmp_path, dynamic(2.0), other)
    assert code == 1
    assert "at 4097 tokens (the same at 4096)" in said
    assert f"{(10000 * (2 * 4097 / 4096 - 1) ** (16 / 14)) ** (-14 / 16):.7g}" in said
    assert two(tmp_path, other, dynamic(2.0))[1] == 1
    answer, code = two(tmp_path, dynamic(2.0), other, as_json=True)
    assert code == 1 and json.loads(answer)["same"] is False


def test_two_are_the_same_where_all_lengths_are(tmp_path):
    assert two(tmp_path, dynamic(2.0), dynamic(2.0)) == two(tmp_path, dynamic(2.0), dynamic(2.0))
    said, code = two(tmp_path, dynamic(2.0), dynamic(2.0))
    assert code == 0 and said.endswith("mean the same positions.")
    assert two(tmp_path, PLAIN, PLAIN)[1] == 0


def test_one_length_is_judged_alone_where_the_user_names_it(tmp_path):
    said, code = two(tmp_path, dynamic(2.0), PLAIN, length=4096)
    assert code == 0 and said.endswith("mean the same positions at 4096 tokens.")
    assert two(tmp_path, dynamic(2.0), PLAIN, length=8192)[1] == 1
    assert two(tmp_path, PLAIN, PLAIN, length=4096)[0].endswith("mean the same positions.")


def test_two_lists_are_compared_on_both_sides_of_their_switch(tmp_path):
    """At the longest length both have the long list."""
    said, code = two(tmp_path, longrope(SHORT, LONG), longrope([1.5] * 8, LONG))
    assert code == 1 and "at 4096 tokens" in said and "the same at" not in said
    assert two(tmp_path, longrope(SHORT, LONG), longrope(list(SHORT), LONG))[1] == 0
    said, code = two(tmp_path, longrope(SHORT, LONG), longrope(SHORT, LONG, original=2048))
    assert code == 1


def test_nothing_is_tried_for_what_never_changes(tmp_path):
    from posenc.runtimes.files.source import load
    from posenc.runtimes.position_record import record_of

    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    assert lengths_around_switches(record_of(load(tmp_path / "config.json"))) == []


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [(64, None, "window: 64 and all keys"), (None, 64, "window: all keys and 64"), (64, 64, "")],
)
def test_a_window_is_compared_with_none_at_all(first, second, said, tmp_path):
    mistral = PLAIN | {"model_type": "mistral"}
    windowed = [mistral | {"sliding_window": window} for window in (first, second)]
    answer, code = two(tmp_path, *windowed)
    assert code == bool(said) and said in answer
    # A missing key may mean the default of the family, or of the runtime.
    assert two(tmp_path, windowed[0], mistral)[1] == 0
