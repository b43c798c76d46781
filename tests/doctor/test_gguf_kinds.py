"""GGUF files whose layers rotate in two ways: what libllama reads of them, and edits."""

import json

import pytest

from posenc.doctor.command import Options
from posenc.frequencies import float64_formulas
from posenc.runtimes.files.gguf_metadata import Metadata, read_metadata
from posenc.runtimes.known.llama_cpp import compute_from_metadata
from tests.doctor.judging import run
from tests.doctor.test_gguf import gguf, write
from tests.doctor.threads import BASE, EIGHT, GEMMA3

assert gguf
FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def config(path, full, sliding=PLAIN):
    nested = {FULL: {"rope_theta": 1000000.0, **full}, SLIDING: sliding}
    path.write_text(json.dumps({**BASE, **GEMMA3, "rope_parameters": nested}))
    return path


def metadata(architecture, **more):
    return Metadata(
        architecture,
        context_length=4096,
        dimension_count=16,
        head_dim=16,
        freq_base=1e6,
        sliding_window=256,
        **more,
    )


@pytest.mark.parametrize(
    "architecture, base, factor",
    [("gemma3", 10000.0, 1.0), ("olmo2", 1e6, 1.0), ("gpt-oss", 1e6, 8.0), ("llama", None, None)],
)
def test_windowed_layers_have_their_architectures_base_and_scale(architecture, base, factor):
    """gemma3.cpp: 10000 and 1; olmo2.cpp: the full base and 1; openai-moe.cpp: both of the full."""
    meta = metadata(architecture, scaling_factor=8.0, attn_factor=1.2)
    layers = compute_from_metadata(meta, None).rotations
    full = layers.get(FULL) or layers["all"]
    assert full.inv_freq == pytest.approx(
        [f / 8 for f in float64_formulas.unscaled_frequencies(16, 1e6)]
    )
    if base is None or (base, factor) == (1e6, 8.0):
        assert set(layers) == {"all"}
        return
    assert layers[SLIDING].inv_freq == pytest.approx(
        [f / factor for f in float64_formulas.unscaled_frequencies(16, base)]
    )
    assert layers[SLIDING].multiplier == (1.0 if architecture == "olmo2" else 1.2)


def test_yarns_temperature_stays_with_the_full_layers():
    meta = metadata(
        "gemma3", scaling_type="yarn", scaling_factor=4.0, original_length=1024.0, attn_factor=1.1
    )
    layers = compute_from_metadata(meta, None).rotations
    assert layers[FULL].multiplier == pytest.approx(
        1.1 * float64_formulas.yarn_attention_factor(4.0)
    )
    assert layers[SLIDING].multiplier == pytest.approx(1.1)


def test_a_file_is_given_the_positions_of_a_config_with_two_kinds(tmp_path):
    like = config(tmp_path / "config.json", {"rope_type": "linear", "factor": 8.0})
    path = write(tmp_path / "a.gguf", "gemma3", freq_base=10000.0)
    out = tmp_path / "b.gguf"
    text, code = run(Options((path,), fix=True, out=out, like=like))
    assert code == 0
    assert "gemma3.rope.scaling.type: linear" in text
    meta = read_metadata(out)
    assert (meta.freq_base, meta.freq_base_swa, meta.scaling_factor) == (1e6, 10000.0, 8.0)
    layers = compute_from_metadata(meta, None).rotations
    assert layers[FULL].inv_freq == pytest.approx(
        [f / 8 for f in float64_formulas.unscaled_frequencies(16, 1e6)]
    )
    assert layers[SLIDING].inv_freq == pytest.approx(
        float64_formulas.unscaled_frequencies(16, 10000.0)
    )
    assert run(Options((out, like)))[1] == 0


CANNOT = {
    "loads no rope_freqs": (
        {
            "rope_type": "longrope",
            "short_factor": EIGHT,
            "long_factor": EIGHT,
            "factor": 1.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.0,
        },
        PLAIN,
    ),
    "sliding_attention: pair 0": (
        {"rope_type": "default"},
        {**PLAIN, "rope_type": "linear", "factor": 2.0},
    ),
}


@pytest.mark.parametrize("message", CANNOT)
def test_what_no_key_says_is_refused(message, tmp_path):
    full, sliding = CANNOT[message]
    like = config(tmp_path / "config.json", full, sliding)
    path = write(tmp_path / "a.gguf", "gemma3", freq_base=1e6)
    with pytest.raises(ValueError, match=message):
        run(Options((path,), fix=True, out=tmp_path / "b.gguf", like=like))
    assert not (tmp_path / "b.gguf").exists()
