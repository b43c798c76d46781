"""The loss of masked tokens: a text of few tokens, too, has one that is masked."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from posenc.hf.tuning import MASKED_SHARE, masked_token_loss

MASK_TOKEN = 9


class ModelOfTenTokens(torch.nn.Module):
    """Return logits that depend on the token, and keep the tokens of the last call."""

    device = torch.device("cpu")

    def forward(self, tokens):
        self.tokens = tokens
        return SimpleNamespace(logits=torch.eye(10)[tokens])


@pytest.mark.parametrize("token", range(8))
def test_a_text_of_one_token_has_a_loss(token):
    model = ModelOfTenTokens()
    loss = masked_token_loss(model, torch.tensor([[token]]), MASK_TOKEN)
    assert model.tokens.tolist() == [[MASK_TOKEN]]
    expected = F.cross_entropy(torch.eye(10)[[MASK_TOKEN]], torch.tensor([token]))
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-6)


def test_a_long_text_has_the_share_of_masked_tokens_as_drawn():
    model = ModelOfTenTokens()
    tokens = torch.arange(4000).reshape(4, 1000) % 8
    masked_token_loss(model, tokens, MASK_TOKEN)
    is_masked = model.tokens == MASK_TOKEN
    drawn = torch.rand(4, 1000, generator=torch.Generator().manual_seed(int(tokens.sum())))
    assert torch.equal(is_masked, drawn < MASKED_SHARE)
    assert torch.equal(model.tokens[~is_masked], tokens[~is_masked])
