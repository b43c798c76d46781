"""Layers that are computed again in the backward pass: the same numbers, in less memory."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import posenc
from posenc import masks
from posenc.models import Decoder, DecoderConfig, EncoderDecoder, stack

CONFIG = DecoderConfig(61, 32, 3, 4, num_kv_heads=2, qk_norm=True, dropout=0.2)


def tokens(seed: int = 1, length: int = 40) -> Tensor:
    return torch.randint(61, (3, length), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model, *inputs, **options) -> list[Tensor]:
    torch.manual_seed(5)  # the same channels are dropped
    loss = model(*inputs, **options).logsumexp(-1).mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) > 20
    return [loss.detach(), *gradients]


def both(build, *inputs, **options) -> tuple[list[Tensor], list[Tensor]]:
    """What the model computes as usual, and what it computes with layers computed again."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = build(replace(CONFIG, recompute=recompute)).train()
        found.append(loss_and_gradients(model, *inputs, **options))
    return found[0], found[1]


@pytest.mark.parametrize("name", ["rope", "alibi:learned=true", "t5", "fox", "rope/nope", "shaw"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_gives_the_same_bits(name, precision):
    inputs = tokens()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        plain, recomputed = both(lambda config: Decoder(config, name), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_documents_and_windows_give_the_same_bits():
    documents = torch.arange(40).expand(3, 40) // 11
    mask = masks.causal & masks.document(documents)

    def build(config):
        return Decoder(replace(config, layer_windows=(None, 7, 7)), "rope")

    plain, recomputed = both(build, tokens(), mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_an_encoder_and_a_decoder_give_the_same_bits():
    plain, recomputed = both(
        lambda config: EncoderDecoder(config, "t5", "t5"), tokens(), tokens(seed=2)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


class _CountedProducts(TorchDispatchMode):
    """Count the matrix products of linear layers without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.count += operator is torch.ops.aten.mm.default
        return operator(*arguments, **(options or {}))


def test_layers_are_computed_again_in_training_only():
    counts = {}
    for recompute in (False, True):
        model = Decoder(replace(CONFIG, dropout=0.0, recompute=recompute), "rope")
        with _CountedProducts() as products:
            loss = model(tokens()).mean()
            forward = products.count
            loss.backward()
        with _CountedProducts() as without_gradients, torch.no_grad():
            model(tokens())
        counts[recompute] = (forward, products.count, without_gradients.count)
    layers, products_of_a_layer = 3, 6  # the output of the seventh is not needed again
    assert counts[True][0] == counts[False][0] == counts[True][2] == counts[False][2]
    assert counts[True][1] == counts[False][1] + layers * products_of_a_layer


def test_a_cache_is_filled_once():
    model = Decoder(replace(CONFIG, dropout=0.0, recompute=True), "rope")
    ids = tokens()
    caches = model.new_caches()
    first = model(ids[:, :30], caches=caches)
    last = model(ids[:, 30:], caches=caches)
    torch.testing.assert_close(torch.cat([first, last], dim=1), model(ids), rtol=0, atol=1e-5)
    last.mean().backward()
    assert caches[0].length == 40


def test_without_gradients_nothing_is_kept_to_compute_it_again(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("prepared to compute a layer again")

    monkeypatch.setattr(stack, "checkpoint", refuse)
    model = Decoder(replace(CONFIG, recompute=True), "rope").eval()
    posenc.generate(model, tokens(), max_new_tokens=3)
    with torch.no_grad():
        model(tokens())
