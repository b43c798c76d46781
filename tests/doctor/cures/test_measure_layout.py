"""Interleaved or half-split: permuted rows, in every kind of tensor, and measured."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from posenc.doctor.command import Options
from posenc.doctor.cures.measure_layout import (
    FEWEST_TOKENS,
    LAYOUT_NAMES,
    measure_layout,
    write_converted_copy,
)
from posenc.runtimes.config_model import model_of
from posenc.runtimes.writers.fold_temperature import (
    FAMILIES_ADDING_ONE,
    fold_multiplier,
    why_not_foldable,
)
from posenc.runtimes.writers.weight_rows import permute_folder, rotary_dim, row_permutation
from tests.doctor.cures.test_fold import FAMILIES, checkpoint
from tests.doctor.judging import run
from tests.hf_models import transformers

LLAMA2XS = Path(__file__).parents[3] / ".." / "shared" / "checkpoints" / "llama2xs"
TEXT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park "
    "with her friends. One day, she saw a big red ball under a tree. She wanted to play with it, "
    "so she ran to the tree and picked it up. Her friend Tom came and asked if he could play too. "
    "Lily said yes and they played together all day long. They were very happy."
)


def rotate(x, angle, interleaved):
    """x (heads, dim) turned by angle (dim/2) in one of the layouts: written out, no shared code."""
    out = x.copy()
    pairs = x.shape[-1] // 2
    for i in range(pairs):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        out[:, a] = x[:, a] * np.cos(angle[i]) - x[:, b] * np.sin(angle[i])
        out[:, b] = x[:, b] * np.cos(angle[i]) + x[:, a] * np.sin(angle[i])
    return out


def scores(weights, heads, kv_heads, rotated, interleaved, norms=None):
    """q.k of each query head at two positions, by the loops of a textbook."""
    x = np.linspace(-1, 1, weights["q"].shape[1])
    y = np.cos(np.arange(weights["q"].shape[1]))
    angle = np.arange(1, rotated // 2 + 1) * 0.37
    q = (weights["q"] @ x).reshape(heads, -1)
    k = (weights["k"] @ y).reshape(kv_heads, -1)
    if norms is not None:
        q, k = q * norms["q"], k * norms["k"]
    q[:, :rotated] = rotate(q[:, :rotated], 5 * angle, interleaved)
    k[:, :rotated] = rotate(k[:, :rotated], 2 * angle, interleaved)
    return np.einsum("hd,hd->h", q, np.repeat(k, heads // kv_heads, axis=0))


@pytest.mark.parametrize("family", ["llama", "glm4", "qwen3", "phi3"])
@pytest.mark.parametrize("to_interleaved", [True, False])
def test_scores_stay_the_same_when_the_reader_changes_too(family, to_interleaved, tmp_path):
    folder = checkpoint(tmp_path / "model", family)
    model = model_of(json.loads((folder / "config.json").read_text()))
    before = load_file(folder / "model.safetensors")
    changed = permute_folder(folder, model, to_interleaved=to_interleaved)
    after = load_file(folder / "model.safetensors")
    assert set(changed) == {n for n in before if not np.array_equal(before[n], after[n])}

    def parts(tensors):
        at = "model.layers.0.self_attn."
        if family == "phi3":
            packed = tensors[f"{at}qkv_proj.weight"]
            return {"q": packed[:64], "k": packed[64:96]}, None
        norms = None
        if family == "qwen3":
            norms = {s: tensors[f"{at}{s}_norm.weight"].astype(np.float64) for s in "qk"}
        return {s: tensors[f"{at}{s}_proj.weight"].astype(np.float64) for s in "qk"}, norms

    rotated = rotary_dim(model)
    old = scores(*[parts(before)[0], 4, 2, rotated, not to_interleaved, parts(before)[1]])
    new = scores(*[parts(after)[0], 4, 2, rotated, to_interleaved, parts(after)[1]])
    wrong = scores(*[parts(after)[0], 4, 2, rotated, not to_interleaved, parts(after)[1]])
    np.testing.assert_allclose(new, old, rtol=1e-6)
    assert abs(wrong - old).max() > 1e-3


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_there_and_back_gives_the_same_bytes(family, tmp_path):
    folder = checkpoint(tmp_path / "model", family, "bfloat16")
    path = folder / "model.safetensors"
    model = model_of(json.loads((folder / "config.json").read_text()))
    before = path.read_bytes()
    permute_folder(folder, model, to_interleaved=True)
    assert path.read_bytes() != before
    permute_folder(folder, model, to_interleaved=False)
    assert path.read_bytes() == before


def test_the_order_is_the_textbooks():
    assert row_permutation(8, to_interleaved=False) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert row_permutation(8, to_interleaved=True) == [0, 4, 1, 5, 2, 6, 3, 7]


def test_grouped_keys_are_permuted_by_their_own_heads(tmp_path):
    """Permuting k with the count of query heads is the bug on record."""
    folder = checkpoint(tmp_path / "model", "llama")
    name = "model.layers.0.self_attn.k_proj.weight"
    before = load_file(folder / "model.safetensors")[name]
    permute_folder(
        folder, model_of(json.loads((folder / "config.json").read_text())), to_interleaved=True
    )
    after = load_file(folder / "model.safetensors")[name]
    np.testing.assert_array_equal(after[1], before[8])  # first head, second row
    np.testing.assert_array_equal(after[17], before[24])  # second head of two


def test_an_adapter_has_only_its_b_rows_permuted(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
    }
    at = "base_model.model.model.layers.0.self_attn."
    rng = np.random.default_rng(0)
    tensors = {
        f"{at}q_proj.lora_A.weight": rng.normal(size=(4, 64)),
        f"{at}q_proj.lora_B.weight": rng.normal(size=(64, 4)),
        f"{at}v_proj.lora_B.weight": rng.normal(size=(32, 4)),
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    changed = permute_folder(tmp_path, model_of(config), to_interleaved=True)
    assert changed == [f"{at}q_proj.lora_B.weight"]
    after = load_file(tmp_path / "adapter_model.safetensors")
    wanted = tensors[changed[0]].reshape(4, 16, 4)[:, row_permutation(16, to_interleaved=True)]
    np.testing.assert_array_equal(after[changed[0]].reshape(4, 16, 4), wanted)


def test_what_cannot_be_converted_is_refused(tmp_path):
    folder = checkpoint(tmp_path / "model", "llama")
    with pytest.raises(ValueError, match="must be interleaved or half-split"):
        write_converted_copy(folder, tmp_path / "out", "halves")
    with pytest.raises(ValueError, match="needs a model's folder"):
        write_converted_copy(folder / "config.json", tmp_path / "out", "interleaved")
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = {"bits": 4}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="quantised"):
        write_converted_copy(folder, tmp_path / "out", "interleaved")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not LLAMA2XS.exists(), reason="no trained checkpoint beside the repository")
class TestMeasured:
    @pytest.fixture
    def text(self, tmp_path):
        path = tmp_path / "text.txt"
        path.write_text(TEXT)
        return path

    def test_a_right_and_a_wrong_layout_are_distinguished(self, tmp_path, text):
        verdict = measure_layout(LLAMA2XS, text)
        assert (verdict.expected, verdict.found, verdict.mismatch) == ("half-split",) * 2 + (False,)
        assert verdict.losses[0] < 2 and verdict.losses[1] > 4
        write_converted_copy(LLAMA2XS, tmp_path / "other", "interleaved")
        said, code = run(Options((tmp_path / "other",), layout=True, text=text))
        assert code == 1 and said.startswith("E PD036") and "interleaved" in said
        write_converted_copy(tmp_path / "other", tmp_path / "back", "half-split")
        original = (LLAMA2XS / "model.safetensors").read_bytes()
        assert (tmp_path / "back" / "model.safetensors").read_bytes() == original

    def test_too_short_a_text_is_unknown(self, tmp_path, text):
        text.write_text("Once upon a time")
        verdict = measure_layout(LLAMA2XS, text)
        assert verdict.found is None and str(FEWEST_TOKENS) in verdict.why
        said, code = run(Options((LLAMA2XS,), layout=True, text=text, as_json=True))
        assert code == 0 and json.loads(said)["found"] is None

    def test_an_untrained_model_is_unknown(self, tmp_path, text):
        folder = checkpoint(tmp_path / "model", "llama")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(LLAMA2XS / name, folder / name)
        raw = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        embed = tensors["model.embed_tokens.weight"]
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = np.resize(embed * 0.01, (512, 64))
        raw["vocab_size"] = 512
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(raw))
        verdict = measure_layout(folder, text)
        assert verdict.found is None and "do not decide" in verdict.why


SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def saved_model(folder, family, **sizes):
    """A random model whose norms differ from channel to channel."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize("q_lora_rank", [None, 16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_a_copy_in_the_other_layout_says_so_where_the_family_has_a_key(
    q_lora_rank, interleaved, tmp_path
):
    sizes = {**LATENT, "q_lora_rank": q_lora_rank, "rope_interleave": interleaved}
    model = saved_model(tmp_path / "model", "deepseek_v3", **sizes)
    wanted = LAYOUT_NAMES[not interleaved]
    options = Options((tmp_path / "model",), convert_layout=wanted, out=tmp_path / "copy")
    said, code = run(options)
    assert code == 0 and said.endswith("and rope_interleave in config.json says so")
    copy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy").eval()
    assert copy.config.rope_interleave is not interleaved
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(copy(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_copy_that_no_key_describes_says_who_reads_it(tmp_path):
    saved_model(tmp_path / "model", "llama", num_key_value_heads=2)
    folder = tmp_path / "model"
    said, code = run(Options((folder,), convert_layout="interleaved", out=tmp_path / "copy"))
    assert code == 0 and "the family's code expects half-split rows" in said


def in_pairs(q, k, cos, sin, *_, **__):
    """What half-split families compute, for rows whose neighbouring channels form a pair."""
    rotated = cos.shape[-1]
    cos, sin = (t[:, None, :, : rotated // 2] for t in (cos, sin))
    turned = []
    for x in (q, k):
        a, b = x[..., 0:rotated:2], x[..., 1:rotated:2]
        first = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        turned.append(torch.cat([first, x[..., rotated:]], -1))
    return tuple(turned)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "hunyuan_v1_dense", "qwen3_next"])
def test_norms_and_gates_stay_with_their_rows(family, tmp_path, monkeypatch):
    """HunYuan's norms stand behind the rotation; Qwen3-Next rotates a quarter of a query, beside
    its gate."""
    sizes = GATED if family == "qwen3_next" else {"head_dim": 16, "num_key_value_heads": 2}
    sizes = {name: value for name, value in sizes.items() if name != "rope_parameters"}
    model = saved_model(tmp_path / "model", family, **sizes)
    write_converted_copy(tmp_path / "model", tmp_path / "copy", "interleaved")
    copy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy").eval()
    ids = torch.arange(3, 15)[None]
    wanted = model(ids).logits
    monkeypatch.setattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", in_pairs)
    torch.testing.assert_close(copy(ids).logits, wanted, rtol=1e-4, atol=1e-4)
    assert (model(ids).logits - wanted).abs().max() > 1e-2  # unconverted rows


def test_a_norm_of_q_that_is_not_known_is_refused(tmp_path):
    saved_model(tmp_path / "model", "stablelm", num_key_value_heads=2, qk_layernorm=True)
    with pytest.raises(ValueError, match="this normalisation of q or k is not known"):
        write_converted_copy(tmp_path / "model", tmp_path / "copy", "interleaved")
    assert not (tmp_path / "copy").exists()


def test_no_temperature_is_folded_where_a_norm_undoes_it(tmp_path):
    saved_model(tmp_path / "after", "hunyuan_v1_dense", head_dim=16, num_key_value_heads=2)
    saved_model(tmp_path / "apart", "stablelm", num_key_value_heads=2, qk_layernorm=True)
    for name, said in (("after", "has no effect in this model"), ("apart", "is not known")):
        model = model_of(json.loads((tmp_path / name / "config.json").read_text()))
        assert said in why_not_foldable(tmp_path / name, model)


GATED = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    "head_dim": 16,
    "num_key_value_heads": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@torch.no_grad()
def test_a_temperature_is_folded_beside_the_gate_of_a_query(tmp_path):
    """The norm of Qwen3-Next multiplies by 1 + weight, and q_proj has the gate, too."""
    model = saved_model(tmp_path / "model", "qwen3_next", **GATED)
    ids = torch.arange(3, 15)[None]
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            layer.self_attn.scaling *= 1.3**2
    wanted = model(ids).logits
    read = model_of(json.loads((tmp_path / "model/config.json").read_text()))
    assert fold_multiplier(tmp_path / "model", read, 1.3)
    folded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    torch.testing.assert_close(folded(ids).logits, wanted, rtol=1e-4, atol=1e-4)


def test_which_norms_of_q_multiply_by_one_plus_their_weight():
    """Read in each family's file: the class of q_norm."""
    read = 0
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        norm = re.search(r"self\.q_(?:layer)?norm = (\w+)\(", source)
        code = norm and re.search(rf"^class {norm[1]}\(.*?(?=^class )", source, re.S | re.M)
        if not code:
            continue
        one_plus = re.search(r"1(\.0)? \+ self\.weight|self\.weight(\.float\(\))? \+ 1", code[0])
        assert bool(one_plus) == (path.parent.name in FAMILIES_ADDING_ONE), path
        read += 1
    assert read > 20
