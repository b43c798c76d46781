"""A temperature folded into q's weights gives the same logits, and touches nothing else."""

import json
from pathlib import Path

import numpy as np
import pytest

from posenc.frequencies import float64_formulas
from posenc.runtimes.config_model import model_of
from posenc.runtimes.files.source import load
from posenc.runtimes.known import RUNTIMES
from posenc.runtimes.writers.fold_temperature import fold_multiplier, why_not_foldable
from posenc.runtimes.writers.weight_rows import decode_floats, encode_floats, read_entries
from tests.doctor.judging import fix
from tests.doctor.threads import BASE, EIGHT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

CARRIER = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": EIGHT,
    "long_factor": EIGHT,
    "factor": 1.0,
    "original_max_position_embeddings": 4096,
    "attention_factor": 1.3,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "attention_factor": 1.3,
    "original_max_position_embeddings": 1024,
}
"""vLLM and SGLang have no longrope for interleaved pairs."""
TINY = {**BASE, "num_hidden_layers": 2, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "llama": {},
    "llama-bias": {"attention_bias": True},
    "qwen2": {},
    "qwen3": {},
    "glm4": {"partial_rotary_factor": 0.5, "pad_token_id": 0},
    "olmo2": {},
    "phi3": {"pad_token_id": 0, "head_dim": None},
}


def checkpoint(folder: Path, family: str, dtype: str = "float32", seed: int = 0) -> Path:
    """A folder with random weights of a family, carrying a temperature of 1.3."""
    torch.manual_seed(seed)
    changes = FAMILIES[family]
    name = family.partition("-")[0]
    raw = {k: v for k, v in {**TINY, "model_type": name, **changes}.items() if v is not None}
    config = transformers.AutoConfig.for_model(**raw)
    config.architectures = None
    config.rope_parameters = dict(YARN if name == "glm4" else CARRIER)
    config.rope_parameters["partial_rotary_factor"] = changes.get("partial_rotary_factor", 1.0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def logits(folder: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokens = torch.arange(3, 40)[None]
    with torch.inference_mode():
        return model.eval()(tokens).logits


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_folded_weights_give_the_same_logits(family, tmp_path):
    source = checkpoint(tmp_path / "model", family)
    named = tuple(r for r in RUNTIMES if r != "llama.cpp")
    if family == "glm4":
        named = ("transformers-4", "transformers-5", "vllm", "sglang", "llama.cpp")
    if family == "olmo2":  # whose class in transformers 4 refuses every factor but a linear one
        said, code = fix(load(source / "config.json"), tmp_path / "all", named)
        assert code == 1 and "not mended for transformers-4: refuses the copy: ValueError" in said
        named = named[1:]
    text, code = fix(load(source / "config.json"), tmp_path / "out", named)
    factor = 1.69 / (float64_formulas.yarn_attention_factor(4.0) ** 2 if family == "glm4" else 1)
    assert code == 0 and f"rotated rows * {factor:.7g}" in text, text
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_parameters"].get("attention_factor", 1.0) == 1.0
    before, after = logits(source), logits(tmp_path / "out")
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    cold = json.loads((source / "config.json").read_text())
    cold["rope_parameters"]["attention_factor"] = 1.0
    (source / "config.json").write_text(json.dumps(cold))
    assert (logits(source) - before).abs().max() > 1e-3  # the temperature matters here


def test_only_rotated_rows_of_q_change(tmp_path):
    folder = checkpoint(tmp_path / "model", "glm4")
    path = folder / "model.safetensors"
    before = {e.name: path.read_bytes()[e.start : e.stop] for e in read_entries(path)}
    changed = fold_multiplier(
        folder, model_of(json.loads((folder / "config.json").read_text())), 1.3
    )
    assert len(changed) == 2 and all("q_proj.weight" in name for name in changed)
    for entry in read_entries(path):
        data = path.read_bytes()[entry.start : entry.stop]
        if entry.name not in changed:
            assert data == before[entry.name]
            continue
        old = decode_floats(before[entry.name], entry.dtype).reshape(4, 16, -1)
        new = decode_floats(data, entry.dtype).reshape(4, 16, -1)
        np.testing.assert_allclose(new[:, :8], old[:, :8] * 1.69, rtol=1e-6)
        np.testing.assert_array_equal(new[:, 8:], old[:, 8:])


def test_bfloat16_is_rounded_to_nearest(tmp_path):
    folder = checkpoint(tmp_path / "model", "llama", "bfloat16")
    path = folder / "model.safetensors"
    name = "model.layers.0.self_attn.q_proj.weight"
    (entry,) = [e for e in read_entries(path) if e.name == name]
    old = decode_floats(path.read_bytes()[entry.start : entry.stop], "BF16")
    fold_multiplier(folder, model_of(TINY), 1.3)
    new = decode_floats(path.read_bytes()[entry.start : entry.stop], "BF16")
    wanted = torch.tensor(old * 1.69).to(torch.bfloat16).double().numpy()
    np.testing.assert_array_equal(new, wanted)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_a_dtype_comes_back_as_it_was(dtype):
    values = np.array([0.0, 1.0, -2.5, 3.140625, 2.0**-10])
    np.testing.assert_array_equal(decode_floats(encode_floats(values, dtype), dtype), values)


def test_what_cannot_be_folded_says_why(tmp_path):
    folder = checkpoint(tmp_path / "model", "llama")
    raw = json.loads((folder / "config.json").read_text())
    assert why_not_foldable(folder, model_of(raw)) == ""
    quantised = {**raw, "quantization_config": {"bits": 4}}
    assert "quantised" in why_not_foldable(folder, model_of(quantised))
    assert "no query weights of the layers [2]" in why_not_foldable(
        folder, model_of({**raw, "num_hidden_layers": 3})
    )
    assert "rows" in why_not_foldable(folder, model_of({**raw, "num_attention_heads": 8}))
    assert "no safetensors" in why_not_foldable(tmp_path, model_of(raw))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "damaged" in why_not_foldable(folder, model_of(raw))
