"""What transformers 5 cannot load, posenc says that it refuses; and nothing else."""

import dataclasses
import json

import pytest

from posenc.doctor.command import Options
from posenc.runtimes.families import all_families
from posenc.runtimes.known import emulate
from posenc.runtimes.runtime_facts import Transformers5Facts
from tests.doctor.judging import run

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 8192,
    "vocab_size": 100,
    "intermediate_size": 64,
    "rope_theta": 1e6,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "type": "yarn", "factor": 4.0, ORIGINAL: 2048}
LLAMA3 = {**YARN, "rope_type": "llama3", "type": "llama3"}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR, LONGROPE = ({"rope_type": kind, "factor": 4.0} for kind in ("linear", "longrope"))
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, ORIGINAL: 2048}


def stretched(rope=YARN, **changes):
    return {"rope_scaling": rope, **changes}


def inside(outer_keys, inner, **changes):
    own = {**SIZES, "model_type": inner, **changes}
    return {**dict.fromkeys(SIZES), **outer_keys, "text_config": own}


NULL_HEAD = (
    "qwen2 qwen2_moe qwen3_moe smollm3 olmo olmo2 olmo3 olmoe granite granitemoe cohere cohere2 "
    "starcoder2 phi gpt_neox glm4_moe exaone4 lfm2 ernie4_5_moe modernbert bitnet persimmon "
    "stablelm nanochat falcon glm4v_text mixtral llama mistral arcee nemotron"
).split()
ORIGINALS = "llama qwen2 qwen3 mistral gemma cohere smollm3 glm4 gpt_neox starcoder2".split()
HEADS = {"num_attention_heads": 24, "num_key_value_heads": 24, "head_dim": 16}
UNEVEN = "llama gemma gemma2 cwm hyperclovax qwen2 qwen3 mistral persimmon stablelm phi".split()
MULTIMODAL = {
    "qwen2_5_vl": "qwen2_5_vl_text",
    "gemma3": "gemma3_text",
    "llava": "llama",
    "glm4v": "glm4v_text",
}
CASES = {
    "rope keys next to a text_config": [
        (name, inside(outer, text, **own))
        for name, text in MULTIMODAL.items()
        for outer, own in (
            (stretched(), stretched()),
            (stretched(), {}),
            (stretched(rope_theta=1e6), {}),
            ({"rope_parameters": YARN}, {}),
            (stretched(LLAMA3), {}),
            (stretched(LINEAR), {}),
            (stretched({"rope_type": "linear"}), {}),
            ({}, {}),
        )
    ],
    "a null head_dim": [
        (name, {"head_dim": None, **more})
        for name in NULL_HEAD
        for more in ({}, stretched(), stretched(LINEAR))
    ],
    "a head_dim that has no setter": [("falcon", {"head_dim": 16}), ("falcon", {})],
    "a null original length": [
        (name, stretched(rope, **{ORIGINAL: None}))
        for name in ORIGINALS
        for rope in (YARN, LLAMA3, LONGROPE, LINEAR)
        if rope is not LONGROPE or name not in ("qwen3", "gemma", "glm4", "gpt_neox")
    ],
    "a number of the wrong kind": [
        (name, {key: value})
        for name in ("llama", "qwen3", "mistral", "gpt_neox", "gemma3_text")
        for key in ("max_position_embeddings", "head_dim", "num_hidden_layers", "sliding_window")
        for value in (16.0, None, 2)
        if not (value == 2 and key == "head_dim") and (name, key) != ("qwen3", "sliding_window")
        if (name, key, value) != ("gpt_neox", "head_dim", 16.0)
    ],
    "a null number of key heads": [
        (name, {"num_key_value_heads": None}) for name in ("llama", "glm", "qwen2_moe")
    ],
    "a mistral with layer_types": [
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"], **more})
        for more in ({}, {"head_dim": 16}, {"head_dim": None}, {"sliding_window": 4096})
    ],
    "a null rotated share": [
        (name, {"partial_rotary_factor": None, **more})
        for name in "llama glm glm4 glm4_moe qwen3_next persimmon stablelm phi nemotron".split()
        for more in ({}, {"rope_scaling": {**LINEAR, "partial_rotary_factor": 0.5}})
    ]
    + [("gpt_neox", {"rotary_pct": None})],
    "layers that a list or pattern leaves out": [
        (name, {"no_rope_layers": layers})
        for name in ("smollm3", "mistral_large4_text", "llama4_text")
        for layers in ([], [1], [1, 0], None)
    ]
    + [
        (name, {"sliding_window": window, "sliding_window_pattern": pattern})
        for name in ("exaone4", "cohere2", "gemma3_text", "olmo3", "gemma2")
        for window, pattern in ((128, "LLG"), (128, 0), (128, None), (128, 2))
    ]
    + [("exaone4", {"sliding_window": None})],
    "heads that do not divide the width": [
        (name, {**HEADS, **more}) for name in UNEVEN for more in ({}, {"hidden_size": 96})
    ],
}


def real_error(folder, raw):
    """The error of loading a config and building its model; empty if both work."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    import torch

    (folder / "config.json").write_text(json.dumps(raw))
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            transformers.AutoModel.from_config(config.get_text_config())
    except Exception as error:  # whatever its classes raise
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.quick(5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_what_transformers_5_cannot_load_it_is_said_to_refuse(name, tmp_path):
    wrong = []
    for family, changes in CASES[name]:
        raw = {"model_type": family, **SIZES, **changes}
        if "text_config" in raw:
            raw = {k: v for k, v in raw.items() if v is not None}
        computed, real = emulate(raw)["transformers-5"], real_error(tmp_path, raw)
        if computed.known == "unknown" and real:
            continue
        if computed.known != "yes" or bool(computed.error) != bool(real):
            wrong.append((family, changes, computed.known, computed.error, real))
    assert not wrong
    assert len(CASES[name]) > 1


def rotated(folder, raw):
    """The rotated pairs of the real model."""
    transformers = pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(raw))
    model = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(folder))
    return next(len(b) for name, b in model.named_buffers() if name.endswith("inv_freq"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["glm", "glm4", "glm4_moe", "qwen3_next"])
def test_a_null_share_rotates_the_whole_head(family, tmp_path):
    experts = {"num_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1}
    raw = {**SIZES, **experts, "model_type": family, "partial_rotary_factor": None, "head_dim": 16}
    (pairs,) = (len(v.inv_freq) for v in emulate(raw)["transformers-5"].rotations.values())
    assert pairs == rotated(tmp_path, raw) == 8
    del raw["partial_rotary_factor"]
    (pairs,) = (len(v.inv_freq) for v in emulate(raw)["transformers-5"].rotations.values())
    assert pairs == rotated(tmp_path, raw) < 8


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"head_dim": None}),
        ("qwen2", {"head_dim": None, **stretched()}),
        ("mistral", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("llama", stretched(**{ORIGINAL: None})),
        ("llama", {"max_position_embeddings": 131072.0}),
        ("llama", {"head_dim": 16.0}),
        ("llama", {"num_hidden_layers": None}),
        ("llama", {"max_position_embeddings": None}),
        ("mistral", {"sliding_window": 0.25}),
        ("llama", HEADS),
        ("glm4", {"partial_rotary_factor": None}),
        ("stablelm", {"partial_rotary_factor": None}),
        ("smollm3", {"no_rope_layers": []}),
        ("exaone4", {"sliding_window_pattern": "LLG"}),
        ("qwen2_5_vl", inside(stretched(), "qwen2_5_vl_text", **stretched())),
    ],
)
def test_doctor_blesses_no_file_that_transformers_5_cannot_load(family, changes, tmp_path):
    raw = {"model_type": family, **SIZES, **changes}
    raw = {k: v for k, v in raw.items() if v is not None or "text_config" not in raw}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    said, code = run(Options((path,), for_="transformers-5"))
    assert code == 1 and "Nothing to complain" not in said
    assert "transformers-5" in said and "as meant" not in said


def test_the_kinds_of_numbers_are_those_of_transformers_classes():
    transformers = pytest.importorskip("transformers")
    seen = 0
    for family, facts in all_families().items():
        known = Transformers5Facts.of(facts.get("transformers5")).checked_keys
        if family not in transformers.CONFIG_MAPPING or not known.integers:
            continue
        fields = dataclasses.fields(transformers.CONFIG_MAPPING[family])
        kinds = {f.name: getattr(f.type, "__name__", f.type) for f in fields}
        for key in ("hidden_size", "num_attention_heads", "max_position_embeddings", "head_dim"):
            if kinds.get(key) == "int":
                assert key in known.integers, (family, key)
                seen += 1
            elif key != "head_dim":
                assert key not in known.integers, (family, key)
    assert seen > 700
