"""The emulator of transformers 5 against the installed one, on random rotary keys."""

import copy
import importlib
import random

import pytest

from posenc.runtimes.known import RUNTIMES
from tests.doctor.threads import BASE

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

FAMILIES = {
    "llama": ("llama", "Llama"),
    "qwen2": ("qwen2", "Qwen2"),
    "phi3": ("phi3", "Phi3"),
    "gemma3_text": ("gemma3", "Gemma3"),
    "olmo3": ("olmo3", "Olmo3"),
    "glm4": ("glm4", "Glm4"),
    "gpt_neox": ("gpt_neox", "GPTNeoX"),
    "gpt_oss": ("gpt_oss", "GptOss"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3"),
    "stablelm": ("stablelm", "StableLm"),
    "gemma4_text": ("gemma4", "Gemma4Text"),
}
NESTED = ("gemma3_text", "olmo3", "gemma4_text")
KINDS = ("default", "linear", "dynamic", "yarn", "yarn", "longrope", "llama3", "su", "none")
OPTIONAL = {
    "beta_fast": (32, 64.0),
    "beta_slow": (1, 4.0),
    "mscale": (1.0, 0.7),
    "mscale_all_dim": (1.0, 0.5, 0.0),
    "attention_factor": (1.0, 1.3),
    "attn_factor": (1.2,),
    "truncate": (True, False),
}


def rope(draw):
    kind, p = draw.choice(KINDS), {}
    if kind != "none":
        p[draw.choice(("type", "rope_type", "rope_type"))] = kind
    if kind != "default" and draw.random() < 0.9:
        p["factor"] = draw.choice((2.0, 4, 8.0, 1.0, "4.0") if draw.random() < 0.2 else (2.0, 8))
    if kind in ("yarn", "longrope", "llama3", "su") and draw.random() < 0.7:
        p["original_max_position_embeddings"] = draw.choice((256, 1024, 2048))
    if kind == "yarn":
        p |= {k: draw.choice(v) for k, v in OPTIONAL.items() if draw.random() < 0.3}
    if kind in ("longrope", "su"):
        count = 8 if draw.random() < 0.9 else 6
        p["short_factor"] = [1 + 0.1 * i for i in range(count)]
        p["long_factor"] = [1 + 0.5 * i for i in range(count)]
        if draw.random() < 0.4:
            p["attention_factor"] = 1.25
    if kind == "llama3":
        p |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return p


def config(draw, name):
    raw = {**BASE, "model_type": name, "max_position_embeddings": draw.choice((1024, 4096))}
    if name in ("phi3", "gpt_neox", "stablelm"):
        raw.pop("head_dim")
    if name == "deepseek_v3":
        raw |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "kv_lora_rank": 32}
        raw.pop("head_dim")
    if draw.random() < 0.8:
        raw["rope_theta"] = draw.choice((10000.0, 500000.0))
    if draw.random() < 0.2:
        raw["original_max_position_embeddings"] = 512
    way = draw.random()
    if way < 0.45:
        raw["rope_scaling"] = rope(draw)
    elif way < 0.9:
        if name in NESTED and draw.random() < 0.8:
            raw["rope_parameters"] = {
                kind: {**rope(draw), "rope_theta": 50000.0}
                for kind in ("full_attention", "sliding_attention")
            }
        else:
            raw["rope_parameters"] = {**rope(draw), "rope_theta": 20000.0}
    return raw


def real(raw, length):
    """kind of layer -> (inv_freq, multiplier), by the installed transformers."""
    module, prefix = FAMILIES[raw["model_type"]]
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    built = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(copy.deepcopy(raw))
    positions, x = torch.arange(length)[None], torch.zeros(1, 1, 1)

    def run(kind):
        rotary = getattr(modeling, f"{prefix}RotaryEmbedding")(built)
        named = "" if kind == "all" else f"{kind}_"
        rotary(x, positions, *([] if kind == "all" else [kind]))
        inv_freq = getattr(rotary, f"{named}inv_freq").double().tolist()
        return inv_freq, float(getattr(rotary, f"{named}attention_scaling"))

    rotary = getattr(modeling, f"{prefix}RotaryEmbedding")(built)
    kinds = rotary.layer_types if isinstance(rotary.rope_type, dict) else ["all"]
    return {kind: run(kind) for kind in kinds}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_random_configs(name):
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    draw = random.Random(name)
    refused = 0
    for _ in range(25):
        raw = config(draw, name)
        for length in (64, raw["max_position_embeddings"] + 500):
            got = RUNTIMES["transformers-5"](raw, length)
            try:
                wanted = real(raw, length)
            except Exception:
                refused += 1
                assert got.error, raw
                continue
            assert got.error is None, (raw, got.error)
            for kind, (inv_freq, multiplier) in wanted.items():
                assert got.rotations[kind].inv_freq == pytest.approx(inv_freq, rel=1e-6, abs=1e-20)
                assert got.rotations[kind].multiplier == pytest.approx(multiplier, rel=1e-6)
    assert refused < 45


def test_a_flat_dict_beside_nested_ones_reaches_all_layers_of_modernbert_decoder():
    kinds = ["sliding_attention", "full_attention"] * 2
    raw = {
        **BASE,
        "model_type": "modernbert-decoder",
        "num_hidden_layers": 4,
        "layer_types": kinds,
        "rope_parameters": {k: {"rope_type": "default", "rope_theta": 1e4} for k in kinds},
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    built = transformers.CONFIG_MAPPING["modernbert-decoder"].from_dict(copy.deepcopy(raw))
    assert {p["rope_type"] for p in built.rope_parameters.values()} == {"linear"}
    layers = RUNTIMES["transformers-5"](raw, 64).rotations
    assert {layers[kind].inv_freq[0] for kind in kinds} == {0.25}


def test_gemma_4_turns_the_large_heads_of_its_far_layers():
    raw = {**BASE, "model_type": "gemma4_text", "num_hidden_layers": 6, "global_head_dim": 64}
    for given in (raw, {**raw, "per_layer_config": {"5": {"head_dim": 64}}}):
        got = RUNTIMES["transformers-5"](given, 64)
        wanted = real(given, 64)
        assert len(wanted["full_attention"][0]) == 32
        for kind, (inv_freq, _) in wanted.items():
            assert got.rotations[kind].inv_freq == pytest.approx(inv_freq, rel=1e-6, abs=1e-20)


@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize("kind", ["yarn", "dynamic"])
@pytest.mark.parametrize("family", ["gemma4_text", "laguna", "mellum"])
def test_a_scaled_module_fills_its_dict_from_the_top_level(family, kind, share):
    """The functions of all types but default settle the dicts before they read them: seen with
    transformers 5.23. A missing base is an error for default, and where the top level has none."""
    from posenc.runtimes.known import emulate

    config = {
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "head_dim": 16,
        "vocab_size": 32,
        "rope_theta": 8e6,
        "global_head_dim": 32,
    }
    if share:
        config["partial_rotary_factor"] = share
    scaling = {"rope_type": kind, "factor": 3.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = 512
    sliding = {"rope_type": "default", "rope_theta": 10000.0}

    def answer(config, full):
        dicts = {"full_attention": full, "sliding_attention": sliding}
        named = ("transformers-5",)
        return emulate({**config, "rope_parameters": dicts}, 128, named)["transformers-5"]

    computed = answer(config, scaling)
    width = (32 if family == "gemma4_text" else 16) * (share or 1)
    slowest = 8e6 ** (-(width - 2) / width) / (3.0 if kind == "yarn" else 1.0)
    inv_freq = computed.rotations["full_attention"].inv_freq
    assert computed.error is None and len(inv_freq) == width / 2
    assert inv_freq[-1] == pytest.approx(slowest, rel=1e-6)
    assert answer(config, {"rope_type": "default"}).error is not None
    without = {key: value for key, value in config.items() if key != "rope_theta"}
    assert answer(without, scaling).error is not None


@pytest.mark.parametrize("family", ["glm_image_text", "glm_ocr_text", "glm4v_text"])
def test_a_module_that_splits_by_sections_stops_where_they_add_up_otherwise(family):
    """Each splits its pairs into [8, 12, 12]; these heads have 16."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}
    config = {"model_type": family, **sizes, "num_key_value_heads": 2}
    stop = RUNTIMES["transformers-5"](config, None).stop_message
    loaded = transformers.AutoConfig.for_model(**config)
    name = type(loaded).__name__.replace("Config", "RotaryEmbedding")
    package = type(loaded).__module__.replace("configuration", "modeling")
    rotary = getattr(importlib.import_module(package), name)(loaded)
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        rotary(torch.zeros(1, 4, 64), torch.zeros(3, 1, 4))
    assert "adds up to 32, and each head has 16 rotated pairs" in stop


def test_zamba_2_has_heads_of_twice_the_usual_width():
    modeling = importlib.import_module("transformers.models.zamba2.modeling_zamba2")
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "use_mem_rope": True}
    kinds = ["mamba", "hybrid"]
    config = {"model_type": "zamba2", **sizes, "num_hidden_layers": 2, "layers_block_type": kinds}
    known = RUNTIMES["transformers-5"](config, None)
    loaded = transformers.AutoConfig.for_model(**config)
    own_frequencies = modeling.Zamba2RotaryEmbedding(loaded).inv_freq
    assert known.rotations["all"].inv_freq == pytest.approx(own_frequencies.tolist(), rel=1e-6)
    attention = modeling.Zamba2Attention(loaded, layer_idx=1, num_fwd_mem_blocks=1, block_id=0)
    assert known.softmax_scale == pytest.approx(attention.scaling, rel=1e-12)
