"""A hundred sound configs raise no error: transformers' causal families, both dialects."""

import pytest

from posenc.runtimes.config_model import model_of
from posenc.runtimes.families import all_families
from posenc.runtimes.meaning import meaning_of
from posenc.runtimes.writers.both_dialects import config_in_both_dialects
from tests.doctor.judging import judge

MISREAD = {
    "gpt_oss": ("mlx-lm", "llama.cpp"),
    "exaone4": ("llama.cpp",),
    "glm": ("mlx-lm",),
    "deepseek_v2": ("mlx-lm",),
    "minicpm3": ("mlx-lm",),
    "glm_moe_dsa": ("vllm", "sglang"),
    "falcon_h1": ("mlx-lm",),
    "minimax": ("mlx-lm",),
    "minimax_m2": ("mlx-lm",),
    "glm4v_moe_text": ("vllm",),
    "modernbert-decoder": ("transformers-4",),
}
"""Families that a runtime misreads in any spelling, or refuses without a key of its own: mlx-lm
wants a rope_scaling of DeepSeek 2 and MiniCPM 3, and MiniMax's rotary_dim, and takes Falcon-H1's
head_dim for 64 where none is given; vLLM and SGLang want GLM-5's indexer_rope_interleave; llama.cpp
gives windows to an EXAONE 4 of 64 layers only; vLLM checks that mrope_section adds up to the pairs,
which GLM-4.5V's class with its default head of 42 channels does not; transformers 4 gives all
layers of ModernBERT's decoder the base of those with full attention."""


@pytest.fixture(scope="module")
def sound():
    """model_type -> the class's default config in both dialects."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    from tests.doctor.oracles import real

    classes = {c.model_type: c for c in real.config_classes().values()}
    found = {}
    for name, facts in all_families().items():
        if (
            "text" in facts or name not in classes or name == "Glm4vMoe_text"
        ):  # transformers 5 has another name for it
            continue
        raw = real.as_json(real.default(classes[name]))
        if len(model_of(raw).without_rotation) == model_of(raw).num_layers:
            continue
        raw["architectures"] = [facts["architecture"]]
        meaning = meaning_of(raw)
        parameters = {kind: dict(p) for kind, p in meaning.parameters.items()}
        # GLM-Image's class has sections for half of its default head, and stops at the whole.
        needs_sections = name == "glm_image_text"
        if needs_sections or "mrope_section" in (facts.get("transformers4") or {}).get(
            "required", ()
        ):
            pairs = len(meaning.computed.rotations["all"].inv_freq)
            parameters["all"]["mrope_section"] = [pairs - 2 * (pairs // 3), *[pairs // 3] * 2]
        found[name] = config_in_both_dialects(raw, meaning, parameters, meaning.max_length)
    return found


def test_no_sound_config_raises_an_error(sound):
    wrong = {}
    for name, config in sound.items():
        errors = [f for f in judge(config) if f.severity == "E"]
        if errors and name not in MISREAD:
            wrong[name] = errors
    assert not wrong
    assert len(set(sound) - set(MISREAD)) >= 200


@pytest.mark.parametrize("name", sorted(MISREAD))
def test_a_misread_family_says_which_runtime(sound, name):
    errors = [f for f in judge(sound[name]) if f.severity == "E"]
    assert {r for f in errors for r in f.runtimes} == set(MISREAD[name])


def test_gpt_oss_cannot_be_cured_by_config(sound):
    (found,) = [f for f in judge(sound["gpt_oss"]) if f.code == "PD024"]
    assert "cannot be cured by config" in found.message


def test_a_broken_family_is_seen(sound):
    """The same configs without the older dialect do raise errors."""
    broken = 0
    for name, config in sound.items():
        if name in MISREAD:
            continue
        new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling")}
        new["rope_parameters"] = {**config.get("rope_parameters", {}), "rope_theta": 123456.0}
        broken += any(f.severity == "E" for f in judge(new))
    assert broken > 60
