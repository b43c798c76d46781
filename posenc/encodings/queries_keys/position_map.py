"""RoPE in several passes, over positions that a method maps into the training length."""

from dataclasses import replace
from typing import Any, NoReturn, Self

from posenc.encodings.base.base import Pass
from posenc.encodings.queries_keys.query_temperature import log_n
from posenc.encodings.queries_keys.rope import RoPE
from posenc.encodings.queries_keys.rope_scaling import Scaling
from posenc.positions import KeyPlaces, Positions, QueryPlaces, Remembered, same


class PositionMap(RoPE):
    """Apply RoPE in several passes at mapped positions; a subclass defines `parts`.

    `log_n_length`: multiply queries by max(1, ln(p + 1) / ln(log_n_length)); None: do not.
    """

    claims = replace(RoPE.claims, needs_raw_k=True, causal_only=True)

    def __init__(
        self,
        head_dim: int,
        rope_theta: float,
        *,
        interleaved: bool,
        rotary_dim: int | None,
        scaling: Scaling | None,
        log_n_length: int | None,
    ) -> None:
        super().__init__(
            head_dim, rope_theta, interleaved=interleaved, rotary_dim=rotary_dim, scaling=scaling
        )
        if log_n_length is not None and log_n_length < 2:
            raise ValueError(
                f"{type(self).__name__}: log_n_length must be at least 2, got {log_n_length}."
            )
        self.log_n_length = log_n_length
        if log_n_length is not None:
            self.claims = replace(self.claims, shift_invariant=False)
        self._prepared: tuple[Remembered, tuple[Pass, ...]] | None = None

    def parts(self, q_positions: QueryPlaces, kv_positions: KeyPlaces) -> tuple[Pass, ...]:
        """Return the passes, each with mapped positions and the mask of its pairs."""
        raise NotImplementedError(f"{type(self).__name__} must define parts()")

    def passes(self, q_positions: QueryPlaces, kv_positions: KeyPlaces) -> tuple[Pass, ...]:
        if self._prepared is not None:
            positions, parts = self._prepared
            if positions.fits(q_positions) and positions.fits(kv_positions):
                return parts
        parts = self.parts(q_positions, kv_positions)
        if self.log_n_length is None:
            return parts
        factor = log_n(q_positions, self.log_n_length)
        return tuple(Pass(p.q_positions, p.kv_positions, p.mask, factor) for p in parts)

    def prepare(self, positions: Positions, length: int | None = None) -> Self:
        prepared = super().prepare(positions, length)
        if isinstance(positions, range):  # mapped later, on the device of the first queries
            return prepared
        parts = self.passes(positions, positions)
        mapped = [p for part in parts for p in (part.q_positions, part.kv_positions)]
        prepared._prepared = (Remembered(positions), parts)
        prepared._ready += tuple(
            (Remembered(p), *prepared.cos_sin(p)) for p in mapped if not same(p, positions)
        )
        return prepared

    def forward(self, q: Any, k: Any, positions: Any, *, layout: str = "bhtd") -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} rotates q and k once for each of its passes: pass it to "
            "posenc.attention or posenc.Attention."
        )
