"""Check sequences: decoding, batches, padding, packing, the future."""

import torch
from torch import Tensor

from posenc import masks
from posenc.attend.cache import KVCache
from posenc.encodings import PositionEncoding
from posenc.testing.harness import Make, assert_same, differs, hidden, layer, room, tokens


def assert_decoding_matches_prefill(make: Make) -> None:
    """Check that decoding token by token, or in pieces, equals one pass, all with one `length`."""
    model = layer(make)
    encoding = model.encoding
    length = room(encoding)
    positions = tokens(encoding, length)
    x = hidden(length, batch=2)
    want = model(x, positions, length=length)
    for cuts in ([1] * length, [length - length // 3, 1, length // 3 - 1]):
        cache, steps, start = KVCache(), [], 0
        for size in cuts:
            part = slice(start, start + size)
            steps.append(model(x[:, part], positions[part], cache=cache, length=length))
            start += size
        assert_same(torch.cat(steps, dim=1), want, f"in {len(cuts)} steps")


def assert_rows_are_independent(make: Make) -> None:
    """Check that a row's result does not depend on other rows, even at far positions."""
    model = layer(make)
    encoding = model.encoding
    length = room(encoding, 17)
    near = tokens(encoding, length)
    limit = encoding.claims.max_positions
    far = near.flip(0) if limit is not None else near + 5000
    x = hidden(length, batch=3)
    alone = model(x[:1], near[None])
    together = model(x, torch.stack([near, far, near]))
    assert_same(together[:1], alone, "first of three rows")
    other = x.clone()
    other[1:] = 7 * x[1:]
    assert_same(model(other, torch.stack([near, far, near]))[:1], alone, "next to other rows")
    assert_same(together[2:], model(x[2:], near), "batched against shared positions")


def assert_earlier_calls_leave_no_trace(make: Make) -> None:
    model = layer(make)
    encoding = model.encoding
    length = room(encoding, 9)
    x, positions = hidden(length), tokens(encoding, length)
    first = model(x, positions)
    longer = room(encoding, 64)
    model(hidden(longer), tokens(encoding, longer), length=longer)
    model.to(torch.bfloat16)(hidden(length, dtype=torch.bfloat16), positions)
    fresh = layer(make)
    fresh(hidden(longer), tokens(encoding, longer))
    assert torch.equal(fresh(x, positions), first), "another result after other calls"


def padded(encoding: PositionEncoding, lengths: list[int], *, left: bool) -> tuple[Tensor, Tensor]:
    """Return a mask of valid tokens (batch, longest), and positions that begin at 0 in each row."""
    total = max(lengths)
    valid = torch.zeros(len(lengths), total, dtype=torch.bool)
    rows = []
    for row, length in enumerate(lengths):
        start = total - length if left else 0
        valid[row, start : start + length] = True
        positions = torch.zeros_like(tokens(encoding, total))
        positions[start : start + length] = tokens(encoding, length)
        rows.append(positions)
    return valid, torch.stack(rows)


def assert_padding_is_invisible(make: Make) -> None:
    model = layer(make)
    encoding = model.encoding
    lengths = [room(encoding, 13), 5, 1]
    for left in (True, False):
        valid, positions = padded(encoding, lengths, left=left)
        x = hidden(valid.shape[1], batch=3)
        out = model(x, positions, masks.causal & masks.padding(valid))
        side = "left" if left else "right"
        for row, length in enumerate(lengths):
            alone = model(x[row : row + 1, valid[row]], tokens(encoding, length))
            assert_same(out[row : row + 1, valid[row]], alone, f"{length} tokens, {side} padding")


def assert_packing_is_invisible(make: Make) -> None:
    model = layer(make)
    encoding = model.encoding
    lengths = [6, 1, room(encoding, 10)]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions = torch.cat([tokens(encoding, length) for length in lengths])
    x = hidden(len(documents))
    out = model(x, positions, masks.causal & masks.document(documents))
    for number, length in enumerate(lengths):
        own = documents == number
        alone = model(x[:, own], tokens(encoding, length))
        assert_same(out[:, own], alone, f"document {number} of {length} tokens")


def assert_the_future_is_invisible(make: Make) -> None:
    model = layer(make)
    encoding = model.encoding
    length = room(encoding, 19)
    x, positions = hidden(length), tokens(encoding, length)
    out = model(x, positions)
    changed = x.clone()
    changed[:, 11:] = 3 * x[:, 11:].flip(1)
    after = model(changed, positions)
    assert_same(after[:, :11], out[:, :11], "queries before the changed tokens")
    assert (after[:, 11:] - out[:, 11:]).abs().amax(-1).min() > 0, "later queries must see them"


def assert_blind_rows_give_zeros(make: Make) -> None:
    """Check that a query that sees no key gives zeros and has no gradient."""
    model = layer(make)
    encoding = model.encoding
    length = room(encoding, 11)
    valid = torch.ones(1, length, dtype=torch.bool)
    valid[:, :4] = False  # the first four queries see only these keys
    x, positions = hidden(length).requires_grad_(), tokens(encoding, length)
    out = model(x, positions, masks.causal & masks.padding(valid))
    assert (out[:, :4] == 0).all(), "rows without a visible key"
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert grad.isfinite().all()
    # In a running sum over the tokens (FoX) contributions of hidden tokens cancel up to rounding.
    state, later = encoding.state(x, positions), encoding.state(x[:, 4:], positions[4:])
    sums = state is not None and later is not None and differs(later, state[:, :, 4:])
    bound = 1e-14 if sums else 0
    assert (grad[:, :4].abs() <= bound).all(), "gradient of tokens that see none and are not seen"
