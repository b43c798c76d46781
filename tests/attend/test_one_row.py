"""A bias that is a term per key goes to torch's kernel in half types as one row for all queries."""

import pytest
import torch

import posenc
from posenc import masks
from posenc.attend.kernels import sdpa, split_rows
from posenc.attend.request import Request

HALF = (torch.bfloat16, torch.float16)


def given(name, length, dtype, batch=2, steep=0.0, kv_heads=4):
    torch.manual_seed(length)
    encoding = posenc.create(name, posenc.ModelShape(64, 4, train_length=64))
    q = torch.randn(batch, 4, length, 16).to(dtype)
    k, v = (torch.randn(batch, kv_heads, length, 16).to(dtype) for _ in range(2))
    p = torch.arange(length)
    with torch.no_grad():
        state = encoding.state(torch.randn(batch, length, 64), p)
    state = state if state is None or not steep else state - steep * p
    return q, k, v, encoding, {
        "q_positions": p, "kv_positions": p, "q_state": state, "kv_state": state,
        "mask": masks.causal,
    }  # fmt: skip


def problem_of(q, k, v, encoding, options):
    (problem,) = Request.of(
        q, k, v, encoding, **options, cache=None, dropout_p=0.0, return_lse=False
    ).problems()
    return problem


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    ("name", "length", "steep"),
    [("alibi", 9, 0), ("alibi", 300, 0), ("alibi", 1024, 0), ("fox", 300, 0), ("fox", 1024, 20.0)],
)
@torch.no_grad()
def test_it_gives_what_float32_gives(name, length, steep, dtype, monkeypatch):
    q, k, v, encoding, options = given(name, length, dtype, steep=steep)
    calls = []
    plain = split_rows.run
    monkeypatch.setattr(split_rows, "run", lambda p: calls.append(p) or plain(p))
    out = posenc.attention(q, k, v, encoding, **options, impl="sdpa")
    assert len(calls) == 1
    wide = [t.float() for t in (q, k, v)]
    right = posenc.attention(*wide, encoding, **options, impl="reference")
    assert out.dtype == dtype
    # Weights and the result are rounded once each.
    torch.testing.assert_close(out.float(), right, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert not torch.allclose(right[:, :, 1:], right[:, :, :-1], atol=0.1)


@torch.no_grad()
def test_what_it_is_not_for_goes_elsewhere():
    half = given("alibi", 40, torch.bfloat16)
    assert sdpa.takes_one_row(problem_of(*half))
    q, k, v, encoding, options = half
    others = {
        "float32": (*(t.float() for t in (q, k, v)), encoding, options),
        "too long": given("alibi", split_rows.HALF_ROWS + 1, torch.bfloat16, batch=1),
        "no term per key": given("t5", 40, torch.bfloat16),
        "a window": (q, k, v, encoding, options | {"mask": masks.sliding_window(8)}),
        "both ways": (q, k, v, encoding, options | {"mask": None}),
        "a part of the queries": (
            q[:, :, 20:], k, v, encoding, options | {"q_positions": torch.arange(20, 40)}
        ),
        "narrow values": (q, k, v[..., :8], encoding, options),
    }  # fmt: skip
    for why, other in others.items():
        assert not sdpa.takes_one_row(problem_of(*other)), why
    with torch.enable_grad():
        assert not sdpa.takes_one_row(problem_of(q.requires_grad_(), k, v, encoding, options))


@torch.no_grad()
def test_groups_share_keys_and_a_later_key_is_not_seen():
    q, k, v, encoding, options = given("alibi", 60, torch.bfloat16, kv_heads=2)
    out = posenc.attention(q, k, v, encoding, **options)
    k[:, :, -1], v[:, :, -1] = 1000.0, 1000.0
    assert torch.equal(posenc.attention(q, k, v, encoding, **options)[:, :, :-1], out[:, :, :-1])
    right = posenc.attention(*(t.float() for t in (q, k, v)), encoding, **options, impl="reference")
    torch.testing.assert_close(out.float()[:, :, :-1], right[:, :, :-1], rtol=0, atol=0.03)
