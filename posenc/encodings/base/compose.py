"""Combine several encodings in one attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from torch import nn

from posenc.encodings.base.base import (
    Cached,
    CachedPlaces,
    Embedded,
    EmbeddedPositions,
    Hidden,
    Output,
    Pass,
    Past,
    PositionEncoding,
    QueriesKeys,
    State,
    Values,
    require_encoding,
    without_position,
)
from posenc.encodings.base.claims import Claims
from posenc.encodings.terms.chain import Chain
from posenc.encodings.terms.term import Term
from posenc.encodings.terms.tokens import Tokens
from posenc.positions import KeyPlaces, Places, Positions, QueryPlaces

_SINGLE = {"scale": "scale", "state": "state per token", "passes": "passes"}
"""Methods that only one of the composed encodings may define, with their names in messages."""


class Compose(PositionEncoding):
    """Combine several encodings in one attention, each at its own places, in the order given.

    Embeddings, rotations and terms are chained. Only one of the encodings may define the scale, the
    state per token, the passes, or a change of the values. Encodings that differ per layer are
    composed within each layer: PerLayer([Compose(a, b), ...]). A position map computes passes at
    mapped positions; the other encodings still see the true ones.

    Args:
        encodings: two or more; a Compose among them is flattened.

    A claim holds if it holds for every encoding; causal_only if any that acts claims it. Parameters
    of scope "model" stay shared by all layers when another encoding is of scope "layer".
    Raises: ValueError if two define one of these, or need different numbers of position axes.
    Source: the composed encodings.

    >>> from posenc import ALiBi, Compose, RoPE
    >>> Compose(RoPE(64, interleaved=False), ALiBi(num_heads=8)).claims.places
    (2, 3)
    """

    claims = Claims(places=(1, 2, 3, 4), source="the encodings it holds")

    def __init__(self, *encodings: PositionEncoding) -> None:
        super().__init__()
        each = [require_encoding("Compose", e) for e in encodings]
        flat = [part for e in each for part in (e.encodings if isinstance(e, Compose) else [e])]
        if len(flat) < 2:
            raise ValueError(f"Compose: needs two or more encodings, got {len(flat)}.")
        self.encodings = nn.ModuleList(flat)
        self._ready: tuple[PositionEncoding, ...] | None = None
        members = self.members
        for e in members:
            if _overrides(e, "for_layer"):
                raise ValueError(
                    f"Compose: {type(e).__name__} differs per layer; compose within each layer: "
                    "PerLayer([Compose(a, b), ...])."
                )
        self._owners = {method: _owner(method, what, members) for method, what in _SINGLE.items()}
        at_values = [e for e in members if 4 in e.claims.places]
        if len(at_values) > 1:
            raise ValueError(_contradiction(at_values, "change of the values"))
        scaling = self._owner("scale")
        readers = [e for e in members if e.claims.reads_scale and e is not scaling]
        if scaling is not None and readers:
            raise ValueError(
                f"Compose: {_names(readers)} multiplies terms of its own with the usual scale, "
                f"which {type(scaling).__name__} changes."
            )
        self.claims = self._claims()

    def _claims(self) -> Claims:
        members = self.members
        acting = [e for e in members if e.claims.places] or list(members)
        passing = self._owner("passes")
        seeing = acting if passing is None else [*acting, passing]
        axes = {e.claims.num_axes for e in seeing}
        if len(axes) > 1:
            raise ValueError(
                f"Compose: positions have one number of components, but {_names(members)} take "
                f"{', '.join(str(e.claims.num_axes) for e in members)}."
            )
        coordinates = {e.claims.coordinates for e in seeing}
        if len(coordinates) > 1:
            raise ValueError(
                f"Compose: {_names(members)} get the same positions, but one takes rows and "
                "columns and another coordinates from -1 to 1 (normalized). Use one kind."
            )
        own = any(e.claims.scope == "layer" for e in members)
        shared = tuple(
            f"encodings.{i}.{name}"
            for i, e in enumerate(members)
            for name in (
                e.claims.shared_parameters
                if e.claims.scope == "layer"
                else dict(e.named_parameters())
            )
        )
        return replace(
            Claims.all([member.claims for member in members]),
            num_axes=axes.pop(),
            scope="layer" if own else "model",
            shared_parameters=shared,
        )

    def reset_parameters(self) -> None:
        for e in self.members:
            e.reset_parameters()

    def for_layer(self, index: int) -> PositionEncoding:
        """Return the encoding without members that act only at the embeddings."""
        if 1 not in self.claims.places:
            return self
        acting = [e for e in self.members if e.claims.places != (1,)]
        if not acting:
            left = without_position(self.claims.num_axes)
        else:
            left = Compose(*acting) if len(acting) > 1 else acting[0].shallow_copy()
        left.embedded_by = _names([e for e in self.members if 1 in e.claims.places])
        return left

    def prepare(self, positions: Positions, length: int | None = None) -> Self:
        prepared = self.shallow_copy()
        prepared._ready = tuple(e.prepare(positions, length) for e in self.members)
        return prepared

    def scale(self, head_dim: int) -> float:
        owner = self._owner("scale")
        return super().scale(head_dim) if owner is None else owner.scale(head_dim)

    def with_scale(self, scale: float) -> Self:
        scaled = super().with_scale(scale)
        scaled._ready = tuple(e.with_scale(scale) for e in self.members)
        return scaled

    def passes(self, q_positions: QueryPlaces, kv_positions: KeyPlaces) -> tuple[Pass, ...]:
        owner = self._owner("passes")
        if owner is None:
            return super().passes(q_positions, kv_positions)
        return owner.passes(q_positions, kv_positions)

    def embed(self, x: Embedded, positions: EmbeddedPositions) -> Embedded:
        for e in self.members:
            x = e.embed(x, positions)
        return x

    def state(self, x: Hidden, positions: Places, past: Past | None = None) -> State | None:
        owner = self._owner("state")
        return None if owner is None else owner.state(x, positions, past)

    def transform(self, q: Tokens, k: Tokens) -> QueriesKeys:
        for e in self.members:
            new_q, new_k = e.transform(self._seen_by(e, q), self._seen_by(e, k))
            q, k = q.given(new_q), k.given(new_k)
        assert q.x is not None and k.x is not None
        return q.x, k.x

    def move_keys(self, k: Cached, before: CachedPlaces, after: CachedPlaces) -> Cached:
        changed = [
            (e, moved) for e in self.members if (moved := e.move_keys(k, before, after)) is not k
        ]
        if len(changed) > 1:  # their changes need not commute
            raise ValueError(
                f"KVCache.shift: {_names([e for e, _ in changed])} both change keys by their "
                "positions, so cached keys cannot be moved exactly. Compute them again."
            )
        return changed[0][1] if changed else k

    def move_values(self, v: Cached, before: CachedPlaces, after: CachedPlaces) -> Cached:
        for e in self.members:  # one at most changes them
            v = e.move_values(v, before, after)
        return v

    def transform_values(self, v: Tokens) -> Values:
        for e in self.members:
            v = v.given(e.transform_values(v))
        return super().transform_values(v)

    def transform_output(self, out: Tokens) -> Output:
        for e in self.members:
            out = out.given(e.transform_output(out))
        return super().transform_output(out)

    def term(self, q: Tokens, k: Tokens) -> Term | None:
        terms = []
        for e in self.members:
            keys = self._seen_by(e, k if e.claims.needs_raw_k else k.given(None))
            term = e.term(self._seen_by(e, q), keys)
            if term is not None:
                terms.append(term)
        return Chain(q, k, terms) if len(terms) > 1 else next(iter(terms), None)

    def _seen_by(self, member: PositionEncoding, tokens: Tokens) -> Tokens:
        """Return the tokens for one member: without the state of another member, and at their true
        positions unless the member defines the passes."""
        if tokens.state is not None and member is not self._owner("state"):
            tokens = tokens.with_state(None)
        return tokens if member is self._owner("passes") else tokens.unmapped()

    @property
    def members(self) -> tuple[PositionEncoding, ...]:
        """Return the encodings; prepared ones if this one was prepared."""
        return tuple(self.encodings) if self._ready is None else self._ready  # type: ignore[return-value]

    def _owner(self, method: str) -> PositionEncoding | None:
        index = self._owners[method]
        return None if index is None else self.members[index]


def _overrides(encoding: PositionEncoding, method: str) -> bool:
    return getattr(type(encoding), method) is not getattr(PositionEncoding, method)


def _owner(method: str, what: str, members: Sequence[PositionEncoding]) -> int | None:
    """Return the index of the only member that defines `method`; None if no member does."""
    if method == "scale":
        claimants = [i for i, e in enumerate(members) if e.scale(64) != 64**-0.5]
    else:
        claimants = [i for i, e in enumerate(members) if _overrides(e, method)]
    if len(claimants) > 1:
        raise ValueError(_contradiction([members[i] for i in claimants], what))
    return next(iter(claimants), None)


def _contradiction(members: Sequence[PositionEncoding], what: str) -> str:
    return f"Compose: {_names(members)} each decide the {what}, and there is only one."


def _names(encodings: Sequence[PositionEncoding]) -> str:
    return " and ".join(type(e).__name__ for e in encodings)
