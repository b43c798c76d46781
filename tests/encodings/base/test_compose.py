"""Compose: each place in order, claims combined, and what does not compose says why."""

import pytest
import torch

import posenc
from posenc import masks
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.compose import Compose, Within
from posenc.encodings.base.term import PairwiseBias
from posenc.testing.harness import add_term_to_scores, as_tokens
from tests.attending import attend, decoded


class Decay(posenc.PositionEncoding):
    """Compute a state per token that accumulates over tokens, as a forgetting gate's does."""

    claims = Claims(places=(3,), permutation_invariant=False, causal_only=True)

    def state(self, x, positions, past=None):
        steps = -x[..., :2].abs().transpose(1, 2).cumsum(-1)
        return steps if past is None else steps + past[..., -1:]

    def term(self, q, k):
        return PairwiseBias(q, k, lambda q, k: q.state[..., :, None] - k.state[..., None, :])


def rope() -> posenc.RoPE:
    return posenc.RoPE(8, interleaved=False)


def random_shaw() -> posenc.Shaw:
    torch.manual_seed(0)
    encoding = posenc.Shaw(8, max_distance=3)
    for table in encoding.parameters():
        table.data = torch.randn_like(table)
    return encoding


def qkv(length: int = 7):
    torch.manual_seed(1)
    return tuple(torch.randn(1, 2, length, 8).double() for _ in range(3))


def dense(q, k, v, bias, mask):
    """Return softmax attention from scores of all pairs."""
    scores = q @ k.mT * 8**-0.5 + bias
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


def test_rotations_and_biases_act_together():
    q, k, v = qkv()
    p = torch.arange(7)
    both = Compose(rope(), posenc.ALiBi(2))
    turned_q, turned_k = rope()(q, k, p)
    bias = posenc.ALiBi(2)(p.double(), p.double())
    want = dense(turned_q, turned_k, v, bias, torch.ones(7, 7).bool().tril())
    for impl in ("auto", "reference"):
        got = attend(q, k, v, both, p, impl=impl)
        torch.testing.assert_close(got, want)


def test_embeddings_are_chained():
    x, p = torch.randn(1, 5, 8), torch.arange(5)
    both = Compose(posenc.Sinusoidal(8), posenc.Learned(5, 8))
    learned = both.encodings[1]
    want = learned.embed(posenc.Sinusoidal(8).embed(x, p), p)
    torch.testing.assert_close(both.embed(x, p), want)
    assert both.claims.places == (1,) and both.claims.max_positions == 5


def test_biases_add_up_and_values_keep_their_owner():
    q, k, v = qkv()
    p = torch.arange(7)
    shaw = random_shaw().double()
    both = Compose(shaw, posenc.ALiBi(2))
    bias = posenc.ALiBi(2)(p.double(), p.double())
    rows = add_term_to_scores(shaw, torch.zeros(1, 2, 7, 7).double(), q, None, p, p)
    scores = q @ k.mT * 8**-0.5 + bias + rows
    weights = scores.masked_fill(~torch.ones(7, 7).bool().tril(), -torch.inf).softmax(-1)
    want = shaw.term(*as_tokens(q, None, p, p)).sum_values(weights, v, slice(0, 7), slice(0, 7))
    got = posenc.attention(q, k, v, both, q_positions=p, kv_positions=p, mask=masks.causal)
    torch.testing.assert_close(got, want)
    assert both.claims.places == (3, 4) and both.claims.scope == "layer"


def test_keys_stay_raw_for_a_score_that_reads_them():
    """DeBERTa beside a rotation, in one pass and token by token."""
    torch.manual_seed(0)
    deberta = posenc.DeBERTa(16, 2, max_distance=4)
    deberta.table.data = torch.randn_like(deberta.table)
    both = Compose(rope(), deberta)
    assert both.claims.needs_raw_k
    layer = posenc.Attention(16, 2, encoding=both).double()
    x, p = torch.randn(2, 6, 16).double(), torch.arange(6)
    whole = layer(x, p, mask=masks.causal)
    torch.testing.assert_close(decoded(layer, x), whole)


def test_a_state_goes_to_its_owner_and_accumulates_in_the_cache():
    layer = posenc.Attention(16, 2, encoding=Compose(rope(), Decay(), posenc.ALiBi(2))).double()
    x, p = torch.randn(2, 6, 16).double(), torch.arange(6)
    whole = layer(x, p, mask=masks.causal)
    torch.testing.assert_close(decoded(layer, x), whole)
    without = posenc.Attention(16, 2, encoding=Compose(rope(), posenc.ALiBi(2))).double()
    without.load_state_dict(layer.state_dict())
    assert (without(x, p, mask=masks.causal) - whole).abs().max() > 1e-3


def test_whole_row_methods_see_what_came_before_them():
    """CoPE's gates come from the scores as they arrive."""
    torch.manual_seed(0)
    cope = posenc.CoPE(8, num_positions=4).double()
    cope.e.data = torch.randn_like(cope.e)
    q, k, v = qkv()
    p = torch.arange(7)
    both = Compose(cope, posenc.ALiBi(2))
    assert both.term(*as_tokens(q, None, p, p)).make_score_mod is None
    seen = torch.ones(7, 7).bool().tril()
    scores = q @ k.mT * 8**-0.5
    term = add_term_to_scores(cope, scores, q, None, p, p, mask=seen[None, None]) - scores
    want = dense(q, k, v, term + posenc.ALiBi(2)(p.double(), p.double()), seen)
    got = posenc.attention(q, k, v, both, q_positions=p, kv_positions=p, mask=masks.causal)
    torch.testing.assert_close(got, want)


def test_claims_are_combined():
    both = Compose(rope(), posenc.CoPE(8), posenc.Learned(9, 16))
    assert both.claims.places == (1, 2, 3)
    assert (
        not both.claims.shift_invariant
        and not both.claims.permutation_invariant
        and both.claims.causal_only
    )
    assert both.claims.max_positions == 9
    assert both.num_parameters == 64 * 8 + 9 * 16
    assert not Compose(rope(), posenc.PositionEncoding()).claims.causal_only
    assert Compose(posenc.PositionEncoding(), Within(masks.causal)).claims.causal_only


def test_the_scale_comes_from_the_one_that_changes_it():
    assert Compose(rope(), posenc.T5Bias(2, unscaled=True)).scale(8) == 1.0
    assert Compose(rope(), posenc.T5Bias(2)).scale(16) == 0.25
    assert Compose(rope(), posenc.ALiBi(2)).scale(16) == 0.25


def test_nested_compositions_are_taken_apart():
    a, b, c = rope(), posenc.ALiBi(2), posenc.Sinusoidal(16)
    assert list(Compose(Compose(a, b), c).encodings) == [a, b, c]


def test_preparing_keeps_the_answers():
    q, k, v = qkv()
    p = torch.arange(7)
    both = Compose(rope(), random_shaw().double())
    results = [
        posenc.attention(q, k, v, e, q_positions=p, kv_positions=p) for e in (both, both.prepare(p))
    ]
    torch.testing.assert_close(*results, rtol=0, atol=1e-7)  # prepared cos and sin are float32


def test_the_state_dict_holds_each_parameter_once():
    both = Compose(random_shaw(), posenc.Learned(9, 16))
    assert sorted(both.state_dict()) == [
        "encodings.0.key_table",
        "encodings.0.value_table",
        "encodings.1.weight",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Compose(rope()), "two or more encodings, got 1"),
        (
            lambda: Compose(posenc.Shaw(8), posenc.Shaw(8)),
            "Shaw and Shaw each decide the change of the values",
        ),
        (lambda: Compose(Decay(), Decay()), "each decide the state per token"),
        (lambda: Compose(Within(masks.causal), Within(masks.causal)), "each decide the passes"),
        (
            lambda: Compose(posenc.T5Bias(2, unscaled=True), posenc.DeBERTa(16, 2)),
            "T5Bias and DeBERTa each decide the scale",
        ),
        (
            lambda: Compose(posenc.T5Bias(2, unscaled=True), posenc.Shaw(8)),
            "Shaw multiplies terms of its own with the usual scale, which T5Bias changes",
        ),
        (
            lambda: Compose(rope(), posenc.PerLayer([rope()])),
            "PerLayer differs per layer; compose within each layer",
        ),
    ],
)
def test_what_does_not_compose_says_why(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
