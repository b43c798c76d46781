"""Reading only the last tokens: written where a config can say it, else said to each server."""

import json

import pytest
import torch
from torch.nn import functional as F

from posenc.extend import extension
from posenc.extend.options import Options
from posenc.extend.variants import window_in_config_variant
from posenc.hf import sliding_window
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.sliding_window import reads_window, why_no_window, window_in_every_layer
from tests.hf_models import LENGTH, WORDS, save, transformers

TARGET = 3 * LENGTH
QUICK = Options(windows=2, search_evaluations=0, task=["none"], anyway=True)
NO_WINDOW = {"sliding_window": None}


def extended(folder, out=None):
    return extension.extend(
        folder, TARGET, WORDS, method="window", out=out, options=QUICK, as_bytes=True
    )


@pytest.mark.parametrize("family", ["mistral", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_a_window_is_written_where_the_config_can_say_it(family, tmp_path):
    """What is measured is what stock transformers computes from the folder."""
    out = tmp_path / "out"
    outcome = extended(save(family, tmp_path / family, spread=0.1, **NO_WINDOW), out)
    assert list(outcome.measured) == ["none", "sliding-window", "window"]
    assert outcome.proof is not None
    raw = json.loads((out / "config.json").read_text())
    assert (raw["sliding_window"], raw["max_position_embeddings"]) == (LENGTH, TARGET)
    assert raw.get("use_sliding_window") in (None, True)
    page = (out / "SERVE.md").read_text()
    assert f"Every layer attends to the last {LENGTH} tokens only" in page
    assert f"llama-server -m model.gguf -c {LENGTH} --context-shift" in page

    written = transformers.AutoModelForCausalLM.from_pretrained(out)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / family)
    tokens = torch.tensor(list(" ".join(WORDS).encode())[:TARGET])[None]
    distance = torch.arange(TARGET)[:, None] - torch.arange(TARGET)
    is_seen = (distance >= 0) & (distance < LENGTH)
    with torch.no_grad():
        by_mask = original(tokens, attention_mask=is_seen[None, None]).logits
        torch.testing.assert_close(written(tokens).logits, by_mask, rtol=0, atol=1e-5)
        whole = original(tokens).logits
    assert (whole - by_mask)[0, LENGTH:].abs().max() > 1e-3


def test_the_losses_of_the_row_are_those_of_the_mask(tmp_path):
    checkpoint = load_checkpoint(save("mistral", tmp_path / "mistral", spread=0.1, **NO_WINDOW))
    tokens = torch.tensor(list(" ".join(WORDS).encode())[:TARGET])[None]
    distance = torch.arange(TARGET)[:, None] - torch.arange(TARGET)
    is_seen = (distance >= 0) & (distance < LENGTH)
    with torch.no_grad():
        logits = checkpoint.model(tokens, attention_mask=is_seen[None, None]).logits
        expected = F.cross_entropy(logits[0, :-1], tokens[0, 1:])
        with window_in_config_variant(checkpoint, TARGET).applied() as model:
            logits = model(tokens).logits
    torch.testing.assert_close(F.cross_entropy(logits[0, :-1], tokens[0, 1:]), expected)
    assert checkpoint.config.sliding_window is None
    assert checkpoint.config.max_position_embeddings == LENGTH


@pytest.mark.parametrize(
    "family, sizes, words",
    [
        ("llama", {}, "a llama config has no sliding_window"),
        ("gemma3_text", {}, "its kinds of layers rotate differently"),
    ],
)
def test_a_config_that_cannot_say_it_is_refused_for_a_folder(family, sizes, words, tmp_path, call):
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join(WORDS))
    asked = ["--to", TARGET, "--method", "window", "--text", text, "--bytes", "--anyway"]
    asked += ["--windows", 2, "--task", "none"]
    folder = save(family, tmp_path / family, **sizes)
    code, out, err = call("extend", folder, *asked, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert words in err and "Leave out --out: the report has the lines" in err
    code, out, err = call("extend", folder, *asked)
    assert code == 0, err
    for line in (
        f"vllm serve {folder} --max-model-len {LENGTH}",
        f'"truncate_prompt_tokens": {LENGTH * 3 // 4}, "max_tokens": {LENGTH // 4}',
        f"llama-server -m model.gguf -c {LENGTH} --context-shift",
        "It cannot be told: --allow-auto-truncate keeps the first",
    ):
        assert line in " ".join(out.split())


def test_a_masked_model_has_no_last_token(tmp_path):
    folder = save("bert", tmp_path / "bert")
    checkpoint = load_checkpoint(folder)
    assert why_no_window(checkpoint) == "a bert config has no sliding_window"


def test_code_that_takes_no_notice_of_the_key_is_seen(tmp_path, monkeypatch):
    facts = {"families": {"llama": {"fields": {"integers_or_null": ["sliding_window"]}}}}
    monkeypatch.setattr(sliding_window, "facts_of_runtime", lambda runtime: facts)
    checkpoint = load_checkpoint(save("llama", tmp_path / "llama", spread=0.1, **NO_WINDOW))
    assert why_no_window(checkpoint) is None
    assert not reads_window(checkpoint.model)
    with pytest.raises(ValueError, match="takes no notice of sliding_window"):
        window_in_config_variant(checkpoint, TARGET)
    mistral = load_checkpoint(save("mistral", tmp_path / "mistral", spread=0.1, **NO_WINDOW))
    assert reads_window(mistral.model)
    with window_in_every_layer(mistral.model, LENGTH, TARGET):
        assert mistral.config.sliding_window == LENGTH
