"""Check each claim of an encoding, such as shift_invariant: it holds if and only if it is made."""

from typing import Any

import torch
from torch import Tensor

from posenc import masks
from posenc.attend.attention import attention, attention_weights
from posenc.encodings import PositionEncoding, without_position
from posenc.testing.harness import (
    SHAPE,
    Make,
    add_term_to_scores,
    as_tokens,
    build_encoding,
    build_example,
    build_layer,
    differs,
    possible_length,
    random_embeddings,
    random_qkv,
    successive_positions,
    transform_queries_keys,
)
from posenc.testing.sequences import results_after_shift, results_in_steps


def _assert_claimed_right(name: str, is_claimed: bool, holds: bool) -> None:
    """Assert that the claim `name` is made if and only if it holds."""
    assert is_claimed == holds, (
        f"{name} is claimed as {is_claimed}, but {'holds' if holds else 'fails'}"
    )


def assert_shift_invariance_as_claimed(make: Make) -> None:
    """Check that adding a number to all positions changes nothing if and only if `shift_invariant`
    is claimed."""
    model = build_layer(make)
    is_changed = any(
        differs(shifted, unshifted) for shifted, unshifted, _ in results_after_shift(model, SHAPE)
    )
    _assert_claimed_right("shift_invariant", model.encoding.claims.shift_invariant, not is_changed)


def assert_permutation_invariance_as_claimed(make: Make) -> None:
    """Check that permuting keys, together with their values, positions and states, changes nothing
    if and only if `permutation_invariant` is claimed."""
    encoding = build_encoding(make, dtype=torch.float64).for_layer(0)
    length = possible_length(encoding)
    positions = successive_positions(encoding, length)
    permutation = torch.randperm(length, generator=torch.Generator().manual_seed(4))
    x, (q, k, v) = random_embeddings(length), random_qkv(length)
    state = encoding.state(x, positions)
    permuted_state = encoding.state(x[:, permutation], positions[permutation])
    # With several axes a causal mask compares the order in memory, which is permuted here.
    mask = masks.causal if encoding.claims.num_axes == 1 else None

    def attend(k: Tensor, v: Tensor, kv_positions: Tensor, kv_state: Tensor | None) -> Tensor:
        """Return the output of attention from the same queries to these keys and values."""
        both_positions: dict[str, Any] = {"q_positions": positions, "kv_positions": kv_positions}
        out = attention(
            q, k, v, encoding, q_state=state, kv_state=kv_state, mask=mask, **both_positions
        )
        assert isinstance(out, Tensor)
        return out

    is_changed = differs(
        attend(k, v, positions, state),
        attend(k[:, :, permutation], v[:, :, permutation], positions[permutation], permuted_state),
    )
    _assert_claimed_right(
        "permutation_invariant", encoding.claims.permutation_invariant, not is_changed
    )


def assert_order_is_seen_without_a_mask(make: Make) -> None:
    """Check that an encoding without the claim `causal_only` distinguishes orders of tokens without
    a mask: permuted tokens must give more than permuted outputs."""
    model, x, positions = build_example(make)
    permutation = torch.randperm(len(positions), generator=torch.Generator().manual_seed(4))
    if model.encoding.claims.causal_only:
        return
    is_order_seen = differs(
        model(x, positions, None)[:, permutation], model(x[:, permutation], positions, None)
    )
    assert is_order_seen, (
        "causal_only is not claimed, but the encoding is blind to order without a mask"
    )


def assert_cache_safety_as_claimed(make: Make) -> None:
    """Check that decoding step by step, with the length so far in each step, equals one pass if and
    only if `cache_safe` is claimed."""
    model = build_layer(make)
    is_changed = any(
        differs(stepwise, in_one_pass)
        for stepwise, in_one_pass, _ in results_in_steps(model, SHAPE)
    )
    _assert_claimed_right("cache_safe", model.encoding.claims.cache_safe, not is_changed)


def assert_places_as_claimed(make: Make) -> None:
    """Check that the encoding acts at each claimed place and at no other."""
    encoding = build_encoding(make, dtype=torch.float64)
    value_methods = ("transform_values", "transform_output")
    methods_by_place = {1: ("embed",), 2: ("transform",), 3: ("term",), 4: ("term", *value_methods)}
    for place, method_names in methods_by_place.items():
        are_overridden = [
            getattr(type(encoding), method_name) is not getattr(PositionEncoding, method_name)
            for method_name in method_names
        ]
        if place in encoding.claims.places:
            assert any(are_overridden), (
                f"place {place} is claimed, but {method_names[0]} is not overridden"
            )
    length = possible_length(encoding, 9)
    positions, x, (q, k, v) = (
        successive_positions(encoding, length),
        random_embeddings(length),
        random_qkv(length),
    )
    if 1 not in encoding.claims.places:
        assert encoding.embed(x, positions) is x
    encoding = encoding.for_layer(0)
    if 2 not in encoding.claims.places:
        new_q, new_k = transform_queries_keys(encoding, q, k, positions, positions)
        assert new_q is q and new_k is k
    num_axes = encoding.claims.num_axes
    if 4 not in encoding.claims.places:
        values, _ = as_tokens(v, None, positions, positions, num_axes=num_axes)
        assert all(getattr(encoding, name)(values) is v for name in value_methods)
    if not {3, 4} & set(encoding.claims.places):
        assert encoding.term(*as_tokens(q, None, positions, positions, num_axes=num_axes)) is None


def assert_additive_as_claimed(make: Make) -> None:
    """Check that the term adds the same numbers to any scores if and only if `additive` is claimed,
    and that a term object with additive=True adds the same numbers."""
    encoding = build_encoding(make, dtype=torch.float64).for_layer(0)
    if 3 not in encoding.claims.places:
        return
    length = possible_length(encoding, 40)  # beyond the training length, where scores may grow
    positions, x, (q, k, _) = (
        successive_positions(encoding, length),
        random_embeddings(length),
        random_qkv(length),
    )
    state = encoding.state(x, positions)
    keys = k.repeat_interleave(2, 1) if encoding.claims.needs_raw_k else None
    tokens_and_states = (q, keys, positions, positions, state, state)
    added_terms = []
    for scores in (torch.zeros(1, 4, length, length).double(), q @ q.mT):
        added_terms.append(add_term_to_scores(encoding, scores, *tokens_and_states) - scores)
    is_additive = not differs(*added_terms)
    _assert_claimed_right("additive", encoding.claims.additive, is_additive)
    term = encoding.term(*as_tokens(*tokens_and_states))
    if term is not None and term.additive:
        _assert_claimed_right("the term's additive", True, is_additive)


def _gain_of_doubled_queries(
    q: Tensor, k: Tensor, encoding: PositionEncoding, options: dict[str, Any]
) -> Tensor:
    """Return how much each score grows if all queries are doubled, minus the mean of its row:
    (batch, heads, q_len, kv_len). Terms that do not depend on the query, such as the decay of FoX,
    cancel."""
    weights_once, weights_twice = (attention_weights(n * q, k, encoding, **options) for n in (1, 2))
    # The logarithm of a weight is its score minus one number per row, which the mean takes away.
    gain = weights_twice.log() - weights_once.log()
    return gain - gain.mean(-1, keepdim=True)


def _sequences_with_one_key(k: Tensor) -> Tensor:
    """Return one sequence for each token of k (1, heads, len, width): that token's key at its
    index, and zeros for all other keys. Together (len, heads, len, width)."""
    length = k.shape[2]
    own_token = torch.eye(length, dtype=k.dtype)[:, None, :, None]
    return k * own_token


def assert_own_scale_as_claimed(make: Make) -> None:
    """Check that tokens at one position have the scores q . k / sqrt(head_dim), as without an
    encoding, if and only if `own_scale` is not claimed. All parameters are set to zero; if that
    gives weights that are not finite, nothing is checked.

    An encoding that is not permutation invariant may rotate tokens by their order, at any
    positions. For such an encoding only the score of each token with itself is compared, which no
    rotation changes.
    """
    encoding = build_encoding(make, dtype=torch.float64).for_layer(0)
    is_claimed = encoding.claims.own_scale
    limit = encoding.claims.max_positions
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.zero_()
    length = 6
    far_position = 8 * SHAPE.train_length  # beyond training, where a temperature may begin
    x, (q, k, _) = random_embeddings(length), random_qkv(length)
    sees_itself_only = not encoding.claims.permutation_invariant
    if sees_itself_only:
        x = x.expand(length, -1, -1)
        q = q.expand(length, -1, -1, -1)
        k = _sequences_with_one_key(k)
    is_changed = False
    for position in (0, far_position if limit is None else limit - 1):
        positions = torch.full_like(successive_positions(encoding, length), position)
        state = encoding.state(x, positions)

        same_positions: dict[str, Any] = {"q_positions": positions, "kv_positions": positions}
        positions_and_state = {**same_positions, "q_state": state, "kv_state": state}
        with torch.no_grad():
            encoding_without_position = without_position(encoding.claims.num_axes)
            expected = _gain_of_doubled_queries(q, k, encoding_without_position, same_positions)
            gain = _gain_of_doubled_queries(q, k, encoding, positions_and_state)
        if sees_itself_only:
            token_index = torch.arange(length)
            expected = expected[token_index, :, token_index]
            gain = gain[token_index, :, token_index]
        if not gain.isfinite().all():
            return
        is_changed = is_changed or differs(gain, expected)
    _assert_claimed_right("own_scale", is_claimed, is_changed)


def assert_claims_have_their_types(make: Make) -> None:
    """Check the types of all claims, and that claims with few possible values have one of them."""
    encoding = make(SHAPE)
    types_by_claim = {
        "shift_invariant": bool,
        "permutation_invariant": bool,
        "causal_only": bool,
        "cache_safe": bool,
        "own_scale": bool,
        "needs_raw_k": bool,
        "max_positions": (int, type(None)),
        "num_axes": int,
        "source": str,
    }
    for name, expected_type in types_by_claim.items():
        value = getattr(encoding.claims, name)
        assert isinstance(value, expected_type), f"{name} is {value!r}"
    assert set(encoding.claims.places) <= {1, 2, 3, 4}
    assert encoding.claims.scope in ("model", "layer")
    assert encoding.claims.coordinates in ("cells", "normalized")
    assert encoding.claims.num_axes >= 1


def note_on_missing_source(encoding: PositionEncoding) -> str | None:
    """Return a note if `claims.source` of the encoding has no digit, so that it names no paper and
    year; None if it has one.

    It is a note and no failed check, because checks judge behaviour.
    """
    if any(character.isdigit() for character in encoding.claims.source):
        return None
    return "claims.source names no paper and year"
