"""Rotary settings as published models spell them: what transformers computes from them, by its own
classes.

vendors.json has one line per model, widths and depths small, written from memory of its config. The
emulator of transformers 5 is held to the classes that are installed here; `python
tests/runtimes/known/test_vendors.py` prints the same for any transformers, posenc on its path.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from posenc.runtimes.known import RUNTIMES

CONFIGS = json.loads(Path(__file__).with_name("vendors.json").read_text("utf-8"))


def computed_by(transformers, config):
    """Kind of layer -> {length: (angles at position 1, multipliers)}, from the cos and sin that the
    rotary modules return, and the softmax scales of the attentions."""
    loaded = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    loaded._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(loaded)
    found, scales = {}, set()
    for name, module in model.named_modules():
        if type(module).__name__.endswith("Attention") and hasattr(module, "scaling"):
            scales.add(float(module.scaling))
        if "RotaryEmbedding" not in type(module).__name__:
            continue
        nested = isinstance(getattr(module, "rope_type", None), dict)
        for kind in list(module.layer_types) if nested else [None]:
            for length in (64, config["max_position_embeddings"]):
                label = kind or ("sliding_attention" if "local" in name else "all")
                found.setdefault(label, {})[length] = turned(module, kind, length)
    return found, scales


def turned(module, kind, length):
    """Angle and length of each pair at position 1, in a batch whose last position is length - 1."""
    x, positions = torch.zeros(1, 1, 1), torch.tensor([[1, length - 1]])
    got: Any
    try:
        got = module(x, positions) if kind is None else module(x, positions, kind)
    except (TypeError, IndexError, RuntimeError):  # transformers 4's Phi-3.5-MoE takes a length
        got = tuple(table[None, :2].flip(1) for table in module(x, seq_len=length))
    if isinstance(got, torch.Tensor):  # complex numbers
        got = (got.real, got.imag)
    cos, sin = (part[0, 0].double() for part in got)
    angles, lengths = torch.atan2(sin, cos).tolist(), torch.hypot(cos, sin).tolist()
    count = len(angles)
    if hasattr(module, "inv_freq") and count == len(module.inv_freq):
        return angles, lengths
    interleaved = angles[0::2] == angles[1::2]
    chosen = slice(0, None, 2) if interleaved else slice(0, count // 2)
    return angles[chosen], lengths[chosen]


def differences(transformers, config):
    """In what the emulator differs from the classes; empty where in nothing."""
    runtime = f"transformers-{transformers.__version__[0]}"
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        return ["known"] if RUNTIMES[runtime](config, 64).is_known else []
    real, scales = computed_by(transformers, config)
    wrong = []
    for kind, by_length in real.items():
        for length, (inv_freq, multipliers) in by_length.items():
            computed = RUNTIMES[runtime](config, length)
            layers = computed.rotations
            ours = layers.get(kind) or layers.get("all") or layers.get("full_attention")
            if computed.error or ours is None or len(ours.inv_freq) != len(inv_freq):
                wrong.append(f"{kind}: {computed.error or 'other pairs'}")
                continue
            pairs = zip(ours.inv_freq, inv_freq, strict=True)
            # cos and sin in float32: an angle of 1 is off by 1e-7
            if not all(abs(a - b) <= 2e-6 * abs(b) + 1e-7 for a, b in pairs):
                wrong.append(f"{kind} at {length}: frequencies")
            if not all(abs(ours.multiplier - m) <= 1e-6 * m for m in multipliers):
                wrong.append(f"{kind} at {length}: multiplier {ours.multiplier}, {multipliers[:2]}")
            ok = any(abs(computed.softmax_scale - s) <= 1e-6 * s for s in scales)
            if scales and not ok:
                wrong.append(f"softmax scale {computed.softmax_scale}, not {scales}")
    return wrong


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_what_the_emulator_says(name):
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    if transformers.__version__[0] != "5":
        pytest.skip("the emulator of transformers 5 is held to transformers 5")
    assert not differences(transformers, CONFIGS[name])


def test_another_number_is_seen():
    transformers = pytest.importorskip("transformers")
    real = CONFIGS["llama-3.1-8b"]
    planted = {**real, "rope_theta": 500001.0}
    computed = RUNTIMES["transformers-5"](real, 64).rotations["all"].inv_freq
    (by_length,) = computed_by(transformers, planted)[0].values()
    assert not all(
        abs(a - b) <= 1.5e-6 * b for a, b in zip(by_length[64][0], computed, strict=True)
    )


def test_a_fixed_alpha_stretches_the_base_of_hunyuan():
    """transformers 4 forgets it beyond the training length, 5 does not."""
    config = CONFIGS["hunyuan-7b"]
    base = 10000.0 * 1000.0 ** (128 / 126)
    for runtime, long in (("transformers-4", 10000.0), ("transformers-5", base)):
        for length, theta in ((32768, base), (40000, long)):
            got = RUNTIMES[runtime](config, length).rotations["all"].inv_freq[1]
            scaled = theta * (40000 / 32768) ** (128 / 126) if theta == 10000.0 else theta
            assert got == pytest.approx(scaled ** (-2 / 128), rel=1e-6)


def test_deepseek_2_has_a_temperature_in_its_scale_since_transformers_5():
    config = CONFIGS["deepseek-v2-lite"]
    old, new = (RUNTIMES[f"transformers-{v}"](config, 64).softmax_scale or 0.0 for v in (4, 5))
    assert old == pytest.approx(96**-0.5, rel=1e-9)
    assert new == pytest.approx(old * 1.2608037774**2, rel=1e-6)


def test_phi_3_5_moe_multiplies_by_its_mscales():
    """transformers 5 takes the short list at any length, 4 the long one beyond the original."""
    lists = {**CONFIGS["phi-3.5-moe"]["rope_scaling"], "rope_type": "longrope"}
    config = {**CONFIGS["phi-3.5-moe"], "rope_scaling": lists}
    for runtime, long in (("transformers-4", "long_factor"), ("transformers-5", "short_factor")):
        for length, name in ((64, "short_factor"), (131072, long)):
            layer = RUNTIMES[runtime](config, length).rotations["all"]
            assert layer.multiplier == lists["long_mscale"]
            assert layer.inv_freq[9] == pytest.approx(10000.0 ** (-18 / 128) / lists[name][9])


def test_llama_cpp_writes_hunyuans_base():
    config = CONFIGS["hunyuan-7b"]
    layer = RUNTIMES["llama.cpp"](config, None).rotations["all"]
    assert layer.inv_freq[1] == pytest.approx((10000.0 * 1000.0 ** (128 / 126)) ** (-2 / 128))
    told = RUNTIMES["llama.cpp"]({**config, "rope_theta": 20000.0}, None).error
    assert "assumptions changed" in (told or "")


def test_servers_stop_at_sections_as_their_code_does():
    config = CONFIGS["qwen2.5-7b-yarn-card"]
    sections = {**config["rope_scaling"], "mrope_section": [16, 24, 24], "mscale": 1.0}
    told = RUNTIMES["sglang"]({**config, "rope_scaling": sections}, None).error
    assert "unexpected keyword argument 'mscale'" in (told or "")
    short = {**config["rope_scaling"], "mrope_section": [16, 24, 23]}
    told = RUNTIMES["vllm"]({**config, "rope_scaling": short}, None).error
    assert "adds up to 63, expected 64" in (told or "")
    half = {**config["rope_scaling"], "extrapolation_factor": 0.5}
    first, usual = (
        RUNTIMES["sglang"]({**config, "rope_scaling": p}, None).rotations["all"].inv_freq[0]
        for p in (half, config["rope_scaling"])
    )
    assert (first, usual) == (0.625, 1.0)  # half of the first pair is divided by 4


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    wrong = {name: said for name in CONFIGS if (said := differences(transformers, CONFIGS[name]))}
    print(f"transformers {transformers.__version__}: {len(CONFIGS) - len(wrong)} right, {wrong}")
