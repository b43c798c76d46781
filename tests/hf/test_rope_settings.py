"""A checkpoint's rotary settings: read, refused where they contradict, carried exactly."""

import json
import re

import pytest
import torch

from posenc.extend.export.folder import config_to_write
from posenc.extend.methods import METHODS, stretch
from posenc.frequencies.scalings.registry import NTK, DynamicYaRN, LongRoPE, YaRN
from posenc.hf.checkpoint.check_config import check_rotary_keys
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.model_rotation import rotary_frequencies, settings_applied
from posenc.hf.rope_settings import (
    FAMILIES_WITH_ONLY_LONGROPE,
    RopeSetting,
    read_settings,
    rope_parameters,
)
from tests.hf_models import LENGTH, ROPE, save

TARGET = 4 * LENGTH


@pytest.fixture(scope="module", params=ROPE)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / request.param
    return load_checkpoint(save(request.param, folder))


def test_own_frequencies_are_read_as_transformers_computes_them(checkpoint):
    held = rotary_frequencies(checkpoint.model)
    for setting in read_settings(checkpoint.config):
        inv_freq, factor = held[setting.layer_type] if setting.layer_type in held else held[None]
        ours = setting.frequencies()
        torch.testing.assert_close(inv_freq, floats(ours.inv_freq), rtol=1e-6, atol=0)
        assert factor == pytest.approx(ours.attention_factor, rel=1e-6)


@pytest.mark.parametrize("name", [n for n in METHODS if n != "none"])
def test_every_method_reaches_stock_transformers_exactly(checkpoint, name):
    method = METHODS[name]
    plain = read_settings(checkpoint.config)
    if plain[0].rotary_dim < 4 and name.startswith(("ntk", "dynamic", "longrope")):
        pytest.skip("NTK needs two pairs of channels")
    if checkpoint.config.model_type in FAMILIES_WITH_ONLY_LONGROPE and name == "dynamic":
        pytest.skip("its config has no word for it, see test_failing_methods")
    if name == "yarn" and len(plain) > 1 and not hasattr(checkpoint.config, "validate"):
        pytest.skip("this transformers cannot load YaRN by layer type")
    settings = stretch(plain, method, TARGET)
    before = {k: v[0].clone() for k, v in rotary_frequencies(checkpoint.model).items()}
    with settings_applied(checkpoint.model, settings, LENGTH if method.keeps_maximum else TARGET):
        held = rotary_frequencies(checkpoint.model)
        for setting in settings:
            inv_freq, factor = held.get(setting.layer_type) or held[None]
            ours = setting.frequencies()
            torch.testing.assert_close(inv_freq, floats(ours.inv_freq), rtol=1e-6, atol=1e-12)
            assert factor == pytest.approx(ours.attention_factor, rel=1e-6)
    after = {k: v[0] for k, v in rotary_frequencies(checkpoint.model).items()}
    for layer_type, inv_freq in before.items():
        torch.testing.assert_close(after[layer_type], inv_freq, rtol=0, atol=0)


def test_a_sliding_layer_keeps_its_frequencies(tmp_path):
    gemma = load_checkpoint(save("gemma3_text", tmp_path / "gemma"))
    for setting in stretch(read_settings(gemma.config), METHODS["yarn"], TARGET):
        assert (setting.scaling is None) == (setting.layer_type == "sliding_attention")


def test_yarn_on_yarn_is_edited_and_never_stacked(tmp_path):
    oss = load_checkpoint(save("gpt_oss", tmp_path / "oss"))
    (setting,) = stretch(read_settings(oss.config), METHODS["yarn"], TARGET)
    assert isinstance(setting.scaling, YaRN)
    assert setting.scaling.factor == TARGET / (LENGTH // 2)
    assert setting.scaling.truncate is False
    assert setting.scaling.beta_fast == 8.0


def test_the_carrier_holds_any_frequencies(tmp_path):
    llama = load_checkpoint(save("llama", tmp_path / "llama"))
    (plain,) = read_settings(llama.config)
    odd = LongRoPE(4.0, LENGTH, (1.0, 1.3, 2.9, 17.0), (1.0, 1.3, 2.9, 17.0), 1.07)
    settings = (RopeSetting(None, plain.rope_theta, plain.rotary_dim, odd, LENGTH),)
    with settings_applied(llama.model, settings, TARGET):
        inv_freq, factor = rotary_frequencies(llama.model)[None]
        expected = [10000.0 ** (-t / 4) / f for t, f in enumerate((1.0, 1.3, 2.9, 17.0))]
        torch.testing.assert_close(inv_freq, torch.tensor(expected), rtol=1e-6, atol=0)
        assert factor == pytest.approx(1.07)


CONTRADICTIONS = {
    "attn_factor": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.9}},
    "original_max_position_embeddings": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "rope_theta": {"rope_parameters": {"rope_type": "default"}},
    "rope_theta is 10000.0 outside": {
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "rope_parameters and another rope_scaling": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "unknown rotary keys beta_quick": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "beta_quick": 3}
    },
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_a_contradictory_config_is_refused(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_rotary_keys(CONTRADICTIONS[message])


def test_legacy_and_flat_configs_are_accepted():
    check_rotary_keys({"rope_theta": 10000.0})
    check_rotary_keys({})
    check_rotary_keys({"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}})


def test_an_unknown_rope_type_is_never_assumed_to_be_another(tmp_path):
    llama = load_checkpoint(save("llama", tmp_path / "llama"))
    llama.config.rope_parameters = {"rope_type": "spiral", "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="spiral"):
        read_settings(llama.config)


def test_pickled_weights_are_refused(tmp_path):
    folder = save("llama", tmp_path / "llama")
    next(folder.glob("*.safetensors")).rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"safetensors, found only pytorch_model\.bin"):
        load_checkpoint(folder)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_checkpoint(tmp_path)


def test_code_from_the_folder_is_never_run(tmp_path):
    folder = save("llama", tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ValueError, match="never run"):
        load_checkpoint(folder)


def floats(decimals) -> torch.Tensor:
    return torch.tensor([float(f) for f in decimals])


def test_exports_say_the_same_to_readers_of_both_dialects(checkpoint):
    """transformers 5 takes rope_scaling where both stand; 4 knows rope_theta and rope_scaling."""
    plain = read_settings(checkpoint.config)
    before = config_to_write(checkpoint.config.to_dict(), LENGTH)[0].config
    neox = checkpoint.config.model_type == "gpt_neox"
    assert before["rotary_emb_base" if neox else "rope_theta"] == next(
        s.rope_theta for s in plain if s.layer_type in (None, "full_attention")
    )
    if checkpoint.config.model_type in FAMILIES_WITH_ONLY_LONGROPE:
        assert "rope_scaling" not in before
        return
    settings = stretch(plain, METHODS["by-parts"], TARGET)
    with settings_applied(checkpoint.model, settings, TARGET):
        saved = checkpoint.config.to_dict()
        recipe, _ = config_to_write({**saved, "auto_map": {"AutoModel": "evil.Evil"}}, TARGET)
        config = recipe.config
        check_rotary_keys(config)
        assert "auto_map" not in config
        assert not {"transformers-4", "transformers-5"} & recipe.misreadings.keys()
        again = type(checkpoint.config)(**{k: v for k, v in config.items() if k != "model_type"})
        old = {k: v for k, v in config.items() if k not in ("model_type", "rope_parameters")}
        for read in (again, type(checkpoint.config)(**old)):
            got = {s.layer_type: s for s in read_settings(read)}
            for meant in settings:
                found = got[meant.layer_type]
                plain_base = found.scaling is None  # it names no length
                assert found.original_length == meant.original_length or plain_base
                torch.testing.assert_close(
                    floats(found.frequencies().inv_freq),
                    floats(meant.frequencies().inv_freq),
                    rtol=1e-6,
                    atol=0,
                )


def test_an_extended_checkpoint_is_extended_further_from_where_it_was_trained(tmp_path):
    """The recipe's original length is the largest one; the training length stands beside it."""
    llama = load_checkpoint(save("llama", tmp_path / "llama"))
    with settings_applied(
        llama.model, stretch(llama.rope_settings, METHODS["by-parts"], TARGET), TARGET
    ):
        config = config_to_write(llama.config.to_dict(), TARGET)[0].config
    assert config["rope_parameters"]["original_max_position_embeddings"] == TARGET
    again = type(llama.config)(**{k: v for k, v in config.items() if k != "model_type"})
    (setting,) = stretch(read_settings(again), METHODS["ntk"], 2 * TARGET)
    assert setting.original_length == LENGTH
    assert setting.scaling == NTK(2 * TARGET / LENGTH)


def test_a_scaling_that_changes_with_the_length_is_never_written_as_a_constant():
    setting = RopeSetting(None, 1e4, 16, DynamicYaRN(2048), 2048)
    with pytest.raises(ValueError, match="changes with the length"):
        rope_parameters(setting, 16)
