"""A sink is one more key of every query, with a learned score and a value of zero."""

import pytest
import torch

import posenc
from posenc import masks
from tests.attending import attend

SHAPE = posenc.ModelShape(embed_dim=32, num_heads=4, num_kv_heads=2, train_length=16)
NAMES = ["nope", "rope", "alibi", "fox", "shaw", "rerope"]
WAYS = ["reference", "blocks", "sdpa"]


def problem(name: str, length: int = 12):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, length, 8, dtype=torch.float64) for h in (4, 2, 2))
    sinks = torch.tensor([-1.0, 0.0, 0.5, 3.0], dtype=torch.float64)
    options = {"window": 5} if name == "rerope" else {}
    encoding = posenc.create(name, SHAPE, **options).double()
    x = torch.randn(2, length, 32, dtype=torch.float64)
    state = encoding.state(x, torch.arange(length))
    return [t.requires_grad_() for t in (q, k, v, sinks)], encoding, state


def with_one_more_key(q, k, v, sinks, encoding, state):
    """The softmax written out: out / (1 + exp(sink - lse)) is what the extra key leaves."""
    out, lse = attend(q, k, v, encoding, state=state, impl="reference", return_lse=True)
    total = torch.stack([lse, sinks[:, None].expand_as(lse)]).logsumexp(0)
    return out * (lse - total).exp()[..., None], total


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_every_way_attends_to_the_sink(name, way):
    inputs, encoding, state = problem(name)
    if way == "sdpa" and name in ("fox", "shaw", "rerope"):
        with pytest.raises(ValueError, match="cannot run"):
            attend(*inputs[:3], encoding, state=state, impl=way, sinks=inputs[3])
        return
    want = with_one_more_key(*inputs, encoding, state)
    got = attend(*inputs[:3], encoding, state=state, impl=way, sinks=inputs[3], return_lse=True)
    alone = attend(*inputs[:3], encoding, state=state, impl=way, sinks=inputs[3])
    torch.testing.assert_close(alone, want[0])
    weight = torch.randn_like(want[0])
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)
    for each in zip(
        *(torch.autograd.grad((o * weight).sum() + e.sum(), inputs) for o, e in (got, want)),
        strict=True,
    ):
        torch.testing.assert_close(*each)


def test_the_softmax_has_one_column_more():
    """Against transformers' form: concatenate the sink to the scores, drop its column."""
    (q, k, v, sinks), _, _ = problem("nope")
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    scores = scores.masked_fill(~torch.ones(12, 12).tril().bool(), -torch.inf)
    column = sinks.view(1, 4, 1, 1).expand(2, 4, 12, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    want = weights @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(attend(q, k, v, None, sinks=sinks), want)


def test_a_query_without_keys_gives_zeros_and_its_sink():
    (q, k, v, sinks), _, _ = problem("nope")
    mask = masks.padding(torch.arange(12).expand(2, 12) > 3) & masks.causal

    def run(*inputs):
        return attend(*inputs[:3], None, mask=mask, sinks=inputs[3], return_lse=True)

    out, lse = run(q, k, v, sinks)
    assert not out[:, :, :4].any()
    torch.testing.assert_close(lse[0, :, 0], sinks)
    assert torch.autograd.gradcheck(run, (q, k, v, sinks), fast_mode=True)


def test_a_sink_of_minus_infinity_changes_nothing_and_half_precision_stays():
    (q, k, v, sinks), _, _ = problem("nope")
    none = torch.full_like(sinks, -torch.inf)
    torch.testing.assert_close(attend(q, k, v, None, sinks=none), attend(q, k, v, None))
    half = [t.bfloat16() for t in (q, k, v)]
    got = attend(*half, None, sinks=sinks)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(
        got.double(), attend(q, k, v, None, sinks=sinks), rtol=0.02, atol=0.02
    )


def test_decoding_with_a_cache_equals_one_pass():
    (q, k, v, sinks), alibi, _ = problem("alibi")
    whole, cache = attend(q, k, v, alibi, sinks=sinks), posenc.KVCache()
    for i in range(12):
        now = torch.tensor([i])
        step = posenc.attention(
            q[:, :, [i]],
            k[:, :, [i]],
            v[:, :, [i]],
            alibi,
            q_positions=now,
            kv_positions=now,
            mask=masks.causal,
            cache=cache,
            sinks=sinks,
        )
        torch.testing.assert_close(step, whole[:, :, [i]])


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (torch.zeros(2), ValueError, r"each of 4 query heads on cpu, got shape \(2,\)"),
        (torch.zeros(4, 1), ValueError, r"got shape \(4, 1\)"),
        (torch.zeros(4).long(), TypeError, r"floating tensor \(num_heads,\), got torch.int64"),
        ([0.0] * 4, TypeError, "got list"),
    ],
)
def test_wrong_sinks_are_refused_and_leave_the_cache(wrong, error, message):
    (q, k, v, _), _, _ = problem("nope")
    cache = posenc.KVCache()
    with pytest.raises(error, match=message):
        attend(q, k, v, None, cache=cache, sinks=wrong)
    assert cache.length == 0


def test_explain_knows_that_sinks_need_the_log_sum_exp():
    (q, k, v, sinks), fox, state = problem("fox")
    where = {"q_positions": range(12), "kv_positions": range(12), "mask": masks.causal}
    states = {"q_state": state, "kv_state": state}
    plan = posenc.explain(q, k, v, fox, **where, **states, sinks=sinks)
    assert "log-sum-exp" in plan.rejected["sdpa"]


def test_a_sink_that_is_no_number_shows_in_its_head():
    (q, k, v, sinks), _, _ = problem("nope")
    sinks = sinks.detach().clone()
    sinks[1] = torch.nan
    out = attend(q, k, v, None, sinks=sinks)
    assert out[:, 1].isnan().all() and out[:, [0, 2, 3]].isfinite().all()
