"""Numbers and names that cannot be meant are errors for every runtime, and sound ones are not."""

import pytest

from tests.doctor.judging import judge
from tests.doctor.threads import BASE, EIGHT, ORIGINAL

SOUND = {**BASE, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    ORIGINAL: 1024,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": EIGHT,
    "long_factor": EIGHT,
    "factor": 1.0,
    ORIGINAL: 4096,
}


def scaled(p, **changes):
    return {**SOUND, "rope_scaling": {**p, **changes}}


def without(config, *keys):
    return {k: v for k, v in config.items() if k not in keys}


PLANTED = [
    ("PD043", {**BASE, "rope_base": 500000.0}, "rope_base 500000 is not read for llama"),
    ("PD043", {**BASE, "rotary_emb_base": 500000.0}, "rotary_emb_base 500000"),
    ("PD043", {**BASE, "rotary_base": 500000.0}, "which reads rope_theta"),
    ("PD044", scaled(YARN, factor=0.25), "factor 0.25; stretching to 4 times"),
    ("PD044", scaled(LLAMA3, factor=0.5), "factor 0.5"),
    ("PD044", scaled(YARN, **{ORIGINAL: 65536}), "65536 of rope_scaling is above max_pos"),
    ("PD045", scaled(LLAMA3, low_freq_factor=4.0, high_freq_factor=1.0), "low_freq_factor 4"),
    ("PD045", scaled(LLAMA3, low_freq_factor=4.0), "not below high_freq_factor 4"),
    ("PD045", scaled(YARN, beta_fast=1, beta_slow=32), "beta_fast 1, not above beta_slow 32"),
    ("PD046", scaled(LONGROPE, long_factor=[-1.0, *EIGHT[1:]]), "1 factors that are not above 0"),
    ("PD046", {**SOUND, "rope_theta": 1}, "rope_theta in the top level is 1"),
    ("PD047", {**SOUND, "rope_scale": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is"),
    ("PD047", {**SOUND, "partial_rotary_factr": 0.5}, "partial_rotary_factor is"),
    ("PD048", {**SOUND, "architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM, of qwen2"),
    ("PD049", {**SOUND, "head_dim": 17}, "head_dim is 17, an odd number"),
    ("PD049", without({**SOUND, "hidden_size": 66}, "head_dim"), "66 is not a multiple of"),
    ("PD050", without(SOUND, "model_type"), "by its class this is a llama"),
    ("PD004", {**SOUND, "rope_theta": None}, "no rope_theta anywhere"),
]


@pytest.mark.parametrize("code, config, words", PLANTED, ids=[f"{p[0]}-{p[2]}" for p in PLANTED])
def test_a_planted_mistake_is_an_error_with_its_key_and_values(code, config, words):
    (found,) = [f for f in judge(config) if f.code == code][:1]
    assert words in found.message and found.cure
    assert found.severity == "E"


@pytest.mark.parametrize(
    "config",
    [
        SOUND,
        scaled(LLAMA3),
        {**SOUND, "swa_rope_theta": 20000.0},
        {
            **BASE,
            "model_type": "gpt_neox",
            "architectures": ["GPTNeoXForCausalLM"],
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
        },
        {**SOUND, "architectures": ["LlamaForSequenceClassification"]},
        {**SOUND, "hidden_size": 66},  # with a head_dim
    ],
)
def test_what_is_sound_is_not_complained_of(config):
    new = {f"PD{i:03}" for i in range(43, 51)}
    assert not new & {f.code for f in judge(config)}


def test_runtimes_read_the_file_as_it_is():
    """A foreign base is not renamed before the emulators look: they take the class's default."""
    from tests.doctor.judging import case

    judged = case({**BASE, "rope_base": 500000.0})
    for runtime in ("transformers-4", "transformers-5", "vllm", "sglang", "mlx-lm"):
        assert judged.computed[runtime].rotations["all"].inv_freq[1] == 10000.0 ** (-2 / 16)
    assert judged.meaning.computed.rotations["all"].inv_freq[1] == 500000.0 ** (-2 / 16)


def test_a_cure_says_who_is_right_and_which_key():
    glm = {
        **SOUND,
        "model_type": "glm",
        "architectures": ["GlmForCausalLM"],
        "partial_rotary_factor": 0.5,
    }
    (found,) = [f for f in judge(glm, ("mlx-lm",)) if f.code == "PD038"]
    assert "rotates 8 pairs of channels; this file was read as 4" in found.message
    assert "If mlx-lm is right, change head_dim and partial_rotary_factor" in found.cure
    assert "mlx-lm's glm.py:58" in found.cure


@pytest.mark.parametrize(
    "name, given, wrong",
    [
        ("deepseek_v32", {}, False),
        ("deepseek_v32", {"indexer_rope_interleave": True}, True),
        ("glm_moe_dsa", {"indexer_rope_interleave": True}, False),
        ("glm_moe_dsa", {}, True),
    ],
)
def test_the_indexers_layout_is_checked(name, given, wrong):
    from posenc.doctor.report import Judgement, report_of
    from posenc.report.terminal import as_text
    from tests.doctor.judging import case

    config = {**BASE, "rope_theta": 1e4, "model_type": name, "qk_rope_head_dim": 16, **given}
    del config["architectures"]
    found = [f for f in judge(config) if f.code == "PD051"]
    assert len(found) == wrong and all(f.runtimes == ("vllm", "sglang") for f in found)
    said = {False: "indexer: half-split", True: "indexer: interleaved"}[name != "deepseek_v32"]
    assert said in as_text(report_of(Judgement(case(config), found)))
