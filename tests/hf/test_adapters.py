"""Adapters sit on attention, are merged, and are written as peft reads them."""

import json

import pytest
import torch
from safetensors.torch import load_file

from posenc import extend as hf
from posenc.extend.options import Options
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.lora import LoRALinear, add_lora, merge_lora, projections, save_adapter
from posenc.hf.tune_config import TuneConfig
from tests.extend.conftest import proved_here as proved_here
from tests.hf_models import LENGTH, save, transformers
from tests.hf_models import NUMBERS as DOCUMENTS

TARGET = 3 * LENGTH
ADAPTED = {
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "opt": {"q_proj", "k_proj", "v_proj", "out_proj"},
    "gpt2": {"c_attn", "c_proj"},
    "bert": {"query", "key", "value", "dense"},
    "gpt_neox": {"query_key_value", "dense"},
}


@pytest.mark.parametrize("family", ADAPTED)
def test_adapters_sit_on_the_projections_of_attention_alone(family, tmp_path):
    model = load_checkpoint(save(family, tmp_path / family)).model
    paths = [path for path, _ in projections(model)]
    assert {path.rpartition(".")[2] for path in paths} == ADAPTED[family]
    assert all("attn" in path or "attention" in path for path in paths)
    assert len(paths) == len(ADAPTED[family]) * 2  # layers
    assert not any(word in path for path in paths for word in ("mlp", "intermediate", "cls"))


def test_a_model_without_projections_is_refused_and_left_trainable():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="found no projections of attention"):
        add_lora(model, 2)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merging_changes_nothing_that_the_adapters_did_not(family, tmp_path):
    model = load_checkpoint(save(family, tmp_path / family, spread=0.1)).model
    tokens = torch.arange(20, 52)[None]
    with torch.no_grad():
        plain = model(tokens).logits
        add_lora(model, 2, only_adapters=True)
        assert {n.rpartition(".")[2] for n, p in model.named_parameters() if p.requires_grad} == {
            "down",
            "up",
        }
        torch.testing.assert_close(model(tokens).logits, plain)
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.up.normal_()
        adapted = model(tokens).logits
        merge_lora(model)
        torch.testing.assert_close(model(tokens).logits, adapted, rtol=1e-4, atol=1e-4)
    assert (adapted - plain).abs().max() > 0.1


@pytest.mark.parametrize("family", ADAPTED)
def test_only_the_weights_that_are_named_change(family, tmp_path):
    model = load_checkpoint(save(family, tmp_path / family, spread=0.1)).model.train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    named = {f"{path}.weight" for path, _ in projections(model)}
    add_lora(model, 2, only_adapters=True)
    adapters = [p for p in model.parameters() if p.requires_grad]
    tokens = torch.arange(20, 52)[None]
    for _ in range(2):  # down moves once up is not zero
        model(tokens, labels=tokens).loss.backward()
        with torch.no_grad():
            for parameter in adapters:
                assert parameter.grad is not None
                parameter -= parameter.grad / parameter.grad.norm()
                parameter.grad = None
    merge_lora(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert {name for name in after if not torch.equal(after[name], before[name])} == named


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:fan_in_fan_out:UserWarning")
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_peft_computes_the_same_from_a_written_adapter(family, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    folder = save(family, tmp_path / family, spread=0.1)
    model, tokens = load_checkpoint(folder).model, torch.arange(20, 52)[None]
    with torch.no_grad():
        plain = model(tokens).logits
        add_lora(model, 2, only_adapters=True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
        save_adapter(model, tmp_path / "adapter", folder)
        expected = model(tokens).logits
        fresh = load_checkpoint(folder).model
        theirs = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
        torch.testing.assert_close(theirs(input_ids=tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - plain).abs().max() > 0.1


def test_peft_finds_the_adapters_beside_the_merged_weights(tmp_path):
    folder, out = save("llama", tmp_path / "llama", spread=0.1), tmp_path / "out"
    tuning = TuneConfig(3, batch=1, lora_rank=2, adapter=True, lr=1e-2)
    options = Options(windows=1, search_evaluations=0, task=["none"], tune=tuning)
    hf.extend(folder, TARGET, DOCUMENTS, method="ntk", out=out, options=options, as_ids=True)
    config = json.loads((out / "adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 4.0)
    assert config["base_model_name_or_path"] == str(folder)
    tensors = load_file(out / "adapter/adapter_model.safetensors")
    before = load_file(folder / "model.safetensors")
    after = load_file(out / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{path}.weight" for path in config["target_modules"]}
    for path in config["target_modules"]:
        a, b = (tensors[f"base_model.model.{path}.lora_{x}.weight"] for x in "AB")
        expected = before[f"{path}.weight"] + 2.0 * b @ a
        torch.testing.assert_close(after[f"{path}.weight"], expected)
    assert not (tmp_path / ".out.state").exists()


def test_less_memory_gives_the_same_steps(tmp_path, monkeypatch):
    folder = save("llama", tmp_path / "llama", spread=0.1)
    modeling_utils = transformers.modeling_utils
    losses, calls, plain = [], [], modeling_utils.checkpoint

    def counted(*given, **named):
        calls.append(1)
        return plain(*given, **named)

    monkeypatch.setattr(modeling_utils, "checkpoint", counted)
    for recompute in (False, True):
        tuning = TuneConfig(3, batch=1, lr=1e-2, recompute=recompute)
        options = Options(windows=1, search_evaluations=0, task=["none"], tune=tuning)
        out = tmp_path / f"out{recompute}"
        found = hf.extend(
            folder, TARGET, DOCUMENTS, method="ntk", out=out, options=options, as_ids=True
        )
        losses.append(found.tuning_losses)
        assert bool(calls) is recompute
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_adapters_without_a_rank_are_refused():
    with pytest.raises(ValueError, match="--adapter: there are none without --lora RANK"):
        TuneConfig(3, adapter=True)
