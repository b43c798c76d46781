"""A checkpoint's positions are those that its model runs, family by family."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
import transformers

from posenc import extend as hf
from posenc.command_line.errors import RunFailed
from posenc.extend.methods import METHODS, stretch
from posenc.extend.options import Options
from posenc.frequencies.scalings.registry import LongRoPE, Proportional
from posenc.hf import tuning
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.model_rotation import (
    frequencies_differ,
    rebuild_rotary_modules,
    rotary_frequencies,
    settings_applied,
)
from posenc.hf.rope_settings import RopeSetting
from posenc.hf.tune_config import TuneConfig
from posenc.inspect.checkpoint.measurements import Request, measure_checkpoint
from posenc.inspect.checkpoint.positions import Rotation
from tests import golden_values
from tests.hf_models import (
    COMMON,
    LENGTH,
    save,
    skip_if_absent,
    skip_if_yarn_is_for_all_layers,
)
from tests.hf_models import NUMBERS as DOCUMENTS

TARGET = 3 * LENGTH
QUICK = Options(windows=1, search_evaluations=0, task=["none"])
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": LENGTH // 4,
}
FAMILIES = {
    "yarn by layer type, truncate false": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": YARN | {"truncate": False},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "head_dim": 16,
        },
    ),
    "yarn, truncate false": (
        "llama",
        {"rope_parameters": YARN | {"truncate": False}, "head_dim": 16},
    ),
    "a fixed alpha": (
        "hunyuan_v1_dense",
        COMMON
        | {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 1000.0,
                "factor": 1.0,
            },
        },
    ),
    "heads of two sizes": (
        "gemma4_text",
        COMMON
        | {
            "head_dim": 8,
            "global_head_dim": 16,
            "num_hidden_layers": 2,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 257,
            "num_kv_shared_layers": 0,
        },
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_frequencies_are_those_that_the_model_runs(name, tmp_path):
    if name == "yarn by layer type, truncate false":
        skip_if_yarn_is_for_all_layers()
    family, options = FAMILIES[name]
    checkpoint = load_checkpoint(save(family, tmp_path / family, **options))
    if name == "a fixed alpha" and frequencies_differ(checkpoint.model, checkpoint.rope_settings):
        rebuild_rotary_modules(checkpoint.model)
        assert not frequencies_differ(checkpoint.model, checkpoint.rope_settings)
        pytest.skip("this transformers computes alpha's frequencies, and loses them as it loads")
    running = rotary_frequencies(checkpoint.model)
    assert checkpoint.rope_settings
    for setting in checkpoint.rope_settings:
        inv_freq, scale = running[setting.layer_type]
        said = setting.frequencies()
        expected = torch.tensor([float(f) for f in said.inv_freq])
        torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=1e-12)
        assert scale == pytest.approx(said.attention_factor, rel=1e-6)
    assert not frequencies_differ(checkpoint.model, checkpoint.rope_settings)


def test_a_model_that_runs_other_frequencies_is_refused(tmp_path):
    """The planted case: one of them is off by a thousandth."""
    checkpoint = load_checkpoint(save("llama", tmp_path / "llama"))
    inv_freq, _ = rotary_frequencies(checkpoint.model)[None]
    for wrong in (1.001, float("nan")):
        kept = inv_freq.clone()
        inv_freq[1] *= wrong
        assert frequencies_differ(checkpoint.model, checkpoint.rope_settings)
        inv_freq.copy_(kept)
    assert not frequencies_differ(checkpoint.model, checkpoint.rope_settings)


def test_a_model_whose_code_does_not_take_a_method_is_not_measured_with_it(tmp_path):
    """It has a base for each layer, which its rotary keys do not change."""
    checkpoint = load_checkpoint(save("granite_swa", tmp_path / "granite", **COMMON))
    wanted = stretch(checkpoint.rope_settings, METHODS["ntk"], TARGET)
    with (
        pytest.raises(ValueError, match="granite_swa model does not take these frequencies"),
        settings_applied(checkpoint.model, wanted, TARGET),
    ):
        pass
    assert not frequencies_differ(checkpoint.model, checkpoint.rope_settings)


FAR = ["sliding_attention", "full_attention"]
NEAR = "only windowed layers rotate"
REFUSED = {
    NEAR: ("cohere2", COMMON | {"sliding_window": 16, "layer_types": FAR, "head_dim": 8}),
    NEAR + ", so that": ("exaone4", COMMON | {"sliding_window": 16, "layer_types": FAR}),
    "is 3 channels, an odd number": (
        "llama",
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.4,
            },
        },
    ),
    "unknown rotary keys alpha": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 2.0,
                "alpha": 10.0,
            }
        },
    ),
    "none of its layers attends": (
        "granitemoehybrid",
        COMMON
        | {
            "layer_types": ["mamba"] * 2,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "shared_intermediate_size": 64,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
        },
    ),
    "takes its base from layer_rope_theta": ("granite_swa", COMMON),
    "no max_position_embeddings": (
        "recurrent_gemma",
        {key: value for key, value in COMMON.items() if key != "max_position_embeddings"}
        | {"lru_width": 32, "head_dim": 8, "attention_window_size": 16},
    ),
    "rotates in layers of the kind sliding_attention only": (
        "beam",
        COMMON
        | {
            "head_dim": 8,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_positions_that_cannot_be_stretched_are_refused_first(message, tmp_path):
    family, options = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        folder = save(family, tmp_path / family, **options)
        hf.extend(folder, TARGET, DOCUMENTS, as_ids=True, options=QUICK)


@pytest.mark.parametrize("name", ["ntk", "ntk-2x", "dynamic", "longrope-switch"])
def test_what_needs_two_pairs_is_refused_where_one_rotates(name):
    one, two = (RopeSetting(None, 1e4, dim, None, LENGTH) for dim in (2, 4))
    with pytest.raises(ValueError, match="only one pair rotates"):
        stretch((one,), METHODS[name], TARGET)
    assert stretch((two,), METHODS[name], TARGET)


@pytest.mark.parametrize("case", golden_values.cases("scaling_clip"))
def test_clip_slows_the_pairs_that_do_not_turn_as_its_authors_do(case):
    dim, theta, clipped = (case.params[k] for k in ("head_dim", "rope_theta", "clipped"))
    last_turning = dim // 2 - clipped - 1
    trained = math.ceil(2 * math.pi * theta ** (2 * last_turning / dim))
    (stretched,) = stretch((RopeSetting(None, theta, dim, None, trained),), METHODS["clip"], 10**6)
    for length in (1, 10**6):
        frequencies = stretched.frequencies(length)
        case.assert_close("inv_freq", torch.tensor([float(f) for f in frequencies.inv_freq]))
        assert frequencies.attention_factor == 1.0


def test_one_pair_that_does_not_turn_is_not_slowed():
    one = RopeSetting(None, 1e4, 8, None, 1000)
    assert stretch((one,), METHODS["clip"], TARGET)[0].frequencies() == one.frequencies()


@pytest.mark.parametrize("method", ["proportional", "clip"])
def test_pairs_that_stand_still_are_proved_to_stand_still(method, tmp_path):
    folder, out = save("llama", tmp_path / "llama", head_dim=16), tmp_path / "out"
    outcome = hf.extend(
        folder, TARGET, DOCUMENTS, method=method, out=out, as_ids=True, options=QUICK
    )
    assert outcome.proof is not None
    rope = json.loads((out / "config.json").read_text())["rope_parameters"]
    assert rope["rope_type"] == "longrope" and rope["long_factor"][-1] > 1e20
    assert outcome.proof.logits_error < 1e-5


def test_drope_writes_layers_that_do_not_rotate_and_recalibrates_at_the_training_length(
    tmp_path, monkeypatch
):
    folder, out, lengths = save("smollm3", tmp_path / "model"), tmp_path / "out", set()
    stock = tuning.next_token_loss

    def loss(model, tokens, *rest):
        lengths.add(tokens.shape[1])
        return stock(model, tokens, *rest)

    monkeypatch.setattr(tuning, "next_token_loss", loss)
    options = replace(QUICK, tune=TuneConfig(steps=8, batch=1))
    outcome = hf.extend(
        folder, TARGET, DOCUMENTS, method="drope", out=out, as_ids=True, options=options
    )
    assert "it has no layer that rotates" in (out / "SERVE.md").read_text(encoding="utf-8")
    assert lengths == {LENGTH}
    assert outcome.proof is not None and outcome.proof.num_generated == 8
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert model.config.no_rope_layers == [0, 0, 0, 0]
    tokens = torch.arange(TARGET)[None]
    before = model(tokens).logits
    model.model.rotary_emb.inv_freq *= 3
    assert torch.equal(model(tokens).logits, before)
    assert outcome.checkpoint.config.no_rope_layers == [1, 1, 1, 0]  # as it was


@pytest.mark.parametrize(
    "family, tune, words",
    [
        ("llama", TuneConfig(steps=1), "a llama config has no no_rope_layers"),
        ("smollm3", None, "drope: without its rotation a model must be recalibrated; give --tune"),
    ],
)
def test_drope_is_refused_where_nothing_can_say_it_and_without_tuning(
    family, tune, words, tmp_path
):
    folder, out = save(family, tmp_path / family), tmp_path / "out"
    options = replace(QUICK, tune=tune)
    with pytest.raises(ValueError, match=words):
        hf.extend(folder, TARGET, DOCUMENTS, method="drope", out=out, as_ids=True, options=options)
    assert not out.exists()


TURNING = 4
SHARE = RopeSetting(None, 1e4, 16, Proportional(TURNING / 8), LENGTH)
"""Eight pairs of channels, of which the four fastest rotate."""


@pytest.mark.parametrize("name", ["linear", "ntk", "ntk-2x", "proportional"])
def test_pairs_that_never_rotated_stand_still_in_what_is_stretched(name):
    before = [float(f) for f in SHARE.frequencies().inv_freq]
    (stretched,) = stretch((SHARE,), METHODS[name], TARGET)
    after = [float(f) for f in stretched.frequencies().inv_freq]
    assert before[TURNING:] == after[TURNING:] == [0.0] * 4
    assert before[TURNING - 1] > 0
    slower = [b / a if a else None for b, a in zip(before, after, strict=True)][:TURNING]
    expected = {
        "linear": pytest.approx([3.0] * TURNING),
        "ntk": pytest.approx([3.0 ** (i / 3) for i in range(TURNING)]),
        "ntk-2x": pytest.approx([6.0 ** (i / 3) for i in range(TURNING)]),
        "proportional": [1.0, 1.0, 1.0, None],  # those that turn once in 64 tokens
    }
    assert slower == expected[name]


@pytest.mark.parametrize(
    "name", ["by-parts", "yarn", "llama3", "dynamic", "longrope-switch", "clip"]
)
def test_a_method_without_words_for_some_of_the_pairs_is_refused(name):
    with pytest.raises(ValueError, match="only 4 of 8 pairs of channels rotate"):
        stretch((SHARE,), METHODS[name], TARGET)


def test_a_search_over_pairs_that_stand_still_is_refused(tmp_path):
    family, options = FAMILIES["heads of two sizes"]
    folder = save(family, tmp_path / family, **options)
    with pytest.raises(RunFailed, match="some of its pairs of channels do not rotate"):
        hf.extend(
            folder,
            TARGET,
            DOCUMENTS,
            method="search",
            as_ids=True,
            options=replace(QUICK, search_evaluations=1),
        )


def test_heads_of_two_sizes_are_inspected_and_exported(tmp_path):
    """Beside nested rotary keys, transformers would take a flat rope_scaling for all of them."""
    family, options = FAMILIES["heads of two sizes"]
    folder, out = save(family, tmp_path / family, **options), tmp_path / "out"
    ids = " ".join(map(str, range(20, 40)))
    asked = Request(folder, ids, ("25", "31"), as_ids=True)
    rotations = [
        kind for kind in measure_checkpoint(asked).position_sources if isinstance(kind, Rotation)
    ]
    assert {kind.head_dim for kind in rotations} == {8, 16}
    outcome = hf.extend(
        folder, TARGET, DOCUMENTS, method="linear", out=out, as_ids=True, options=QUICK
    )
    assert outcome.proof is not None
    assert outcome.proof.inv_freq_error < 1e-6
    assert "rope_scaling" not in json.loads((out / "config.json").read_text())


def test_a_config_that_transformers_would_not_load_is_not_measured(tmp_path):
    """Where heads have two sizes, its check of longrope asks for one."""
    family, options = FAMILIES["heads of two sizes"]
    checkpoint = load_checkpoint(save(family, tmp_path / family, **options))
    if not hasattr(checkpoint.config, "per_layer_config"):
        pytest.skip("this transformers has one size of heads in its check")
    lists = tuple(
        replace(s, scaling=LongRoPE(3.0, LENGTH, (2.0,) * 8, (2.0,) * 8))
        if s.layer_type == "full_attention"
        else s
        for s in checkpoint.rope_settings
    )
    with (
        pytest.raises(ValueError, match="transformers would not load a gemma4_text config"),
        settings_applied(checkpoint.model, lists, TARGET),
    ):
        pass
    assert not frequencies_differ(checkpoint.model, checkpoint.rope_settings)


def test_a_share_that_attention_reads_too_is_written_as_lists(tmp_path):
    """GPT-NeoX Japanese would rotate fewer channels, and fail, with partial_rotary_factor."""
    options = {k: v for k, v in COMMON.items() if k != "num_key_value_heads"}
    folder, out = save("gpt_neox_japanese", tmp_path / "neox", **options), tmp_path / "out"
    outcome = hf.extend(
        folder, TARGET, DOCUMENTS, method="proportional", out=out, as_ids=True, options=QUICK
    )
    assert outcome.proof is not None
    assert outcome.proof.logits_error < 1e-5


VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "patch_size": 4,
}
QWEN = COMMON | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


def with_images(family, folder, **text):
    """A model of text and images of this family, as its publisher saves it."""
    skip_if_absent(family)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family, text_config=QWEN | text, vision_config=VISION
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.quick(1)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_of_a_model_with_images_is_extended_and_the_images_stay(family, tmp_path):
    before = with_images(family, tmp_path / "before")
    text = copy.deepcopy(before.config.text_config)
    text.standardize_rope_params()
    if text.rope_parameters["partial_rotary_factor"] != 0.5:
        pytest.skip("this transformers writes its default over the share of channels that rotate")
    raw = json.loads((tmp_path / "before" / "config.json").read_text())
    outcome = hf.extend(
        tmp_path / "before",
        TARGET,
        DOCUMENTS,
        as_ids=True,
        method="yarn",
        out=tmp_path / "after",
        options=QUICK,
    )
    assert outcome.proof is not None
    new = json.loads((tmp_path / "after" / "config.json").read_text())
    assert {k: v for k, v in new.items() if k != "text_config"} == {
        k: v for k, v in raw.items() if k != "text_config"
    }
    keys = new["text_config"]["rope_parameters"]
    assert (keys["rope_type"], keys["factor"]) == ("yarn", TARGET / LENGTH)
    assert keys["mrope_section"] == [2, 1, 1] and keys["mrope_interleaved"]
    assert new["text_config"]["max_position_embeddings"] == TARGET
    assert any(line.startswith("  text_config.rope_parameters: ") for line in outcome.config_diff)
    tokens = torch.arange(5, 105)[None]
    kinds = transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM
    both, text = (kind.from_pretrained(tmp_path / "after").eval() for kind in kinds)
    with torch.no_grad():
        logits = [model(tokens).logits for model in (both, text, before)]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-6)
    assert (logits[0] - logits[2]).abs().max() > 1e-3
    assert both.model.visual.state_dict().keys() == before.model.visual.state_dict().keys()


def test_rotary_keys_of_a_nested_text_are_checked_too(tmp_path):
    with_images("qwen3_5", tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"]["rope_parameters"]["rope_theta"] = -1
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="rope_theta must be a positive number, got -1"):
        load_checkpoint(tmp_path / "m")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_a_model_that_is_built_with_its_images_is_inspected_and_extended(family, tmp_path):
    text = COMMON | {"head_dim": 8, "sliding_window": 16, "num_hidden_layers": 6}
    if family == "gemma4":  # whose own vocabulary for each layer has 400 million parameters
        text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 257}
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 8,
        "patch_size": 4,
    }
    skip_if_absent(family)
    config = transformers.AutoConfig.for_model(family, text_config=text, vision_config=sizes)
    folder = tmp_path / "before"
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    sheet = measure_checkpoint(Request(folder, " ".join(map(str, range(5, 25))), as_ids=True))
    assert all(isinstance(kind, Rotation) for kind in sheet.position_sources)
    assert sheet.structure.layers == 6
    outcome = hf.extend(
        folder,
        TARGET,
        DOCUMENTS,
        method="linear",
        out=tmp_path / "after",
        as_ids=True,
        options=replace(QUICK, anyway=True),
    )
    assert outcome.proof is not None and outcome.proof.logits_error < 1e-5
