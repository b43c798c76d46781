"""Several encodings at once, and a mask as an encoding."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from posenc.encoding.base import Pass, PositionEncoding, Rows
from posenc.masks import Mask
from posenc.numbers.heads import grouped_matmul
from posenc.terms.term import ScoreMod


class Compose(PositionEncoding):
    """Several encodings in one attention, each at its own places, in the order given.

    Embeddings, rotations and scores are chained. Not composable, because there is one of each and
    two owners would contradict each other: the scale, the state per token, the passes, and place 4.
    Encodings that differ per layer are composed within each layer: PerLayer([Compose(a, b), ...]).

    Args:
        encodings: two or more; a Compose among them is taken apart.

    Claims hold where they hold for every one; causal_only where any that acts claims it. Parameters
    of scope "model" stay one for all layers when another encoding is of scope "layer".
    Raises: ValueError where two own the same thing, or positions have other numbers of components.
    Source: the encodings it holds.
    """

    def __init__(self, *encodings: PositionEncoding) -> None:
        super().__init__()
        flat = [
            part for e in encodings for part in (e.encodings if isinstance(e, Compose) else [e])
        ]
        if len(flat) < 2:
            raise ValueError(f"Compose: needs two or more encodings, got {len(flat)}.")
        self.encodings = nn.ModuleList(flat)
        self._ready: tuple[PositionEncoding, ...] | None = None
        members = self._members()
        acting = [e for e in members if e.places] or list(members)
        for e in members:
            if _overrides(e, "for_layer"):
                raise ValueError(
                    f"Compose: {type(e).__name__} differs per layer; compose within each layer: "
                    "PerLayer([Compose(a, b), ...])."
                )
        self._owners = {
            "scale": _owner("scale", members, [e for e in members if e.scale(64) != 64**-0.5]),
            "token_state": _owner("state per token", members, _overriding(members, "token_state")),
            "passes": _owner("passes", members, _overriding(members, "passes")),
            "combine_values": _owner("place 4", members, _overriding(members, "combine_values")),
        }
        scaling = self._owner("scale")
        readers = [e for e in members if e.reads_scale and e is not scaling]
        if scaling is not None and readers:
            raise ValueError(
                f"Compose: {_names(readers)} multiplies terms of its own with the usual scale, "
                f"which {type(scaling).__name__} changes."
            )
        axes = {e.num_axes for e in {*acting, *_overriding(members, "passes")}}
        if len(axes) > 1:
            raise ValueError(
                f"Compose: positions have one number of components, but {_names(members)} take "
                f"{', '.join(str(e.num_axes) for e in members)}."
            )
        self.places = tuple(sorted({place for e in members for place in e.places}))  # type: ignore[misc]
        self.source = "; ".join(dict.fromkeys(e.source for e in acting))  # type: ignore[misc]
        self.shift_invariant = all(e.shift_invariant for e in members)
        self.permutation_invariant = all(e.permutation_invariant for e in members)
        self.causal_only = any(e.causal_only for e in acting)
        self.cache_safe = all(e.cache_safe for e in members)
        self.needs_raw_k = any(e.needs_raw_k for e in members)
        self.reads_scale = any(e.reads_scale for e in members)
        self.num_axes = axes.pop()
        self.scope = "layer" if any(e.scope == "layer" for e in members) else "model"
        limits = [e.max_positions for e in members if e.max_positions is not None]
        self.max_positions = min(limits, default=None)
        self.shared_parameters = tuple(
            f"encodings.{i}.{name}"
            for i, e in enumerate(members)
            for name in (e.shared_parameters if e.scope == "layer" else dict(e.named_parameters()))
        )

    @property
    def pointwise(self) -> bool:
        return all(e.pointwise for e in self._members())

    def reset_parameters(self) -> None:
        for e in self._members():
            e.reset_parameters()

    def prepare(self, positions: Tensor, length: int | None = None) -> Self:
        prepared = self.shallow_copy()
        prepared._ready = tuple(e.prepare(positions, length) for e in self._members())
        return prepared

    def for_blocks(
        self,
        q: Tensor,
        k: Tensor | None,
        q_positions: Tensor,
        kv_positions: Tensor,
        rows: int,
        causal: bool,
    ) -> Self:
        ready = self.shallow_copy()
        ready._ready = tuple(
            e.for_blocks(q, k if e.needs_raw_k else None, q_positions, kv_positions, rows, causal)
            for e in self._members()
        )
        return ready

    def scale(self, head_dim: int) -> float:
        owner = self._owner("scale")
        return super().scale(head_dim) if owner is None else owner.scale(head_dim)

    def passes(self, q_positions: Tensor, kv_positions: Tensor) -> tuple[Pass, ...]:
        owner = self._owner("passes")
        if owner is None:
            return super().passes(q_positions, kv_positions)
        return owner.passes(q_positions, kv_positions)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        for e in self._members():
            x = e.embed(x, positions)
        return x

    def token_state(
        self, x: Tensor, positions: Tensor, past: Tensor | None = None
    ) -> Tensor | None:
        owner = self._owner("token_state")
        return None if owner is None else owner.token_state(x, positions, past)

    def transform_qk(
        self, q: Tensor, k: Tensor, q_positions: Tensor, kv_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        for e in self._members():
            q, k = e.transform_qk(q, k, q_positions, kv_positions)
        return q, k

    def score_mod(
        self, q, k, q_positions, kv_positions, q_state=None, kv_state=None
    ) -> Chain | None:
        mods, owner = [], self._owner("token_state")
        for e in self._members():
            states = (q_state, kv_state) if e is owner else (None, None)
            mods.append(
                e.score_mod(q, k if e.needs_raw_k else None, q_positions, kv_positions, *states)
            )
        return None if all(mod is None for mod in mods) else Chain(mods)

    def split_bias(self, q_positions, kv_positions, q_state=None, kv_state=None):
        total, owner = None, self._owner("token_state")
        for e in self._members():
            if 3 not in e.places:
                continue
            states = (q_state, kv_state) if e is owner else (None, None)
            part = e.split_bias(q_positions, kv_positions, *states)
            if part is None:
                return None
            total = part if total is None else (total[0] + part[0], total[1] + part[1])
        return total

    def score_rows(
        self, scores: Tensor, mod: ScoreMod | None, mask: Tensor | None, rows: Rows
    ) -> Tensor:
        assert isinstance(mod, Chain) or mod is None
        mods = [None] * len(self.encodings) if mod is None else mod.mods
        for e, part in zip(self._members(), mods, strict=True):
            scores = e.score_rows(scores, part, mask, rows)
        return scores

    def combine_values(
        self, weights: Tensor, v: Tensor, q_positions: Tensor, kv_positions: Tensor
    ) -> Tensor:
        owner = self._owner("combine_values")
        if owner is None:
            return grouped_matmul(weights, v)
        return owner.combine_values(weights, v, q_positions, kv_positions)

    def _members(self) -> tuple[PositionEncoding, ...]:
        return tuple(self.encodings) if self._ready is None else self._ready  # type: ignore[return-value]

    def _owner(self, what: str) -> PositionEncoding | None:
        index = self._owners[what]
        return None if index is None else self._members()[index]


class Chain:
    """The score_mods of several encodings, one after the other; None where one has none."""

    def __init__(self, mods: list[ScoreMod | None]) -> None:
        self.mods = mods

    def __call__(
        self, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        for mod in self.mods:
            if mod is not None:
                score = mod(score, batch, head, q_idx, kv_idx)
        return score


class Within(PositionEncoding):
    """Let a query look at what `mask` shows and at nothing else: a window that travels with an
    encoding.

    Compose(RoPE(...), Within(masks.sliding_window(4096))) rotates and looks 4096 tokens back,
    whatever mask the model is given besides.

    Args:
        mask: an unbound mask; it is bound to the positions of each call.

    shift_invariant is claimed for masks that distance alone decides (exact ones), not for chunks.
    Raises: ValueError for a mask that is bound already.
    """

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        if mask.bound:
            raise ValueError("Within: mask must not be bound to positions; each call binds it.")
        self.mask = mask
        self.shift_invariant = mask.exact

    def passes(self, q_positions: Tensor, kv_positions: Tensor) -> tuple[Pass, ...]:
        mask = self.mask.bind(q_positions, kv_positions)
        return (Pass(q_positions, kv_positions, mask),)


def _overrides(encoding: PositionEncoding, method: str) -> bool:
    return getattr(type(encoding), method) is not getattr(PositionEncoding, method)


def _overriding(members: tuple[PositionEncoding, ...], method: str) -> list[PositionEncoding]:
    return [e for e in members if _overrides(e, method)]


def _owner(
    what: str, members: tuple[PositionEncoding, ...], claimants: list[PositionEncoding]
) -> int | None:
    if len(claimants) > 1:
        raise ValueError(
            f"Compose: {_names(claimants)} each decide the {what}, and there is only one."
        )
    return next((i for i, e in enumerate(members) if e in claimants), None)


def _names(encodings) -> str:
    return " and ".join(type(e).__name__ for e in encodings)
