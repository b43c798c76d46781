"""Decoders written as Hugging Face Llama folders, held to transformers' own Llama."""

import dataclasses
import json

import pytest
import torch

import posenc
from posenc.hf.checkpoint.decoder_as_llama import export_llama
from posenc.models import Decoder, DecoderConfig

transformers = pytest.importorskip("transformers")

CONFIG = DecoderConfig(vocab_size=61, embed_dim=32, num_layers=3, num_heads=4)
VARIANTS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1},
    "tied": {"tie_embeddings": True},
    "biased": {"attention_bias": True},
    "wide heads": {"head_dim": 16, "num_kv_heads": 2, "tie_embeddings": True, "norm_eps": 1e-5},
}


def decoder(config: DecoderConfig = CONFIG, name: str = "rope", **options) -> Decoder:
    torch.manual_seed(0)
    model = Decoder(config, posenc.create(name, config.shape(64), **options)).eval()
    for parameter in model.parameters():  # no gain at one, no bias at zero
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(61, (2, 47), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_gives_the_same_logits(variant, tmp_path):
    config = dataclasses.replace(CONFIG, **VARIANTS[variant])
    model = decoder(config, rope_theta=5000.0)
    export_llama(model, tmp_path / "out", max_positions=64)
    theirs, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, local_files_only=True
    )
    assert not (info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
    ids = tokens()
    ours, logits = model(ids), theirs.eval()(ids).logits
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, logits, rtol=0, atol=1e-5)
    shifted = torch.arange(47)[None] + 1000
    torch.testing.assert_close(
        model(ids, shifted), theirs(ids, position_ids=shifted).logits, rtol=0, atol=1e-4
    )


def test_the_config_says_what_was_asked(tmp_path):
    model = decoder(rope_theta=1234.5)
    export_llama(model, tmp_path, max_positions=64, stop_token=7)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 1234.5}
    assert written["rope_theta"] == 1234.5  # where transformers 4 and mlx-lm look for it
    assert "rope_scaling" not in written
    assert (written["max_position_embeddings"], written["eos_token_id"]) == (64, 7)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_every_runtime_reads_the_base_of_the_config(tmp_path, call):
    export_llama(decoder(rope_theta=5e5), tmp_path / "model", max_positions=64)
    code, out, _ = call("doctor", tmp_path / "model", "--ask", "none")
    assert code == 0 and "PD001" not in out


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: decoder(name="alibi"), "this model has ALiBi"),
        (lambda: decoder(name="nope"), "this model has PositionEncoding"),
        (lambda: decoder(interleaved=True), r"RoPE\(interleaved=True\)"),
        (lambda: decoder(rotary_dim=4), "rotary_dim=4 of 8"),
        (lambda: decoder(scaling="linear", factor=2.0), r"Linear\(factor=2.0\)"),
        (lambda: decoder(dataclasses.replace(CONFIG, norm="layer")), "norm='rms' only"),
        (lambda: decoder(dataclasses.replace(CONFIG, norm_position="post")), "norm_position='pre'"),
        (lambda: decoder(dataclasses.replace(CONFIG, final_norm=False)), "final_norm=True"),
        (lambda: decoder(dataclasses.replace(CONFIG, ffn_bias=True)), "ffn_bias=False"),
        (lambda: decoder(dataclasses.replace(CONFIG, activation="relu")), "activation='swiglu'"),
        (lambda: decoder(dataclasses.replace(CONFIG, qk_norm=True)), "qk_norm=False only"),
        (
            lambda: decoder(dataclasses.replace(CONFIG, layer_windows=(8,) * 3)),
            "layer_windows=None",
        ),
        (lambda: decoder(dataclasses.replace(CONFIG, output_bias=True)), "output_bias=True"),
    ],
)
def test_what_llama_cannot_express_is_refused_and_nothing_written(model, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_llama(model(), tmp_path / "out", max_positions=64)
    assert not (tmp_path / "out").exists()
