"""Check the arguments of attention and split it into softmax attentions, one for each pass."""

from typing import Any

import torch
from torch import Tensor

from posenc.arguments import check_flag, check_share
from posenc.attend.cache import KVCache
from posenc.attend.problem import Problem
from posenc.encodings import Term, Tokens
from posenc.encodings.base import boundary
from posenc.encodings.base.base import PositionEncoding, QueriesKeys
from posenc.encodings.base.placed import check_positions
from posenc.encodings.numbers.heads import for_every_head
from posenc.encodings.numbers.precision import without_autocast
from posenc.masks import Mask, bind_in_memory, check_documents, check_mask
from posenc.positions import held_already, run_shift

_OWNER = "attention"


def problems_of(
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
    encoding = boundary.check_encoding(_OWNER, encoding)
    boundary.check_vectors(_OWNER, q=q, k=k, v=v)
    boundary.check_sizes(q, k, v)
    boundary.check_sinks(sinks, q)
    boundary.check_scale(_OWNER, scale)
    if scale is not None:
        encoding = encoding.with_scale(float(scale))
    axes = encoding.claims.num_axes
    queries = Tokens(q, check_positions(_OWNER, "q_positions", q_positions, q, axes), q_state, axes)
    if kv_positions is q_positions and k.shape[2] == q.shape[2]:
        keys = queries.given(k).with_state(kv_state)
    else:
        at_k = check_positions(_OWNER, "kv_positions", kv_positions, k, axes)
        keys = Tokens(k, at_k, kv_state, axes)
    boundary.check_state("q_state", q_state, q)
    boundary.check_state("kv_state", kv_state, k)
    check_share(_OWNER, "dropout_p", dropout_p)
    check_flag(_OWNER, "return_lse", return_lse)
    check_mask(_OWNER, mask, len(q), q.shape[2], k.shape[2] + (cache.length if cache else 0))
    keep_raw, rotated = encoding.claims.needs_raw_k, None
    v = encoding.transform_values(keys.given(v))
    if cache is not None:
        if not keep_raw:
            rotated = _transformed(encoding, queries, keys)
            keys = keys.given(rotated[1])
        _check_new(cache, keys, mask)
        keys, v = _with_past(cache, encoding, keys, v)
    mask = _bound(mask, queries, keys)
    passes = _passes(encoding, queries, keys)
    grad_enabled, problems = torch.is_grad_enabled(), []
    for seen_q, seen_k, own in passes:
        if rotated is None:
            new_q, new_k = _transformed(encoding, seen_q, seen_k)
        else:
            assert keys.x is not None
            new_q, new_k = rotated[0], keys.x
        raw_k = None
        if keep_raw and {3, 4} & {*encoding.claims.places}:
            assert seen_k.x is not None
            raw_k = for_every_head(seen_k.x, q.shape[1])
        seen_k = seen_k.given(raw_k)
        with without_autocast(q.device):
            term = encoding.term(seen_q, seen_k)
        if term is not None and not isinstance(term, Term):
            wrong = f"must return a Term, such as Dense, or None, got {type(term).__name__}"
            raise TypeError(f"{type(encoding).__name__}.term {wrong}.")
        visible = mask
        if own is not None:
            if own.bound or mask is None:  # to tensors, which may not be comparable with a range
                own = _bind(own, queries, keys)
            if mask is None:
                check_documents(own)
            visible = own if mask is None else own & mask
        read = (new_q, new_k, v, seen_q.x, seen_q.state, seen_k.x, seen_k.state)
        read += tuple(encoding.parameters()) if grad_enabled else ()
        shift = mask_shift = run_shift(seen_q.where, seen_k.where)
        if visible is not None:
            bound = visible.q_positions, visible.kv_positions
            if bound[0] is not seen_q.where or bound[1] is not seen_k.where:
                mask_shift = run_shift(*bound)  # type: ignore[arg-type]
        one = Problem(
            q=new_q,
            k=new_k,
            v=v,
            queries=seen_q,
            keys=seen_k,
            term=term,
            encoding=encoding,
            mask=visible,
            scale=encoding.scale(q.shape[-1]),
            dropout_p=dropout_p,
            need_lse=return_lse or sinks is not None or len(passes) > 1,
            needs_grad=grad_enabled and any(t is not None and t.requires_grad for t in read),
            shift=shift,
            mask_shift=mask_shift,
        )
        problems.append(one)
    return problems


def _check_new(cache: KVCache, new: Tokens, mask: Mask | None) -> None:
    """Raise ValueError if a causal mask would show a new token earlier ones at its own position, as
    where two layers share a cache or positions do not advance."""
    if mask is None or not mask.causal or mask.bound or mask.separates or new.num_axes > 1:
        return
    padded = any(read.name == "padding" for read in mask.reads)  # padding may have any position
    if cache.where is None or padded:
        return
    position = held_already(cache.where, new.where)
    if position is not None:
        raise ValueError(
            f"{_OWNER}: the cache already holds position {position:g}. One KVCache per layer; the "
            "next position is cache.length. For packed rows: mask & masks.document(ids)."
        )


def _with_past(
    cache: KVCache, encoding: PositionEncoding, new: Tokens, v: Tensor
) -> tuple[Tokens, Tensor]:
    """Append the new tokens to the cache, and return all keys and values, the cached ones first."""
    assert new.x is not None
    cache.belong_to(encoding)
    only_last, axis = encoding.claims.state_kept == "last", -1 if new.num_axes == 1 else -2
    k, v, positions, state = cache.append(
        new.x, v, new.where, new.state, position_axis=axis, keep_last_state=only_last
    )
    return Tokens(k, positions, None if only_last else state, new.num_axes), v


def _bound(mask: Mask | None, queries: Tokens, keys: Tokens) -> Mask | None:
    """Return the mask bound to the positions of the tokens, unless it is bound already.

    Raises: ValueError if positions show packed documents and the mask does not separate them.
    """
    if mask is None:
        return None
    if not mask.bound:
        mask = _bind(mask, queries, keys)
    check_documents(mask)
    return mask


def _bind(mask: Mask, queries: Tokens, keys: Tokens) -> Mask:
    """Return the mask bound to the positions of the tokens, or to their order in memory if
    positions have several components."""
    if queries.num_axes > 1:
        return bind_in_memory(mask, queries.positions, keys.positions)
    return mask.bind(queries.where, keys.where)


def _passes(
    encoding: PositionEncoding, queries: Tokens, keys: Tokens
) -> list[tuple[Tokens, Tokens, Mask | None]]:
    """Return queries, keys and own mask of each pass."""
    if type(encoding).passes is PositionEncoding.passes:  # needs no tensor of positions
        return [(queries, keys, None)]
    passes = encoding.passes(queries.positions, keys.positions)
    return [(queries.at(p.q_positions), keys.at(p.kv_positions), p.mask) for p in passes]


def _transformed(encoding: PositionEncoding, q: Tokens, k: Tokens) -> QueriesKeys:
    """Apply place 2. Raises: TypeError if a subclass returns anything but q and k of that shape."""
    found: Any = encoding.transform(q, k)
    pair = found if isinstance(found, tuple) else (found,)
    tokens = [x.shape[:3] if isinstance(x, Tensor) else None for x in pair]
    if tokens != [t.x.shape[:3] for t in (q, k) if t.x is not None]:
        wanted = "must return (q, k), each (batch, heads, len, width) like those it got"
        shapes = (tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in pair)
        got = ", ".join(map(str, shapes))
        raise TypeError(f"{type(encoding).__name__}.transform {wanted}, got {got}.")
    return found
