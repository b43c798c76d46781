"""Losses in chunks of tokens equal those of whole logits, with gradients, and hold one chunk."""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posenc.extend.measure.losses import masked_token_losses, next_token_losses
from posenc.extend.methods import METHODS, stretch
from posenc.hf import chunked_logits
from posenc.hf.checkpoint.loading import load_checkpoint
from posenc.hf.chunked_logits import ChunkedLogits
from posenc.hf.lora import LoRALinear, add_lora
from posenc.hf.model_rotation import settings_applied
from posenc.hf.teacher import SameWeights, Teacher
from posenc.hf.tuning import masked_token_loss, next_token_loss
from tests.hf_models import COMMON, LENGTH, save, transformers
from tests.memory import MostBytes

VOCABULARY = COMMON["vocab_size"]
CHUNK = 16
HEADS = {
    "llama": {},
    "gpt2": {},  # its head is its table of tokens
    "opt": {},  # its backbone is inside of another one
    "gemma2": {**COMMON, "head_dim": 8, "final_logit_softcapping": 0.5},
    "granite": {**COMMON, "logits_scaling": 8.0},
    "cohere": {**COMMON, "logit_scale": 0.25},
}
"""Families whose heads differ, with sizes of those that tests.hf_models does not have."""


def tiny_model(family, folder, **sizes):
    return load_checkpoint(save(family, folder / family, spread=0.1, **sizes)).model


def tokens_of(rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def gradients_of(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_logits, "MAX_LOGITS_PER_CHUNK", CHUNK * VOCABULARY)


@pytest.mark.parametrize("family", HEADS)
def test_loss_and_gradients_in_chunks_are_those_of_whole_logits(family, tmp_path, small_chunks):
    model = tiny_model(family, tmp_path, **HEADS[family])
    assert ChunkedLogits(model).backbone is not None
    tokens = tokens_of(2, 50)
    logits = model(tokens, use_cache=False).logits[:, :-1].float()
    whole_loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    expected = gradients_of(model, whole_loss)
    loss = next_token_loss(model, tokens, LENGTH, None)
    torch.testing.assert_close(loss, whole_loss, rtol=1e-6, atol=1e-6)
    computed = gradients_of(model, loss)
    assert computed.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(computed[name], gradient, rtol=1e-5, atol=1e-6)


def test_masked_tokens_in_chunks_are_those_of_whole_logits(tmp_path, small_chunks):
    model = tiny_model("bert", tmp_path)
    assert ChunkedLogits(model).backbone is not None
    tokens = tokens_of(4, 50)
    loss = masked_token_loss(model, tokens, 1)
    computed = gradients_of(model, loss)
    draws = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(int(tokens.sum())))
    is_masked = draws < 0.15
    logits = model(tokens.masked_fill(is_masked, 1)).logits[is_masked]
    whole_loss = F.cross_entropy(logits, tokens[is_masked])
    torch.testing.assert_close(loss, whole_loss, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients_of(model, whole_loss).items():
        torch.testing.assert_close(computed[name], gradient, rtol=1e-5, atol=1e-6)


class MostLogits(TorchDispatchMode):
    """Keep the size of the largest tensor of logits that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        out = operator(*arguments, **(options or {}))
        for leaf in tree_leaves(out):
            # The head's weight, transposed, ends with the vocabulary, too.
            head_shape = (COMMON["hidden_size"], VOCABULARY)
            is_logits = isinstance(leaf, torch.Tensor) and leaf.shape[-1:] == (VOCABULARY,)
            if is_logits and leaf.shape != head_shape:
                self.most = max(self.most, leaf.numel())
        return out


@pytest.mark.parametrize("length", [64, 512])
def test_the_largest_logits_are_those_of_a_chunk(length, tmp_path, small_chunks):
    """In tuning, with and without a teacher, and in measuring."""
    model = tiny_model("llama", tmp_path)
    ChunkedLogits(model)
    tokens = tokens_of(1, length)
    teacher = Teacher(copy.deepcopy(model))
    ChunkedLogits(teacher.model)
    with MostLogits() as seen:
        next_token_loss(model, tokens, length // 2, teacher).backward()
        next_token_losses(model, tokens, in_one_piece=True)
    assert 0 < seen.most <= CHUNK * VOCABULARY
    bert = tiny_model("bert", tmp_path, max_position_embeddings=length)
    ChunkedLogits(bert)
    with MostLogits() as seen:
        masked_token_loss(bert, tokens, 1).backward()
        masked_token_losses(bert, tokens, 1)
    assert 0 < seen.most <= CHUNK * VOCABULARY


@pytest.mark.slow
def test_the_peak_grows_with_the_chunk_and_not_with_length_times_vocabulary(tmp_path, monkeypatch):
    """Of the loss and its gradient, in real tensors, at 4,096 and at 32,768 tokens."""
    vocabulary, lengths = 32_000, (4096, 32_768)
    model = tiny_model("llama", tmp_path, **COMMON | {"vocab_size": vocabulary})
    divided = ChunkedLogits(model)
    num_channels = COMMON["hidden_size"]

    def peak_of_loss(length: int) -> int:
        hidden = torch.randn(1, length, num_channels, requires_grad=True)
        tokens = torch.randint(vocabulary, (1, length))

        def loss_of_chunk(logits, positions):
            return F.cross_entropy(logits.flatten(0, 1), tokens[0, positions], reduction="sum")

        with MostBytes() as real:
            divided.sum_over_chunks(hidden, loss_of_chunk).backward()
        model.zero_grad()
        return real.peak

    chunk_tokens = chunked_logits.MAX_LOGITS_PER_CHUNK // vocabulary
    chunk_bytes = 4 * chunk_tokens * vocabulary
    peaks = [peak_of_loss(length) for length in lengths]
    assert chunk_bytes < peaks[0] < 4.5 * chunk_bytes
    # What grows are hidden states and their gradients.
    assert peaks[1] - peaks[0] < 4 * (lengths[1] - lengths[0]) * num_channels * 4
    monkeypatch.setattr(chunked_logits, "MAX_LOGITS_PER_CHUNK", chunk_tokens // 4 * vocabulary)
    assert peak_of_loss(lengths[0]) < 0.35 * peaks[0]


def test_a_model_that_cannot_be_divided_is_taken_whole(tmp_path):
    model = tiny_model("llama", tmp_path)

    def mixed_head(module, arguments, out):
        return out + out.mean(dim=1, keepdim=True)  # each token's logits depend on the others'

    model.lm_head.register_forward_hook(mixed_head)
    divided = ChunkedLogits(model)
    assert divided.backbone is None
    tokens = tokens_of(1, 20)
    with torch.no_grad():
        logits = divided.logits(divided.hidden_states(tokens)[:, 3:7])
        torch.testing.assert_close(logits, model(tokens).logits[:, 3:7])


@pytest.mark.parametrize("only_adapters", [False, True])
def test_the_teacher_of_lora_is_the_model_as_it_was(only_adapters, tmp_path):
    """With the adapters, embeddings, norms and rotation changed, and put back afterwards."""
    checkpoint = load_checkpoint(save("llama", tmp_path / "llama", spread=0.1))
    model = checkpoint.model
    tokens = tokens_of(2, LENGTH)
    original_logits = copy.deepcopy(model)(tokens).logits
    teacher = SameWeights(model)
    settings = stretch(checkpoint.rope_settings, METHODS["yarn"], 4 * LENGTH)
    with settings_applied(model, settings, 4 * LENGTH), torch.no_grad():
        add_lora(model, 2, only_adapters=only_adapters)
        teacher.keep_trained_weights()
        assert bool(teacher.kept_weights) is not only_adapters
        for module in model.modules():
            if isinstance(module, LoRALinear):
                module.up.normal_()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1
        model.train()
        tuned_logits = model(tokens).logits
        assert (tuned_logits - original_logits).abs().max() > 0.1
        with teacher.as_before() as original_model:
            torch.testing.assert_close(original_model(tokens).logits, original_logits)
        assert model.training
        torch.testing.assert_close(model(tokens).logits, tuned_logits, rtol=0, atol=0)


def test_a_loss_with_lora_learns_from_the_same_weights_as_from_a_copy(tmp_path):
    checkpoint = load_checkpoint(save("llama", tmp_path / "llama", spread=0.1))
    model = checkpoint.model
    copied, same = Teacher(copy.deepcopy(model)), SameWeights(model)
    tokens = tokens_of(1, 2 * LENGTH)
    settings = stretch(checkpoint.rope_settings, METHODS["ntk"], 2 * LENGTH)
    with settings_applied(model, settings, 2 * LENGTH):
        add_lora(model, 2)
        same.keep_trained_weights()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.05
        losses = [next_token_loss(model, tokens, LENGTH, teacher) for teacher in (copied, same)]
        gradients = [gradients_of(model, loss) for loss in losses]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-6)


def test_weights_in_half_precision_are_tuned_by_steps_below_their_last_bit(tmp_path):
    from posenc.hf.checkpoint.tokenization import Windows
    from posenc.hf.tune_config import TuneConfig
    from posenc.hf.tuning import tune

    folder = save("llama", tmp_path / "llama", spread=0.1)
    half = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokens_of(4, LENGTH)
    windows = Windows(tokens, torch.zeros_like(tokens))
    config = TuneConfig(40, batch=1, lr=2e-5, warmup=1)
    before = half.model.layers[0].mlp.up_proj.weight.detach().float().clone()
    for name, model in {"half": half, "whole": whole}.items():
        tune(model, windows, LENGTH, config, tmp_path / name, lambda what, share: None)
    # Steps of 2e-5 are below the last bit of weights of 0.1: each by itself would be lost.
    change = half.model.layers[0].mlp.up_proj.weight.detach().float() - before
    expected = whole.model.layers[0].mlp.up_proj.weight.detach() - before
    assert float((change * expected).sum() / (change.norm() * expected.norm())) > 0.5
