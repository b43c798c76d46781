"""A LoRA adapter goes with the fixed model as it went with the broken one: by logits."""

import json
from pathlib import Path

import pytest

from posenc.doctor.command import Options
from tests.doctor.cures.test_fold import checkpoint
from tests.doctor.judging import run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

RANK, TOKENS = 3, [[5, 17, 42, 8, 77, 23, 61, 30]]


def write_adapter(model: Path, folder: Path, targets=("q_proj", "v_proj"), **settings) -> Path:
    """Random adapters of some projections, by peft's names."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    weights = safetensors.load_file(model / "model.safetensors")
    tensors = {}
    for name, weight in weights.items():
        if any(f"{target}.weight" in name for target in targets):
            at = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = (RANK, weight.shape[1]), (weight.shape[0], RANK)
            tensors[f"{at}.lora_A.weight"] = 0.2 * torch.randn(a, generator=generator)
            tensors[f"{at}.lora_B.weight"] = 0.2 * torch.randn(b, generator=generator)
    safetensors.save_file(tensors, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    return folder


def merged_logits(model: Path, adapter: Path):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    tensors = safetensors.load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, b in tensors.items():
            if name.endswith("lora_B.weight"):
                a = tensors[name.replace("lora_B", "lora_A")]
                at = name.removeprefix("base_model.model.").removesuffix(".lora_B.weight")
                loaded.get_submodule(at).weight += b @ a
        return loaded(torch.tensor(TOKENS)).logits


NAMED = "transformers-4,transformers-5,vllm,sglang,mlx-lm"


@pytest.mark.parametrize(
    "family, targets",
    [
        ("llama", ("q_proj", "v_proj")),
        ("qwen3", ("q_proj", "v_proj")),
        ("phi3", ("qkv_proj",)),
        ("qwen2", ("v_proj",)),
    ],
)
def test_an_adapter_is_scaled_with_its_model(family, targets, tmp_path):
    base = checkpoint(tmp_path / "base", family)
    adapter = write_adapter(base, tmp_path / "adapter", targets)
    wanted = merged_logits(base, adapter)
    out, mended = tmp_path / "fixed-adapter", tmp_path / "fixed"
    said, _ = run(Options((adapter,), fix=True, like=base, out=out, for_=NAMED))
    run(Options((base,), fix=True, out=mended, for_=NAMED))
    torch.testing.assert_close(merged_logits(mended, out), wanted, rtol=0, atol=2e-4)
    touched = {"llama": 2, "qwen3": 0, "phi3": 2, "qwen2": 0}[family]
    assert f"{touched} tensors of q's B" in said
    if touched:
        off = (merged_logits(mended, adapter) - wanted).abs().max()
        assert off > 1e-2  # the old adapter on the new model is another model


def read_interleaved(q, k, cos, sin, **_):
    """Rotation of channels 2i and 2i + 1, from tables that repeat after half of the head."""
    half = cos.shape[-1] // 2
    turn = torch.complex(cos[..., :half].float(), sin[..., :half].float())[:, None]

    def rotate(x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (half, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)

    return rotate(q), rotate(k)


def test_an_adapter_is_permuted_with_its_model(tmp_path, monkeypatch):
    base = checkpoint(tmp_path / "base", "llama")
    adapter = write_adapter(base, tmp_path / "adapter", ("q_proj", "k_proj"))
    run(Options((base,), out=tmp_path / "model", convert_layout="interleaved"))
    said, _ = run(
        Options((adapter,), like=base, out=tmp_path / "other", convert_layout="interleaved")
    )
    assert "rows of 4 tensors permuted" in said
    for folder, name in ((tmp_path / "model", "model"), (tmp_path / "other", "adapter_model")):
        assert (folder / f"{name}.safetensors").is_file()
    wanted = merged_logits(base, adapter)
    llama = transformers.models.llama.modeling_llama
    with monkeypatch.context() as patch:
        patch.setattr(llama, "apply_rotary_pos_emb", read_interleaved)
        got = merged_logits(tmp_path / "model", tmp_path / "other")
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)
        # The adapter as it was goes with the model as it was alone.
        assert (merged_logits(tmp_path / "model", adapter) - wanted).abs().max() > 1e-2
    other, again = tmp_path / "other", tmp_path / "again"
    run(Options((other,), like=base, out=again, convert_layout="half-split"))
    weights = [(f / "adapter_model.safetensors").read_bytes() for f in (adapter, again, other)]
    assert weights[0] == weights[1] != weights[2]


REFUSED = {
    "--like MODEL": {"fix": True},
    "expected a LoRA adapter, got DoRA": {"fix": True, "settings": {"use_dora": True}},
    "expected a LoRA adapter, got IA3": {"fix": True, "settings": {"peft_type": "IA3"}},
    "its positions are its model's": {"out": None},
    "must be interleaved or half-split": {"convert_layout": "other"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_done_is_said(message, tmp_path):
    base = checkpoint(tmp_path / "base", "llama")
    given = {"out": tmp_path / "out", **REFUSED[message]}
    adapter = write_adapter(base, tmp_path / "adapter", **given.pop("settings", {}))
    like = None if "--like" in message or given["out"] is None else base
    with pytest.raises(ValueError, match=message):
        run(Options((adapter,), like=like, **given))
    assert not (tmp_path / "out").exists()


def test_a_model_whose_fix_folds_nothing_needs_no_other_adapter(tmp_path):
    base = checkpoint(tmp_path / "base", "llama")
    adapter = write_adapter(base, tmp_path / "adapter")
    options = Options((adapter,), fix=True, like=base, out=tmp_path / "out", for_="vllm")
    with pytest.raises(ValueError, match="the adapter fits as it is"):
        run(options)
