"""Families of the table against the rotary modules of the installed transformers: a sample here,
all of them in `make oracles` (tests/doctor/oracles/sweep.py)."""

import copy
import importlib

import pytest

from posenc.runtimes.config_model import model_of
from posenc.runtimes.families import all_families
from posenc.runtimes.known import RUNTIMES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from tests.doctor.oracles import real, sweep  # noqa: E402 - they need transformers

SAMPLE = (
    "llama",
    "gpt_neox",
    "glm4v_text",
    "qwen2_vl_text",
    "qwen3_vl_text",
    "qwen2_5_vl_vision",
    "modernbert",
    "eurobert",
    "mistral4",
    "step3p5",
    "deepseek_v3",
    "deepseek_v4",
    "minimax_m2",
    "minimax_m3_vl_vision",
    "mimo_v2_flash",
    "dots3_note_text",
    "moonshine_streaming",
    "lfm3",
    "beam",
    "gemma4_text",
    "pixtral",
    "granitemoehybrid",
    "falcon",
    "kimi_linear",
    "lara_mini",
    "bamba",
    "dbrx",
    "glm4_moe_lite",
    "olmo3",
    "mimi",
    "ultrabert",
    "gemma3_text",
    "qwen3",
    "glm4_moe",
    "apertus",
    "cosmos3_edge_text",
)


@pytest.fixture(autouse=True)
def quiet():
    real.quiet()


@pytest.mark.parametrize("name", SAMPLE)
def test_a_family_computes_what_its_modules_do(name):
    config = real.class_of(name)
    found = real.rotary_modules(real.default(config))
    if name == "kimi_linear":
        assert not found
        return
    raw = real.as_json(real.default(config))
    wrong = {what: sweep.differs(config, found, v, what) for what, v in sweep.variations(raw)}
    assert not {what: why for what, why in wrong.items() if why}


PLANTED = {
    "llama": ("transformers5", {"rope_theta": 10001.0}),
    "glm4v_text": ("transformers5", {"partial_rotary_factor": 0.5}),
    "qwen2_5_vl_vision": ("transformers5", {"axes": 1}),
    "modernbert": ("transformers5", {"flat": ["full_attention"]}),
    "beam": ("transformers5", {"own_dicts": {"sliding_attention": None, "full_attention": None}}),
    "deepseek_v4": ("transformers5", {"flat_new": False}),
    "mistral4": ("defaults", {"head_dim": 64}),
    "bamba": ("transformers5", {"share_key": "partial_rotary_factor"}),
    "olmo3": ("transformers5", {"flat": None}),
    "qwen3": ("transformers5", {"declares_kinds": False}),
    "deepseek_v3": ("defaults", {"qk_rope_head_dim": 32}),
    "step3p5": ("transformers5", {"required": []}),
    "mimo_v2_flash": ("transformers5", {"share_use": "rotated"}),
    "cosmos3_edge_text": ("transformers5", {"required": [], "sections": None}),
    "neomme": ("transformers5", {"strict": False}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_fact_is_seen(name, monkeypatch):
    config, (cell, change) = real.class_of(name), PLANTED[name]
    found = real.rotary_modules(real.default(config))
    facts = all_families()[name]
    monkeypatch.setitem(facts, cell, {**facts[cell], **change})
    raw = real.as_json(real.default(config))
    assert any(sweep.differs(config, found, v, what) for what, v in sweep.variations(raw))


TINY = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "vocab_size": 32,
    "sliding_window": 4,
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEAR_FAR = ["sliding_attention", "full_attention"] * 4
STILL = {
    "smollm3": {},
    "cohere2": {},
    "afmoe": {},
    "exaone4": {},
    "exaone_moe": {},
    "flint": {"layer_types": [*["full_attention"] * 2, *["sliding_attention"] * 6]},
    "kolibri1": {},
    "lara_mini": {},
    "muse_glimmer_text": {},
    "muse_spark_text": {},
    "beam": {"n_group": 1, "topk_group": 1, "layer_types": NEAR_FAR},
    "llama4_text": {"intermediate_size_mlp": 32},
    "falcon": {"alibi": True, "head_dim": None},
    "smollm3, listed": {"no_rope_layers": [1, 1, 0, 1, 0, 1, 1, 1]},
    "llama": {},
    "exaone4, no window": {"sliding_window": None, "layer_types": ["full_attention"] * 8},
    "muse_glimmer_text, listed": {"layer_rope_theta": [0, 1, 1, 0, 1, 1, 1, 0]},
}
"""Families some of whose layers do not rotate, by the config that says which."""


def rotating_layers(config):
    """The layers whose attention applies a rotation, seen in a forward pass of a tiny model."""
    module = importlib.import_module(type(config).__module__.replace("configuration", "modeling"))
    model = transformers.AutoModel.from_config(config).eval()
    seen, current = set(), []
    for part in model.modules():
        if type(part).__name__.endswith("Attention") and hasattr(part, "layer_idx"):
            part.register_forward_pre_hook(lambda m, a: current.append(m.layer_idx))
    for name, function in list(vars(module).items()):
        if name.startswith("apply_rotary"):

            def noting(*args, _function=function, **kwargs):
                seen.add(current[-1])
                return _function(*args, **kwargs)

            setattr(module, name, noting)
    try:
        with torch.inference_mode():
            model(torch.tensor([[3, 4, 5, 6, 7, 8]]))
    finally:
        importlib.reload(module)
    return seen, set(range(config.num_hidden_layers))


@pytest.mark.parametrize("name", STILL)
def test_the_layers_that_do_not_rotate_are_the_real_ones(name):
    config_class = real.class_of(name.partition(",")[0])
    given = {k: v for k, v in {**TINY, **STILL[name]}.items() if (k, v) != ("head_dim", None)}
    config = config_class.from_dict(copy.deepcopy(given))
    config._attn_implementation = "eager"
    rotating, every = rotating_layers(config)
    raw = {**given, "model_type": config.model_type}
    assert every - rotating == set(model_of(raw).without_rotation)


@pytest.mark.slow
def test_every_class_is_known_or_listed():
    """A class of a new transformers must be looked at before it is known."""
    found = {c.model_type for c in real.config_classes().values()} - {""}
    known = {name for name, facts in all_families().items() if facts.get("transformers5")}
    rest = found - known - sweep.FAMILIES_WITHOUT_ROTATION
    assert rest == sweep.NOT_KNOWN


LAYOUTS = 170
"""At least; the others rotate by a function that takes other arguments."""


def layouts(names) -> dict[str, bool]:
    """Whether the attention of each family pairs channels (2i, 2i+1), where a call can tell; held
    to the record."""
    seen = {name: real.is_interleaved(real.class_of(name)) for name in names}
    told = {name: interleaved for name, interleaved in seen.items() if interleaved is not None}
    assert told == {name: bool(all_families()[name].get("interleaved")) for name in told}
    return told


def test_families_pair_channels_as_their_attention_does():
    told = layouts(["glm4v_text", "mistral4", "llama", "deepseek_v3", "qwen3"])
    assert {told["glm4v_text"], told["mistral4"], told["llama"]} == {True, False}


@pytest.mark.slow
def test_every_family_pairs_channels_as_its_attention_does():
    """Imports the models of all families."""
    known = [name for name, facts in all_families().items() if facts.get("transformers5")]
    known = [name for name in known if name in transformers.CONFIG_MAPPING]
    assert len(layouts(known)) >= LAYOUTS


def test_rope_interleave_decides_the_layout_where_the_class_reads_it():
    from posenc.runtimes import frequencies

    for name, wanted in (("deepseek_v3", "half-split"), ("deepseek_v32", "interleaved")):
        (kind,) = frequencies({"model_type": name, "rope_interleave": False})["kinds"]
        assert kind["layout"] == wanted


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"model_type": "deepseek_v4", "rope_theta": None}, "rope_theta is None"),
        (
            {"model_type": "lfm3", "rope_parameters": {"full_attention": None}},
            "full_attention is None",
        ),
        ({"model_type": "gemma4_text", "rope_scaling": None}, "rope_scaling is None"),
        (
            {"model_type": "laguna", "rope_scaling": None, "rope_parameters": {}},
            "rope_scaling is None",
        ),
    ],
)
def test_a_null_that_the_class_refuses_is_refused(config, refused):
    assert (RUNTIMES["transformers-5"](config).error or "").endswith(refused)


@pytest.mark.parametrize("runtime", ["transformers-4", "transformers-5"])
def test_longcat_takes_the_class_head_dim_where_none_is_given(runtime):
    """Printed by the modules of transformers: 32 pairs, whatever qk_rope_head_dim."""
    got = RUNTIMES[runtime]({"model_type": "longcat_flash", "qk_rope_head_dim": 32})
    assert len(got.rotations["all"].inv_freq) == 32


def test_neomme_takes_each_kinds_base_for_null():
    got = RUNTIMES["transformers-5"]({"model_type": "neomme", "rope_theta": None})
    want = RUNTIMES["transformers-5"]({"model_type": "neomme"})
    assert got.error is None and got.rotations == want.rotations
