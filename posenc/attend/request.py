"""The arguments of one attention, checked, and the ordinary attentions that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from posenc.attend.cache import KVCache, check_cache
from posenc.attend.problem import Known, Problem
from posenc.encodings.base.base import Pass, PositionEncoding
from posenc.encodings.base.boundary import check_encoding, check_vectors
from posenc.encodings.base.placed import check_positions
from posenc.encodings.numbers.heads import for_every_head
from posenc.encodings.numbers.precision import without_autocast
from posenc.encodings.terms.tokens import Tokens
from posenc.masks import Mask, check_mask
from posenc.positions import counted, goes_back

_OWNER = "attention"
_PACKED = (
    f"{_OWNER}: keys go back to positions that their row has had, as packed documents do, and a "
    "causal mask alone shows one document to another. Use mask & posenc.masks.document(ids), with "
    "ids = posenc.positions.documents_from_positions(positions) where none are at hand; or number "
    "the tokens on."
)


@dataclass(frozen=True)
class Request:
    """The arguments of `attention`, checked. `new` are the tokens of k and v before the cache's
    are put in front of them."""

    queries: Tokens
    new: Tokens
    v: Tensor
    encoding: PositionEncoding
    mask: Mask | None
    cache: KVCache | None
    dropout_p: float
    return_lse: bool

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        encoding: Any,
        *,
        q_positions: Tensor,
        kv_positions: Tensor,
        q_state: Tensor | None,
        kv_state: Tensor | None,
        mask: Any,
        cache: Any,
        dropout_p: float,
        return_lse: bool,
    ) -> Request:
        """Raises: TypeError for things of the wrong kind, ValueError for sizes that do not fit."""
        encoding = check_encoding(_OWNER, encoding)
        check_vectors(_OWNER, q=q, k=k, v=v)
        _check_sizes(q, k, v)
        axes = encoding.claims.num_axes
        queries = Tokens(
            q, check_positions(_OWNER, "q_positions", q_positions, q, axes), q_state, axes
        )
        if kv_positions is q_positions and k.shape[2] == q.shape[2]:
            keys = queries.given(k).with_state(kv_state)
        else:
            at_k = check_positions(_OWNER, "kv_positions", kv_positions, k, axes)
            keys = Tokens(k, at_k, kv_state, axes)
        _check_state("q_state", q_state, q)
        _check_state("kv_state", kv_state, k)
        if not 0 <= dropout_p < 1:
            raise ValueError(
                f"{_OWNER}: dropout_p must be at least 0 and below 1, got {dropout_p}."
            )
        check_cache(_OWNER, cache)
        past = 0 if cache is None else cache.length
        check_mask(_OWNER, mask, q.shape[0], q.shape[2], past + k.shape[2])
        return cls(queries, keys, v, encoding, mask, cache, dropout_p, return_lse)

    def problems(self) -> list[Problem]:
        """Return one ordinary attention for each pass of the encoding. Appends to the cache, if
        there is one."""
        encoding, queries, keys, v = self.encoding, self.queries, self.new, self.v
        assert queries.x is not None and keys.x is not None
        scale = encoding.scale(queries.x.shape[-1])
        keep_raw = encoding.claims.needs_raw_k
        turned: tuple[Tensor, Tensor] | None = None
        if self.cache is not None:
            if not keep_raw:
                turned = encoding.transform(queries, keys)
            keys, v = self._with_past(keys if turned is None else keys.given(turned[1]))
        mask = self._bound(keys)
        passes = encoding.passes(queries.positions, keys.positions)
        problems = []
        for part in passes:
            seen_q, seen_k = _in_pass(queries, keys, part)
            if turned is None:
                q, k = encoding.transform(seen_q, seen_k)
            else:
                assert keys.x is not None
                q, k = turned[0], keys.x
            if part.q_factor is not None:
                q = (q * part.q_factor[..., None, :, None]).to(q.dtype)
            raw_k = None
            if keep_raw and {3, 4} & set(encoding.claims.places):
                assert seen_k.x is not None
                raw_k = for_every_head(seen_k.x, queries.x.shape[1])
            seen_k = seen_k.given(raw_k)
            with without_autocast(q.device):
                term = encoding.term(seen_q, seen_k)
            visible = mask
            if part.mask is not None:
                own = part.mask
                own = own.bind(queries.where, keys.where) if mask is None else own & mask
                visible = own
            problems.append(
                Problem(
                    q=q,
                    k=k,
                    v=v,
                    queries=seen_q,
                    keys=seen_k,
                    term=term,
                    encoding=encoding,
                    mask=visible,
                    scale=scale,
                    dropout_p=self.dropout_p,
                    need_lse=self.return_lse or len(passes) > 1,
                    known=Known.of(seen_q, seen_k, (q, k, v), visible, encoding),
                )
            )
        return problems

    def _with_past(self, new: Tokens) -> tuple[Tokens, Tensor]:
        """Return all keys and values, those of the cache first."""
        assert self.cache is not None and new.x is not None
        self.cache.belong_to(self.encoding)
        only_last = self.encoding.claims.state_kept == "last"
        k, v, positions, state = self.cache.append(
            new.x,
            self.v,
            new.where,
            new.state,
            position_axis=-1 if new.num_axes == 1 else -2,
            keep_last_state=only_last,
        )
        return Tokens(k, positions, None if only_last else state, new.num_axes), v

    def _bound(self, keys: Tokens) -> Mask | None:
        """Raises: ValueError for packed documents that the mask does not keep apart."""
        mask = self._at_positions(keys)
        if mask is not None and mask.causal and not mask.separates:
            assert mask.kv_positions is not None
            valid = [read.tensor for read in mask.reads if read.name == "padding"]
            if goes_back(mask.kv_positions, *valid):
                raise ValueError(_PACKED)
        return mask

    def _at_positions(self, keys: Tokens) -> Mask | None:
        if self.mask is None or self.mask.bound:
            return self.mask
        if self.encoding.claims.num_axes == 1:
            return self.mask.bind(self.queries.where, keys.where)
        # Where a position has several components, order is the order in memory, and the last query
        # stands at the last key: of more queries than keys, the first stand before them.
        count, last = len(self.queries), len(keys)
        where = counted(last - count, count, keys.device), counted(0, last, keys.device)
        return self.mask.bind(*where)


def _in_pass(queries: Tokens, keys: Tokens, part: Pass) -> tuple[Tokens, Tokens]:
    """Return the tokens at the positions that the pass asks for."""
    if part.q_positions is queries.positions and part.kv_positions is keys.positions:
        return queries, keys
    return queries.at(part.q_positions), keys.at(part.kv_positions)


def _check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: "
            "k and v share heads and length, q and k share head_dim, all share the batch."
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: {k.shape[1]} key/value heads do not divide {q.shape[1]} query heads."
        )


def _check_state(name: str, state: Any, x: Tensor) -> None:
    if state is None:
        return
    if not isinstance(state, Tensor) or state.ndim < 3:
        got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(
            f"attention: {name} must be what encoding.state(x, positions) gives, "
            f"(batch, heads, len, ...), got {got}."
        )
    if state.shape[0] != x.shape[0] or state.shape[2] != x.shape[2]:
        raise ValueError(
            f"attention: {name} must be of {x.shape[0]} rows and {x.shape[2]} tokens, "
            f"got {tuple(state.shape)}."
        )
