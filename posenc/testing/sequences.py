"""Check sequences: decoding, batches, padding, packing, the future."""

from collections.abc import Iterator

import torch
from torch import Tensor

from posenc import masks
from posenc.attend.cache import KVCache
from posenc.encodings import ModelShape, PositionEncoding
from posenc.testing.harness import (
    LENGTH,
    SHAPE,
    Make,
    OneLayerModel,
    assert_same,
    build_example,
    build_layer,
    differs,
    possible_length,
    random_embeddings,
    successive_positions,
)

FAR_OFFSET = 20_011
"""Shift of all positions that changes the result of every absolute method; a prime, so that it is
no multiple of a group size."""
LONG_LENGTH = 600
"""Tokens of a long text: enough to show the effect of an encoding that changes beyond some
length."""
ComparedResults = Iterator[tuple[Tensor, Tensor, str]]
"""Yields triples: two results that should be equal, and a few words that say how the first was
made."""


def assert_decoding_matches_prefill(make: Make) -> None:
    """Check that decoding token by token, and in three pieces, gives the results of one pass. All
    calls get the same `length`. A long text is read in pieces only."""
    model, x, positions = build_example(make, batch=2)
    length = len(positions)
    _assert_cuts_change_nothing(model, x, positions, [1] * length)
    _assert_cuts_change_nothing(model, x, positions, _three_pieces(length))
    model, x, positions = build_example(make, LONG_LENGTH, batch=2)
    _assert_cuts_change_nothing(model, x, positions, _three_pieces(len(positions)))


def _three_pieces(length: int) -> list[int]:
    """Return the numbers of tokens of three calls that read `length` tokens together: a prompt, one
    decoding step, and the rest, which is empty for fewer than 6 tokens. length: at least 3."""
    third = length // 3
    return [length - third, 1, third - 1]


def _assert_cuts_change_nothing(
    model: OneLayerModel, x: Tensor, positions: Tensor, call_lengths: list[int]
) -> None:
    """Assert that calls with call_lengths[0], call_lengths[1], ... tokens and one cache give the
    outputs of a single call without a cache."""
    length = len(positions)
    expected = model(x, positions, length=length)
    cache = KVCache()
    outputs = []
    start = 0
    for call_length in call_lengths:
        tokens_of_call = slice(start, start + call_length)
        outputs.append(
            model(x[:, tokens_of_call], positions[tokens_of_call], cache=cache, length=length)
        )
        start += call_length
    assert_same(
        torch.cat(outputs, dim=1), expected, f"{length} tokens in {len(call_lengths)} steps"
    )


def assert_moved_keys_are_made_anew(make: Make) -> None:
    """Check that the keys and values in a cache, after `KVCache.shift`, are those that the encoding
    makes at the new positions. An encoding that raises ValueError, because it cannot move keys,
    passes."""
    model = build_layer(make)
    encoding = model.encoding
    limit = encoding.claims.max_positions
    num_axes = encoding.claims.num_axes
    length = possible_length(encoding, 11)
    shift = 7  # any small number; less for an encoding with few positions
    if limit is not None:
        length = max(1, min(length, limit // 2)) if num_axes == 1 else length
        shift = min(shift, limit // 2)
    x = random_embeddings(length, batch=2)
    positions = successive_positions(encoding, length)
    if limit is not None and num_axes > 1:
        positions = positions % max(1, limit // 2)
    cache = KVCache()
    model(x, positions, cache=cache)
    try:
        cache.shift(shift)
    except ValueError:
        return
    expected_cache = KVCache()
    model(x, positions + shift, cache=expected_cache)
    assert_same(cache.k, expected_cache.k, f"keys that are moved by {shift}")
    if type(encoding).transform_values is not PositionEncoding.transform_values:
        assert_same(cache.v, expected_cache.v, f"values that are moved by {shift}")


def assert_earlier_calls_leave_no_trace(make: Make) -> None:
    """Check that results do not depend on earlier calls: with more tokens, in another dtype, or
    with as many tokens at other positions."""
    model, x, positions = build_example(make, 9)
    encoding = model.encoding
    first_output = model(x, positions)
    longer_length = possible_length(encoding, 64)
    model(
        random_embeddings(longer_length),
        successive_positions(encoding, longer_length),
        length=longer_length,
    )
    model.to(torch.bfloat16)(x.bfloat16(), positions)
    other_model = build_layer(make)
    other_model(random_embeddings(longer_length), successive_positions(encoding, longer_length))
    assert torch.equal(other_model(x, positions), first_output), "another result after other calls"
    reversed_positions = positions.flip(0)
    last_outputs = []
    for positions_of_calls in ([reversed_positions], [positions.roll(1, 0), reversed_positions]):
        new_model = build_layer(make)
        layer_encoding = new_model.encoding.for_layer(0)  # itself, and no prepared copy
        outputs = [
            new_model.attention(x, p, mask=masks.causal, encoding=layer_encoding)
            for p in positions_of_calls
        ]
        last_outputs.append(outputs[-1])
    assert torch.equal(*last_outputs), "another result after as many tokens at other positions"


def padded_rows(
    encoding: PositionEncoding, lengths: list[int], *, pads_left: bool
) -> tuple[Tensor, Tensor]:
    """Return a mask of valid tokens (batch, longest), and positions (batch, longest) or (batch,
    longest, axes), which begin at 0 in each row.

    lengths: tokens of each row. pads_left: padding is on the left of them; if False, on the right.
    """
    padded_length = max(lengths)
    valid = torch.zeros(len(lengths), padded_length, dtype=torch.bool)
    position_rows = []
    for row_index, length in enumerate(lengths):
        start = padded_length - length if pads_left else 0
        valid[row_index, start : start + length] = True
        positions = torch.zeros_like(successive_positions(encoding, padded_length))
        positions[start : start + length] = successive_positions(encoding, length)
        position_rows.append(positions)
    return valid, torch.stack(position_rows)


def results_next_to_padding(model: OneLayerModel, shape: ModelShape) -> ComparedResults:
    """Yield the result of a sequence with padding beside it in its row, its result without padding,
    and words for its length and the side of the padding."""
    encoding = model.encoding
    lengths = [possible_length(encoding, 13), 5, 1]
    for pads_left in (True, False):
        valid, positions = padded_rows(encoding, lengths, pads_left=pads_left)
        x = random_embeddings(valid.shape[1], batch=3, shape=shape)
        out = model(x, positions, masks.causal & masks.padding(valid))
        side = "left" if pads_left else "right"
        for row_index, length in enumerate(lengths):
            result_alone = model(
                x[row_index : row_index + 1, valid[row_index]],
                successive_positions(encoding, length),
            )
            yield (
                out[row_index : row_index + 1, valid[row_index]],
                result_alone,
                f"{length} tokens, {side} padding",
            )


def results_in_a_pack(model: OneLayerModel, shape: ModelShape) -> ComparedResults:
    """Yield the result of each document in a packed sequence, its result alone, and words for its
    number and length."""
    encoding = model.encoding
    lengths = [6, 1, possible_length(encoding, 10)]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    positions = torch.cat([successive_positions(encoding, length) for length in lengths])
    x = random_embeddings(len(documents), shape=shape)
    out = model(x, positions, masks.causal & masks.document(documents))
    for number, length in enumerate(lengths):
        in_document = documents == number
        result_alone = model(x[:, in_document], successive_positions(encoding, length))
        yield out[:, in_document], result_alone, f"document {number} of {length} tokens"


def results_among_other_rows(model: OneLayerModel, shape: ModelShape) -> ComparedResults:
    """Yield the result of a row of a batch, its result alone, and words for the other rows: at far
    positions, or with other content."""
    encoding = model.encoding
    near_positions = successive_positions(encoding, possible_length(encoding, 17))
    far_positions = (
        near_positions + 5000 if encoding.claims.max_positions is None else near_positions.flip(0)
    )
    x = random_embeddings(len(near_positions), batch=3, shape=shape)
    positions = torch.stack([near_positions, far_positions, near_positions])
    result_alone = model(x[:1], near_positions[None])
    results_together = model(x, positions)
    yield results_together[:1], result_alone, "first of three rows"
    yield results_together[2:], model(x[2:], near_positions), "batched against shared positions"
    changed_x = torch.cat([x[:1], 7 * x[1:]])
    yield model(changed_x, positions)[:1], result_alone, "next to other rows"


def results_in_steps(model: OneLayerModel, shape: ModelShape) -> ComparedResults:
    """Yield the result of decoding token by token, that of one pass, and the words "token by
    token". Each step gets the length so far, which grows beyond the training length."""
    encoding = model.encoding
    length = possible_length(encoding)
    x = random_embeddings(length, shape=shape)
    positions = successive_positions(encoding, length)
    cache = KVCache()
    num_tokens_before = max(0, shape.train_length - length // 2)
    outputs = [
        model(x[:, t : t + 1], positions[t : t + 1], cache=cache, length=num_tokens_before + t + 1)
        for t in range(length)
    ]
    yield (
        torch.cat(outputs, dim=1),
        model(x, positions, length=num_tokens_before + length),
        "token by token",
    )


def results_after_shift(model: OneLayerModel, shape: ModelShape) -> ComparedResults:
    """Yield the result with a number added to all positions, the result without, and words for the
    number. It is FAR_OFFSET, or less if the encoding's max_positions is too small for that."""
    encoding = model.encoding
    limit = encoding.claims.max_positions
    num_axes = encoding.claims.num_axes
    length = LENGTH if limit is None or num_axes > 1 else max(1, min(LENGTH, limit // 2))
    x = random_embeddings(length, shape=shape)
    positions = successive_positions(encoding, length)
    shift = FAR_OFFSET
    if limit is not None and num_axes > 1:  # shifted by half the limit, all stay below it
        positions = positions % max(1, limit // 2)
        shift = limit // 2
    elif limit is not None:
        shift = max(1, min(FAR_OFFSET, limit - length))
    elif num_axes == 1:
        # Spread to twice the training length: encodings that map positions, as ReRoPE does, may
        # change those beyond it only.
        positions = positions * -(-2 * shape.train_length // length)
    yield model(x, positions + shift), model(x, positions), f"shifted by {shift}"


def _assert_equal_results(compared_results: ComparedResults) -> None:
    """Assert that both results of each pair are equal up to rounding."""
    for result, alone, case_in_words in compared_results:
        assert_same(result, alone, case_in_words)


def assert_padding_is_invisible(make: Make) -> None:
    """Check that a row gives the same results next to padding as alone."""
    _assert_equal_results(results_next_to_padding(build_layer(make), SHAPE))


def assert_packing_is_invisible(make: Make) -> None:
    """Check that documents give the same results packed into one row as alone."""
    _assert_equal_results(results_in_a_pack(build_layer(make), SHAPE))


def assert_rows_are_independent(make: Make) -> None:
    """Check that a row of a batch gives the same results as alone."""
    _assert_equal_results(results_among_other_rows(build_layer(make), SHAPE))


def assert_the_future_is_invisible(make: Make) -> None:
    """Check that changed tokens change their own outputs, and no output of earlier tokens."""
    for wanted_length in (19, LONG_LENGTH):
        model, x, positions = build_example(make, wanted_length)
        length = len(positions)
        earlier_tokens = slice(0, length - 8)
        changed_tokens = slice(length - 8, length)
        changed_x = x.clone()
        changed_x[:, changed_tokens] = 3 * x[:, changed_tokens].flip(1)
        out = model(x, positions)
        new_out = model(changed_x, positions)
        which_queries = f"queries before the changed ones of {length} tokens"
        assert_same(new_out[:, earlier_tokens], out[:, earlier_tokens], which_queries)
        differences = (new_out[:, changed_tokens] - out[:, changed_tokens]).abs().amax(-1)
        assert differences.min() > 0, "later queries must see them"


def assert_blind_rows_give_zeros(make: Make) -> None:
    """Check that a query that sees no key has output zero and gradient zero, and that all gradients
    are finite."""
    model, x, positions = build_example(make, 11)
    encoding = model.encoding
    valid = torch.ones(1, len(positions), dtype=torch.bool)
    valid[:, :4] = False  # the first four queries see only these keys
    out = model(x.requires_grad_(), positions, masks.causal & masks.padding(valid))
    assert (out[:, :4] == 0).all(), "rows without a visible key"
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert grad.isfinite().all()
    # In a running sum over the tokens (FoX) contributions of hidden tokens cancel up to rounding.
    state = encoding.state(x, positions)
    later_state = encoding.state(x[:, 4:], positions[4:])
    is_running_sum = (
        state is not None and later_state is not None and differs(later_state, state[:, :, 4:])
    )
    bound = 1e-14 if is_running_sum else 0
    assert (grad[:, :4].abs() <= bound).all(), "gradient of tokens that see none and are not seen"
