"""Combine several encodings in one attention, and give an encoding a mask."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

from torch import nn

from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import (
    Cached,
    CachedPositions,
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
from posenc.encodings.base.term import Chain, Term, Tokens
from posenc.masks import Mask
from posenc.positions.tokens import (
    KeyPositionTensor,
    Positions,
    PositionTensor,
    QueryPositionTensor,
)

_METHODS_OF_ONE_MEMBER = {"scale": "scale", "state": "state per token", "passes": "passes"}
"""Methods that at most one of the composed encodings may define, with words for them in
messages."""


class Compose(PositionEncoding):
    """Combine several encodings in one attention, each at its own places, in the order given.

    Embeddings, rotations and terms are chained. Only one of the encodings may define the scale, the
    state per token, the passes, or a change of the values. Encodings that differ per layer are
    composed within each layer: PerLayer([Compose(a, b), ...]). A position map computes passes at
    mapped positions; the other encodings still see the true ones.

    Args:
        encodings: two or more; a Compose among them is flattened.

    A claim holds if it holds for every encoding; causal_only if any encoding that acts claims it.
    Parameters of an encoding with scope "model" stay shared by all layers, also next to one with
    scope "layer".
    Raises: ValueError if two encodings define the scale, the state, the passes or the values, or if
    they need different numbers of position axes.
    Source: the composed encodings.

    >>> from posenc import ALiBi, Compose, RoPE
    >>> Compose(RoPE(64, interleaved=False), ALiBi(num_heads=8)).claims.places
    (2, 3)
    """

    # Of the class, whose methods act at all places, as __init_subclass__ demands. An object claims
    # what its members do.
    claims = Claims(places=(1, 2, 3, 4), source="the encodings it holds")

    def __init__(self, *encodings: PositionEncoding) -> None:
        super().__init__()
        flat_members: list[PositionEncoding] = []
        for encoding in encodings:
            encoding = require_encoding("Compose", encoding)
            flat_members += encoding.members if isinstance(encoding, Compose) else [encoding]
        if len(flat_members) < 2:
            raise ValueError(f"Compose: needs two or more encodings, got {len(flat_members)}.")
        # As built; `members` are these, or prepared copies of them.
        self.encodings = nn.ModuleList(flat_members)
        self._prepared_members: tuple[PositionEncoding, ...] | None = None
        self._refuse_encodings_by_layer()
        self._indices_of_defining_members = {
            method: _index_of_defining_member(method, what, self.members)
            for method, what in _METHODS_OF_ONE_MEMBER.items()
        }
        self._refuse_two_at_the_values()
        self._refuse_a_changed_scale()
        self.claims = self._combined_claims()

    def _refuse_encodings_by_layer(self) -> None:
        """Raise ValueError if a member is a PerLayer, or defines `for_layer` in another way."""
        for e in self.members:
            if _overrides(e, "for_layer"):
                raise ValueError(
                    f"Compose: {type(e).__name__} differs per layer; compose within each layer: "
                    "PerLayer([Compose(a, b), ...])."
                )

    def _refuse_two_at_the_values(self) -> None:
        """Raise ValueError if more than one member acts at the values."""
        members_at_values = [e for e in self.members if 4 in e.claims.places]
        if len(members_at_values) > 1:
            raise ValueError(_two_definers_message(members_at_values, "change of the values"))

    def _refuse_a_changed_scale(self) -> None:
        """Raise ValueError if one member changes the scale with which another multiplies."""
        scale_definer = self._defining_member("scale")
        members_reading_scale = [
            e for e in self.members if e.claims.reads_scale and e is not scale_definer
        ]
        if scale_definer is not None and members_reading_scale:
            raise ValueError(
                f"Compose: {_join_class_names(members_reading_scale)} multiplies terms of its own "
                f"with the usual scale, which {type(scale_definer).__name__} changes."
            )

    def _combined_claims(self) -> Claims:
        """Return the claims that hold for all members together, see `Claims.combine`."""
        differs_by_layer = any(e.claims.scope == "layer" for e in self.members)
        return replace(
            Claims.combine([member.claims for member in self.members]),
            num_axes=self._num_axes(),
            scope="layer" if differs_by_layer else "model",
            shared_parameters=tuple(self._shared_parameters()),
        )

    def _num_axes(self) -> int:
        """Return the number of components of a position. Raise ValueError unless all members that
        read positions take the same number of components and the same kind of coordinates."""
        members = self.members
        reading_members = [e for e in members if e.claims.places] or list(members)
        position_map = self._defining_member("passes")
        if position_map is not None:
            reading_members.append(position_map)
        axis_counts = {e.claims.num_axes for e in reading_members}
        if len(axis_counts) > 1:
            raise ValueError(
                f"Compose: positions have one number of components, but "
                f"{_join_class_names(members)} take "
                f"{', '.join(str(e.claims.num_axes) for e in members)}."
            )
        coordinates = {e.claims.coordinates for e in reading_members}
        if len(coordinates) > 1:
            raise ValueError(
                f"Compose: {_join_class_names(members)} get the same positions, but one takes rows "
                "and columns and another coordinates from -1 to 1 (normalized). Use one kind."
            )
        return axis_counts.pop()

    def _shared_parameters(self) -> Iterator[str]:
        """Yield the names of parameters that all layers share: those that a member of scope "layer"
        claims as shared, and all of a member of scope "model"."""
        for i, e in enumerate(self.members):
            differs_by_layer = e.claims.scope == "layer"
            shared_names = (
                e.claims.shared_parameters if differs_by_layer else dict(e.named_parameters())
            )
            for name in shared_names:
                yield f"encodings.{i}.{name}"  # the parameters are registered under `encodings`

    def reset_parameters(self) -> None:
        for e in self.members:
            e.reset_parameters()

    def for_layer(self, index: int) -> PositionEncoding:
        """Return the encoding without members that act only at the embeddings, because the model
        applies these. The result is the same for every `index`: members do not differ per layer."""
        if 1 not in self.claims.places:
            return self
        members_in_attention = [e for e in self.members if e.claims.places != (1,)]
        if not members_in_attention:
            encoding_in_attention = without_position(self.claims.num_axes)
        elif len(members_in_attention) == 1:
            encoding_in_attention = members_in_attention[0].shallow_copy()
        else:
            encoding_in_attention = Compose(*members_in_attention)
        encoding_in_attention.embedding_encoding_name = _join_class_names(
            [e for e in self.members if 1 in e.claims.places]
        )
        return encoding_in_attention

    def prepare(self, positions: Positions, length: int | None = None) -> Self:
        prepared = self.shallow_copy()
        prepared._prepared_members = tuple(e.prepare(positions, length) for e in self.members)
        return prepared

    def scale(self, head_dim: int) -> float:
        defining_member = self._defining_member("scale")
        return (
            super().scale(head_dim) if defining_member is None else defining_member.scale(head_dim)
        )

    def with_scale(self, scale: float) -> Self:
        scaled = super().with_scale(scale)
        scaled._prepared_members = tuple(e.with_scale(scale) for e in self.members)
        return scaled

    def passes(
        self, q_positions: QueryPositionTensor, kv_positions: KeyPositionTensor
    ) -> tuple[Pass, ...]:
        defining_member = self._defining_member("passes")
        if defining_member is None:
            return super().passes(q_positions, kv_positions)
        return defining_member.passes(q_positions, kv_positions)

    def embed(self, x: Embedded, positions: EmbeddedPositions) -> Embedded:
        for e in self.members:
            x = e.embed(x, positions)
        return x

    def state(self, x: Hidden, positions: PositionTensor, past: Past | None = None) -> State | None:
        defining_member = self._defining_member("state")
        return None if defining_member is None else defining_member.state(x, positions, past)

    def transform(self, q: Tokens, k: Tokens) -> QueriesKeys:
        for e in self.members:
            new_q, new_k = e.transform(self._tokens_for(e, q), self._tokens_for(e, k))
            q = q.with_vectors(new_q)
            k = k.with_vectors(new_k)
        assert q.x is not None and k.x is not None
        return q.x, k.x

    def move_keys(self, k: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        moving_members = []
        moved_keys = k
        for e in self.members:
            moved_by_member = e.move_keys(k, before, after)
            if moved_by_member is not k:
                moving_members.append(e)
                moved_keys = moved_by_member
        if len(moving_members) > 1:  # their changes need not commute
            raise ValueError(
                f"KVCache.shift: {_join_class_names(moving_members)} both change keys by their "
                "positions, so cached keys cannot be moved exactly. Compute them again."
            )
        return moved_keys

    def move_values(self, v: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        for e in self.members:  # one at most changes them
            v = e.move_values(v, before, after)
        return v

    def transform_values(self, v: Tokens) -> Values:
        for e in self.members:
            v = v.with_vectors(e.transform_values(v))
        return super().transform_values(v)

    def transform_output(self, out: Tokens) -> Output:
        for e in self.members:
            out = out.with_vectors(e.transform_output(out))
        return super().transform_output(out)

    def term(self, q: Tokens, k: Tokens) -> Term | None:
        terms = []
        for e in self.members:
            keys = self._tokens_for(e, k if e.claims.needs_raw_k else k.with_vectors(None))
            term = e.term(self._tokens_for(e, q), keys)
            if term is not None:
                terms.append(term)
        if not terms:
            return None
        return terms[0] if len(terms) == 1 else Chain(q, k, terms)

    def _tokens_for(self, member: PositionEncoding, tokens: Tokens) -> Tokens:
        """Return the tokens as `member` gets them: without a state that another member computed,
        and at their true positions, unless `member` is the position map that changes them."""
        if tokens.state is not None and member is not self._defining_member("state"):
            tokens = tokens.with_state(None)
        return tokens if member is self._defining_member("passes") else tokens.unmapped()

    @property
    def members(self) -> tuple[PositionEncoding, ...]:
        """Return the composed encodings; their prepared copies if this object was prepared."""
        return tuple(self.encodings) if self._prepared_members is None else self._prepared_members  # type: ignore[return-value]

    def _defining_member(self, method: str) -> PositionEncoding | None:
        """Return the member that defines `method`, one of _METHODS_OF_ONE_MEMBER; None if no member
        does. A member defines `scale` if its scale differs from 1/sqrt(head_dim)."""
        index = self._indices_of_defining_members[method]
        return None if index is None else self.members[index]


def _overrides(encoding: PositionEncoding, method: str) -> bool:
    """Return True if the class of the encoding overrides `method` of PositionEncoding."""
    return getattr(type(encoding), method) is not getattr(PositionEncoding, method)


def _index_of_defining_member(
    method: str, decision: str, members: Sequence[PositionEncoding]
) -> int | None:
    """Return the index of the only member that defines `method`, one of _METHODS_OF_ONE_MEMBER;
    None if no member does. Raise ValueError if several do.

    decision: words for what the method decides, for the message.
    """
    if method == "scale":  # most classes that override it return the usual scale by default
        # 64: any size of a head tells whether the scale is 1/sqrt of it.
        indices = [i for i, e in enumerate(members) if e.scale(64) != 64**-0.5]
    else:
        indices = [i for i, e in enumerate(members) if _overrides(e, method)]
    if len(indices) > 1:
        raise ValueError(_two_definers_message([members[i] for i in indices], decision))
    return indices[0] if indices else None


def _two_definers_message(members: Sequence[PositionEncoding], decision: str) -> str:
    """Return the error message for members that each make a `decision`, such as "scale", which only
    one of them may make."""
    class_names = _join_class_names(members)
    return f"Compose: {class_names} each decide the {decision}, and there is only one."


def _join_class_names(encodings: Sequence[PositionEncoding]) -> str:
    """Return the names of the classes of encodings, for a message: "RoPE and ALiBi"."""
    return " and ".join(type(e).__name__ for e in encodings)


class Within(PositionEncoding):
    """Restrict attention to the pairs that `mask` shows, next to another encoding in Compose.

    Compose(RoPE(...), Within(masks.sliding_window(4096))) rotates, and hides keys 4096 or more
    tokens away. The model's own mask still applies.

    Args:
        mask: an unbound mask; it is bound to the positions of each call.

    shift_invariant is claimed only if the mask depends on nothing but the distance.
    Raises: ValueError for a mask that is bound already.

    >>> from posenc import Within, masks
    >>> Within(masks.sliding_window(4)).claims.shift_invariant
    True
    """

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        if mask.bound:
            raise ValueError("Within: mask must not be bound to positions; each call binds it.")
        self.mask = mask
        # An exact mask is described by `causal` and `window` alone. Both compare distances, which a
        # shift of all positions does not change. Of any other predicate nothing is known.
        self.claims = replace(self.claims, shift_invariant=mask.exact)

    def passes(
        self, q_positions: QueryPositionTensor, kv_positions: KeyPositionTensor
    ) -> tuple[Pass, ...]:
        mask = self.mask.bind(q_positions, kv_positions)
        return (Pass(q_positions, kv_positions, mask),)
