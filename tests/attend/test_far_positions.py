"""Positions far from 0 that are no run: gaps, rows at different offsets, clocks in nanoseconds."""

import pytest
import torch

import posenc
from posenc import masks

CLOCK = 1_764_201_600 * 10**9
"""Nanoseconds from 1970 to a day of November 2025."""
OFFSETS = (10**4, 2**40, 2**50, 2**53 - 10**4, CLOCK)
BY_DISTANCE = ("alibi", "t5", "kerple", "kerple:form=power", "sandwich", "rope", "nope", "shaw")
BY_DISTANCE += ("transformer_xl", "deberta", "pope", "rove", "rerope", "rope+alibi", "alibi+kerple")
SHAPE = posenc.ModelShape(64, 4, train_length=16)


def made(name):
    torch.manual_seed(0)
    encoding = posenc.create(name, SHAPE).for_layer(0)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.2 * torch.rand_like(parameter)
    return encoding


def attended(encoding, q, positions, q_len=None, impl="auto"):
    """Attend causally to all positions from the last `q_len` tokens."""
    q_len = q.shape[2] if q_len is None else q_len
    return posenc.attention(
        q[:, :, -q_len:],
        q,
        q,
        encoding,
        q_positions=positions[..., -q_len:],
        kv_positions=positions,
        mask=masks.causal,
        impl=impl,
    )


def near(name, q, positions):
    """Return the same attention in float64, at positions from which the first position of their row
    is subtracted."""
    moved = positions - positions[..., :1]
    return attended(made(name).double(), q.double(), moved, impl="reference")


LAYOUTS = {
    "gaps": torch.arange(40) * 3 // 2 + 100 * (torch.arange(40) // 13),
    "one gap of a million": torch.arange(40) + 10**6 * (torch.arange(40) // 20),
    "pairs": torch.arange(40) // 2,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("name", BY_DISTANCE)
def test_only_distances_count(name, offset, layout):
    q, encoding = torch.randn(2, 4, 40, 16), made(name)
    positions = LAYOUTS[layout]
    for where in (positions + offset, torch.stack([positions, positions + offset])):
        for q_len in (40, 12):
            for impl in ("auto", "reference", "blocks"):
                got = attended(encoding, q, where, q_len, impl)
                want = near(name, q, where)[:, :, -q_len:]
                torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "sandwich", "rope", "nope"])
def test_padding_at_zero_before_a_clock_changes_nothing(name):
    q, encoding = torch.randn(1, 4, 40, 16), made(name)
    positions = CLOCK + torch.arange(40) * 2
    positions[:7] = 0
    shown = torch.arange(40)[None] >= 7
    where = {"q_positions": positions[7:], "kv_positions": positions}
    mask = masks.causal & masks.padding(shown)
    want = near(name, q[:, :, 7:], positions[7:])
    for dtype, atol in ((torch.float32, 2e-5), (torch.float64, 1e-9)):
        x = q.to(dtype)
        got = posenc.attention(x[:, :, 7:], x, x, encoding.to(dtype), mask=mask, **where)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


def test_a_run_of_keys_far_before_a_run_of_queries():
    q = torch.randn(1, 4, 9, 16, dtype=torch.float64)
    where = {"q_positions": range(2**60, 2**60 + 9), "kv_positions": range(9)}
    for name in ("t5", "kerple", "rope"):
        encoding = made(name).double()
        got = posenc.attention(q, q, q, encoding, mask=masks.causal, **where)
        want = posenc.attention(q, q, q, encoding, mask=masks.causal, impl="reference", **where)
        torch.testing.assert_close(got, want)


def test_bursts_of_tokens_are_as_exact_as_a_run():
    q = torch.randn(1, 4, 640, 16)
    positions = torch.arange(640) % 64 + 10**6 * (torch.arange(640) // 64)
    got = attended(made("alibi"), q, positions)
    torch.testing.assert_close(got.double(), near("alibi", q, positions), rtol=0, atol=1e-5)


@pytest.mark.quick(4)
@pytest.mark.parametrize("rows", ["one", "apart"])
@pytest.mark.parametrize("offset", [0, 10**4, 10**7, CLOCK])
def test_gradients_of_learned_slopes(offset, rows):
    n, gradients = 600, []
    positions = torch.arange(n) * 2
    where = torch.stack([positions + (offset if rows == "one" else 0), positions + offset])
    for impl, dtype in (("auto", torch.float32), ("reference", torch.float64)):
        torch.manual_seed(0)
        q, signs = torch.randn(2, 4, n, 16), torch.randn(2, 4, n, 16)
        alibi = posenc.ALiBi(4, learned=True).to(dtype)
        at = where if impl == "auto" else where - where[:, :1]
        (attended(alibi, q.to(dtype), at, impl=impl) * signs).sum().backward()
        gradients.append(alibi.log_slopes.grad.double())
    torch.testing.assert_close(*gradients, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kinds", [(torch.int64, torch.float32), (torch.float32, torch.int64)])
def test_whole_and_real_positions_mix_without_rounding(kinds):
    p = 2**24 - 1
    q = torch.randn(1, 4, 1, 16)
    sides = [torch.tensor([p + far]).to(kind) for far, kind in zip((0, -1), kinds, strict=True)]
    sides = sides if kinds[0] == torch.float32 else [torch.tensor([2**24 + 1]), sides[1]]
    bias = posenc.ALiBi(4)(*sides)
    exact = float(sides[0].double() - sides[1].double())
    assert bias[0].item() == -posenc.ALiBi(4).slopes[0] * exact
    assert (
        posenc.attention(q, q, q, posenc.ALiBi(4), q_positions=sides[0], kv_positions=sides[1])
        .isfinite()
        .all()
    )


@pytest.mark.parametrize("name", ["self_extend", "dual_chunk"])
def test_groups_of_positions_stay_exact_at_a_clock(name):
    # All sizes divide the offset, so that groups and chunks begin at the same tokens. The shift of
    # the first one, 5 - 5 / 3, is no whole number.
    if name == "self_extend":
        encoding = posenc.SelfExtend(16, interleaved=False, window=5, group_size=3)
    else:
        encoding = posenc.DualChunk(16, interleaved=False, chunk_size=11, local_window=5)
    q, positions = torch.randn(2, 4, 40, 16), torch.arange(40) * 2
    for where in (positions + CLOCK, torch.stack([positions, positions + CLOCK])):
        got = attended(encoding, q, where)
        moved = where % 600
        want = attended(encoding, q.double(), moved, impl="reference")
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)


FARTHEST = (
    range(2**63 - 3, 2**63),
    range(2**70, 2**70 + 3),
    range(-(2**63), 2**63, 2**63),
    torch.tensor([0, 1, 2**63 - 1]),
    torch.tensor([0, 1, -(2**63)]),
    torch.tensor([0, 1, 2**62]),
    torch.tensor([0, 1, 2**64 - 1], dtype=torch.uint64),
)


@pytest.mark.parametrize("positions", FARTHEST, ids=str)
@pytest.mark.parametrize("name", ["alibi", "rope", "t5", "nope", "sinusoidal"])
def test_positions_whose_differences_overflow_are_refused(name, positions):
    encoding, q = posenc.create(name, SHAPE), torch.randn(1, 4, 3, 16)
    with pytest.raises(ValueError, match=r"differences of positions fit int64 only below 2\^62"):
        if name == "sinusoidal":
            encoding.embed(torch.randn(1, 3, 64), positions)
        else:
            posenc.attention(q, q, q, encoding, q_positions=positions, kv_positions=positions)
    if name == "alibi":
        with pytest.raises(ValueError, match="below 2"):
            encoding(positions, positions)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint64]
)
@pytest.mark.parametrize("name", BY_DISTANCE)
def test_narrow_whole_numbers_do_not_wrap(name, dtype):
    q, encoding = torch.randn(1, 4, 40, 16), made(name)
    positions = torch.arange(40) * 3
    got = attended(encoding, q, positions.to(dtype))
    assert torch.equal(got, attended(encoding, q, positions))
