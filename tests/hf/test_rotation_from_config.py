"""RoPE.from_config is the rotation that transformers computes from the same config."""

import json
from pathlib import Path

import pytest
import torch

import posenc
from posenc.hf.model_rotation import rotary_frequencies
from tests.hf.attachment.models import INTERLEAVED, build
from tests.hf.attachment.test_deepseek_v4 import model as deepseek_v4  # noqa: F401 - a fixture
from tests.hf_models import transformers

VENDORS = json.loads(
    (Path(__file__).parents[1] / "runtimes/known/vendors.json").read_text(encoding="utf-8")
)


def assert_computes(encoding: posenc.RoPE, inv_freq: torch.Tensor, scale: float) -> None:
    own = encoding.frequencies()
    mine = torch.tensor([float(f) for f in own.inv_freq])
    torch.testing.assert_close(mine, inv_freq.float(), rtol=1e-5, atol=1e-12)
    assert own.attention_factor == pytest.approx(scale, rel=1e-5)


@pytest.mark.parametrize(
    "family", ["llama", "gpt_oss", "gemma3_text", "glm", "cohere", "phi", "phi3", "modernbert"]
)
def test_the_models_own_rotation(family):
    model = build(family)
    running = rotary_frequencies(model)
    for kind, (inv_freq, scale) in running.items():
        for config in (model.config, model.config.to_dict()):
            encoding = posenc.RoPE.from_config(config, kind)
            assert_computes(encoding, inv_freq, scale)
            assert encoding.interleaved == (family in INTERLEAVED)
    if len(running) > 1:
        with pytest.raises(ValueError, match=r"kind must be one of \w+, \w+, got None"):
            posenc.RoPE.from_config(model.config)
    else:
        with pytest.raises(ValueError, match="kind must be one of all, got 'sliding'"):
            posenc.RoPE.from_config(model.config, "sliding")


@pytest.mark.parametrize("family", ["modernbert", "eurobert", "nomic_bert", "jina_embeddings_v3"])
def test_the_rotation_of_encoders_for_embeddings(family):
    """By the config as published, without a size of the heads or the base."""
    if family not in transformers.models.auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(family, **sizes, num_hidden_layers=4)
    running = rotary_frequencies(transformers.AutoModel.from_config(config))
    assert len(running) == (2 if family == "modernbert" else 1)
    for kind, (inv_freq, scale) in running.items():
        assert_computes(posenc.RoPE.from_config(config, kind), inv_freq, scale)


def test_deepseek_v4_rotates_the_last_channels(deepseek_v4):  # noqa: F811
    config = deepseek_v4.config
    for kind, found in rotary_frequencies(deepseek_v4).items():
        if kind == "compress":  # the tiny model has no such layer
            continue
        encoding = posenc.DecoupledRoPE.from_config(config, kind)
        assert_computes(encoding, *found)
        assert encoding.head_dim == 16 and encoding.interleaved
    with pytest.raises(ValueError, match=r"the last channels .* posenc\.DecoupledRoPE\.from"):
        posenc.RoPE.from_config(config)
    llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(ValueError, match=r"the first channels .* posenc\.RoPE\.from_config"):
        posenc.DecoupledRoPE.from_config(llama)


def test_every_vendors_config_is_read_or_refused_with_the_class_to_take():
    classes = (posenc.RoPE, posenc.DecoupledRoPE, posenc.MRoPE)
    for name, config in VENDORS.items():
        kind, errors = None, []
        for cls in (*classes, *classes):
            try:
                cls.from_config(config, kind)
                break
            except ValueError as error:
                errors.append(str(error))
                if "kind must be one of" in errors[-1]:
                    kind = errors[-1].split("one of ")[1].split(",")[0]
        else:
            pytest.fail(f"{name}: {errors}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is unknown. Build it"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
        (
            {
                "model_type": "qwen2_vl",
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e6,
                    "mrope_section": [2, 3, 3],
                },
            },
            r"has an mrope_section: use posenc\.MRoPE",
        ),
    ],
)
def test_what_is_not_known_is_refused(changes, message):
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        posenc.RoPE.from_config(config)


def test_another_reading_than_the_doctors_is_refused(monkeypatch):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    config = {"model_type": "llama", **sizes, "rope_parameters": rope}
    assert posenc.RoPE.from_config(config).scaling == posenc.Linear(4.0)
    monkeypatch.setattr(
        posenc.Linear, "from_rope_parameters", lambda *keys: posenc.DynamicNTK(4.0, 512)
    )
    with pytest.raises(ValueError, match="this config's linear is not computed here"):
        posenc.RoPE.from_config(config)
