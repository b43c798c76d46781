"""The weights, the score_mod and the other layout: three doors to the same attention."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import posenc
from posenc import masks
from tests.attending import attend

SHAPE = posenc.ModelShape(embed_dim=32, num_heads=4, num_kv_heads=2, train_length=16)
N = 12
WHERE = {"q_positions": range(N), "kv_positions": range(N)}
PADDED = masks.padding(torch.arange(N).expand(2, N) > 2) & masks.causal


def problem(name: str):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, N, 8, dtype=torch.float64) for h in (4, 2, 2))
    options = {"window": 5} if name == "rerope" else {}
    encoding = posenc.create(name, SHAPE, **options).double()
    state = encoding.state(torch.randn(2, N, 32, dtype=torch.float64), torch.arange(N))
    return (q, k, v), encoding, {"q_state": state, "kv_state": state}


@pytest.mark.parametrize("sinks", [None, torch.tensor([-1.0, 0.0, 1.0, 4.0])])
@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "fox", "cope", "rerope", "dape"])
def test_weights_times_values_are_attention(name, sinks):
    (q, k, v), encoding, states = problem(name)
    options = {**WHERE, **states, "mask": PADDED, "sinks": sinks}
    weights = posenc.attention_weights(q, k, encoding, **options)
    want = posenc.attention(q, k, v, encoding, **options)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), want)
    total = weights.sum(-1)
    assert not weights[:, :, :3].any() and not weights[:, :, :, :3].any()
    if sinks is None:
        torch.testing.assert_close(total[:, :, 3:], torch.ones_like(total[:, :, 3:]))
    else:
        assert (total[:, :, 3:] < 1).all()


def test_weights_have_gradients():
    (q, k, _), alibi, _ = problem("alibi")
    q, k = (t[:1, :, :4].requires_grad_() for t in (q, k))
    where = {"q_positions": range(4), "kv_positions": range(4), "mask": masks.causal}

    def run(q, k):
        return posenc.attention_weights(q, k, alibi, **where)

    assert torch.autograd.gradcheck(run, (q, k), fast_mode=True)


@pytest.mark.quick(3)
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "fox", "inkling"])
@pytest.mark.parametrize("far", [False, True])
def test_flex_attention_with_the_score_mod_is_attention(name, far):
    """At consecutive positions, where a bias by distance is one row, and at others."""
    (q, k, v), encoding, states = problem(name)
    q, k, v = (t.float() for t in (q, k, v))
    encoding = encoding.float().requires_grad_(False)  # its CPU form has no gradients
    states = {key: state if state is None else state.detach() for key, state in states.items()}
    at = torch.arange(N) ** (2 if far else 1)
    where = {"q_positions": at, "kv_positions": at}
    mod = posenc.score_mod(q, k, encoding, **where, **states)
    mask = masks.causal.bind(at, at)
    dense = mask.rows(1, 1, 0, N, N, q.device)

    def masked(score, batch, head, q_idx, kv_idx):
        return torch.where(
            dense[0, 0][q_idx, kv_idx], mod(score, batch, head, q_idx, kv_idx), -torch.inf
        )

    got = flex_attention(q, k, v, score_mod=masked, scale=encoding.scale(8), enable_gqa=True)
    want = posenc.attention(q, k, v, encoding, **where, **states, mask=mask)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rope", "RoPE does not change scores only. Rotate queries and keys yourself"),
        ("rope+alibi", "Compose does not change scores only"),
        ("shaw", "Shaw does not change scores only"),
        ("nope", "does not change scores only"),
        ("cope", "CoPE reads whole rows of scores"),
        ("dape", "DAPE reads whole rows of scores"),
    ],
)
def test_what_no_score_mod_can_do_is_refused(name, message):
    (q, k, _), encoding, states = problem(name)
    with pytest.raises(ValueError, match=message):
        posenc.score_mod(q, k, encoding, **WHERE, **states)


def test_the_other_layout_is_the_same_attention():
    (q, k, v), rope, _ = problem("rope")
    flipped = [t.transpose(1, 2) for t in (q, k, v)]
    want, lse = attend(q, k, v, rope, return_lse=True)
    got, same = posenc.attention(
        *flipped, rope, **WHERE, mask=masks.causal, return_lse=True, layout="bthd"
    )
    torch.testing.assert_close(got.transpose(1, 2), want)
    torch.testing.assert_close(same, lse)
    turned = rope(*flipped[:2], range(N), layout="bthd")
    for mine, theirs in zip(turned, rope(q, k, range(N)), strict=True):
        torch.testing.assert_close(mine.transpose(1, 2), theirs)
    cache = posenc.KVCache()
    for i in range(N):
        part = [t[:, i : i + 1] for t in flipped]
        where = {"q_positions": range(i, i + 1), "kv_positions": range(i, i + 1)}
        step = posenc.attention(*part, rope, **where, cache=cache, layout="bthd")
        torch.testing.assert_close(step, got[:, i : i + 1])


def test_a_layout_that_does_not_fit_is_named():
    (q, k, v), rope, _ = problem("rope")
    hint = r'Axis 1 has that length: layout="bthd" is \(batch, len, heads, head_dim\)'
    flipped = [t.transpose(1, 2) for t in (q, k, v)]
    with pytest.raises(ValueError, match=hint):
        posenc.attention(*flipped, rope, **WHERE)
    with pytest.raises(ValueError, match=hint):
        rope(*flipped[:2], range(N))
    with pytest.raises(ValueError, match=r"must have shape \(4,\)"):
        posenc.attention(q, k, v, rope, **WHERE, layout="bthd")
    with pytest.raises(ValueError, match=r"layout must be .* got 'bht'"):
        rope(q, k, range(N), layout="bht")
