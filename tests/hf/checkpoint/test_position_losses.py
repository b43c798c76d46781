"""The loss at each position, against logits in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from posenc.hf import chunked_logits
from posenc.testing import losses_by_position
from tests.hf_models import COMMON

transformers = pytest.importorskip("transformers")


def in_numpy(logits: np.ndarray, tokens: np.ndarray) -> list[float]:
    """The mean over windows of -log softmax, by position, in float64."""
    found = []
    for i in range(tokens.shape[1] - 1):
        total = 0.0
        for row in range(len(tokens)):
            at = logits[row, i].astype(np.float64)
            total += np.log(np.exp(at - at.max()).sum()) + at.max() - at[tokens[row, i + 1]]
        found.append(total / len(tokens))
    return found


def tiny(kind: str, **sizes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **COMMON, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_model_of_transformers_a_chunk_of_logits_at_a_time(kind, monkeypatch):
    """Gemma 2 caps its logits after the head."""
    model = tiny(
        kind, **({"head_dim": 8, "final_logit_softcapping": 0.5} if kind == "gemma2" else {})
    )
    tokens = torch.randint(0, 257, (3, 41), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = in_numpy(model(tokens[:, :-1]).logits.numpy(), tokens.numpy())
    sizes = []
    hook = model.lm_head.register_forward_hook(lambda *call: sizes.append(call[2].shape[1]))
    monkeypatch.setattr(chunked_logits, "MAX_LOGITS_PER_CHUNK", 3 * 257 * 7)
    losses = losses_by_position(model, tokens)
    hook.remove()
    assert losses.dtype == torch.float64 and losses.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(sizes[-6:]) == 7 and sum(sizes[-6:]) == 40  # never the logits of all 40


class Counted(nn.Module):
    """Logits of a table, as nanoGPT returns them: a pair."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 11)
        self.calls = []

    def forward(self, tokens):
        self.calls.append((tuple(tokens.shape), self.training))
        return self.table(tokens), None


def test_a_module_is_read_in_batches_and_stays_in_its_mode():
    model = Counted().train()
    tokens = torch.randint(0, 11, (5, 1001), dtype=torch.int16)
    losses = losses_by_position(model, tokens)
    assert model.training and model.calls == [((2, 1000), False)] * 2 + [((1, 1000), False)]
    logits = model.table.weight.detach()[tokens[:, :-1].long()].numpy()
    expected = in_numpy(logits[:, :30], tokens[:, :31].numpy())
    assert losses[:30].tolist() == pytest.approx(expected, abs=1e-6)
    assert losses.shape == (1000,) and not losses.requires_grad


def test_a_loss_that_is_not_finite_is_returned():
    def broken(tokens):
        logits = torch.zeros(*tokens.shape, 5)
        logits[:, 1] = torch.nan
        return logits

    losses = losses_by_position(broken, torch.zeros(2, 4, dtype=torch.int64))
    assert losses.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2]], "tokens must be a tensor of integers .*, got list"),
        (torch.zeros(2, 3), "tensor of integers .*, got torch.float32"),
        (torch.zeros(2, 3, dtype=torch.bool), "tensor of integers .*, got torch.bool"),
        (torch.zeros(3, dtype=torch.int64), r"tokens must be windows .* the shape \(3,\)"),
        (torch.zeros(2, 1, dtype=torch.int64), r"at least two tokens, got the shape \(2, 1\)"),
        (torch.zeros(0, 5, dtype=torch.int64), r"at least one, .* the shape \(0, 5\)"),
        (torch.full((1, 3), 11), "the token 11 is outside the model's 11 tokens"),
        (torch.full((1, 3), -1), "the token -1 is outside the model's 11 tokens"),
    ],
)
def test_other_tokens_are_refused(tokens, message):
    with pytest.raises((TypeError, ValueError), match=message):
        losses_by_position(lambda inputs: torch.zeros(*inputs.shape, 11), tokens)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda tokens: None, "must return a tensor of logits, .*, got NoneType"),
        (lambda tokens: tokens, "must return a tensor of logits, .*, got Tensor"),
        (
            lambda tokens: torch.zeros(len(tokens), 1, 9),
            r"that is \(2, 3, vocabulary\), got \(2, 1, 9",
        ),
        (lambda tokens: torch.zeros(len(tokens), 9), r"that is \(2, 3, vocabulary\), got \(2, 9\)"),
    ],
)
def test_a_model_without_all_logits_is_refused(model, message):
    """nanoGPT returns the last logits alone where it is called without targets."""
    with pytest.raises((TypeError, ValueError), match=message):
        losses_by_position(model, torch.zeros(2, 4, dtype=torch.int64))


def test_a_token_outside_a_models_vocabulary_is_refused_before_it_is_read():
    with pytest.raises(ValueError, match="the token 257 is outside the model's 257 tokens"):
        losses_by_position(tiny("llama"), torch.full((1, 5), 257))


def test_each_part_keeps_its_own_mode_and_can_be_trained_afterwards():
    """A frozen part in evaluation mode, and a rotation that makes its frequencies anew at length:
    what it keeps must not forbid a backward pass."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    config = transformers.LlamaConfig(
        **COMMON | {"max_position_embeddings": 16, "rope_parameters": rope}
    )
    model = transformers.LlamaForCausalLM(config).train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    losses = losses_by_position(model, torch.randint(0, 50, (2, 41)))
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert not losses.is_inference()
    model(torch.randint(0, 50, (2, 41))).logits.sum().backward()
    torch.nn.Linear(40, 1).double()(losses).backward()
