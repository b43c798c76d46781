"""Cached keys are cut and moved: the same as keys that are computed at their new positions."""

import copy
import itertools
import math

import pytest
import torch

import posenc
from posenc import masks

HEADS, DIM, LENGTH = 4, 16, 12
SHAPE = posenc.ModelShape(HEADS * DIM, HEADS, num_kv_heads=2, train_length=32)
WITH_LARGE_GRID = posenc.ModelShape(HEADS * DIM, HEADS, num_kv_heads=2, train_length=16**2)
SHIFTS = (5, -3, 8, 1, -2, 13, -7, 2, 4, 9)
IN_HIDDEN_STATES = (
    "sinusoidal",
    "sinusoidal_concatenated",
    "sinusoidal_fairseq",
    "learned",
    "sincos_2d",
    "learned_2d",
)
REFUSED = {
    **dict.fromkeys(IN_HIDDEN_STATES, "added positions to the embeddings"),
    "dynamic_ntk": "frequencies of RoPE depend on the length",
    "longrope": "frequencies of RoPE depend on the length",
    "fope": "does not define move_keys",
}
"""Encodings whose cached keys do not determine those at other positions, and the reason."""


def layer_of(encoding: posenc.PositionEncoding) -> posenc.Attention:
    torch.manual_seed(1)
    return posenc.Attention(
        HEADS * DIM, HEADS, 2, encoding, head_dim=encoding_width(encoding)
    ).eval()


def encoding_width(encoding: posenc.PositionEncoding) -> int:
    return getattr(encoding, "head_dim", DIM)


def places(encoding: posenc.PositionEncoding, start: int, length: int = LENGTH) -> torch.Tensor:
    axes = encoding.claims.num_axes
    positions = torch.arange(start, start + length)
    return positions if axes == 1 else positions[:, None] + torch.arange(axes)


def filled(layer, x, positions) -> posenc.KVCache:
    cache = posenc.KVCache()
    with torch.no_grad():
        layer(x, positions, cache=cache, mask=masks.causal)
    return cache


@pytest.mark.parametrize("name", posenc.names())
def test_ten_shifts_equal_a_prefill_at_the_new_positions(name):
    encoding = posenc.create(name, SHAPE).for_layer(0)
    if encoding.claims.num_axes > 1:  # a grid for tokens that are LENGTH rows apart
        encoding = posenc.create(name, WITH_LARGE_GRID).for_layer(0)
    layer, total = layer_of(encoding), sum(SHIFTS)
    x, new = torch.randn(2, LENGTH, HEADS * DIM), torch.randn(2, 1, HEADS * DIM)
    cache = filled(layer, x, places(encoding, 0))
    if name in REFUSED:
        before = cache.k.clone(), cache.positions.clone()
        with pytest.raises(ValueError, match=f"^KVCache.shift: .*{REFUSED[name]}"):
            cache.shift(1)
        assert torch.equal(cache.k, before[0]) and torch.equal(cache.positions, before[1])
        return
    for delta in SHIFTS:
        cache.shift(delta)
    want = filled(layer, x, places(encoding, total))
    torch.testing.assert_close(cache.positions, want.positions)
    torch.testing.assert_close(cache.k, want.k, rtol=0, atol=1e-6)
    torch.testing.assert_close(cache.v, want.v, rtol=0, atol=1e-6)
    with torch.no_grad():
        out, expected = (
            layer(new, places(encoding, total + LENGTH, 1), cache=c, mask=masks.causal)
            for c in (cache, want)
        )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


SCALED = {
    "yarn": posenc.YaRN(4.0, 2048),
    "yarn, a factor of its own": posenc.YaRN(8.0, 64, attention_factor=3.0),
    "longrope, one list": posenc.LongRoPE(4.0, 64, (2.0,) * 8, (2.0,) * 8),
    "longrope, exempt tokens": posenc.LongRoPE(4.0, 64, (2.0,) * 8, (2.0,) * 8, exempt_tokens=7),
    "partial": None,
}


def rotated(x: torch.Tensor, positions: list[int], factor: float, inv_freq: list[float]):
    """Rotate x in float64 by RoPE's formula: channels t and t + d/2 are a complex number, times
    `factor`."""
    first, second = x.double().chunk(2, -1)
    angle = torch.tensor([[p * f for f in inv_freq] for p in positions], dtype=torch.float64)
    turned = torch.complex(first, second) * factor * torch.exp(1j * angle)
    return torch.cat([turned.real, turned.imag], -1)


def test_a_multiplier_comes_once_by_the_formula():
    rope = posenc.RoPE(64, interleaved=False, scaling=posenc.YaRN(4.0, 2048))
    k, cache = torch.randn(1, 2, 5, 64), posenc.KVCache()
    posenc.attention(
        k, k, k, rope, q_positions=range(5), kv_positions=range(5), cache=cache, mask=masks.causal
    )
    for _ in range(7):
        cache.shift(1)
    factor = 0.1 * math.log(4.0) + 1
    found = [float(f) for f in rope.frequencies().inv_freq]
    want = rotated(k, [*range(7, 12)], factor, found)
    torch.testing.assert_close(cache.k.double(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("name", SCALED)
def test_scalings_move_exactly_from_any_token_on(name, start):
    partial = 8 if name == "partial" else None
    rope = posenc.RoPE(DIM, interleaved=True, scaling=SCALED[name], rotary_dim=partial)
    layer, x = layer_of(rope), torch.randn(2, LENGTH, HEADS * DIM)
    positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) + 4])
    cache = filled(layer, x, positions)
    for delta in (1, 2, -1, 4):
        cache.shift(delta, start=start)
    moved = positions.clone()
    moved[:, start:] += 6
    want = filled(layer, x, moved)
    torch.testing.assert_close(cache.positions, want.positions)
    torch.testing.assert_close(cache.k, want.k, rtol=0, atol=1e-6)


def test_rounding_does_not_grow_with_shifts():
    rope = posenc.RoPE(DIM, interleaved=False)
    layer, x = layer_of(rope).bfloat16(), torch.randn(1, LENGTH, HEADS * DIM).bfloat16()
    cache = filled(layer, x, range(LENGTH))
    once = filled(layer, x, range(LENGTH))
    for _ in range(500):
        cache.shift(1)
    once.shift(500)
    assert torch.equal(cache.k, once.k)
    cache.shift(-500)
    assert torch.equal(cache.k, filled(layer, x, range(LENGTH)).k)


@pytest.mark.parametrize("name", ["rope", "yarn", "alibi", "rerope", "rove", "mrope", "xpos"])
def test_a_window_with_sinks_slides(name):
    """Keep 2 first tokens and the 5 newest, at positions 0 .. 6, as StreamingLLM does."""
    encoding = posenc.create(name, SHAPE).for_layer(0)
    layer, x = layer_of(encoding), torch.randn(2, 15, HEADS * DIM)
    cache = posenc.KVCache()
    with torch.no_grad():
        for i in range(15):
            if cache.length == 7:
                cache.drop(2, 3)
                cache.shift(-1, start=2)
            at = places(encoding, cache.length, 1)
            out = layer(x[:, [i]], at, cache=cache, mask=masks.causal)
        kept = x[:, [0, 1, *range(10, 15)]]
        want = filled(layer, kept, places(encoding, 0, 7))
        torch.testing.assert_close(cache.k, want.k, rtol=0, atol=1e-6)
        expected = layer(kept, places(encoding, 0, 7), mask=masks.causal)[:, -1:]
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_shifted_rows_are_reordered_cut_and_continued():
    layer = layer_of(posenc.RoPE(DIM, interleaved=False))
    x = torch.randn(2, LENGTH, HEADS * DIM)
    positions = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) + 4])
    cache = filled(layer, x, positions)
    cache.shift(3)
    cache.reorder(torch.tensor([1, 1, 0]))
    cache.shift(2)
    cache.crop(6)
    rows, new = torch.tensor([1, 1, 0]), torch.randn(3, 2, HEADS * DIM)
    moved = positions[rows, :6] + 5
    want = filled(layer, x[rows, :6], moved)
    at = moved[:, -1:] + torch.tensor([1, 2])
    with torch.no_grad():
        out, expected = (layer(new, at, cache=c, mask=masks.causal) for c in (cache, want))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    cache.shift(-5)
    want = filled(layer, torch.cat([x[rows, :6], new], 1), torch.cat([moved, at], 1) - 5)
    torch.testing.assert_close(cache.k, want.k, rtol=0, atol=1e-6)


def test_fragments_are_joined_at_their_new_positions():
    rope = posenc.create("yarn", SHAPE)
    layer, x = layer_of(rope), torch.randn(1, 9, HEADS * DIM)
    first, second = filled(layer, x[:, :4], range(4)), filled(layer, x[:, 4:], range(5))
    second.shift(4)
    first.append(second.k, second.v, second.positions)
    want = filled(layer, x, range(9))
    torch.testing.assert_close(first.positions, torch.arange(9))
    torch.testing.assert_close(first.k, want.k, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["rope", "fox", "cope", "t5", "inkling", "rove"])
def test_a_cropped_cache_goes_on_as_if_the_rest_never_came(name):
    encoding = posenc.create(name, SHAPE).for_layer(0)
    layer, x = layer_of(encoding), torch.randn(2, LENGTH, HEADS * DIM)
    new = torch.randn(2, 1, HEADS * DIM)
    cache, want = filled(layer, x, range(LENGTH)), filled(layer, x[:, :5], range(5))
    cache.crop(5)
    assert cache.length == 5 and cache.positions.tolist() == [0, 1, 2, 3, 4]
    with torch.no_grad():
        out, expected = (layer(new, range(5, 6), cache=c, mask=masks.causal) for c in (cache, want))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_a_cache_cropped_to_nothing_is_new():
    layer, x = layer_of(posenc.ALiBi(HEADS)), torch.randn(2, LENGTH, HEADS * DIM)
    cache = filled(layer, x, range(LENGTH))
    cache.crop(0)
    assert cache.length == 0 and cache.positions is None and cache.nbytes == 0
    filled_again = torch.randn(3, 2, HEADS * DIM)
    layer(filled_again, torch.arange(2), cache=cache, mask=masks.causal)
    assert cache.length == 2


def test_the_only_state_that_is_kept_cannot_be_removed():
    repo = posenc.RePo(HEADS * DIM, 2, DIM)
    cache = filled(layer_of(repo), torch.randn(1, 5, HEADS * DIM), range(5))
    with pytest.raises(ValueError, match="keeps the state of its newest token only"):
        cache.crop(3)
    assert cache.length == 5
    cache.drop(1, 3)
    assert cache.length == 3 and cache.state.shape[2] == 1


def test_positions_that_a_model_added_to_embeddings_are_known():
    model = posenc.Decoder(posenc.DecoderConfig(32, 32, 2, 2), "sinusoidal+rope").eval()
    caches = model.new_caches()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), caches=caches)
    with pytest.raises(ValueError, match="Sinusoidal added positions to the embeddings"):
        caches[1].shift(1)


def test_two_rotations_of_other_pairs_are_refused():
    both = posenc.Compose(
        posenc.RoPE(DIM, interleaved=False), posenc.RoPE(DIM, interleaved=True, rope_theta=50.0)
    )
    cache = filled(layer_of(both), torch.randn(1, 5, HEADS * DIM), range(5))
    with pytest.raises(ValueError, match="RoPE and RoPE both change keys"):
        cache.shift(2)


def test_a_rotation_with_a_transform_of_its_own_is_not_guessed():
    class Twice(posenc.RoPE):
        def transform(self, q, k):
            new_q, new_k = super().transform(q, k)
            return super().transform(q.with_vectors(new_q), k.with_vectors(new_k))

    cache = filled(layer_of(Twice(DIM, interleaved=False)), torch.randn(1, 5, 64), range(5))
    with pytest.raises(ValueError, match="Twice changes keys by their positions, and does not def"):
        cache.shift(2)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda c: c.crop(6), ValueError, "KVCache.crop: length must be at most 5, got 6"),
        (lambda c: c.crop(-1), ValueError, "KVCache.crop: length must be at least 0, got -1"),
        (lambda c: c.crop(2.0), TypeError, "KVCache.crop: length must be a whole number"),
        (lambda c: c.drop(3, 2), ValueError, "KVCache.drop: stop must be at least 3, got 2"),
        (lambda c: c.shift(0.5), TypeError, "KVCache.shift: delta must be a whole number, got 0.5"),
        (lambda c: c.shift(True), TypeError, "KVCache.shift: delta must be a whole number"),
        (lambda c: c.shift(math.nan), TypeError, "KVCache.shift: delta must be a whole number"),
        (lambda c: c.shift(1, start=6), ValueError, "start must be at most 5, got 6"),
        (lambda c: c.shift(2**62 - 3), ValueError, "fit int64 only below"),
        (lambda c: c.shift(2**70), ValueError, "delta must be below 2^62"),
        (lambda c: c.shift(-(2**70), start=2), ValueError, "delta must be below 2^62"),
        (lambda c: c.shift(), TypeError, "KVCache.shift: delta is missing"),
    ],
)
def test_what_cannot_be_done_is_refused_and_changes_nothing(call, kind, said):
    cache = filled(
        layer_of(posenc.RoPE(DIM, interleaved=False)), torch.randn(1, 5, HEADS * DIM), range(5)
    )
    k, positions = cache.k.clone(), cache.positions
    with pytest.raises(kind) as raised:
        call(cache)
    assert said in str(raised.value)
    assert torch.equal(cache.k, k) and torch.equal(cache.positions, positions)


def test_keys_that_no_encoding_made_are_not_moved():
    cache, k = posenc.KVCache(), torch.randn(1, 2, 3, 16)
    cache.append(k, k, range(3))
    with pytest.raises(ValueError, match=r"cache\.record_encoding\(encoding\)"):
        cache.shift(1)
    cache.record_encoding(posenc.PositionEncoding())
    cache.shift(1)
    assert cache.positions.tolist() == [1, 2, 3] and torch.equal(cache.k, k)
    posenc.KVCache().shift(3)  # an empty one has nothing to move


def test_components_of_positions_are_appended_along_their_axis_only():
    cache, k, cells = posenc.KVCache(), torch.randn(1, 2, 4, 16), posenc.positions.grid(2, 2)
    cache.append(k, k, cells, position_axis=-2)
    with pytest.raises(TypeError, match=r"along axis -2, got position_axis=-1"):
        cache.append(k, k, cells)
    assert cache.length == 4
    cache.append(k, k, cells, position_axis=-2)
    assert cache.positions.shape == (8, 2)


@pytest.mark.parametrize("steps", list(itertools.product([[2], [0, 2]], [[0, 0, 0], [0]])))
@pytest.mark.parametrize("shared", [False, True])
def test_rows_leave_and_become_beams(steps, shared):
    """Rows that finish leave, and one that goes on is copied; positions of one row then stand for
    all, whichever form the next ones have."""
    layer = layer_of(posenc.RoPE(DIM, interleaved=False))
    x = torch.randn(3, LENGTH, HEADS * DIM)
    starts = [[4], [4], [4]] if shared else [[0], [0], [4]]
    positions = torch.tensor(starts) + torch.arange(LENGTH)
    cache = filled(layer, x, positions[:1] if shared else positions)
    rows = torch.arange(3)
    for kept in steps:
        cache.reorder(torch.tensor(kept))
        rows = rows[torch.tensor(kept)]
    new = torch.randn(len(rows), 1, HEADS * DIM)
    at = positions[rows, -1:] + 1
    want = layer(torch.cat([x[rows], new], 1), torch.cat([positions[rows], at], 1))[:, -1:]
    forms = [at, at[:1], at[0]] if len(at.unique()) == 1 else [at]
    for next_positions in forms:
        goes_on = copy.deepcopy(cache)
        with torch.no_grad():
            out = layer(new, next_positions, cache=goes_on, mask=masks.causal)
        torch.testing.assert_close(out, want, rtol=0, atol=2e-6)
        assert (
            goes_on.positions.expand(len(rows), -1).tolist()
            == torch.cat([positions[rows], at], 1).tolist()
        )
