"""Null, missing and empty rope dicts of kinds of layers: what the installed transformers does."""

import json

import pytest

from posenc.runtimes.ask import ask
from posenc.runtimes.config_model import model_of
from posenc.runtimes.families import all_families
from posenc.runtimes.known import RUNTIMES
from posenc.runtimes.runtime_facts import Transformers5Facts
from tests.doctor.oracles.facts import difference

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

RUNTIME = "transformers-5"
SIZES = {
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "vocab_size": 64,
    "pad_token_id": 0,
    "max_position_embeddings": 256,
    "intermediate_size": 96,
    "sliding_window": 16,
}
FURTHER_SIZES = {
    "deepseek_v4": {"qk_rope_head_dim": 16, "head_dim": 64},
    "diffusion_gemma_text": {
        "num_global_key_value_heads": 2,
        "global_head_dim": 32,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
    "mimo_v2_flash": {"n_routed_experts": 4, "num_experts_per_tok": 2},
}
LAYER_TYPES = {
    "main": "sliding_attention",
    "compress": "compressed_sparse_attention",
}
"""Kinds that layer_types have under another name, of DeepSeek V4."""
OUTER_CLASSES = {"diffusion_gemma_text": "diffusion_gemma", "step3p5": "step3p7"}
"""Language models for which transformers has no model of their own -> the one around them."""
NOT_ASKED = ("t5gemma2_decoder", "t5gemma2_text")
"""Halves of a model that has two."""
PLAIN = {"rope_type": "default", "rope_theta": 5e4}


def kinds_of(family):
    facts = Transformers5Facts.of(all_families()[family].get("transformers5"))
    return list(facts.dicts_by_kind or ())


FAMILIES = sorted(name for name in all_families() if kinds_of(name) and name not in NOT_ASKED)


def config_of(family, layer_kinds, rope_parameters):
    """A config whose layers are of these kinds, in turn."""
    types = [LAYER_TYPES.get(kind, kind) for kind in layer_kinds]
    config = {
        "model_type": family,
        **SIZES,
        **FURTHER_SIZES.get(family, {}),
        "layer_types": [types[index % len(types)] for index in range(4)],
        "rope_parameters": rope_parameters,
    }
    if family in OUTER_CLASSES:
        return {"model_type": OUTER_CLASSES[family], "text_config": config}
    return config


def cases_of(family):
    """Yield (what is written, config)."""
    kinds = kinds_of(family)
    every_dict = {kind: dict(PLAIN) for kind in kinds}
    yield "every dict", config_of(family, kinds, every_dict)
    yield "null alone", config_of(family, kinds, dict.fromkeys(kinds))
    yield "no dict", config_of(family, kinds, {})
    for kind in kinds:
        other_dicts = {k: v for k, v in every_dict.items() if k != kind}
        other_kinds = [k for k in kinds if k != kind]
        for name, rope_parameters in (
            ("null", {**every_dict, kind: None}),
            ("no", other_dicts),
            ("an empty dict", {**every_dict, kind: {}}),
        ):
            yield f"{name} for {kind}", config_of(family, kinds, rope_parameters)
            without_layers = config_of(family, other_kinds, rope_parameters)
            yield f"{name} for {kind}, which no layer is", without_layers
        # Kinds may differ in their sizes, and so in the scale of the scores.
        yield f"{kind} alone", config_of(family, [kind], every_dict)


@pytest.mark.slow
def test_every_family_with_a_dict_per_kind_is_known_as_it_answers():
    cases = [(f"{name}: {written}", c) for name in FAMILIES for written, c in cases_of(name)]
    answers = ask([(config, [256]) for _, config in cases], seconds=900)
    differences = {}
    for (name, config), answer in zip(cases, answers, strict=True):
        known = RUNTIMES[RUNTIME](config, 256, transformers.__version__)
        if why := difference(answer, known, model_of(config)):
            differences[name] = why
    assert not differences
    assert sum(not answer.why_unmeasured for answer in answers) > 0.95 * len(answers)


@pytest.mark.parametrize(
    "kinds, width",
    [
        (["sliding_attention"], 192 + 64),
        (["indexed_attention"], 128 + 64),
        (["sliding_attention", "indexed_attention"], 128 + 64),
    ],
)
def test_layers_of_one_kind_have_the_scale_of_their_own_sizes(kinds, width):
    config = config_of("dots3_note_text", kinds, {kind: dict(PLAIN) for kind in kinds})
    known = RUNTIMES[RUNTIME](config, 256, "5.24")
    assert known.softmax_scale == pytest.approx(width**-0.5)


NULL_STOPS = (
    "embedding_gemma2_text",
    "gemma4_text",
    "gemma4_unified_text",
    "laguna",
    "mellum",
    "mimo_v2_flash",
    "ultrabert",
    "zaya",
)


def forward_pass(config, tmp_path):
    """Run a model without weights as transformers makes it of a folder."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    loaded = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"), torch.no_grad():
        model = transformers.AutoModel.from_config(loaded, dtype=torch.bfloat16)
        model(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize("family", NULL_STOPS)
def test_null_for_the_dict_of_a_kind_stops_a_forward_pass(family, tmp_path):
    kind, other_kind = kinds_of(family)
    config = config_of(family, [kind, other_kind], {kind: None, other_kind: dict(PLAIN)})
    with pytest.raises(KeyError) as stop:
        forward_pass(config, tmp_path)
    known = RUNTIMES[RUNTIME](config, None)
    assert known.stop_message == f"KeyError: {stop.value}"


@pytest.mark.parametrize("family", [*NULL_STOPS, "beam", "lfm3"])
def test_null_for_a_kind_that_no_layer_is_runs(family, tmp_path):
    kind, other_kind = sorted(kinds_of(family))  # the last layer of Gemma 4 is of full attention
    config = config_of(family, [kind], {kind: dict(PLAIN), other_kind: None})
    forward_pass(config, tmp_path)
    known = RUNTIMES[RUNTIME](config, None)
    assert known.error is None and not known.stop_message
    assert known.rotations.keys() == {kind} and not known.without_rotation


def test_beams_layers_of_a_null_kind_rest(tmp_path):
    config = config_of(
        "beam", kinds_of("beam"), {"sliding_attention": PLAIN, "full_attention": None}
    )
    forward_pass(config, tmp_path)
    known = RUNTIMES[RUNTIME](config, None)
    assert not known.stop_message and known.without_rotation == (1, 3)
