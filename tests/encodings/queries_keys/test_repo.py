"""RePo: the positions and rotations of its authors' code, in plain loops."""

import math

import pytest
import torch

from posenc.encodings.base.term import Tokens
from posenc.encodings.queries_keys.repo import RePo


@pytest.mark.reference("repo")
def test_repo_turns_at_the_positions_that_its_network_gives():
    torch.manual_seed(0)
    repo = RePo(embed_dim=24, num_kv_heads=2, head_dim=4, rope_theta=100.0).double()
    with torch.no_grad():
        for weight in repo.parameters():
            weight.normal_()
    x, q = torch.randn(1, 3, 24).double(), torch.randn(1, 4, 3, 4).double()
    state = repo.state(x, torch.arange(3))
    tokens = Tokens(q, torch.arange(3), state)
    turned, _ = repo.transform(tokens, tokens)
    gate, content, final = (w.tolist() for w in repo.parameters())
    assert len(gate) == 3
    for n, row in enumerate(x[0].tolist()):
        hidden = []
        for one, other in zip(gate, content, strict=True):
            g = sum(w * c for w, c in zip(one, row, strict=True))
            hidden.append(
                g / (1 + math.exp(-g)) * sum(w * c for w, c in zip(other, row, strict=True))
            )
        for h in range(4):
            position = sum(w * c for w, c in zip(final[h // 2], hidden, strict=True))
            assert state[0, h // 2, n].item() == pytest.approx(position, abs=1e-12)
            for t in range(2):
                angle = position * 100.0 ** (-t / 2)
                a, b = q[0, h, n, t].item(), q[0, h, n, t + 2].item()
                want = [
                    a * math.cos(angle) - b * math.sin(angle),
                    b * math.cos(angle) + a * math.sin(angle),
                ]
                assert turned[0, h, n, [t, t + 2]].tolist() == pytest.approx(want, abs=1e-12)


def test_the_index_of_a_token_does_not_matter():
    repo, x = RePo(16, num_kv_heads=2, head_dim=8), torch.randn(1, 5, 16)
    near, far = repo.state(x, torch.arange(5)), repo.state(x, torch.arange(5) + 1000)
    assert torch.equal(near, far)
