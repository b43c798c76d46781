"""A checkpoint's positions are those that its model runs, family by family."""

from __future__ import annotations

import pytest
import torch

from posenc import extend as hf
from posenc.extend.options import Options
from posenc.extend.variants.methods import METHODS, stretch
from posenc.hf.apply import applied, other_frequencies, rotary_frequencies
from posenc.hf.loading import load_checkpoint
from posenc.hf.rope_config import RopeSetting
from tests.hf_models import COMMON, LENGTH, save

TARGET = 3 * LENGTH
DOCUMENTS = [" ".join(str((7 * i + j) % 200 + 20) for j in range(400)) for i in range(8)]
QUICK = Options(windows=1, search_tries=0, tasks="none")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0,
        "original_max_position_embeddings": LENGTH // 4}  # fmt: skip
FAMILIES = {
    "yarn by layer type, truncate false": ("gemma3_text", {
        "rope_parameters": {"full_attention": YARN | {"truncate": False},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        "head_dim": 16}),
    "yarn, truncate false": ("llama", {"rope_parameters": YARN | {"truncate": False},
                                       "head_dim": 16}),
    "a fixed alpha": ("hunyuan_v1_dense", COMMON | {"head_dim": 8, "rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}}),
    "heads of two sizes": ("gemma4_text", COMMON | {
        "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 2, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 257, "num_kv_shared_layers": 0}),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_the_frequencies_are_those_that_the_model_runs(name, tmp_path):
    family, options = FAMILIES[name]
    checkpoint = load_checkpoint(save(family, tmp_path / family, **options))
    running = rotary_frequencies(checkpoint.model)
    assert checkpoint.rotary
    for setting in checkpoint.rotary:
        inv_freq, scale = running[setting.layer_type]
        said = setting.frequencies()
        expected = torch.tensor([float(f) for f in said.inv_freq])
        torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=1e-12)
        assert scale == pytest.approx(said.attention_factor, rel=1e-6)
    assert not other_frequencies(checkpoint.model, checkpoint.rotary)


def test_a_model_that_runs_other_frequencies_is_refused(tmp_path):
    """The planted case: one of them is off by a thousandth."""
    checkpoint = load_checkpoint(save("llama", tmp_path / "llama"))
    inv_freq, _ = rotary_frequencies(checkpoint.model)[None]
    for wrong in (1.001, float("nan")):
        kept = inv_freq.clone()
        inv_freq[1] *= wrong
        assert other_frequencies(checkpoint.model, checkpoint.rotary)
        inv_freq.copy_(kept)
    assert not other_frequencies(checkpoint.model, checkpoint.rotary)


def test_a_model_whose_code_does_not_take_a_method_is_not_measured_with_it(tmp_path):
    """It has a base for each layer, which its rotary keys do not change."""
    checkpoint = load_checkpoint(save("granite_swa", tmp_path / "granite", **COMMON))
    wanted = stretch(checkpoint.rotary, METHODS["ntk"], TARGET)
    with (
        pytest.raises(ValueError, match="granite_swa model does not take these frequencies"),
        applied(checkpoint.model, wanted, TARGET),
    ):
        pass
    assert not other_frequencies(checkpoint.model, checkpoint.rotary)


FAR = ["sliding_attention", "full_attention"]
NEAR = "only layers that look through a window rotate"
REFUSED = {
    NEAR: ("cohere2", COMMON | {"sliding_window": 16, "layer_types": FAR, "head_dim": 8}),
    NEAR + ", so that": ("exaone4", COMMON | {"sliding_window": 16, "layer_types": FAR}),
    "is 3 channels, which are no pairs": ("llama", {"head_dim": 8, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}}),
    "unknown rotary keys alpha": ("llama", {"rope_parameters": {
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "alpha": 10.0}}),
    "rotates in layers of the kind sliding_attention only": ("beam", COMMON | {
        "head_dim": 8, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"]}),
}  # fmt: skip


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


def test_pairs_that_stand_still_are_proved_to_stand_still(tmp_path):
    folder, out = save("llama", tmp_path / "llama", head_dim=16), tmp_path / "out"
    outcome = hf.extend(
        folder, TARGET, DOCUMENTS, method="proportional", out=out, as_ids=True, options=QUICK
    )
    assert outcome.proof is not None
    assert outcome.proof.logits_error < 1e-5
