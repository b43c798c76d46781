"""YaRN's pair of temperatures: what transformers' own attention makes of it, before and after."""

import inspect
import json
import math
import sys
from dataclasses import replace

import pytest
import torch

from posenc import extend as hf
from posenc.extend.methods import METHODS, stretch
from posenc.extend.options import Options
from posenc.hf import model_rotation
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.model_rotation import configured_score_scales, rotary_frequencies, settings_applied
from tests.hf_models import COMMON, LENGTH, save
from tests.hf_models import NUMBERS as DOCUMENTS

TARGET, BEFORE = 3 * LENGTH, 4.0
AFTER = 12.0
"""Both factors count from the original length, a quarter of LENGTH."""
QUICK = Options(windows=1, search_evaluations=0, task=["none"])
LATENT = COMMON | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
PAIRS = [
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.7, "mscale_all_dim": 1.2},
    {"mscale_all_dim": 0.5},
    {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.3},
]


def model(folder, family, pair, kind="yarn"):
    keys = {"rope_type": kind, "rope_theta": 1e4, "factor": BEFORE, **pair}
    if kind == "yarn":
        keys |= {"beta_fast": 4.0, "original_max_position_embeddings": LENGTH // 4}
    sizes = LATENT if family.startswith("deepseek") else COMMON
    return save(family, folder / family, spread=0.3, **sizes, rope_parameters=keys)


def temperature(factor, mscale):
    return 0.1 * mscale * math.log(factor) + 1


def on_scores(checkpoint, factor, all_dim):
    """The factor on the scores, if the model's own file reads the key at all: DeepSeek-V2's of
    early transformers 5 does not, and leaves the scores as they are."""
    if "mscale_all_dim" not in inspect.getsource(sys.modules[type(checkpoint.model).__module__]):
        assert checkpoint.config.model_type == "deepseek_v2"
        return 1.0
    return temperature(factor, all_dim) ** 2


def scales(checkpoint):
    """What its attentions hold, one by one."""
    return [m.scaling for m in checkpoint.model.modules() if hasattr(m, "qk_head_dim")]


def built_again(running):
    """The same weights in a model that transformers builds from the running one's config."""
    config = type(running.config).from_dict(running.config.to_dict())
    fresh = type(running)(config).eval()
    fresh.load_state_dict(running.state_dict())
    return fresh


def logits(running):
    with torch.no_grad():
        return running(torch.arange(20, 70)[None]).logits


def on_cos(factor, pair):
    if pair.get("mscale"):
        return temperature(factor, pair["mscale"]) / temperature(factor, pair["mscale_all_dim"])
    return temperature(factor, 1.0)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("pair", PAIRS)
def test_yarn_stretched_further_has_the_temperatures_of_the_new_factor(family, pair, tmp_path):
    """The paper's formulas, and the logits of a stock model built from the config as it is."""
    checkpoint = load_checkpoint(model(tmp_path, family, pair))
    all_dim = pair["mscale_all_dim"]
    before = 16**-0.5 * on_scores(checkpoint, BEFORE, all_dim)
    assert scales(checkpoint) == pytest.approx([before] * 2)
    with settings_applied(
        checkpoint.model, stretch(checkpoint.rope_settings, METHODS["yarn"], TARGET), TARGET
    ):
        keys = checkpoint.config.rope_parameters
        assert (keys["factor"], keys["mscale_all_dim"]) == (AFTER, all_dim)
        assert ("attention_factor" in keys) == ("mscale" not in pair)
        after = 16**-0.5 * on_scores(checkpoint, AFTER, all_dim)
        assert scales(checkpoint) == pytest.approx([after] * 2)
        (_, said), *rest = rotary_frequencies(checkpoint.model).values()
        assert not rest
        assert said == pytest.approx(on_cos(AFTER, pair))
        assert torch.equal(logits(checkpoint.model), logits(built_again(checkpoint.model)))
    assert scales(checkpoint) == pytest.approx([before] * 2)


@pytest.mark.parametrize("name", ["ntk", "linear", "by-parts", "llama3"])
def test_a_method_in_place_of_yarn_takes_its_temperatures_away(name, tmp_path):
    checkpoint = load_checkpoint(model(tmp_path, "deepseek_v3", PAIRS[0]))
    with settings_applied(
        checkpoint.model, stretch(checkpoint.rope_settings, METHODS[name], TARGET), TARGET
    ):
        assert scales(checkpoint) == pytest.approx([16**-0.5] * 2)
        assert torch.equal(logits(checkpoint.model), logits(built_again(checkpoint.model)))


def test_the_export_has_the_new_pair_and_is_proved(tmp_path):
    folder, out = model(tmp_path, "deepseek_v3", PAIRS[1]), tmp_path / "out"
    outcome = hf.extend(
        folder,
        TARGET,
        DOCUMENTS,
        method="yarn",
        out=out,
        as_ids=True,
        options=replace(QUICK, anyway=True),  # random weights know no text
    )
    assert outcome.proof is not None
    assert outcome.proof.logits_error < 1e-5
    written = json.loads((out / "config.json").read_text())["rope_parameters"]
    assert {key: written[key] for key in PAIRS[1]} == PAIRS[1]
    assert written["factor"] == AFTER
    assert "attention_factor" not in written


def test_a_scale_that_stays_as_it_was_built_is_another_model(tmp_path, monkeypatch):
    """The planted case: what would be measured is not what is read back."""
    monkeypatch.setattr(model_rotation, "_set_score_scales", lambda scales: None)
    checkpoint = load_checkpoint(model(tmp_path, "deepseek_v3", PAIRS[0]))
    with settings_applied(
        checkpoint.model, stretch(checkpoint.rope_settings, METHODS["yarn"], TARGET), TARGET
    ):
        fresh = built_again(checkpoint.model)
        assert (logits(checkpoint.model) - logits(fresh)).abs().max() > 0.1


@pytest.mark.parametrize("pair", PAIRS)
def test_other_attention_takes_the_pair_on_cos_and_sin_only(pair, tmp_path):
    checkpoint = load_checkpoint(model(tmp_path, "llama", pair))
    settings = stretch(checkpoint.rope_settings, METHODS["yarn"], TARGET)
    with settings_applied(checkpoint.model, settings, TARGET):
        assert set(configured_score_scales(checkpoint.model).values()) == {8**-0.5}
        _, said = rotary_frequencies(checkpoint.model)[None]
        assert said == pytest.approx(on_cos(AFTER, pair))


def test_a_scale_beside_another_scaling_is_refused(tmp_path):
    """Its classes read the key beside any rope_type; no method says what they were trained with."""
    folder = model(tmp_path, "deepseek_v3", {"mscale_all_dim": 1.0}, kind="linear")
    with pytest.raises(ValueError, match="mscale_all_dim with rope_type linear"):
        hf.extend(folder, TARGET, DOCUMENTS, as_ids=True, options=QUICK)
