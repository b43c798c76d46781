"""Check the arguments of attention and split it into softmax attentions, one for each pass.

`build_problems` works in four steps:

    _checked_call      every argument is checked, positions become Tokens
    _join_cached_keys  new keys and values are appended to the cache, and all are returned
    _bound_mask        the mask is bound to the positions of all keys
    _build_problem     one Problem for each pass, with its vectors, its term and its mask

Most encodings have one pass. Self-Extend has two: one for near keys and one for far keys.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc.arguments import check_flag, check_probability
from posenc.attend.cache import KVCache
from posenc.attend.problem import Problem
from posenc.attend.sinks import check_sinks
from posenc.encodings import Term, Tokens
from posenc.encodings.base import check_inputs
from posenc.encodings.base.check_inputs import validated_positions
from posenc.encodings.base.position_encoding import PositionEncoding, QueriesKeys
from posenc.encodings.numerics.precision import without_autocast
from posenc.encodings.numerics.tensor_views import repeat_kv_heads
from posenc.masks import Mask
from posenc.masks.mask import PADDING_NAME, check_mask
from posenc.masks.packed_documents import bind_to_memory_order, check_documents
from posenc.positions.tokens import offset_of_first_query, repeated_position

_CALLER = "attention"
"""Name of the public function, with which error messages begin."""
_PLACE_QUERIES_AND_KEYS = 2
_PLACE_SCORES = 3
_PLACE_VALUES = 4
"""Numbers in `Claims.places`."""


class CheckedCall(NamedTuple):
    """Hold the checked arguments of one call of `attention`, with the new keys and values only, not
    the cached ones."""

    encoding: PositionEncoding
    queries: Tokens
    keys: Tokens
    v: Tensor
    """Values as `encoding.transform_values` returned them, (batch, num_kv_heads, new, v_dim)."""
    mask: Mask | None
    scale: float
    dropout_p: float


class UntransformedKeys(NamedTuple):
    """Hold all keys, the cached ones first, before `encoding.transform`, and their values. Each
    pass transforms these keys for its own positions. Used without a cache, and for encodings that
    claim needs_raw_k."""

    keys: Tokens
    v: Tensor
    """Values (batch, num_kv_heads, kv_len, v_dim)."""


class TransformedQueriesKeys(NamedTuple):
    """Hold the queries, and all keys, the cached ones first, after `encoding.transform`, and the
    values. Keys enter the cache transformed, so that a decode step transforms only the new ones.
    Used with a cache, unless the encoding claims needs_raw_k."""

    q: Tensor
    """Queries (batch, num_heads, q_len, width), transformed together with the new keys."""
    keys: Tokens
    v: Tensor
    """Values (batch, num_kv_heads, kv_len, v_dim)."""


class PassInputs(NamedTuple):
    """Hold the inputs of one pass: of one of the softmax attentions that an encoding needs (most
    need one). The queries and keys are untransformed, at the positions that the encoding gives them
    in this pass."""

    queries: Tokens
    keys: Tokens
    mask: Mask | None
    """Mask of the pairs that belong to this pass; None for all pairs."""


def build_problems(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Any,
    *,
    q_positions: Tensor | range,
    kv_positions: Tensor | range,
    q_state: Tensor | None = None,
    kv_state: Tensor | None = None,
    mask: Any = None,
    cache: Any = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    sinks: Any = None,
    scale: Any = None,
) -> list[Problem]:
    """Check the arguments of `attention`, append to its cache, and return one softmax attention for
    each pass of the encoding (most have one).

    Raises: TypeError for wrong types, ValueError for sizes that do not fit.
    """
    call = _checked_call(
        q,
        k,
        v,
        encoding,
        q_positions=q_positions,
        kv_positions=kv_positions,
        q_state=q_state,
        kv_state=kv_state,
        mask=mask,
        num_cached=cache.length if cache else 0,
        dropout_p=dropout_p,
        return_lse=return_lse,
        sinks=sinks,
        scale=scale,
    )
    all_keys = _join_cached_keys(call, cache)
    shared_mask = _bound_mask(call.mask, call.queries, all_keys.keys)
    passes = _pass_inputs(call.encoding, call.queries, all_keys.keys)
    transforms_q_and_k = _PLACE_QUERIES_AND_KEYS in call.encoding.claims.places
    if isinstance(all_keys, TransformedQueriesKeys) and len(passes) > 1 and transforms_q_and_k:
        raise ValueError(
            f"{_CALLER}: {type(call.encoding).__name__} changes queries and keys in each of its "
            f"{len(passes)} passes, and the cache stores keys that were changed once. It must "
            "claim needs_raw_k, see posenc.Claims."
        )
    # Passes are merged, and a sink is added, by their log-sum-exp.
    needs_lse = return_lse or sinks is not None or len(passes) > 1
    return [_build_problem(call, all_keys, inputs, shared_mask, needs_lse) for inputs in passes]


def _checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Any,
    *,
    q_positions: Any,
    kv_positions: Any,
    q_state: Any,
    kv_state: Any,
    mask: Any,
    num_cached: int,
    dropout_p: Any,
    return_lse: Any,
    sinks: Any,
    scale: Any,
) -> CheckedCall:
    """Check every argument and return the queries and the new keys as Tokens. The values are
    transformed here, because no encoding transforms them for a pass.

    num_cached: number of tokens in the cache, which a mask counts among the keys.
    Raises: as `build_problems`.
    """
    encoding = check_inputs.require_attention_encoding(_CALLER, encoding)
    check_inputs.check_vectors(_CALLER, q=q, k=k, v=v)
    check_inputs.check_sizes(q, k, v)
    check_sinks(sinks, q)
    check_inputs.check_scale(_CALLER, scale)
    if scale is not None:
        encoding = encoding.with_scale(float(scale))

    num_axes = encoding.claims.num_axes
    shares_positions = kv_positions is q_positions and k.shape[2] == q.shape[2]
    q_positions = validated_positions(_CALLER, "q_positions", q_positions, q, num_axes)
    queries = Tokens(q, q_positions, q_state, num_axes)
    if shares_positions:
        keys = queries.with_vectors(k).with_state(kv_state)  # positions need no second check
    else:
        kv_positions = validated_positions(_CALLER, "kv_positions", kv_positions, k, num_axes)
        keys = Tokens(k, kv_positions, kv_state, num_axes)
    check_inputs.check_state("q_state", q_state, q)
    check_inputs.check_state("kv_state", kv_state, k)

    check_probability(_CALLER, "dropout_p", dropout_p)
    check_flag(_CALLER, "return_lse", return_lse)
    check_mask(_CALLER, mask, len(q), q.shape[2], k.shape[2] + num_cached)
    return CheckedCall(
        encoding,
        queries,
        keys,
        v=encoding.transform_values(keys.with_vectors(v)),
        mask=mask,
        scale=encoding.scale(q.shape[-1]),
        dropout_p=dropout_p,
    )


def _join_cached_keys(
    call: CheckedCall, cache: KVCache | None
) -> UntransformedKeys | TransformedQueriesKeys:
    """Append the new keys and values to the cache, if there is one, and return all keys and values,
    the cached ones first."""
    if cache is None:
        return UntransformedKeys(call.keys, call.v)
    if call.encoding.claims.needs_raw_k:
        _check_new_positions(cache, call.keys, call.mask)
        return UntransformedKeys(*_append_tokens(cache, call.encoding, call.keys, call.v))
    q, k = _transform_queries_keys(call.encoding, call.queries, call.keys)
    transformed_keys = call.keys.with_vectors(k)
    _check_new_positions(cache, transformed_keys, call.mask)
    return TransformedQueriesKeys(
        q, *_append_tokens(cache, call.encoding, transformed_keys, call.v)
    )


def _check_new_positions(cache: KVCache, new_tokens: Tokens, mask: Mask | None) -> None:
    """Raise ValueError if a causal mask would show a new token earlier ones at its own position, as
    where two layers share a cache or positions do not advance."""
    if mask is None or cache.positions_or_range is None or new_tokens.num_axes > 1:
        return
    compares_positions = mask.causal and not mask.bound
    if not compares_positions:
        return
    # Packed documents begin again at 0, and padding may have any position. `captured` are the
    # tensors that a mask holds, by name.
    hides_padding = any(captured.name == PADDING_NAME for captured in mask.captured)
    may_repeat = mask.separates_documents or hides_padding
    if may_repeat:
        return
    position = repeated_position(cache.positions_or_range, new_tokens.positions_or_range)
    if position is not None:
        raise ValueError(
            f"{_CALLER}: the cache already holds position {position:g}. One KVCache per layer; the "
            "next position is cache.length. For packed rows: mask & masks.document(ids)."
        )


def _append_tokens(
    cache: KVCache, encoding: PositionEncoding, new_tokens: Tokens, v: Tensor
) -> tuple[Tokens, Tensor]:
    """Append the new tokens to the cache, and return all keys and values, the cached ones first."""
    assert new_tokens.x is not None
    cache.record_encoding(encoding)
    keeps_only_last_state = encoding.claims.state_kept == "last"
    k, v, positions, state = cache.append(
        new_tokens.x,
        v,
        new_tokens.positions_or_range,
        new_tokens.state,
        position_axis=-1 if new_tokens.num_axes == 1 else -2,
        keep_last_state=keeps_only_last_state,
    )
    # A state of which only the last token is kept does not belong to these keys.
    return Tokens(k, positions, None if keeps_only_last_state else state, new_tokens.num_axes), v


def _bound_mask(mask: Mask | None, queries: Tokens, keys: Tokens) -> Mask | None:
    """Return the mask bound to the positions of the tokens, unless it is bound already.

    Raises: ValueError if positions show packed documents and the mask does not separate them.
    """
    if mask is None:
        return None
    if not mask.bound:
        mask = _bind_to_tokens(mask, queries, keys)
    check_documents(mask)
    return mask


def _bind_to_tokens(mask: Mask, queries: Tokens, keys: Tokens) -> Mask:
    """Return the mask bound to the positions of the tokens, or to their order in memory if
    positions have several components."""
    if queries.num_axes > 1:
        return bind_to_memory_order(mask, queries.positions, keys.positions)
    return mask.bind(queries.positions_or_range, keys.positions_or_range)


def _pass_inputs(encoding: PositionEncoding, queries: Tokens, keys: Tokens) -> list[PassInputs]:
    """Return queries, keys and mask for each pass: each softmax attention that the encoding needs
    (most need one).

    queries, keys: all tokens, the cached ones included, at their true positions.
    """
    if type(encoding).passes is PositionEncoding.passes:  # needs no tensor of positions
        return [PassInputs(queries, keys, None)]
    passes = encoding.passes(queries.positions, keys.positions)
    return [
        PassInputs(
            queries.at(one_pass.q_positions),
            keys.at(one_pass.kv_positions),
            one_pass.mask,
        )
        for one_pass in passes
    ]


def _build_problem(
    call: CheckedCall,
    all_keys: UntransformedKeys | TransformedQueriesKeys,
    inputs: PassInputs,
    shared_mask: Mask | None,
    needs_lse: bool,
) -> Problem:
    """Return the softmax attention of one pass of the encoding (Self-Extend has two, which
    `attention` merges).

    call: the checked arguments, with the new keys only.
    all_keys: keys and values, the cached ones first, at their true positions.
    inputs: the same queries and keys as this pass sees them, and its own mask.
    shared_mask: the caller's mask, bound to the true positions; it applies to every pass.
    needs_lse: True if the caller, a sink or the merging of passes needs the log-sum-exp.
    """
    encoding = call.encoding
    queries = inputs.queries
    if isinstance(all_keys, TransformedQueriesKeys):
        # These were transformed once, at the true positions: there is one pass, or the encoding
        # leaves them as they are.
        q = all_keys.q
        k = all_keys.keys.x
        assert k is not None
    else:
        q, k = _transform_queries_keys(encoding, queries, inputs.keys)
    keys = inputs.keys.with_vectors(_keys_for_term(encoding, inputs.keys, q.shape[1]))
    with without_autocast(q.device):
        term = _checked_term(encoding, queries, keys)
    mask = _mask_of_pass(inputs.mask, shared_mask, call.queries, all_keys.keys)
    query_offset = offset_of_first_query(queries.positions_or_range, keys.positions_or_range)
    vectors_and_states = (q, k, all_keys.v, queries.x, queries.state, keys.x, keys.state)
    return Problem(
        q=q,
        k=k,
        v=all_keys.v,
        queries=queries,
        keys=keys,
        term=term,
        encoding=encoding,
        mask=mask,
        scale=call.scale,
        dropout_p=call.dropout_p,
        needs_lse=needs_lse,
        needs_grad=_autograd_tracks(encoding, vectors_and_states),
        query_offset=query_offset,
        mask_query_offset=_mask_query_offset(mask, queries, keys, query_offset),
    )


def _keys_for_term(encoding: PositionEncoding, keys: Tokens, num_heads: int) -> Tensor | None:
    """Return untransformed keys (batch, num_heads, kv_len, width), repeated for every query head,
    if the encoding's term reads them; None if it does not."""
    places = encoding.claims.places
    acts_in_term = _PLACE_SCORES in places or _PLACE_VALUES in places
    if not (encoding.claims.needs_raw_k and acts_in_term):
        return None
    assert keys.x is not None
    return repeat_kv_heads(keys.x, num_heads)


def _checked_term(encoding: PositionEncoding, queries: Tokens, keys: Tokens) -> Term | None:
    """Return the encoding's term. Raises: TypeError if a subclass returns anything else."""
    term: Any = encoding.term(queries, keys)
    if term is not None and not isinstance(term, Term):
        message = f"must return a Term, such as PairwiseBias, or None, got {type(term).__name__}"
        raise TypeError(f"{type(encoding).__name__}.term {message}.")
    return term


def _mask_of_pass(
    pass_mask: Mask | None, shared_mask: Mask | None, queries: Tokens, keys: Tokens
) -> Mask | None:
    """Return a bound mask of the pairs that both masks show; None if there is no mask at all.

    pass_mask: the pairs that belong to one pass of the encoding, such as those with near keys.
    shared_mask: the mask of the call, bound to true positions.
    queries, keys: the tokens at their true positions, not at those that the pass gives them.
    """
    if pass_mask is None:
        return shared_mask
    if shared_mask is None:
        pass_mask = _bind_to_tokens(pass_mask, queries, keys)
        check_documents(pass_mask)
        return pass_mask
    # `&` binds an unbound mask as the other one is. Two bound masks it joins only if it knows that
    # their positions are equal. It does not know that of a range and a tensor on a GPU: bind this
    # mask again, to the same objects as the mask of the call.
    if pass_mask.bound:
        pass_mask = _bind_to_tokens(pass_mask, queries, keys)
    return pass_mask & shared_mask


def _mask_query_offset(
    mask: Mask | None, queries: Tokens, keys: Tokens, query_offset: int | None
) -> int | None:
    """Return the position of the first query minus that of the first key, by the positions to which
    the mask is bound; None unless both are consecutive. query_offset: the same difference by the
    positions of the tokens, which is returned without a mask."""
    if mask is None:
        return query_offset
    if (
        mask.q_positions is queries.positions_or_range
        and mask.kv_positions is keys.positions_or_range
    ):
        return query_offset
    return offset_of_first_query(mask.q_positions, mask.kv_positions)  # type: ignore[arg-type]


def _autograd_tracks(encoding: PositionEncoding, tensors: tuple[Tensor | None, ...]) -> bool:
    """Return True if autograd tracks one of the tensors or a parameter of the encoding."""
    if not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in (*tensors, *encoding.parameters()))


def _transform_queries_keys(encoding: PositionEncoding, q: Tokens, k: Tokens) -> QueriesKeys:
    """Return queries and keys as `encoding.transform` changes them, each (batch, heads, len,
    width). Raises: TypeError if a subclass returns anything else."""
    result: Any = encoding.transform(q, k)
    returned_tensors = result if isinstance(result, tuple) else (result,)
    # The width may change, nothing else may.
    returned_leading_shapes = [
        x.shape[:3] if isinstance(x, Tensor) else None for x in returned_tensors
    ]
    expected_leading_shapes = [t.x.shape[:3] for t in (q, k) if t.x is not None]
    if returned_leading_shapes != expected_leading_shapes:
        shapes_or_types = (
            tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in returned_tensors
        )
        returned_in_words = ", ".join(map(str, shapes_or_types))
        raise TypeError(
            f"{type(encoding).__name__}.transform must return (q, k), each (batch, heads, len, "
            f"width) like those it got, got {returned_in_words}."
        )
    return result
