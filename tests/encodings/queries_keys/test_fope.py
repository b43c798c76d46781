"""FoPE: its series in plain loops, as the authors' training code has them, and its start."""

import math

import pytest
import torch

from posenc import ModelShape, create
from posenc.encodings.queries_keys.fope import FoPE


@pytest.mark.reference("fope")
@pytest.mark.parametrize(("head_dim", "theta", "pairs"), [(8, 100.0, 2), (16, 10000.0, 3)])
def test_fope_turns_by_the_series_of_its_weights(head_dim, theta, pairs):
    torch.manual_seed(0)
    fope = FoPE(head_dim, num_kv_heads=2, train_length=128, rope_theta=theta).double()
    q, k = torch.randn(2, 1, 2, 3, head_dim).double()
    positions = torch.tensor([0, 5, 300])
    turned = fope(q, k, positions)
    half = head_dim // 2
    kept = [f for m in range(half) if (f := theta ** (-m / half)) >= 2 * math.pi / 128]
    cos_weight, sin_weight = fope.cos_weight.tolist(), fope.sin_weight.tolist()
    assert len(cos_weight[0]) == len(kept) and len(cos_weight[0][0]) == pairs
    for x, got in zip((q, k), turned, strict=True):
        for h in range(2):
            for i, p in enumerate(positions.tolist()):
                for t in range(half):
                    c = s = 1.0
                    if t < pairs:
                        c = sum(cos_weight[h][m][t] * math.cos(p * f) for m, f in enumerate(kept))
                        s = sum(sin_weight[h][m][t] * math.sin(p * f) for m, f in enumerate(kept))
                    a, b = x[0, h, i, t].item(), x[0, h, i, t + half].item()
                    want = torch.tensor([a * c - b * s, b * c + a * s], dtype=torch.float64)
                    torch.testing.assert_close(
                        got[0, h, i, [t, t + half]], want, rtol=0, atol=1e-12
                    )


def test_each_pair_starts_with_a_frequency_of_its_own_and_a_little_of_the_others():
    torch.manual_seed(0)
    fope = FoPE(head_dim=64, num_kv_heads=8, train_length=4096)
    heads, frequencies, pairs = fope.cos_weight.shape
    assert (heads, pairs) == (8, 16) and frequencies == 23
    own = torch.zeros(frequencies, pairs)
    for i in range(pairs):
        if 2 * i < frequencies:  # every second frequency, as far as there are any
            own[2 * i, i] = 1
    std = 0.3 * math.sqrt(2 / (frequencies * pairs + heads * pairs))
    for weight in (fope.cos_weight, fope.sin_weight):
        noise = weight - own
        assert abs(noise.std().item() / std - 1) < 0.05 and abs(noise.mean().item()) < std / 10
    assert not torch.equal(fope.cos_weight, fope.sin_weight)


def test_weights_stay_as_they_were_drawn():
    fope = create("fope", ModelShape(64, 4, train_length=128))
    assert not any(p.requires_grad for p in fope.parameters())


def test_a_training_in_which_nothing_turns_is_refused():
    with pytest.raises(ValueError, match="train_length must be at least 7, got 6"):
        FoPE(head_dim=16, num_kv_heads=2, train_length=6)
